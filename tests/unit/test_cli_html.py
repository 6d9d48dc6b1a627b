"""`ringreduce plan --html`: the page, and what it plays."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ringreduce import cli
from ringreduce.plan import build
from ringreduce.plan.network import switch
from ringreduce.plan.simulate import hops, simulate
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset

Captured = pytest.CaptureFixture[str]
TOPOLOGIES = Path(__file__).parents[1] / "fixtures" / "topologies"


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


def test_it_holds_every_message_with_its_direction(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "dgx1-v100", "--algorithm", "rings", "--html", str(path)]) == 0
    data, plan = data_of(path), plan_for(preset("dgx1-v100"), "all_reduce", 160 * 10**6, "rings").plan
    sent = Counter(
        (channel, rank, peer)
        for channel, each in enumerate(plan.channels)
        for rank, program in enumerate(each.programs)
        for step in program
        for peer in step.send
    )
    assert Counter(tuple(hop[3:6]) for hop in data["hops"]) == sent
    names = [node["name"] for node in data["nodes"]]
    for link, *_, source, target, _, _ in data["hops"]:
        assert [names[end] for end in data["links"][link][:2]] == [f"GPU {source}", f"GPU {target}"]
    assert len(data["channels"]) == len(plan.channels) == 4
    for at, channel in enumerate(data["channels"]):
        ring = [int(rank) for rank in channel["shape"].split(" → ")]
        assert {(at, *hop) for hop in pairwise(ring)} == {hop for hop in sent if hop[0] == at}
    assert sum(channel["share"] for channel in data["channels"]) == pytest.approx(1)


def test_messages_pass_named_switches_on_their_way(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", str(TOPOLOGIES / "pcie_x8_six_and_two.txt"), "--size", "16MB", "--html", str(path)]) == 0
    data = data_of(path)
    names = [node["name"] for node in data["nodes"]]
    assert names == [*(f"GPU {rank}" for rank in range(8)), "PCIe 0", "PCIe 1", "CPU 0", "CPU 1"]
    after: dict[tuple[int, ...], dict[str, str]] = {}
    for link, _, _, *message in data["hops"]:
        src, dst = (names[end] for end in data["links"][link][:2])
        after.setdefault(tuple(message), {})[src] = dst
    assert len(after) == 8 * 8  # in a ring of 8 every chunk passes between every two neighbours
    for (_, source, target, *_), way in after.items():
        at, passed = f"GPU {source}", 0
        while at in way:
            at, passed = way[at], passed + 1
        assert (at, passed) == (f"GPU {target}", len(way))


def test_names_of_several_hosts(tmp_path: Path) -> None:
    machine, path = tmp_path / "two.json", tmp_path / "plan.html"
    machine.write_text('{"machine": "p3.8xlarge", "hosts": 2}')
    assert cli.main(["plan", str(machine), "--size", "1KB", "--html", str(path)]) == 0
    data = data_of(path)
    names = [node["name"] for node in data["nodes"]]
    assert {f"host{host}/GPU {gpu}" for host in range(2) for gpu in range(4)} <= set(names)
    assert "network" in names
    assert {name.partition("/")[2].split(" ")[0] for name in names} - {"GPU", "CPU", "PCIe", "NIC", ""} == set()
    assert [host for host, *_ in data["hosts"]] == [0, 1]


def test_trees_are_told_by_their_roots(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "p3.8xlarge", "--algorithm", "trees", "--size", "1MB", "--html", str(path)]) == 0
    trees = plan_for(preset("p3.8xlarge"), "all_reduce", 10**6, "trees").trees
    expected = [f"tree, root {tree.parents.index(None)}" for tree in trees]
    assert [channel["shape"] for channel in data_of(path)["channels"]] == expected


def test_a_plan_with_too_many_slices_is_played_in_larger_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert cli.main(["plan", "dgx2", "--algorithm", "tree", "--size", "10GB", "--html", str(path)]) == 0
    data = data_of(path)
    seconds, slice_bytes = data["whole"]
    assert 10_000 < len(data["hops"]) <= 20_000
    assert data["slice"] > slice_bytes
    assert data["seconds"] > seconds


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
        assert channel < len(data["channels"])
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
