"""examples/search.py: what its table says, also when a rank of a trial dies."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from frameworks.launch import ROOT, environment, ranks, torchrun

PROGRAM = "examples/search.py"
KEEP = ("--no-python", sys.executable, "-m", "ringreduce", "keep", sys.executable, PROGRAM)


def kept(*arguments: str, size: int = 2) -> str:
    """Ranks that are started again when they die."""
    return torchrun(f"--nproc-per-node={size}", *KEEP, *arguments)


def rows_of(output: str) -> list[tuple[int, int]]:
    """Trial and number of epochs of each row, best first."""
    rows = re.findall(r"^trial (\d+) +lr .* (\d+) epochs, loss \d", output, re.M)
    return [(int(trial), int(epochs)) for trial, epochs in rows]


@pytest.mark.slow
def test_each_trial_has_a_row() -> None:
    output = ranks(PROGRAM, "--trials", "3", "--epochs", "1")
    assert sorted(rows_of(output)) == [(0, 1), (1, 1), (2, 1)] and "3 of 3 trials in" in output


def test_a_package_that_is_missing_is_named() -> None:
    program = (
        "import runpy, sys; sys.modules['sklearn'] = None; runpy.run_path('examples/search.py', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, env=environment(), text=True, stderr=subprocess.PIPE
    )
    assert ran.returncode == 2 and ran.stderr.endswith("sklearn is not installed: python -m pip install scikit-learn\n")


@pytest.mark.slow
def test_a_killed_trial_is_named_and_the_others_finish(tmp_path: Path) -> None:
    picture = tmp_path / "search.png"
    output = kept("--trials", "3", "--epochs", "2", "--kill", "1", "--png", str(picture))
    assert sorted(rows_of(output)) == [(0, 2), (2, 2)]
    assert re.search(r"^trial 1 +was lost: rank [01] died$", output, re.M) and "2 of 3 trials in" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_ranks_of_a_trial_end_together() -> None:
    """The program compares the numbers of epochs of a trial's ranks. One trial loses one of its two ranks."""
    output = kept("--how", "halving", "--group-size", "2", "--trials", "8", "--epochs", "4", "--kill", "0", size=4)
    rows = rows_of(output)
    assert sorted(trial for trial, _ in rows) == list(range(1, 8))
    assert re.search(r"^trial 0 +was lost: .*rank [13]\b.* died", output, re.M)
    assert {epochs for _, epochs in rows} >= {1, 4}, "none was pruned, or none was trained to the end"


@pytest.mark.slow
def test_halving_finds_one_of_the_best() -> None:
    whole = rows_of(ranks(PROGRAM, "--epochs", "8"))
    halved = rows_of(ranks(PROGRAM, "--how", "halving", "--epochs", "8"))
    assert len(whole) == len(halved) == 16
    assert halved[0][0] in [trial for trial, _ in whole[:3]]
    assert sum(epochs for _, epochs in halved) < 0.75 * sum(epochs for _, epochs in whole)


@pytest.mark.slow
def test_a_population_takes_over_what_is_better() -> None:
    output = ranks(PROGRAM, "--how", "population", "--epochs", "4")
    assert sorted(rows_of(output)) == [(0, 4), (1, 4)]
    momenta = re.findall(r"momentum ([\d.]+)", output)
    assert momenta[0] == momenta[1], "they had different ones"


DIES_BEFORE_ITS_START = """
import os, sys
sys.path.insert(0, "examples")
import search
start = search.Team.start
search.Team.start = lambda team, *arguments: os.kill(os.getpid(), 9) if team.number == 1 else start(team, *arguments)
search.main()
"""


@pytest.mark.slow
def test_a_population_does_not_wait_for_a_team_that_died_before_its_start() -> None:
    program = (*KEEP[:-1], "-c", DIES_BEFORE_ITS_START, "--how", "population", "--epochs", "2")
    output = torchrun(*program)
    assert re.search(r"^trial 1 +was lost: rank 1 died$", output, re.M) and "1 of 2 trials in" in output


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("optuna"), reason="Optuna is not installed: make ecosystem")
def test_optuna(tmp_path: Path) -> None:
    output = ranks(PROGRAM, "--optuna", str(tmp_path / "journal"), "--trials", "6", "--epochs", "3")
    assert sorted(trial for trial, _ in rows_of(output)) == list(range(6)), output
