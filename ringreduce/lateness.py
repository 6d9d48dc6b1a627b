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

from ringreduce.membership.protocol import Member

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


class Lateness:
    """Of the members of one view. Its calls are for one thread. All times within are in microseconds."""

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self._members, self._rank = members, rank
        self._lost, self._took = [0] * len(members), 0
        self._recent: deque[tuple[int, int, int]] = deque()
        """Of the latest steps: who was the latest, what that cost, what the step took. Below, their sums by rank."""
        self._latest_in, self._recent_lost, self._recent_took = [0] * len(members), [0] * len(members), 0
        self._waited, self._since = _waited(), time.monotonic()

    def figures(self) -> list[int]:
        """This member's part of what `take` gets: rank 0's time for the step, all ranks' waits."""
        now, waited = time.monotonic(), _waited()
        mine = [0] * (1 + len(self._members))
        if self._rank == 0:
            mine[0] = round((now - self._since) / MICRO)
        mine[1 + self._rank] = round(max(waited - self._waited, 0.0) / MICRO)  # groups that went took theirs along
        self._waited, self._since = waited, now
        return mine

    def take(self, figures: list[int]) -> None:
        """Learns from the sum of all members' figures."""
        took, waits = figures[0], figures[1:]
        first, second = sorted(waits)[:2]
        latest, lost = waits.index(first), second - first
        if len(self._recent) == STEPS:
            self._count(*self._recent.popleft(), -1)
        self._recent.append((latest, lost, took))
        self._count(latest, lost, took, 1)
        self._lost[latest] += lost
        self._took += took

    def _count(self, latest: int, lost: int, took: int, times: int) -> None:
        self._latest_in[latest] += times
        self._recent_lost[latest] += times * lost
        self._recent_took += times * took

    def all(self) -> list[Late]:
        """Those that others have waited for since these members came together, the worst first."""
        found = [self._late(rank, lost, self._took) for rank, lost in enumerate(self._lost) if lost > 0]
        return sorted(found, key=lambda late: -late.seconds)

    def straggler(self) -> Late | None:
        """The one of the latest `STEPS` steps, if there is one; then the next `STEPS` are counted."""
        rank = self._recent[-1][0]
        lost, took = self._recent_lost[rank], self._recent_took
        if len(self._recent) < STEPS or self._latest_in[rank] < LATEST_IN * STEPS or lost < COSTS * took:
            return None
        while self._recent:
            self._count(*self._recent.popleft(), -1)
        return self._late(rank, lost, took)

    def _late(self, rank: int, lost: int, took: int) -> Late:
        who = json.loads(self._members[rank].address)
        return Late(rank, who["host"], who["pid"], MICRO * lost, lost / took if took else 0.0)


def _waited() -> float:
    """Seconds that this process has waited for others, in all its groups."""
    from ringreduce import _C

    return sum(counters[3] for calls in _C.statistics().values() for counters in calls.values())
