"""bench/peers.py and bench/differences.py from end to end, with the backends that need no installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    report_path = tmp_path / "peers.json"
    text = "bench/peers.py --ranks 2 --backends ringreduce ringreduce-shared gloo --sizes 8 64K --rounds 1"
    command = [sys.executable, *text.split(), "--batch-time", "0.01", "--json", str(report_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
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


@pytest.mark.slow
def test_our_answers_are_those_of_the_page(tmp_path: Path) -> None:
    """And the tests that hold them are there."""
    report = tmp_path / "differences.json"
    command = [sys.executable, "bench/differences.py", "--peers", "ringreduce", "--json", str(report)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"RINGREDUCE_TUNING": "off"})
    found = [f"{row['what']}: {row['ringreduce']}" for row in json.loads(report.read_text())["rows"]]
    table = [line.split(" | ") for line in (ROOT / "docs/differences.md").read_text().splitlines() if line[:1] == "|"]
    on_page = [f"{what.removeprefix('| ')}: {ours}" for what, *_, ours, _ in table[2:]]
    assert [re.sub(r"within [\d.]+ s", "", row) for row in found] == [
        re.sub(r"within [\d.]+ s", "", row) for row in on_page
    ]
    for *_, test in table[2:]:
        file, name = re.findall(r'\(\.\./(\S+) "(\w+)"\)', test)[0]
        assert f"def {name}(" in (ROOT / file).read_text(), test
