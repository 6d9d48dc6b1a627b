"""bench/gpu: the bytes a plan moves, and what a report makes of what the parts said."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import torch_cuda

import build_cuda
from bench.gpu import collectives, driver, probe, processes, proof, reports, sanitizer, tests

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
    assert collectives.traffic(collective, algorithm, ranks, 4 * MB) == pytest.approx(blocks * 4 * MB)


def test_the_algorithm_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGREDUCE_ALGORITHMS", "all_reduce:ring:1M-")
    assert collectives.algorithm_for("all_reduce", 4, MB) == "ring"
    assert collectives.algorithm_for("all_reduce", 4, 1024) != "ring"


@pytest.mark.skipif(build_cuda.find_nvcc() is None, reason="there is no nvcc")
def test_the_kernels_of_the_probe_compile(tmp_path: Path) -> None:
    assert b"probe_hand_over" in driver.image(False, (9, 0), tmp_path)


def report(path: Path | None = None) -> reports.Report:
    return reports.Report(path, {"header": {}, "state": "running", "why": "", "bars": [], "rows": [], "notes": []})


def test_a_report_is_complete_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    found = report(path)
    for number in range(3):
        found.row("a line", number=number, wrong=0)
        assert [row["number"] for row in json.loads(path.read_text())["rows"]] == list(range(number + 1))
    assert json.loads(path.read_text())["state"] == "running"
    assert [entry.name for entry in tmp_path.iterdir()] == ["part.json"]
    assert found.end() == 0
    assert reports.Report.again(path).found["state"] == "passed"


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
    files = [*tests.half(1), *tests.half(2)]
    assert sorted(files) == sorted(map(str, (ROOT / "tests/gpu").glob("test_*.py")))
    assert len({*files}) == len(files)


@pytest.mark.parametrize("name", proof.PARTS)
def test_a_part_has_less_than_nine_minutes(name: str) -> None:
    part = proof.PARTS[name]
    assert part.limit < 540
    assert importlib.util.find_spec(part.module)


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
    found, reason = sanitizer.judged(output, code)
    assert found == state
    assert says in reason


def running(pid: int) -> bool:
    """And no zombie, whose parent has not asked for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(pid)


def test_what_a_tool_started_ends_with_it() -> None:
    code, output = sanitizer.ended(["sh", "-c", "echo first; exit 86"], 60)
    assert (code, output) == (86, "first\n")
    code, output = sanitizer.ended(["sh", "-c", "sleep 100 & echo $!; wait"], 1)
    assert code is None
    assert ends(int(output))


class Refusing:
    """A Gpu whose driver refuses two calls."""

    def call(self, name: str, *_: object, allowed: int = 0) -> int:
        if name in ("cuMemAlloc_v2", "cuMemFree_v2"):
            raise driver.DriverError(f"{name}: CUDA_ERROR_UNKNOWN")
        return 0

    made = call

    def host_words(self, count: int) -> tuple[list[int], int]:
        return [0] * count, 0

    def __getattr__(self, _: str) -> Any:  # stream, memory, wait, write, done
        return lambda *_: 0


def test_a_call_that_fails_is_not_one_that_does_not_block() -> None:
    asker: Any = SimpleNamespace(gpu=Refusing(), image=b"", stand_in=True)
    found = probe.blocked_calls(asker, "a stream waits")
    assert (found["blocked"], found["wrong"]) == ("none", 2)
    assert found["failed"] == (
        "cuMemAlloc: DriverError: cuMemAlloc_v2: CUDA_ERROR_UNKNOWN; "
        "cuMemFree: DriverError: cuMemFree_v2: CUDA_ERROR_UNKNOWN"
    )


def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_SECONDS", 0)
    waited: list[float] = []
    stuck: Any = SimpleNamespace(pid=7, kill=lambda: None, join=waited.append, is_alive=lambda: True)
    held = processes.Processes(True, [])
    held._processes = [stuck]
    with pytest.raises(TimeoutError, match="process 0, pid 7, still runs 0 s after SIGKILL"), held:
        pass
    assert waited == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "why"),
    [
        ("sys.exit(2)", 2, "exit code 2"),
        ("pass", 1, "it ended without a result"),
        ("report().end(); os.abort()", 1, "exit code -6"),
        ("report().end()", 0, ""),
        ("sys.exit(report().end('no such thing'))", 1, "no such thing"),
    ],
)
def test_how_a_part_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, why: str) -> None:
    (tmp_path / "part.py").write_text(f"""
import os, sys
from bench.gpu import reports
def report():
    args = reports.parser("").parse_args()
    return reports.Report(args.json, dict(state="running", why="", bars=[], rows=[], notes=[]))
{body}
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(proof.PARTS, "part", proof.Part("part", "part", limit=60))
    assert proof.run("part", tmp_path, False, []) == code
    found = json.loads((tmp_path / "part.json").read_text())
    assert (found["state"], found["why"]) == ("failed" if code else "passed", why)


SLOW = """
import os, subprocess, sys, time
from bench.gpu import reports
args = reports.parser("").parse_args()
report = reports.begin(args, "slow")
own_group = subprocess.Popen(["sleep", "200"], preexec_fn=os.setpgrp)
own_session = subprocess.Popen(["sleep", "200"], start_new_session=True)
report.row("a row", pid=os.getpid(), own_group=own_group.pid, own_session=own_session.pid)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-ins need a torch without CUDA")
def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda.build()  # which may take longer than the part may
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(proof.PARTS, "slow", proof.Part("slow", "slow", limit=0))
    monkeypatch.setattr(proof, "KILL_SECONDS", 1)  # for the last line of a log that is never closed
    wait, report = subprocess.Popen.wait, tmp_path / "slow.json"

    def wait_from_its_row_on(process: Any, seconds: float) -> int:
        while not (report.exists() and "own_session" in report.read_text()):
            time.sleep(0.02)
        return wait(process, seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_from_its_row_on)
    assert proof.run("slow", tmp_path, True, []) == 1
    found = json.loads(report.read_text())
    assert (found["state"], found["why"]) == ("failed", "not done after 0 s")
    [row] = found["rows"]
    still_holds_the_output = running(row["own_session"])
    os.kill(row["own_session"], signal.SIGKILL)
    assert still_holds_the_output, "the part's output was read until all its holders had ended"
    assert ends(row["pid"])
    assert ends(row["own_group"])


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_without_a_gpu_it_says_what_to_do() -> None:
    command = [sys.executable, "-m", "bench.gpu.proof", "--look"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is built without CUDA" in done.stderr
    assert "make gpu STAND_IN=1" in done.stderr
    assert subprocess.run([*command, "--stand-in"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_it_looks_at_its_arguments_before_anything_is_built(tmp_path: Path) -> None:
    def look(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "bench.gpu.proof", "--look", "--stand-in", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, text = look("--part", "nonsense")
    assert code == 2
    assert "invalid choice: 'nonsense'" in text
    folder = tmp_path / "deep/results"
    assert look("--part", "probe", "kernels", "--results", str(folder)) == (0, "")
    assert [*folder.iterdir()] == []
    (tmp_path / "file").touch()
    code, text = look("--results", str(tmp_path / "file/results"))
    assert code == 2
    assert text == (
        f"error: --results {tmp_path}/file/results: Not a directory; name a folder that can be written to\n"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gpu_looks_at_part_and_results() -> None:
    command = ["make", "-n", "gpu", "PART=probe kernels", "RESULTS=there", "STAND_IN=1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")
    look, prove = [line.split("bench.gpu.proof")[1].split() for line in shown.splitlines() if "bench.gpu.proof" in line]
    assert prove == ["--part", "probe", "kernels", "--results", "there", "--stand-in"]
    assert look == [*prove, "--look"]
