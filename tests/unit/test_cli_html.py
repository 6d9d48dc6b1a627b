"""`ringreduce plan --html`: the page, what it plays, and how it behaves in a browser, if there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ringreduce import cli
from ringreduce.plan import build
from ringreduce.plan.network import switch
from ringreduce.plan.simulate import hops, simulate

Captured = pytest.CaptureFixture[str]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def page(tmp_path: Path, capsys: Captured) -> Path:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "dgx1-v100", "--size", "1MB", "--html", str(path)]) == 0
    assert f"written: {path}" in capsys.readouterr().out
    return path


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_hops_are_those_of_the_simulation() -> None:
    plan, network = build("all_reduce", "ring", 4), switch(4, 1e9, 1e-6)
    expected = simulate(plan, network, 1e6, slice_bytes=50_000)
    found = hops(plan, network, 1e6, 50_000)
    assert len(found) == 2 * expected.messages  # each takes two links
    assert max(hop.end for hop in found) + 1e-6 == pytest.approx(expected.seconds)
    busy: Counter[int] = Counter()
    free: dict[int, float] = {}
    for hop in found:
        assert hop.begin >= free.get(hop.link, 0.0) - 1e-12, "a link serves one message at a time"
        free[hop.link] = hop.end
        busy[hop.link] += hop.end - hop.begin  # type: ignore[assignment]
        assert hop.target == (hop.source + 1) % 4
        assert hop.link in (2 * hop.source, 2 * hop.target + 1)
    assert [busy[link] for link in range(8)] == pytest.approx(expected.link_busy_seconds)
    assert {hop.chunk for hop in found} == set(range(4))
    assert {hop.slice for hop in found} == set(range(expected.rounds))


def test_a_plan_with_too_many_slices_is_played_by_whole_chunks(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "dgx2", "--algorithm", "tree", "--size", "10GB", "--html", str(path)]) == 0
    assert len(data_of(path)["hops"]) == 120


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", text)
    data = data_of(page)
    assert len(data["nodes"]) == 8
    assert sorted(node["rank"] for node in data["nodes"]) == list(range(8))
    for link, begin, end, channel, source, target, *_ in data["hops"]:
        assert 0 <= begin < end <= data["seconds"]
        assert link < len(data["links"])
        assert channel < len(data["colours"])
        assert source != target


def test_names_of_files_are_only_text(tmp_path: Path, capsys: Captured) -> None:
    """A machine is called by the name of its file, which may hold anything."""
    machine, page = tmp_path / "<script>alert(1)<@DATA@@TITLE@\udcff.json", tmp_path / "plan.html"
    assert cli.main(["topo", "dgx1-v100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    document["nodes"] = json.loads(json.dumps(document["nodes"]).replace("GPU7", "</script><b>"))
    document["links"] = json.loads(json.dumps(document["links"]).replace("GPU7", "</script><b>"))
    document.pop("name", None)
    machine.write_text(json.dumps(document))
    assert cli.main(["plan", str(machine), "--size", "1MB", "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<script") == 2
    assert "<b>" not in text
    assert "&lt;script&gt;alert(1)&lt;@DATA@@TITLE@?.json" in text
    assert len(data_of(page)["nodes"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dgx1-v100", "--gpus", "0"), "cannot be played: nothing moves on one GPU"),
        (("gb200-nvl72",), "the most that a page can play; take fewer GPUs"),
        (("gb200-nvl72", "--algorithm", "nvls"), "cannot be played: switches reduce in it"),
    ],
)
def test_what_cannot_be_played(words: tuple[str, ...], said: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["plan", *words, "--html", str(tmp_path / "plan.html")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.html").exists()


def test_a_name_without_html_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["plan", "dgx1-v100", "--html", str(tmp_path / "plan.png")]) == 2
    assert "is no page; end its name in .html, .htm" in capsys.readouterr().err


PLAYED = """<script>
const seen = [], note = () => seen.push(get("now").textContent + " " + get("list").children.length);
note();
get("step").click(); note();
get("step").click(); note();
get("back").click(); note();
get("play").click(); seen.push(get("play").textContent);
get("play").click(); seen.push(get("play").textContent);
get("time").value = 1000; get("time").dispatchEvent(new Event("input")); note();
document.title = JSON.stringify(seen);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_its_controls_in_a_browser(page: Path, tmp_path: Path) -> None:
    played = tmp_path / "played.html"
    played.write_text(page.read_text() + PLAYED)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *options, "--virtual-time-budget=2000", "--dump-dom", played.as_uri()]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", ended.stdout, re.S)
    assert title is not None
    begin, first, second, back, playing, paused, end = json.loads(title[1].replace("&gt;", ">"))
    first_moment, second_moment = sorted({hop[1] for hop in data_of(page)["hops"]})[1:3]
    assert begin.startswith("0.0 us of ")
    assert first.startswith(f"{first_moment * 1e6:.1f} us of ")
    assert second.startswith(f"{second_moment * 1e6:.1f} us of ")
    assert back == first
    assert (playing, paused) == ("Pause", "Play")
    assert end.endswith(": done 0")
    carried = int(re.search(r": (\d+) of ", begin)[1])  # type: ignore[index]
    assert begin.endswith(f" {carried}")
