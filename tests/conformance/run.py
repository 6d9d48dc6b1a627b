"""Runs PyTorch's suite with ringreduce, by name and as Gloo, and with Gloo, and puts the counts side by side.

    python tests/conformance/run.py                                 # all on 2, 3, 4 and 8 ranks
    python tests/conformance/run.py --run ringreduce:3 -k barrier   # some tests of one of them

Every test has processes of its own, forked from this one, and a deadline, after which they are killed. What they print
goes to a file for each test; exits non-zero if ringreduce failed a test, or did not run one that passes with Gloo.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share few cores; read as torch is imported
os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # it would name a file that does not exist

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import fnmatch
import gc
import json
import multiprocessing
import re
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import suite
from left_out import LEFT_OUT

CPP_FRAME = re.compile(r"^(#\d+ |frame #|C\+\+ CapturedTraceback).*\n", re.MULTILINE)
OUTCOMES = ("passed", "failed", "hung", "skipped", "left out")
SPARE = 20.0
"""Seconds that a test's processes have beyond the deadline of its ranks, to say where those are."""


@dataclasses.dataclass
class Result:
    backend: str
    size: int
    test: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""  # why it was skipped; the ranks' tracebacks


class Recorder(unittest.TestResult):
    """The outcome of the one test of a process."""

    outcome, detail = "failed", "torch reported no outcome"

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        ran = getattr(test, "exit_codes", [])
        self.outcome, self.detail = ("passed", "") if ran else ("failed", "no ranks were started")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome, self.detail = "skipped", reason

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.outcome = "hung" if issubclass(err[0], suite.Hung) else "failed"
        codes = getattr(test, "exit_codes", [])
        self.detail = f"exit codes {codes}\n" * bool(codes) + str(err[1])

    def addFailure(self, test: Any, err: Any) -> None:
        self.addError(test, err)


class Running:
    """A test in a process group of its own."""

    def __init__(self, case: Any, test: str, log: Path, deadline: float) -> None:
        context = multiprocessing.get_context("fork")
        self.test, self.start, self.deadline = test, time.monotonic(), deadline
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(case, test, log, theirs))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        theirs.close()

    def over(self) -> bool:
        return self.pipe.poll() or not self.process.is_alive() or time.monotonic() > self.start + self.deadline

    def result(self, backend: str, size: int) -> Result:
        """Called when it is over; no process of it is left after."""
        outcome, detail = "hung", f"had not ended after {self.deadline:.0f} s"
        try:
            if self.pipe.poll() or not self.process.is_alive():
                outcome, detail = self.pipe.recv()
        except EOFError:
            outcome, detail = "failed", "the process that started the ranks died"
        self.kill()
        return Result(backend, size, self.test, outcome, round(time.monotonic() - self.start, 2), detail)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _main(case: Any, test: str, log: Path, pipe: connection.Connection) -> None:
    os.setpgid(0, 0)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    recorder = Recorder()
    try:
        unittest.TestSuite([case(test)]).run(recorder)
    except BaseException:
        recorder.outcome, recorder.detail = "failed", traceback.format_exc()
    pipe.send((recorder.outcome, recorder.detail))


def run(backend: str, size: int, pattern: str, names: bool, logs: Path, jobs: int, deadline: float) -> Iterator[Result]:
    """Every test's result, as it comes. `names`: only of tests that depend on the backend's name."""
    case = suite.load(backend, size)
    case.deadline = deadline
    gc.freeze()  # a rank's collector would write to, and so copy, every page it has from us
    logs = logs / f"{backend}_{size}"
    logs.mkdir(parents=True, exist_ok=True)
    tests = [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if fnmatch.fnmatch(name, pattern)]
    waiting = collections.deque(test for test in tests if not names or suite.depends_on_the_name(case, test))
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                test = waiting.popleft()
                if backend != "gloo" and test in LEFT_OUT:
                    yield Result(backend, size, test, "left out", detail=LEFT_OUT[test])
                    continue
                running.append(Running(case, test, logs / f"{test}.log", deadline + SPARE))
            connection.wait([one.pipe for one in running], timeout=1.0)  # a second is when a death is noticed
            for one in [one for one in running if one.over()]:
                running.remove(one)
                yield one.result(backend, size)
    finally:
        for one in running:
            one.kill()


def table(results: Iterable[Result], times: dict[tuple[str, int], float]) -> str:
    """The counts, a column for each backend and size."""
    columns = list(times)
    counts = collections.Counter((r.backend, r.size, r.outcome) for r in results)
    counted = {column: {outcome: counts[(*column, outcome)] for outcome in OUTCOMES} for column in columns}
    rows = [("", *(f"{backend} x{size}" for backend, size in columns))]
    rows += [("run", *(str(sum(counted[c][o] for o in ("passed", "failed", "hung"))) for c in columns))]
    rows += [
        (outcome + " by torch itself" * (outcome == "skipped"), *(str(counted[c][outcome]) for c in columns))
        for outcome in OUTCOMES
    ]
    rows += [("seconds", *(f"{times[c]:.0f}" for c in columns))]
    return "\n".join(f"{row[0]:24}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)


def unmatched(results: list[Result]) -> list[str]:
    """Tests that pass with Gloo and were not run with ringreduce at the same size."""
    passed = {(r.size, r.test) for r in results if r.backend == "gloo" and r.outcome == "passed"}
    return [
        f"{r.test} x{r.size}: {r.outcome}, {r.detail}"
        for r in results
        if r.backend != "gloo" and r.outcome == "skipped" and (r.size, r.test) in passed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run",
        nargs="+",
        metavar="BACKEND:SIZE[:names]",
        default=[f"{backend}:{size}" for size in (3, 2, 4, 8) for backend in ("gloo", "ringreduce", "as_gloo")],
        help="with :names, only the tests that ask for a backend by its name or make groups",
    )
    parser.add_argument("-k", metavar="PATTERN", default="*", help="tests whose name matches, such as 'test_all_*'")
    parser.add_argument("--jobs", type=int, default=4, help="tests at once")
    parser.add_argument("--deadline", type=float, default=120, help="seconds for the ranks of a test")
    parser.add_argument("--out", type=Path, default=Path("build/conformance"), help="folder for results and logs")
    parser.add_argument("-v", action="store_true", help="a line for every test")
    args = parser.parse_args()

    results: list[Result] = []
    times: dict[tuple[str, int], float] = {}
    for backend, size, *part in (which.split(":") for which in args.run):
        start = time.monotonic()
        found = run(backend, int(size), args.k, part == ["names"], args.out, args.jobs, args.deadline)
        for count, result in enumerate(found, 1):
            results.append(result)
            bad = result.outcome in ("failed", "hung")
            if bad or args.v:
                print(f"  {result.outcome:8} {backend} x{size} {result.test} ({result.seconds} s)", flush=True)
            elif count % 50 == 0:
                print(f"  {backend} x{size}: {count} tests, {time.monotonic() - start:.0f} s", flush=True)
        times[backend, int(size)] = time.monotonic() - start

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
    for r in results:  # what Gloo fails is in the logs
        if r.backend != "gloo" and r.outcome in ("failed", "hung"):
            print(f"\n==== {r.outcome}: {r.test}, {r.backend} x{r.size}\n{CPP_FRAME.sub('', r.detail)}")
    print(f"\n{table(results, times)}\n")
    missed = unmatched(results)
    print("\n".join(["passed with Gloo, not run with ringreduce:", *missed]) if missed else "", end="")
    print(f"every result: {args.out}/results.json, what the tests printed: {args.out}/*/*.log")
    return int(bool(missed) or any(r.backend != "gloo" and r.outcome in ("failed", "hung") for r in results))


if __name__ == "__main__":
    sys.exit(main())
