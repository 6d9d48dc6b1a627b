"""tests/soak.py, for a moment: `make soak` runs it for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import soak
from processes import ROOT
from torch.distributed import HashStore

pytestmark = pytest.mark.slow
LOADS = ("calls", "worlds", "parameter-server")


def test_what_a_process_holds_is_counted() -> None:
    store, over = HashStore(), threading.Event()
    before = soak.held(store)
    opened = [os.dup(0) for _ in range(3)]
    thread = threading.Thread(target=over.wait)
    thread.start()
    store.set("left", "")
    large, small = bytearray(8 << 20), [object() for _ in range(1000)]
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    after = soak.held(store)
    over.set()
    thread.join()
    child.wait()
    grown = {what: after[what] - before[what] for what in before}
    assert (grown["descriptors"], grown["threads"], grown["zombies"], grown["keys"]) == (3, 1, 1, 1), grown
    assert grown["heap KB"] > 8 << 9 and grown["RSS MB"] > 4 and grown["blocks"] >= 1000, grown
    for each in opened:
        os.close(each)
    assert len(large) + len(small) > 0
    assert soak.held(store)["descriptors"] == before["descriptors"]


def test_loads_run_and_leave_neither_descriptors_nor_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "soak", "--scale", "1e-5", "--json", str(tmp_path / "soak.json"), "--only", *LOADS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), str(ROOT)])}
    ended = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert [row["load"] for row in rows] == list(LOADS)
    for row in rows:
        assert len(row["all"]) == row["ranks"] and row["us a step"]
        assert f"load {row['load']}, ranks {row['ranks']}, steps {row['steps']}, " in ended.stderr
        for rank in row["all"]:
            assert rank[-1]["zombies"] == 0
            assert rank[-1]["descriptors"] <= rank[0]["descriptors"], row["load"]
