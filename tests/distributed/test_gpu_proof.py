"""bench/gpu/proof.py, which is `make gpu`: its parts on stand-ins for GPUs, and what is left when one is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import until

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-ins need a torch without CUDA"),
    pytest.mark.slow,
]


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"bench.gpu.{module}", "--stand-in", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COMMIT": "c0ffee"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def prove(part: str, folder: Path, *others: str) -> tuple[int, dict[str, Any], str]:
    with start("proof", "--part", part, "--results", str(folder), "--", *others) as process:
        output, _ = process.communicate()
    return process.returncode, json.loads((folder / f"{part}.json").read_text()), output


def test_probe(tmp_path: Path) -> None:
    code, found, output = prove("probe", tmp_path)
    assert code == 0, output
    rows = {row["question"]: row for row in found["rows"]}
    assert not [row for row in found["rows"] if "failed" in row or "left_out" in row]
    assert rows["memory of another process"]["written"] == 42
    assert all(row["waited"] and row["let_go"] for name, row in rows.items() if " waits for a word" in name)
    assert rows["hand-over between processes, by streams with kernels"]["handover_us"] > 0
    assert rows["a process is killed while its memory is read"]["after_it"] == "reads go on"
    assert {row["blocked"] for name, row in rows.items() if name.startswith("calls that block")} == {"none"}
    assert len(found["bars"]) == 2
    assert found["header"]["commit"] == "c0ffee"
    assert "no figure here is of a GPU" in found["header"]["note"]
    assert (tmp_path / "probe.log").read_text() in output


def test_kernels(tmp_path: Path) -> None:
    code, found, output = prove("kernels", tmp_path)
    assert code == 0, output
    assert ("float32", "sum") in {(row.get("dtype"), row.get("op")) for row in found["rows"]}
    assert "4 collectives between 2 ranks, 0 wrong" in output


def test_accumulate(tmp_path: Path) -> None:
    code, found, output = prove("accumulate", tmp_path)
    assert code == 0, output
    assert len(found["rows"]) == 12
    for row in found["rows"]:
        assert row["wrong"] == 0
        assert {"ringreduce", "copy"} <= row["gbps"].keys()


def test_run_mode(tmp_path: Path) -> None:
    code, found, output = prove("run-mode", tmp_path)
    assert code == 0, output
    rows = found["rows"]
    threads = [row for row in rows if row.get("where") == "threads"]
    assert {row["ranks"] for row in threads} == {2}
    assert all(row["calls"] >= 200 for row in threads if "calls" in row)
    assert all(row["compared"] > 60 for row in threads if "compared" in row)
    assert {row["bytes"] for row in threads if "share" in row} == {8, 65536}
    assert [row["bytes"] for row in rows if row.get("where") == "processes"] == [4, 256, 4096]


def test_steps(tmp_path: Path) -> None:
    code, found, output = prove("steps", tmp_path)
    assert code == 0, output
    rows = [row for row in found["rows"] if "collective" in row]
    assert {(row["collective"], row["ranks"], row["bytes"]) for row in rows} >= {("all_reduce", 2, 4096)}
    for row in rows:
        assert {"ringreduce", "graph", "host"} == row["median_us"].keys() == row["wrong_in"].keys()
        assert (row["bound_us"] is not None) == row["shared"] == (row["ranks"] == 3)


def test_faults(tmp_path: Path) -> None:
    code, found, output = prove("faults", tmp_path)
    assert code == 0, output
    assert [row["way"] for row in found["rows"]] == ["waits", "loads kernels", "queues launches"]
    assert all(row["seconds"].keys() == {"0", "2"} for row in found["rows"])


def test_sanitizer(tmp_path: Path) -> None:
    code, found, _ = prove("sanitizer", tmp_path)
    assert (code, found["rows"], found["notes"]) == (0, [], ["the stand-in is no GPU"])


def test_tests(tmp_path: Path) -> None:
    test = tmp_path / "test_three.py"
    test.write_text("""
import pytest
def test_one(): assert 1 == 2
def test_two(): pass
def test_three(): pytest.skip("no such thing")
""")
    (tmp_path / "probe.json").write_text('{"rows": []}')
    code, found, output = prove("tests-1", tmp_path, str(test))
    assert code == 1, output
    assert found["state"] == "failed"
    outcomes = {row["test"].partition("::")[2]: (row["outcome"], row["why"]) for row in found["rows"]}
    assert outcomes["test_two"] == ("passed", "")
    assert outcomes["test_three"] == ("skipped", "Skipped: no such thing")
    assert outcomes["test_one"] == ("failed", "assert 1 == 2")


def test_a_part_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    report = tmp_path / "kernels.json"

    def rows() -> list[Any]:
        return json.loads(report.read_text())["rows"] if report.exists() else []

    with start("kernels", "--json", str(report)) as process:
        try:
            until(lambda: len(rows()) >= 3)
        finally:
            process.kill()
    found = json.loads(report.read_text())
    assert found["state"] == "running"
    assert [(row["op"], row["wrong"]) for row in found["rows"][:3]] == [("sum", 0), ("product", 0), ("min", 0)]


def test_what_it_runs_ends_with_it(tmp_path: Path) -> None:
    test, running = tmp_path / "test_one.py", tmp_path / "running"
    test.write_text(f"""
import os, pathlib, time
def test_one():
    pathlib.Path({str(running)!r}).write_text(str(os.getpid()))
    time.sleep(100)
""")
    command = ("proof", "--part", "tests-1", "--results", str(tmp_path), "--", str(test))
    with start(*command) as process:
        try:
            until(lambda: running.exists() and running.read_text() != "", seconds=90)
            pid = int(running.read_text())
        finally:
            process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    until(lambda: not Path(f"/proc/{pid}").exists(), seconds=10)
