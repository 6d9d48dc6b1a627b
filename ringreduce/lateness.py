"""Who keeps the others waiting, by what each member of a world has waited from one commit to the next.

A rank that comes late to its calls waits least, since the others wait for it. So the one that waited least in a step is
the latest, and the step would have been shorter by the difference to the next one, had it been as quick as that one.
All members get the same figures with the vote of a commit, so they come to the same conclusions.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringreduce.membership.protocol import Member

if TYPE_CHECKING:
    import torch

STEPS, LATEST_IN, COSTS = 100, 0.9, 0.1
"""A straggler is the latest in at least this share of so many steps in a row, and costs at least this share of their
time."""
MICRO = 1e-6


@dataclass(frozen=True)
class Late:
    """A member that the others have waited for."""

    rank: int
    host: str
    pid: int
    seconds: float
    """What the steps would have been shorter by, had it been as quick as the next one."""
    share: float
    """The same as a share of the time."""


@dataclass(frozen=True)
class _Step:
    latest: int
    lost: float
    took: float


class Lateness:
    """Of the members of one view. Its calls are for one thread."""

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self._members, self._rank = members, rank
        self._lost = [0.0] * len(members)
        self._took = 0.0
        self._recent: deque[_Step] = deque(maxlen=STEPS)
        self._waited, self._since = _waited(), time.monotonic()

    def put(self, vote: torch.Tensor) -> None:
        """Adds this member's figures for the step to the vote, in microseconds: rank 0's time, all ranks' waits."""
        now, waited = time.monotonic(), _waited()
        if self._rank == 0:
            vote[0] = round((now - self._since) / MICRO)
        vote[1 + self._rank] = round(max(waited - self._waited, 0.0) / MICRO)  # groups that went took theirs along
        self._waited, self._since = waited, now

    def take(self, figures: list[int]) -> None:
        """Learns from the vote, in which all members' figures are."""
        took, *waits = (MICRO * figure for figure in figures)
        first, second = sorted(waits)[:2]
        step = _Step(waits.index(first), second - first, took)
        self._recent.append(step)
        self._lost[step.latest] += step.lost
        self._took += took

    def all(self) -> list[Late]:
        """Those that others have waited for since these members came together, the worst first."""
        found = [self._late(rank, lost, self._took) for rank, lost in enumerate(self._lost) if lost > 0]
        return sorted(found, key=lambda late: -late.seconds)

    def straggler(self) -> Late | None:
        """The one of the latest `STEPS` steps, if there is one; then the next `STEPS` are counted."""
        steps = self._recent
        if len(steps) < STEPS:
            return None
        latest = [step.latest for step in steps]
        rank = max(set(latest), key=latest.count)
        lost, took = sum(step.lost for step in steps if step.latest == rank), sum(step.took for step in steps)
        if latest.count(rank) < LATEST_IN * STEPS or lost < COSTS * took:
            return None
        steps.clear()
        return self._late(rank, lost, took)

    def _late(self, rank: int, lost: float, took: float) -> Late:
        who = json.loads(self._members[rank].address)
        return Late(rank, who["host"], who["pid"], lost, lost / took if took else 0.0)


def _waited() -> float:
    """Seconds that this process has waited for others, in all its groups."""
    from ringreduce import _C

    return sum(counters[3] for calls in _C.statistics().values() for counters in calls.values())
