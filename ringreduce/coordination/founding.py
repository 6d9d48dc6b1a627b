"""How a fixed number of ranks begin something together, in numbered attempts.

    founding = Founding(store, founded)                 # on each of them
    attempt = founding.take_part(rank, me, taken)       # then all make it, under keys of this attempt
    founding.end(attempt)                               # if this rank cannot go on

All ranks come to the latest attempt, each with one process at most. If an earlier process of a rank has taken part and
ended, the next one of that rank ends the attempt and begins another. So processes that a launcher starts again meet
those that still wait, whichever of them had failed. The caller knows what is made, and when that is done (`founded`).

Keys in the store:

    attempt          the number of the latest attempt; none: 0
    attempt N/rank R the process that takes part in attempt N as rank R (`Founder`)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ringreduce.common.failures import RingReduceError
from ringreduce.coordination.process import Who, identity, lives, process_began
from ringreduce.coordination.store import once, value_of

LOOK_AT_ATTEMPT, LOOK_AT_EARLIER = 0.25, 0.02
"""Seconds between two looks whether an attempt is over: of a process that takes part in it, and of one that waits
because an earlier process of its rank does."""


class Founder(NamedTuple):
    """A process that takes part in an attempt."""

    name: str
    at: float
    """When it came, in seconds of `time.time()`."""
    who: Who

    @property
    def is_earlier(self) -> bool:
        """Whether it came before this process began."""
        return self.at < process_began()


class Founding:
    """The attempts in one store, as a process sees them."""

    def __init__(self, store: Any, founded: Callable[[], bool] = lambda: False) -> None:
        """`store`: of torch. `founded`: whether an attempt has succeeded."""
        self.store, self._founded = store, founded

    def take_part(self, rank: int, me: str, taken: Callable[[Who], None]) -> int | None:
        """The number of the attempt that this process takes part in, under the name `me`; None: an earlier one has
        succeeded.

        While another process of this rank takes part and lives, this one waits, and calls `taken` with that process
        again and again, which may raise.
        """
        while True:
            attempt = self.latest()
            founder = self.claim(attempt, rank, me)
            if founder.name == me:
                return attempt
            if lives(founder.who) and founder.who != identity():
                taken(founder.who)
                time.sleep(LOOK_AT_EARLIER)
            else:
                self.end(attempt)
            if self._founded():
                return None

    def claim(self, attempt: int, rank: int, me: str) -> Founder:
        """Takes part in an attempt as `rank`, under a name that is never used again, unless another process does.
        Returns who takes part."""
        mine = json.dumps([me, time.time(), identity()])
        return _founder(once(self.store, f"attempt {attempt}/rank {rank}", mine))

    def founder(self, attempt: int, rank: int) -> Founder | None:
        """Who takes part in an attempt as `rank`; None: nobody has come."""
        said = value_of(self.store, f"attempt {attempt}/rank {rank}")
        return None if said is None else _founder(said)

    def end(self, attempt: int) -> None:
        """Ends an attempt, unless it is over: those that come from now on meet in the next one."""
        self.store.compare_set("attempt", str(attempt) if attempt else "", str(attempt + 1))

    def latest(self) -> int:
        """The number of the latest attempt."""
        return int(value_of(self.store, "attempt") or b"0")

    def look_at(self, attempt: int, error: RingReduceError) -> Callable[[], RingReduceError | None]:
        """A function that returns `error` if an attempt is over, also by success. It asks the store now and then."""
        checked = time.monotonic()

        def look() -> RingReduceError | None:
            nonlocal checked
            if time.monotonic() <= checked + LOOK_AT_ATTEMPT:
                return None
            checked = time.monotonic()
            return error if self.latest() != attempt or self._founded() else None

        return look


def _founder(said: str | bytes) -> Founder:
    name, at, who = json.loads(said)
    return Founder(name, at, Who(*who))
