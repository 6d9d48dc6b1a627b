"""bench/gpu_proof.py, which is `make gpu`, from end to end on stand-ins for GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-ins need a torch without CUDA")


def start(report: Path, *tests: str) -> subprocess.Popen[str]:
    command = [sys.executable, "bench/gpu_proof.py", "--stand-in", "--commit", "c0ffee", "--json", str(report)]
    return subprocess.Popen(
        [*command, "--tests", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def prove(report: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    with start(report, *tests) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.slow
def test_all_parts_report(tmp_path: Path) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("def test_one(): pass\n")
    done = prove(tmp_path / "found.json", str(test))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["header"]["commit"] == "c0ffee"
    assert "no figure here is of a GPU" in report["header"]["note"]
    assert [device["name"] for device in report["header"]["gpu"]["devices"]] == ["Stand-in GPU"] * 2
    parts = {part["name"]: part for part in report["parts"]}
    tools = {f"compute-sanitizer {tool}" for tool in ("memcheck", "racecheck", "synccheck")}
    assert {name for name, part in parts.items() if part["state"] == "not checked"} == tools | {"NCCL"}
    assert {name for name, part in parts.items() if part["state"] == "passed"} == {
        *("tests", "kernels against the CPU's", "accumulate", "collectives")
    }
    assert parts["tests"]["found"] == {"passed": 1, "failed": {}, "skipped": {}}
    for row in parts["accumulate"]["found"]["rows"]:
        assert row["wrong"] == 0
        assert {"ringreduce", "copy"} <= row["gbps"].keys()
    rows = parts["collectives"]["found"]["rows"]
    assert {(row["collective"], row["ranks"], row["bytes"]) for row in rows} >= {("all_reduce", 2, 4096)}
    for row in rows:
        assert {"ringreduce", "graph", "host"} == row["median_us"].keys() == row["wrong"].keys()
        assert not any(row["wrong"].values())
        assert (row["bound_us"] is not None) == row["shared"] == (row["ranks"] == 3)


@pytest.mark.slow
def test_a_failure_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("def test_one(): assert 1 == 2\n")
    done = prove(tmp_path / "found.json", str(test))
    assert done.returncode == 1
    parts = {part["name"]: part for part in json.loads((tmp_path / "found.json").read_text())["parts"]}
    assert parts["tests"]["state"] == "failed"
    assert list(parts["tests"]["found"]["failed"].values()) == ["assert 1 == 2"]
    assert parts["collectives"]["state"] == "passed"


@pytest.mark.slow
def test_what_it_runs_ends_with_it(tmp_path: Path) -> None:
    test, running = tmp_path / "test_one.py", tmp_path / "running"
    test.write_text(f"""
import os, pathlib, time
def test_one():
    pathlib.Path({str(running)!r}).write_text(str(os.getpid()))
    time.sleep(100)
""")
    with start(tmp_path / "found.json", str(test)) as process:
        try:
            until(lambda: running.exists() and running.read_text() != "", 90)
            pid = int(running.read_text())
        finally:
            process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    until(lambda: not Path(f"/proc/{pid}").exists(), 10)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
