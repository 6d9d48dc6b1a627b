"""bench/gpu*.py: the bytes a plan moves, and what a report makes of what the parts said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_collectives
import gpu_driver
import gpu_proof
import gpu_report
import gpu_sanitizer
import gpu_tests
import pytest
import torch
from stand_in import torch_cuda

import build_cuda

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


@pytest.mark.skipif(build_cuda.find_nvcc() is None, reason="there is no nvcc")
def test_the_kernels_of_the_probe_compile(tmp_path: Path) -> None:
    assert b"probe_hand_over" in gpu_driver.image(False, (9, 0), tmp_path)


def report(path: Path | None = None) -> gpu_report.Report:
    return gpu_report.Report(path, {"header": {}, "state": "running", "why": "", "bars": [], "rows": [], "notes": []})


def test_a_report_is_complete_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    found = report(path)
    for number in range(3):
        found.row("a line", number=number, wrong=0)
        assert [row["number"] for row in json.loads(path.read_text())["rows"]] == list(range(number + 1))
    assert json.loads(path.read_text())["state"] == "running"
    assert [entry.name for entry in tmp_path.iterdir()] == ["part.json"]
    assert found.end() == 0
    assert gpu_report.Report.again(path).found["state"] == "passed"


def test_wrong_results_fail_a_part_and_bars_do_not() -> None:
    slow = report()
    slow.bar("share", 0.8, at_least=0.9)
    slow.bar("us", 3, at_most=15)
    assert [bar["holds"] for bar in slow.found["bars"]] == [False, True]
    assert slow.end() == 0
    wrong = report()
    wrong.row("a line", wrong=2)
    assert wrong.end() == 1
    assert (wrong.found["state"], wrong.found["why"]) == ("failed", "2 wrong")


def test_the_halves_are_all_of_the_tests() -> None:
    files = [*gpu_tests.half(1), *gpu_tests.half(2)]
    assert sorted(files) == sorted(map(str, (ROOT / "tests/gpu").glob("test_*.py")))
    assert len({*files}) == len(files)


@pytest.mark.parametrize("name", gpu_proof.PARTS)
def test_a_part_has_less_than_nine_minutes(name: str) -> None:
    part = gpu_proof.PARTS[name]
    assert part.limit < 540
    assert (ROOT / "bench" / part.script).exists()


@pytest.mark.parametrize(
    ("output", "code", "state", "says"),
    [
        ("", 0, "passed", ""),
        ("========= Error: Device not supported. x", 1, "not checked", "Device not supported"),
        ("========= Invalid __global__ read of size 4", 86, "failed", "exit code 86"),
        ("========= Unable to x\n========= Invalid __shared__ write", 86, "failed", "exit code 86"),
        ("Unable to x\n4 collectives between 2 ranks, 3 wrong", 1, "failed", "exit code 1"),
    ],
)
def test_a_sanitizer_that_does_not_work_is_no_fault(output: str, code: int, state: str, says: str) -> None:
    found, reason = gpu_sanitizer.judged(output, code)
    assert found == state
    assert says in reason


SLOW = """
import gpu_report, os, sys, time
args = gpu_report.parser("").parse_args()
report = gpu_report.begin(args, "slow")
report.row("a row", pid=os.getpid())
time.sleep(100)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-ins need a torch without CUDA")
def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda.build()  # which may take longer than the part may
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "bench"))
    monkeypatch.setitem(gpu_proof.PARTS, "slow", gpu_proof.Part(str(tmp_path / "slow.py"), "slow", limit=15))
    assert gpu_proof.run("slow", tmp_path, True, []) == 1
    found = json.loads((tmp_path / "slow.json").read_text())
    assert (found["state"], found["why"]) == ("failed", "not done after 15 s")
    [row] = found["rows"]
    assert not Path(f"/proc/{row['pid']}").exists()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_without_a_gpu_it_says_what_to_do() -> None:
    command = [sys.executable, "bench/gpu_proof.py", "--look"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is built without CUDA" in done.stderr
    assert "make gpu STAND_IN=1" in done.stderr
    assert subprocess.run([*command, "--stand-in"], cwd=ROOT, check=False).returncode == 0
