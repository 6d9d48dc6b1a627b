"""bench/gpu*.py: the bytes a plan moves, and what a report makes of what the parts said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gpu_collectives
import gpu_proof
import pytest
import torch

ROOT = Path(__file__).parents[2]
MB = 1024**2


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "blocks"),  # of a block, that all ranks together read and write
    [
        # Each rank: reads its input, writes a slot; then reads its input and n - 1 slots, writes its output.
        ("all_reduce", "one_shot", 2, 2 * (2 + 2 + 1)),
        ("all_reduce", "one_shot", 4, 4 * (2 + 4 + 1)),
        # Each rank, in chunks of 1/n: reads and sends its own; n - 2 times combines with its own and sends; combines
        # the last, writes and sends; n - 2 times takes, writes and sends; takes the last and writes.
        ("all_reduce", "ring", 2, 2 * (2 + 4 + 2) / 2),
        ("all_reduce", "ring", 4, 4 * (2 + 2 * 3 + 4 + 2 * 3 + 2) / 4),
    ],
)
def test_traffic_of_a_plan(collective: str, algorithm: str, ranks: int, blocks: float) -> None:
    assert gpu_collectives.traffic(collective, algorithm, ranks, 4 * MB) == pytest.approx(blocks * 4 * MB)


def test_the_algorithm_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGREDUCE_ALGORITHMS", "all_reduce:ring:1M-")
    assert gpu_collectives.algorithm_for("all_reduce", 4, MB) == "ring"
    assert gpu_collectives.algorithm_for("all_reduce", 4, 1024) != "ring"


def test_outcomes_of_tests() -> None:
    xml = """<testsuites><testsuite>
      <testcase classname="a" name="good"/>
      <testcase classname="a" name="bad"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
      <testcase classname="a" name="broken"><error message="no fixture"/></testcase>
      <testcase classname="a" name="left"><skipped message="one GPU"/></testcase>
    </testsuite></testsuites>"""
    assert gpu_proof.outcomes(xml) == {
        "passed": 1,
        "failed": {"a::bad": "assert 1 == 2", "a::broken": "no fixture"},
        "skipped": {"a::left": "one GPU"},
    }


@pytest.mark.parametrize(
    ("output", "why", "state", "says"),
    [
        ("========= Error: Device not supported. x", "exit code 1", "not checked", "Device not supported"),
        ("========= Invalid __global__ read of size 4", "exit code 86", "failed", "exit code 86"),
        ("========= Unable to x\n========= Invalid __shared__ write", "exit code 86", "failed", "exit code 86"),
        ("Unable to x\n320 results of kernels compared; 3 wrong", "exit code 1", "failed", "exit code 1"),
        ("", "not done after 120 s", "not checked", "not done after 120 s"),
    ],
)
def test_a_sanitizer_that_does_not_work_is_no_fault(output: str, why: str, state: str, says: str) -> None:
    found, reason = gpu_proof.judged(output, why)
    assert found == state
    assert says in reason


def proof(folder: Path, seconds: float = 60) -> gpu_proof.Proof:
    return gpu_proof.Proof(("tests/gpu",), False, time.monotonic() + seconds, folder)


def test_a_part_fails_by_its_exit_code_or_its_time(tmp_path: Path) -> None:
    part, output = proof(tmp_path).run("part", [sys.executable, "-c", "print(5); exit(3)"], 30, log=True)
    assert (part.state, part.why, output) == ("failed", "exit code 3", "5\n")
    part, _ = proof(tmp_path).run("part", [sys.executable, "-c", "import time; time.sleep(60)"], 5.5)
    assert (part.state, part.why) == ("failed", "not done after 6 s")
    part, _ = proof(tmp_path, seconds=1).run("part", [sys.executable, "-c", ""], 30)
    assert (part.state, part.why) == ("not checked", "no time left")


def test_tests_that_cannot_run_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_proof.importlib.util, "find_spec", lambda name: None if name == "pytest_timeout" else object()
    )
    part = gpu_proof.run_tests(proof(tmp_path))
    assert part.state == "not checked"
    assert "no pytest-timeout" in part.why


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_without_a_gpu_it_says_what_to_do() -> None:
    command = [sys.executable, "bench/gpu_proof.py", "--look"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is built without CUDA" in done.stderr
    assert "make gpu STAND_IN=1" in done.stderr
    assert subprocess.run([*command, "--stand-in"], cwd=ROOT, check=False).returncode == 0
