"""How the survivors of a group agree on who they are, and where they meet to make a smaller group.

    agreed = ringreduce.agree(group)         # after a PeerLost, for example; the same on all survivors
    smaller = dist.shrink_group(agreed.lost)

Every group has a directory from the start, in which its ranks are members (`membership`). On one host it is a ledger,
which lies behind the regions in the group's shared memory. On several hosts it is the store that the group was made
with. So survivors on one host need no store, and can go on even if the launcher dies.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _ProcessGroupWrapper

from ringreduce._C import ProcessGroupRing
from ringreduce.errors import PeerLost
from ringreduce.membership.key_store import KeyStore
from ringreduce.membership.ledger import Ledger
from ringreduce.rendezvous import store

if TYPE_CHECKING:
    from ringreduce.membership.directory import Directory
    from ringreduce.membership.rounds import Membership

DEVICES = (torch.device("cpu"), torch.device("cuda"))

_living: WeakValueDictionary[int, Survivors] = WeakValueDictionary()


class Agreement(NamedTuple):
    """What all survivors of a group have agreed on. Ranks are ranks in that group."""

    round: int
    """The number of agreements so far, over all groups that were shrunk from one another."""
    ranks: list[int]
    """The survivors in ascending order: the ranks that live and have called `agree`."""
    lost: list[int]
    """All other ranks in ascending order, whether lost now or in an earlier round."""


class Lineage:
    """A group and the smaller ones made from it: one chain of views. A member's name is its rank in the first group."""

    def __init__(self, rank: int, size: int, source: Store | Ledger, prefix: str = "") -> None:
        """`source`: where the ranks meet after their group has failed, a ledger or a store. `prefix`: of the keys."""
        self._rank, self._size, self._source, self._prefix = rank, size, source, prefix
        self.lock = threading.Lock()
        """To be held while `membership` is used."""

    @functools.cached_property
    def membership(self) -> Membership:
        """This rank's membership. Made at the first loss, so that making a group need not import its modules."""
        from ringreduce.membership.directory import Bounded, Under
        from ringreduce.membership.protocol import Member, View
        from ringreduce.membership.rounds import Membership

        source = self._source
        directory: Directory = (
            source if isinstance(source, Ledger) else Under(Bounded(source), f"{self._prefix}/members/")
        )
        return Membership(directory, str(self._rank), View(0, tuple(Member(str(r)) for r in range(self._size))))

    def place(self, epoch: int) -> Store:
        """The store in which the group of the view of `epoch` is made. On one host it needs no other process."""
        if isinstance(self._source, Ledger):
            return KeyStore(self._source, f"epoch {epoch}/")
        return PrefixStore(f"{self._prefix}/epoch {epoch}", self._source)


class Survivors:
    """The survivors of one group, as this rank sees them."""

    def __init__(self, number: int, lineage: Lineage, names: list[str]) -> None:
        """`number`: the group's number in this process. `names`: the names of its ranks in the lineage."""
        self.lineage, self.names = lineage, names
        _living[number] = self

    def agree(self, group: ProcessGroupRing, silent_after: float, without: Sequence[int] = ()) -> Agreement:
        """Agrees with the other survivors on who they are. `without`: ranks that this one wants to exclude.

        Waits for every living rank, and gives up those that have not called within `silent_after` seconds. Raises
        `Expelled` if the others have given up this rank, and `SystemFailure` if the directory is out of reach.
        """
        from ringreduce.membership.protocol import Report

        report = Report(without=tuple(self.names[rank] for rank in without))
        with self.lineage.lock:
            view = self.lineage.membership.leave(report, lambda: self.ended(group), silent_after)
        ranks = [rank for rank, name in enumerate(self.names) if name in view.names]
        return Agreement(view.epoch, ranks, [rank for rank in range(len(self.names)) if rank not in ranks])

    def ended(self, group: ProcessGroupRing) -> list[str]:
        """The names of the ranks that the group knows to have ended.

        A rank that has only destroyed the group is not among them, since it may be in a later one.
        """
        return [self.names[rank] for rank in group.ended()]


def survivors_of(group: ProcessGroupRing) -> Survivors:
    """The survivors of a group of this process."""
    return _living[group.number]


@contextlib.contextmanager
def shrinking(group: ProcessGroupRing, survivors: Survivors, wanted: list[int], timeout: float) -> Iterator[Store]:
    """Yields the store in which the ranks `wanted` can make their group, once all of them have agreed to.

    Raises `PeerLost` on all of them if another rank is lost or excluded, too. `timeout` is in seconds.
    """
    without = [rank for rank in range(len(survivors.names)) if rank not in wanted]
    agreed = survivors.agree(group, timeout, without)
    if agreed.ranks != wanted:
        also = sorted(set(agreed.lost) - set(without))
        raise PeerLost(
            f"shrink: the ranks to exclude are {without}, and rank{'s' * (len(also) > 1)} "
            f"{', '.join(map(str, also))} lost or excluded by others; the survivors agree on {agreed.lost}: shrink "
            "with these",
            also[0],
        )
    with known_ends(group, wanted):
        yield survivors.lineage.place(agreed.round)


@contextlib.contextmanager
def known_ends(group: ProcessGroupRing, wanted: list[int]) -> Iterator[None]:
    """Lets whoever makes a group of the ranks `wanted` of `group` notice the ends that `group` knows of."""
    known = store.ended.set(lambda: [wanted.index(rank) for rank in group.ended() if rank in wanted])
    try:
        yield
    finally:
        store.ended.reset(known)


def found_in(group: dist.ProcessGroup) -> ProcessGroupRing | None:
    """The ringreduce backend of a process group; None if it has none."""
    for device in DEVICES:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # the group has none for it
            continue
        if isinstance(backend, _ProcessGroupWrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if isinstance(backend, ProcessGroupRing):
            return backend
    return None


def use_instead(place: KeyStore, group: ProcessGroupRing) -> None:
    """Makes torch use `place` as the store of the process group of `group`, and so of the smaller one.

    torch would make a copy of the store that the group was made with. The copy of a `TCPStore` is a new connection, for
    which it waits for minutes if the launcher has died.
    """
    groups = dist.distributed_c10d._world.pg_map
    for process_group, (backend, _) in list(groups.items()):
        if found_in(process_group) is group:
            groups[process_group] = backend, place
