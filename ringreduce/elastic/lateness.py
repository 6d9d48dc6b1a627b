"""Finds the member of a world that keeps the others waiting.

Each member measures how long it waits for others between two commits. A member that comes late to its calls waits
least, because the others wait for it. So the member that waited least in a step was the latest. Had it been as quick as
the second latest, the step would have been shorter by the difference of their waits.

The vote of a commit carries the measurements to all members, so all come to the same conclusions.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from ringreduce.coordination.endpoint import address_of
from ringreduce.coordination.protocol import Member

STEPS, LATEST_IN, COSTS = 100, 0.9, 0.1
"""A straggler is the latest in at least this share of so many steps in a row, and costs at least this share of their
time."""
MICRO = 1e-6
LEAST_LOST = round(0.01 / MICRO)
"""A straggler costs at least so much in these steps. In a loop of tiny steps the scheduler alone makes a rank late."""
WARN_AGAIN = 60.0
"""Seconds between two warnings of a straggler."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Late:
    """A member that the others have waited for."""

    rank: int
    host: str
    pid: int
    seconds: float
    """By how much the steps would have been shorter, had it been as quick as the second latest."""
    share: float
    """`seconds` as a share of the time that the steps took."""


class Lateness:
    """The lateness of the members of one view. Only one thread may use it. All times inside are in microseconds."""

    _warn_from = 0.0  # of this process, in whatever view

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self._members, self._rank = members, rank
        self._lost, self._took = [0] * len(members), 0
        self._recent: deque[tuple[int, int, int]] = deque()
        """For each of the last `STEPS` steps: the latest rank, what that cost, what the step took. Below, the sums."""
        self._latest_in, self._recent_lost, self._recent_took = [0] * len(members), [0] * len(members), 0
        self._waited, self._since = _waited(), time.monotonic()

    def figures(self) -> list[int]:
        """This member's share of what `judge` gets: what the step took (from rank 0), then each rank's wait.

        Every member fills in its own places, so the sum over all members is complete.
        """
        now, waited = time.monotonic(), _waited()
        mine = [0] * (1 + len(self._members))
        if self._rank == 0:
            mine[0] = round((now - self._since) / MICRO)
        mine[1 + self._rank] = round(max(waited - self._waited, 0.0) / MICRO)  # negative if a group has gone
        self._waited, self._since = waited, now
        return mine

    def judge(self, figures: list[int]) -> Late | None:
        """Counts one step, from the sum of all members' figures. Returns the straggler, if there is one now.

        Rank 0 warns of it.
        """
        took, waits = figures[0], figures[1:]
        if len(waits) == 1:
            return None
        first, second = sorted(waits)[:2]
        latest, lost = waits.index(first), second - first
        if len(self._recent) == STEPS:
            self._count(*self._recent.popleft(), -1)
        self._recent.append((latest, lost, took))
        self._count(latest, lost, took, 1)
        self._lost[latest] += lost
        self._took += took
        return self._straggler()

    def _count(self, latest: int, lost: int, took: int, times: int) -> None:
        self._latest_in[latest] += times
        self._recent_lost[latest] += times * lost
        self._recent_took += times * took

    def all(self) -> list[Late]:
        """The members that others have waited for since this view began, worst first."""
        found = [self._late(rank, lost, self._took) for rank, lost in enumerate(self._lost) if lost > 0]
        return sorted(found, key=lambda late: -late.seconds)

    def _straggler(self) -> Late | None:
        """The straggler of the last `STEPS` steps, if there is one. After one was found, counting begins again."""
        rank = self._recent[-1][0]
        lost, took = self._recent_lost[rank], self._recent_took
        enough = lost >= max(COSTS * took, LEAST_LOST)
        if len(self._recent) < STEPS or self._latest_in[rank] < LATEST_IN * STEPS or not enough:
            return None
        while self._recent:
            self._count(*self._recent.popleft(), -1)
        late = self._late(rank, lost, took)
        if self._rank == 0 and time.monotonic() > self._warn_from:
            Lateness._warn_from = time.monotonic() + WARN_AGAIN
            log.warning(
                "rank %d (%s, pid %d) is a straggler: the others have waited %.3g s for it in %d steps, %.0f%% of "
                "their time",
                *(late.rank, late.host, late.pid, late.seconds, STEPS, 100 * late.share),
            )
        return late

    def _late(self, rank: int, lost: int, took: int) -> Late:
        who = address_of(self._members[rank]).who
        return Late(rank, who.host, who.pid, MICRO * lost, lost / took if took else 0.0)


def _waited() -> float:
    """Seconds that this process has waited for others so far, in all its present groups."""
    from ringreduce import _C

    return sum(counters[3] for calls in _C.statistics().values() for counters in calls.values())
