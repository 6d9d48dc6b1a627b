"""`ringreduce bench`: the verdict from given figures, the tables, and results that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ringreduce.cli import bench
from ringreduce.cli.bench import steps
from ringreduce.cli.bench.compare import (
    ALONE,
    GLOO,
    MPI,
    OURS,
    PAYS,
    PAYS_NOT,
    UNCLEAR,
    Case,
    Comparison,
    Reduced,
    Stepped,
    verdict,
)
from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.cli.terminal import console

CASE = Case("transformer", "DDP", batch=2, length=100, width=768, layers=12)


def stepped(ours: list[float], gloo: float = 400e3, alone: float = 300e3) -> Stepped:
    """Steps with these times, in us."""
    times = {GLOO: [gloo] * len(ours), OURS: ours, ALONE: [alone] * len(ours)}
    return Stepped(CASE, 2, 100_400_000, times)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([320e3] * 3, PAYS),
        ([395e3] * 5, PAYS_NOT),  # less than noise
        ([440e3] * 3, PAYS_NOT),
        ([440e3, 440e3, 320e3, 440e3, 440e3], PAYS_NOT),
        ([320e3, 320e3, 410e3], UNCLEAR),  # one of three was slower
        ([320e3, 320e3, 410e3, 320e3, 320e3], PAYS),
        ([320e3, 320e3, 410e3, 410e3, 320e3], UNCLEAR),
    ],
)
def test_verdict(ours: list[float], said: str) -> None:
    step, all_steps, *more = verdict([stepped(ours)])
    assert step.startswith("2 ranks, transformer, 100.4 M parameters, DDP, 200 tokens a rank: 25% of a step with Gloo")
    assert step.endswith(f": {said}.")
    assert all_steps == f"ringreduce pays here for {int(said == PAYS)} of 1 kinds of steps."
    assert bool(more) == (said == UNCLEAR)


def test_figures_of_a_step() -> None:
    step = stepped([320e3, 330e3, 310e3])
    assert step.rate(GLOO) == pytest.approx(1000)  # 2 ranks with 200 tokens in 0.4 s
    assert step.rate(OURS) == pytest.approx(1250)
    assert step.speedup(OURS) == pytest.approx(1.25)
    assert step.communication(OURS) == pytest.approx(1 - 300 / 320)
    assert stepped([290e3] * 3).communication(OURS) == 0


@pytest.mark.parametrize("mpi", [False, True])
def test_tables(capsys: pytest.CaptureFixture[str], mpi: bool) -> None:
    times = {GLOO: 400.0, OURS: 5.0} | ({MPI: 2.0} if mpi else {})
    bench.show(console(), [Reduced(2, 64, times)], [stepped([320e3] * 3)], ["MPI was left out: why"] * (not mpi))
    out = capsys.readouterr().out
    row = ["2", "64 B", "400 us", "5 us", *(["2 us"] if mpi else []), "80.00x", *(["0.40x"] if mpi else [])]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert " ".join(row) in lines
    assert any(line.endswith("tokens 2 1e+03 1.25e+03 1.25x 25% 6%") for line in lines)
    assert "ringreduce pays here for 1 of 1 kinds of steps." in lines
    assert ("MPI was left out: why" in lines) is not mpi


class Given:
    """A team whose steps come to `checksum`; it fails with its third order."""

    def __init__(self, name: str, checksum: float, lasts: int = 100) -> None:
        self.name, self.checksum, self.lasts, self.ended = name, checksum, lasts, False

    def run(self, iterations: int, **order: Any) -> list[dict[str, Any]]:
        self.lasts -= 1
        if not self.lasts:
            raise BackendFailed(f"{self.name} died")
        assert self.name == GLOO or not order["alone"]
        return [{"times_ns": [1000] * iterations, "wrong": 0, "checksum": self.checksum}] * 2

    def kill(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("team", "failure"),
    [
        (Given(OURS, 1.001), ""),
        (Given(OURS, 1.1), "ringreduce-dist: transformer by DDP comes to 1.1 on all ranks, and with Gloo to 1"),
        (Given(OURS, float("nan")), "ringreduce-dist: transformer by DDP comes to nan"),
        (Given(OURS, 1, lasts=3), "left out: ringreduce-dist died"),
    ],
    ids=["rounded otherwise", "wrong", "no number", "died"],
)
def test_what_fails_is_told(team: Given, failure: str) -> None:
    comparison = Comparison(2, Path(), lambda what: None)
    comparison.teams = [cast(Team, each) for each in (Given(GLOO, 1), team)]
    found = comparison.steps(CASE, 0)
    assert [each.parameters for each in found] in ([], [100_414_464])
    assert len(found) == (not failure.startswith("left out"))
    assert [each[: len(failure)] for each in comparison.failures] == [failure] * bool(failure)


def test_a_net_that_is_too_large_is_left_out() -> None:
    comparison = Comparison(10_000, Path(), lambda what: None)
    comparison.teams = [cast(Team, Given(name, 1)) for name in (GLOO, OURS)]
    assert comparison.steps(CASE, 0) == comparison.failures == []
    assert "needs 22358 GB" in comparison.notes[0]


def test_the_convolutional_net_is_resnet_18() -> None:
    """By the number of its parameters, which torchvision documents as 11,689,512."""
    assert steps.parameters(Case("convolutional", "DDP", batch=1, length=224)) == 11_689_512
