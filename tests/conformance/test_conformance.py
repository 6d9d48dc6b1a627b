"""A part of PyTorch's suite, and the proof that the runner notices what is wrong. The whole: `make conformance`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PART = "test_all_[rg]*"


def outcomes(out: Path, *command: str) -> tuple[int, dict[str, str]]:
    """Runs it in a process of its own, as ranks are forked from one without threads."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *command, "--out", str(out)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (out / "results.json").exists(), done.stderr
    print(done.stdout)
    return done.returncode, {
        result["test"]: result["outcome"] for result in json.loads((out / "results.json").read_text())
    }


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduces_and_all_gathers(size: int, tmp_path: Path) -> None:
    code, found = outcomes(tmp_path, "run.py", "--run", f"ringreduce:{size}", "-k", PART)
    assert code == 0
    assert sum(outcome == "passed" for outcome in found.values()) >= 25


def test_only_tests_that_depend_on_the_name(tmp_path: Path) -> None:
    which = ("--run", "as_gloo:2:names", "-k", "test_get_[bf]*")  # test_get_future does not
    code, found = outcomes(tmp_path, "run.py", *which)
    assert (code, found) == (0, {"test_get_backend": "passed"})


def test_the_runner_notices_what_is_wrong(tmp_path: Path) -> None:
    sick = "import test_conformance; test_conformance.run_sick_tests()"
    code, found = outcomes(tmp_path, "-c", sick, "--run", "ringreduce:2", "-k", "test_sick_*", "--deadline", "8")
    assert code == 1
    assert found == {
        "test_sick_healthy": "passed",
        "test_sick_wrong_values_on_the_last_rank": "failed",
        "test_sick_dies": "failed",
        "test_sick_hangs": "hung",
        "test_sick_skips_on_one_rank": "failed",
        "test_sick_skips": "skipped",
    }


def run_sick_tests() -> None:
    """The command line of `run`, for the suite with these tests in it; each is run by every rank."""
    import run
    import suite
    import torch
    import torch.distributed as dist

    def all_reduce(self: Any, error: float) -> None:
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        tensor[-1] += error
        self.assertEqual(tensor, torch.full((1000,), 2.0))

    def skip(self: Any) -> None:
        self.skipTest("to see it reported")

    def on_the_last_rank(action: Any) -> Any:
        return lambda self: action(self) if self.rank == 1 else None

    tests = {
        "healthy": lambda self: all_reduce(self, 0.0),
        "wrong_values_on_the_last_rank": lambda self: all_reduce(self, 1.0 * self.rank),
        "dies": on_the_last_rank(lambda self: os.kill(os.getpid(), signal.SIGKILL)),
        "hangs": lambda self: time.sleep(60),
        "skips_on_one_rank": on_the_last_rank(skip),
        "skips": skip,
    }
    load = suite.load

    def load_sick(backend: str, size: int) -> Any:
        case = load(backend, size)
        for name, test in tests.items():
            setattr(case, f"test_sick_{name}", test)
        return case

    suite.load = load_sick
    sys.exit(run.main())
