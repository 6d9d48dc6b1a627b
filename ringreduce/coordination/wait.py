"""Waiting with a deadline: looking again and again, and repeating requests that fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ringreduce.common.failures import RingReduceError

Found = TypeVar("Found")

CHECK_PROCESSES, CHECK_BY_RANK = 0.25, 0.001
"""Seconds between two looks whether processes have ended, and the same for each rank."""

WARN_AFTER = 60.0
"""Seconds after which a rank first tells its user for whom it waits, while a group is made and in calls."""


class Reminder:
    """When a wait is told: after `WARN_AFTER`, then when it has doubled, but at most ten times `WARN_AFTER` later.

    The engine has the same rule (csrc/engine/late.h).
    """

    def __init__(self) -> None:
        self.next = WARN_AFTER
        """How long the wait is then, in seconds."""

    def due(self, waited: float) -> bool:
        if waited < self.next:
            return False
        self.next = waited + min(waited, 10 * WARN_AFTER)
        return True


def at_first(deadline: float) -> float:
    """For how many seconds a wait lasts before it is over, or is told."""
    return max(0.0, min(deadline - time.monotonic(), WARN_AFTER))


class Pauses(NamedTuple):
    """The pauses between two looks, in seconds: a share of the time waited so far, between a shortest and a longest."""

    share: float
    shortest: float
    longest: float

    def after(self, waited: float) -> float:
        return min(max(self.share * waited, self.shortest), self.longest)


def every(seconds: float) -> Pauses:
    """Pauses of one length."""
    return Pauses(0.0, seconds, seconds)


def wait_for(
    look: Callable[[], Found], pauses: Pauses, deadline: float = float("inf"), at_once: bool = True
) -> Found | None:
    """Calls `look` until it returns something other than None or False, and returns that; None if the deadline passed.

    `deadline`: a time of `time.monotonic`. Once it has passed, `look` is called at most once more. `at_once`: whether
    to look before the first pause.
    """
    began = time.monotonic()
    while not at_once or (found := look()) is None or found is False:
        if (now := time.monotonic()) >= deadline:
            return None
        at_once = True
        time.sleep(pauses.after(now - began))
    return found


def persist(request: Callable[[], Found], again: float, failed: Callable[[Exception, float], None]) -> Found:
    """Repeats a request to a store while the store is out of reach. The request may be carried out several times.

    `again`: seconds after which it is repeated. `failed(error, seconds)` is called after each failure, with the time
    since the first call, and may raise.
    """
    began = time.monotonic()
    while True:
        try:
            return request()
        except RingReduceError:
            raise
        except (RuntimeError, OSError) as error:  # torch raises these if a store is gone
            failed(error, time.monotonic() - began)
        time.sleep(again)
