"""bench/peers.py from end to end, with the backends that need no installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    report_path = tmp_path / "peers.json"
    command = [sys.executable, "bench/peers.py", "--ranks", "2", "--backends", "ringreduce", "gloo", "--zero-copy"]
    options = ["--sizes", "8", "64K", "--rounds", "1", "--batch-time", "0.01", "--json", str(report_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    assert [(row["collective"], row["bytes"]) for row in report["rows"]] == [
        (collective, size)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
        for size in (8, 65536)
    ]
    for row in report["rows"]:
        assert min(row["ringreduce"], row["ringreduce-shared"], row["gloo"]) > 0
        assert row["best peer"] == "gloo"
        assert row["wrong_in"] == {"ringreduce": 0, "ringreduce-shared": 0, "gloo": 0, "memcpy": 0, "memcpy-nt": 0}
        assert ("limit" in row) == (row["bytes"] >= 32768)


def test_mpi_has_no_bfloat16() -> None:
    command = [sys.executable, "bench/peers.py", "--backends", "impi", "--dtype", "bfloat16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "MPI has no bfloat16" in done.stderr
