"""Who has come to make a group, who has said that it will not, and who has ended, as far as a rank can see.

One store serves many attempts. A launcher may keep its store while it restarts all ranks, and ranks may make a group
again after a failure, one of them once more often than another. So keys do not count attempts. Instead rank 0 draws a
random id whenever it begins, and tells it in its `Arrival`. The other ranks answer under keys that contain this id. If
rank 0 begins again, it has another id, and whoever still waits answers again.

A rank may find what an earlier attempt has left behind. It ignores an arrival if it has taken part in that attempt
itself. It also ignores an arrival that is older than its own process if that attempt has failed or its process has
ended. The launcher's count of restarts could not tell: each agent of torchrun has its own, and a change of the number
of nodes restarts ranks without counting.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ringreduce.common import failures
from ringreduce.common.failures import CollectiveMismatch, CollectiveTimeout, PeerLost, RingReduceError
from ringreduce.common.ranks import call_ranks
from ringreduce.coordination.endpoint import Endpoint, PreparedEndpoint
from ringreduce.coordination.process import Who, has_ended, identity, process_began
from ringreduce.coordination.store import Store, value_of
from ringreduce.groups.order import Order

WHO = "who"
"""The first phase, in which all ranks tell at least {"who": identity()}."""


class Beforehand(NamedTuple):
    """What the caller that makes a group knows of its ranks beforehand, and torch would not hand on."""

    prepared: PreparedEndpoint | None = None
    """This rank's, which the others know already."""
    endpoints: Sequence[Endpoint] = ()
    """Of all ranks, with which the group is made without a store; none: the ranks tell each other."""
    ended: Callable[[], dict[int, str]] | None = None
    """If the ranks were in another group: those of its ranks that have ended or are out of reach there, and which of
    these it is. With it, the death of a rank that has not told the store anything is seen, too."""
    gives_up: Callable[[RingReduceError], None] | None = None
    """What to do when this process cannot go on with the group, before it closes its connections."""
    look: Callable[[], RingReduceError | None] | None = None
    """What a wait also calls now and then. If it returns an error, the wait raises that."""


DIED = "died"
"""How a rank has ended whose process has."""

NOTHING = Beforehand()
beforehand = contextvars.ContextVar("beforehand", default=NOTHING)


@contextlib.contextmanager
def known_beforehand(**facts: Any) -> Iterator[None]:
    """Has a group be made with these fields of `Beforehand`, besides those that are set already."""
    before = beforehand.set(beforehand.get()._replace(**facts))
    try:
        yield
    finally:
        beforehand.reset(before)


def passed(stage: str) -> None:
    """Called at each stage of making a group. Tests put something else here."""


class Arrival(NamedTuple):
    """What a rank tells as soon as it begins: that it is here, and what for. Or why it does not come."""

    id: str
    """Random; it names this attempt of this rank. That of rank 0 names the attempt of the group."""
    who: Who
    at: float
    """When, in seconds of `time.time()`."""
    ranks: list[int]
    """The global ranks of the group that it wants."""
    failed: tuple[str, str, int] | None = None
    """The class, the message and the culprit of the error for which it does not come."""


class Arrivals:
    """The ranks that make one group, as one of them sees them without waiting."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        ranks: Sequence[int] = (),
        within: str = "",
        processes: Sequence[tuple[str, int]] = (),
        before: Beforehand = NOTHING,
        order: Order | None = None,
    ) -> None:
        """`ranks`: the global ranks of the group, by which messages call them. `within`: the attempt that has made the
        group whose ranks make this one, as in `new_group`; then nothing under these keys is of another attempt.
        `processes`: host and pid of each rank, if they are known from that group. `order`: the group's place among the
        others that are made within that one.
        """
        self.store, self.rank, self.size, self.before = store, rank, size, before
        self.endpoints = endpoints = before.endpoints
        """What the ranks have told before, instead of the first phase: see `endpoint`."""
        self.ranks = list(ranks or range(size))
        self.deadline = time.monotonic() + timeout
        self.id = secrets.token_hex(8)
        self.attempt = endpoints[0]["socket"][1] if endpoints else ""
        """The id of rank 0, once this rank knows it."""
        self.job = ""
        """Of the group whose ranks make this one; empty: this one begins a job."""
        self.watched = range(size) if rank == 0 else [0]
        """The ranks without which a wait is in vain: where they are on this machine, their end ends it."""
        self._within, self._processes, self.order = within, processes, order
        self._known = {rank: Who(*endpoint["who"]) for rank, endpoint in enumerate(endpoints)}
        self._counted_in = bool(endpoints) or rank == 0
        """Whether rank 0 has counted this rank in, so that the attempt is surely not an old one."""
        self._looked = 0.0
        self._gave_up = False

    @property
    def prefix(self) -> str:
        """Of the keys of this attempt."""
        return f"ringreduce/{self.attempt}"

    def _set_arrival(self, failed: tuple[str, str, int] | None = None) -> None:
        arrival = Arrival(self.id, identity(), time.time(), self.ranks, failed)
        self.store.set(self._arrival_key(self.rank), json.dumps(arrival))
        passed("arrival: told")

    def _arrival_key(self, rank: int) -> str:
        # By global ranks: torch may give the groups of different ranks the same name, and with it the same keys.
        return f"ringreduce/{self._within}/arrival/{self.ranks[rank]}"

    def _arrival(self, rank: int) -> Arrival | None:
        """The latest of a rank that this process has not heard of before."""
        text = value_of(self.store, self._arrival_key(rank))
        if text is None:
            return None
        identifier, who, *rest = json.loads(text)
        arrival = Arrival(identifier, Who(*who), *rest)
        return None if (self.rank, arrival.id) in over and arrival.id != self.attempt else arrival

    def _is_coming(self, rank: int, arrival: Arrival) -> bool:
        """Whether this is the arrival of a rank that takes part; False: it is of an earlier attempt.

        Raises what keeps the rank from coming.
        """
        if arrival.ranks != self.ranks:
            if not self._within:
                return False
            raise CollectiveMismatch(
                f"making the group: {self.describe(self.rank)} makes a group of the ranks {self.ranks}, "
                f"and {self.describe(rank, arrival.who)} makes one of the ranks {arrival.ranks} instead; all ranks "
                "must make the same groups in the same order",
                rank,
            )
        failed = arrival.failed
        if rank == 0 and not failed and (text := value_of(self.store, f"ringreduce/{arrival.id}/given up")):
            failed = json.loads(text)
        if failed and (self.rank, failed[1]) in over:  # this rank's own words, which an earlier attempt has heard
            return False
        ended = has_ended(arrival.who)
        if not (failed or ended):
            return True
        if not self._within and arrival.at < process_began():
            return False
        ignore((self.rank, arrival.id))
        if failed:
            kind, why, culprit = failed
            raise getattr(failures, kind)(str(why), int(culprit))
        self.know(rank, arrival.who)
        raise PeerLost(f"making the group: {self.describe(rank)} {DIED}", rank)

    def has_told(self, phase: str, rank: int) -> bool:
        return bool(phase == WHO and self.endpoints) or self.store.check([f"{self.prefix}/{phase}/{rank}"])

    def untold(self) -> list[int]:
        """The ranks that have told nothing yet, as far as this rank can know."""
        return [rank for rank in range(self.size) if not self.has_told(WHO, rank)] if self.attempt else []

    def know(self, rank: int, who: Sequence[Any]) -> None:
        """`who`: what the rank has told as its `identity`."""
        self._known[rank] = Who(*who)

    def raise_if_lost(self) -> None:
        self.raise_if_given_up()
        self.raise_if_dead()

    def raise_if_dead(self) -> None:
        """Raises `PeerLost` if one of the ranks that are watched has ended, as far as this process can see."""
        if death := self.death():
            self.raise_if_given_up()  # which may be the reason for its end
            if not self.endpoints and (arrival := self._arrival(death.culprit)):
                self._is_coming(death.culprit, arrival)  # it may have made another group
            raise death

    def death(self) -> PeerLost | None:
        """Of the first of the watched ranks that has ended, as far as this process can see."""
        for rank, how in self._ended():
            return PeerLost(f"making the group: {self.describe(rank)} {how}", rank)
        return None

    def _ended(self) -> Iterator[tuple[int, str]]:
        if self.before.ended:
            yield from self.before.ended().items()
        for rank in self.watched:
            if rank != self.rank and (who := self._known.get(rank)) and has_ended(who):
                yield rank, DIED

    def raise_if_given_up(self) -> None:
        """Raises what keeps another rank from coming."""
        found = self.before.look() if self.before.look else None
        if self.attempt and self.store.check([f"{self.prefix}/given up"]):
            kind, why, culprit = json.loads(self.store.get(f"{self.prefix}/given up"))
            raise getattr(failures, kind)(str(why), int(culprit))
        if found:
            raise found

    def give_up(self, error: BaseException) -> None:
        """Tells the others that this rank does not come, and why. The first to say so is heard."""
        if self._gave_up:
            return
        self._gave_up = True
        if self.attempt:  # whoever makes the group again takes no part in this attempt
            ignore((self.rank, self.attempt))
        if (tell := self.before.gives_up) and isinstance(error, RingReduceError):
            tell(error)
        if isinstance(error, CollectiveTimeout | PeerLost | CollectiveMismatch):  # -1: it may be anybody's fault
            self._tell_error(type(error).__name__, str(error), error.culprit)
        else:
            culprit = error.culprit if isinstance(error, RingReduceError) and error.culprit >= 0 else self.rank
            why = str(error) if isinstance(error, RingReduceError) else f"{type(error).__name__}: {error}"
            me = self.describe(self.rank)
            self._tell_error("PeerLost", f"making the group: {me}: {why}", culprit)

    def _tell_error(self, kind: str, why: str, culprit: int) -> None:
        with contextlib.suppress(Exception):  # the store may be gone, and what counts is the error
            if not self.attempt:  # rank 0 has not told where it looks, so it looks at this
                ignore((self.rank, why))
                self._set_arrival((kind, why, culprit))
            elif not self.store.check([f"{self.prefix}/given up"]):
                self.store.set(f"{self.prefix}/given up", json.dumps([kind, why, culprit]))
            if self.rank == 0:  # whoever has failed, too, is no reason for the next attempt to fail
                absent = [rank for rank in range(1, self.size) if rank not in self._known]
                ignore(*((0, each.id) for rank in absent if (each := self._arrival(rank)) and each.failed))

    def call(self, ranks: Sequence[int]) -> str:
        """How messages call ranks of the group; a single one with its process."""
        return self.describe(ranks[0]) if len(ranks) == 1 else call_ranks(ranks, self.ranks)

    def describe(self, rank: int, who: Who | None = None) -> str:
        """How messages call one rank, with its process if that is known."""
        who = who or self._known.get(rank) or (identity() if rank == self.rank else None)
        process = who[:2] if who else self._processes[rank] if self._processes else None
        return call_ranks([rank], self.ranks, "{}, pid {}".format(*process) if process else "")


over: OrderedDict[tuple[int, str], None] = OrderedDict()
"""(rank, id) of arrivals that concern no later attempt of this rank in this process, and what the rank itself has said
in vain. Only the latest are kept, since the next arrival of a rank takes the place of the one before it in a store."""
MOST_OVER = 1 << 14
"""The most that `over` keeps, some 4 MB: those of 16 attempts of a group of 1,024 ranks."""


def ignore(*heard: tuple[int, str]) -> None:
    """No later attempt of a rank of this process heeds these: see `over`."""
    over.update(dict.fromkeys(heard))
    for _ in range(len(over) - MOST_OVER):
        over.popitem(last=False)
