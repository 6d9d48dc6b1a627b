"""What tests' processes need of the server that forks them, and how long tests wait for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fork_server
import processes
import pytest
import torch
from distributed.harness import Rank, on_ranks
from stand_in import build as stand_in

ROOT = Path(__file__).parents[2]


@on_ranks(1, returns=[(True, "", "1")])
def test_the_server_has_not_initialised_cuda(_: Rank) -> tuple[bool, str, str]:
    return os.getpid() != fork_server.PID, fork_server.CUDA_IN_USE, os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


LOOK = """
import ctypes, fork_server, sys
print(fork_server.cuda_in_use(sys.argv[1]) or "no")
driver = ctypes.CDLL(sys.argv[1])
print(fork_server.cuda_in_use(sys.argv[1]) or "no")
driver.cuInit(0)
print(fork_server.cuda_in_use(sys.argv[1]) or "no")
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="a stand-in's driver is looked at")
def test_a_process_that_has_initialised_cuda_is_noticed() -> None:
    driver = stand_in.build(ROOT / "build/stand_in") / "libcuda.so.1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", LOOK, str(driver)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["no", "no", "cuInit was called: cuDeviceGetCount gives 0"]


def test_ranks_are_told_of_a_server_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="did not import fork_server"):
        fork_server.check()
    monkeypatch.setattr(fork_server, "PID", 1)
    monkeypatch.setattr(fork_server, "CUDA_IN_USE", "cuInit was called")
    with pytest.raises(RuntimeError, match="cuInit was called"):
        fork_server.check()


@pytest.mark.parametrize(("us", "seconds"), [(50, 60), (200, 60), (400, 120), (2000, 170)])
def test_the_deadline_grows_with_the_hand_over(
    us: float, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "probe.json"
    rows = [{"question": "hand-over between processes, by streams", "handover_us": us / 2}]
    rows += [{"question": "hand-over between processes, by streams with kernels", "handover_us": us}]
    rows += [{"question": "hand-over between processes, by kernels that spin", "handover_us": 9 * us}]
    report.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("RINGREDUCE_TEST_HAND_OVER_US", str(processes.slowest_hand_over(report)))
    assert processes.deadline.__wrapped__() == seconds


def test_without_a_gpu_the_deadline_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGREDUCE_TEST_HAND_OVER_US", "1e6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert processes.deadline.__wrapped__() == processes.DEADLINE
