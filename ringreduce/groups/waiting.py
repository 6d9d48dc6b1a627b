"""How a rank waits for others while a group is made, and whom it blames if they do not come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ringreduce.common.failures import CollectiveTimeout, PeerLost, RingReduceError, SystemFailure
from ringreduce.coordination.wait import CHECK_BY_RANK, CHECK_PROCESSES, Pauses, Reminder
from ringreduce.groups.arrivals import Arrivals

PAUSES = Pauses(1 / 4, 0.0002, 0.05)
"""Between two looks."""
LONGEST_BY_RANK = 0.0005
"""With many ranks a pause is at most so many seconds for each, so that one store, and the cores of one host, serve them
all."""
CHECK_KNOWN_ENDS = 0.005
"""Seconds between two looks where whoever makes the group knows of ends."""
LOOKS = 10
"""If a look takes longer than a tenth of the longest pause, since the store is slow, other questions are asked only in
every tenth look or so."""
LEST = 1.0
"""Seconds that the others wait longer than rank 0, which can tell them whom it has missed."""

log = logging.getLogger(__name__)


class Wait:
    """One wait for other ranks that make a group with this one."""

    def __init__(self, arrivals: Arrivals, whom: Callable[[], list[int]] | None, deadline: float | None) -> None:
        """`whom`: the ranks that have not come yet; None: rank 0 is waited for, which waits for all."""
        self._arrivals, self._whom = arrivals, whom
        self._deadline = deadline or arrivals.deadline + (0.0 if whom else LEST)
        self._began = self._checked = self._asked = time.monotonic()
        self._reminder = Reminder()

    def until(self, ready: Callable[[float], bool], first: float = 0.0) -> None:
        """Returns when `ready(seconds)` says so, which may take that long to look, and the first time `first`."""
        longest = max(PAUSES.longest, LONGEST_BY_RANK * self._arrivals.size)
        pauses = PAUSES._replace(shortest=max(PAUSES.shortest, first), longest=longest)
        pause, before = first, self._began
        try:
            while not ready(pause):
                now = time.monotonic()
                took = max(now - before - pause, 0.0)
                pause = pauses.after(now - self._began)
                if self._ends(now, took, ready):
                    return
                before = time.monotonic()
        except RingReduceError:
            raise
        except RuntimeError as error:  # torch's: the store, which a process of a rank may hold, is gone
            if death := self._arrivals.death():
                raise death from None
            raise SystemFailure(f"making the group: its store cannot be asked any more: {error}") from None

    def _ends(self, now: float, took: float, ready: Callable[[float], bool]) -> bool:
        """Asks the other questions, as far as it is time for them; `took`: how long the last look took.

        Raises what makes the wait vain. True: a rank has ended, but it did its part before.
        """
        arrivals, late, waited = self._arrivals, now > self._deadline, now - self._began
        asks = late or LOOKS * took < PAUSES.longest or now - self._asked > LOOKS * took
        if asks and (waited > PAUSES.longest or late):
            arrivals.raise_if_given_up()
        between = CHECK_KNOWN_ENDS if arrivals.before.ended else CHECK_PROCESSES
        if late or now - self._checked > max(between, CHECK_BY_RANK * arrivals.size):
            self._checked = now
            missing = self._whom() if asks and self._whom else []
            try:
                arrivals.raise_if_dead()
            except PeerLost:
                if ready(0.0):
                    return True
                raise
            if late and (missing or not self._whom):
                text = arrivals.call(missing) if missing else f"{arrivals.call([0])}, which waits for all ranks,"
                culprit = missing[0] if missing else 0
                raise CollectiveTimeout(f"making the group: {text} did not come in time", culprit)
            if asks and self._reminder.due(waited):
                log.warning(
                    "making the group of the ranks %s: %s has waited %.0f s for %s, and will wait %.0f s more",
                    arrivals.ranks,
                    arrivals.describe(arrivals.rank),
                    waited,
                    arrivals.call(missing or arrivals.untold() or [0]),
                    max(arrivals.deadline - now, 0.0),
                )
            if arrivals.order and asks and (missing or not arrivals.attempt):
                arrivals.order.look(missing or [0])
        self._asked = time.monotonic() if asks else self._asked
        return False
