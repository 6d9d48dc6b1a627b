"""Teams take turns, batch by batch, so that a drift of the machine hits all alike; and what is made of their times."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.doctor.facts import memory_left

MOST_ITERATIONS = 10_000
"""Calls in a batch; it keeps the recorded times few."""

Answers = Sequence[dict[str, Any]]


@dataclass
class Tally:
    """What the rounds have found so far for one kind of call, by team. A batch's figures are in microseconds."""

    times_us: dict[str, list[float]] = field(default_factory=dict)
    means_us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    estimate_us: dict[str, float] = field(default_factory=dict)  # of one call

    def add(self, name: str, answers: Answers, counted: bool) -> None:
        """Take in a batch of the team `name`; its time only if it is `counted`."""
        self.estimate_us[name] = slowest(answers)
        self.wrong[name] = self.wrong.get(name, 0) + sum(answer["wrong"] for answer in answers)
        if counted:
            self.times_us.setdefault(name, []).append(slowest(answers))
            self.means_us.setdefault(name, []).append(mean(answers))

    @property
    def median_us(self) -> dict[str, float]:
        """Of the rounds."""
        return {name: statistics.median(times) for name, times in self.times_us.items()}


AnyTally = TypeVar("AnyTally", bound=Tally)


def slowest(answers: Answers) -> float:
    """The figure of a batch in us: the median over its calls of the slowest rank's time."""
    calls = zip(*(answer["times_ns"] for answer in answers), strict=True)
    return statistics.median(float(max(times)) for times in calls) / 1e3


def mean(answers: Answers) -> float:
    """The batch's duration on its slowest rank over its calls, in us: it counts the calls that waited for a core."""
    return float(max(statistics.fmean(answer["times_ns"]) for answer in answers)) / 1e3


def take_turns(
    tallies: Sequence[AnyTally],
    teams: list[Team],
    order: Callable[[AnyTally, Team], dict[str, Any]],
    give_up: Callable[[BackendFailed], None],
    *,
    rounds: int,
    batch_time: float,
    least: int,
) -> Iterator[int]:
    """Has every team make a batch of calls for each tally, round by round; yields the number of each round that ended.

    A batch takes about `batch_time` seconds, but has `least` calls. Round 0 is not counted: it finds out how many calls
    fill a batch. A team that fails leaves `teams`, and `give_up` is told.
    """
    for turn in range(rounds + 1):
        for tally, team in itertools.product(tallies, tuple(teams)):
            if team.ended:
                continue
            fitting = batch_time * 1e6 / tally.estimate_us.get(team.name, math.inf)
            try:
                iterations = min(max(least, round(fitting)), MOST_ITERATIONS)
                tally.add(team.name, team.run(**order(tally, team), iterations=iterations), counted=turn > 0)
            except BackendFailed as error:
                give_up(error)
                if not team.ended:
                    team.kill()
        teams[:] = [each for each in teams if not each.ended]
        yield turn


def free_memory() -> float:
    """Bytes that the ranks' buffers may take: what is available, less a quarter for all else."""
    left = memory_left(Path("/sys"), Path("/proc"))
    return math.inf if left is None else 0.75 * left
