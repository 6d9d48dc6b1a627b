"""bench/gpu_proof.py, which is `make gpu`, from end to end on stand-ins for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-ins need a torch without CUDA")


def prove(report: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/gpu_proof.py", "--stand-in", "--commit", "c0ffee", "--json", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "--tests", *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


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
