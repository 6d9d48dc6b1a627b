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
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from ringreduce._C import ProcessGroupRing
from ringreduce.common.names import NAME
from ringreduce.common.ranks import call_ranks
from ringreduce.common.units import duration
from ringreduce.coordination.ledger import Ledger
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.errors import CollectiveTimeout, PeerLost
from ringreduce.groups.lookup import backend_of, found_in

if TYPE_CHECKING:
    from ringreduce.coordination.protocol import View
    from ringreduce.coordination.rounds import Membership
    from ringreduce.coordination.store import Directory

_living: WeakValueDictionary[int, Survivors] = WeakValueDictionary()


def call_shrunk_groups_by_their_type() -> None:
    """Lets `dist.shrink_group` make a group whose backend is of type CUSTOM, as all groups of this backend are.

    torch chooses GLOO or NCCL by the device. Its C++ then takes the backend for a `ProcessGroupGloo`: DDP reads its
    members for a log. It makes a device of the old group known to the new one only if the old one was bound to it.
    """
    make: Callable[..., dist.ProcessGroup] | None = getattr(c10d, "_create_shrunk_process_group", None)
    if make is None:
        return

    @functools.wraps(make)
    def create(new_backend: Any, *args: Any, **named: Any) -> dist.ProcessGroup:
        group = make(new_backend, *args, **named)
        if isinstance(new_backend, ProcessGroupRing):
            custom = dist.ProcessGroup.BackendType.CUSTOM
            for device in dist.Backend.backend_capability[NAME]:
                group._register_backend(torch.device(device), custom, new_backend)
            group._set_default_backend(custom)
        return group

    c10d._create_shrunk_process_group = create


class Agreement(NamedTuple):
    """What all survivors of a group have agreed on. Ranks are ranks in that group."""

    round: int
    """The epoch that begins. Every call of `agree` and every `shrink_group` begins at least one."""
    ranks: list[int]
    """The survivors in ascending order: the ranks that live and have called `agree`."""
    lost: list[int]
    """All other ranks in ascending order, whether lost now or in an earlier round."""


class Lineage:
    """A group and the smaller ones made from it: one chain of views.

    A member's address is JSON: the ranks in the first group that it wants to leave out of the next one. It is null if
    the member has called `agree`.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[tuple[str, int]],
        source: Store | Ledger,
        prefix: str,
        attempt: str,
        ranks: Sequence[int],
    ) -> None:
        """`processes`: host and pid of all ranks of the first group.

        `source`: where the ranks meet after their group has failed, a ledger or a store. `prefix`: of the keys.
        `attempt`: which made the first group; see `Exchange`. `ranks`: its global ranks.
        """
        self.attempt, self.ranks = attempt, ranks
        self.rank, self.processes, self._source, self._prefix = rank, processes, source, prefix
        self.begun: set[str] = set()
        """The names of the groups of its ranks that this rank has begun to make; see `Order`."""
        self.lock = threading.Lock()
        """To be held while `membership` is used."""

    def call(self, rank: int, first_rank: int) -> str:
        """How messages name a rank that was `first_rank` in the first group."""
        host, pid = self.processes[first_rank]
        return f"rank {rank} ({host}, pid {pid})"

    @functools.cached_property
    def names(self) -> list[str]:
        """The members' names, by their ranks in the first group."""
        return [call_ranks([rank], self.ranks, f"{host}, pid {pid}") for rank, (host, pid) in enumerate(self.processes)]

    @functools.cached_property
    def membership(self) -> Membership:
        """This rank's membership. Made at the first loss, so that making a group need not import its modules."""
        from ringreduce.coordination.protocol import Member, View
        from ringreduce.coordination.rounds import Membership
        from ringreduce.coordination.store import Bounded, Under

        source = self._source
        directory: Directory = (
            source if isinstance(source, Ledger) else Under(Bounded(source), f"{self._prefix}/members/")
        )
        first = View(0, tuple(map(Member, self.names)))
        advice = "it cannot come back into a group that was shrunk"
        return Membership(directory, self.names[self.rank], first, advice=advice)

    def store_for(self, epoch: int) -> Store:
        """The store in which the group of the view of `epoch` is made. On one host it needs no other process."""
        if isinstance(self._source, Ledger):
            return KeyStore(self._source, f"epoch {epoch}/")
        return PrefixStore(f"{self._prefix}/epoch {epoch}", self._source)


class Survivors:
    """The survivors of one group, as this rank sees them."""

    def __init__(self, number: int, lineage: Lineage, first_ranks: list[int]) -> None:
        """`number`: the group's number in this process. `first_ranks`: its ranks, as ranks of the first group."""
        self.lineage, self.first_ranks = lineage, first_ranks
        _living[number] = self

    def agree(self, group: ProcessGroupRing, silent_after: float) -> Agreement:
        """Agrees with the other survivors on who they are.

        Waits for every living rank, and gives up those that have not called within `silent_after` seconds. Raises
        `Expelled` if the others have given up this rank, and `SystemFailure` if the directory is out of reach.
        """
        return self.agreement(self.leave(group, silent_after, None))

    def leave(self, group: ProcessGroupRing, silent_after: float, wanted: list[int] | None) -> View:
        """The next view, which `agree` describes. `wanted`: the ranks to make a group of; None: only agrees."""
        from ringreduce.coordination.protocol import Report

        names, kept = self.lineage.names, {self.first_ranks[rank] for rank in wanted or []}
        left_out = None if wanted is None else [rank for rank in range(len(names)) if rank not in kept]
        report = Report(lost=tuple(names[rank] for rank in left_out or []), address=json.dumps(left_out))
        with self.lineage.lock:
            return self.lineage.membership.leave(report, lambda: self.ended(group), silent_after)

    def agreement(self, view: View) -> Agreement:
        """What a view says about the ranks of this group."""
        names = [self.lineage.names[rank] for rank in self.first_ranks]
        ranks = [rank for rank, name in enumerate(names) if name in view.names]
        return Agreement(view.epoch, ranks, [rank for rank in range(len(names)) if rank not in ranks])

    def ended(self, group: ProcessGroupRing) -> list[str]:
        """The names of the ranks that the group knows to have ended.

        A rank that has only destroyed the group is not among them, since it may be in a later one.
        """
        return [self.lineage.names[self.first_ranks[rank]] for rank in group.ended()]

    def processes(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """Host and pid of ranks of this group."""
        return [self.lineage.processes[self.first_ranks[rank]] for rank in ranks]

    def call(self, ranks: Sequence[int]) -> str:
        """How messages name ranks of this group."""
        each = ", ".join(self.lineage.call(rank, self.first_ranks[rank]) for rank in ranks)
        return each if len(ranks) == 1 else f"ranks {each.replace('rank ', '')}"


def agree(group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None) -> Agreement:
    """Which ranks of `group` are lost: the same answer on all survivors, also if ranks die meanwhile.

    For a group that has failed; one that has not is aborted. Returns when every rank has called or has ended, or has
    not called for `timeout` after this one (a number is in seconds; the group's by default): then it is lost to the
    others, and if it calls later, it gets `Expelled`. After that `dist.shrink_group(agreed.lost)` makes the survivors'
    group. If another rank dies in it, `agree` can be called again, on the old group. docs/elastic_how.md says who
    decides, and how.

    Raises `Expelled` if the others have given this rank up, and `SystemFailure` if the ranks cannot reach the store
    that they agree by.
    """
    backend = backend_of(group)
    backend.abort()
    seconds = (backend.options._timeout if timeout is None else duration("timeout", timeout)).total_seconds()
    return survivors_of(backend).agree(backend, seconds)


def survivors_of(group: ProcessGroupRing) -> Survivors:
    """The survivors of a group of this process."""
    return _living[group.number]


@contextlib.contextmanager
def shrinking(group: ProcessGroupRing, survivors: Survivors, wanted: list[int], timeout: float) -> Iterator[Store]:
    """Yields the store in which the ranks `wanted` can make their group, once all of them have agreed to.

    Raises `PeerLost` on all of them unless the lists of all of them are what the survivors agree on. Waits for ranks
    that have called `agree` until they shrink the group, too. `timeout` is in seconds.
    """
    while True:
        view = survivors.leave(group, timeout, wanted)
        _raise_if_lists_differ(survivors, view)
        if all(json.loads(member.address) is not None for member in view.members):
            break  # else some ranks have only called `agree`, and shrink the group in a later round
    with _culprit_before(wanted):
        yield survivors.lineage.store_for(view.epoch)


def _raise_if_lists_differ(survivors: Survivors, view: View) -> None:
    """Raises `PeerLost` unless every survivor that shrinks the group excludes all lost ranks.

    The view alone decides this, so all survivors do the same. A survivor cannot exclude more ranks than are lost.
    """
    names, agreed = survivors.lineage.names, survivors.agreement(view)
    lost = {rank for rank, name in enumerate(names) if name not in view.names}
    lists = [json.loads(member.address) for member in view.members]
    unlisted = [lost.difference(lost if each is None else each) for each in lists]
    if not any(unlisted):
        return
    also = [rank for rank in agreed.lost if survivors.first_ranks[rank] in set().union(*unlisted)]
    lacking = [rank for rank, each in zip(agreed.ranks, unlisted, strict=True) if each]
    this = survivors.first_ranks.index(survivors.lineage.rank)
    raise PeerLost(
        f"shrink: {'this rank' if this in lacking else survivors.call(lacking[:1])} does not exclude "
        f"{survivors.call(also) if also else 'a rank of an earlier group'}, which others exclude or know to be lost; "
        f"the survivors agree on {agreed.lost}: shrink with these",
        also[0] if also else -1,
    )


@contextlib.contextmanager
def _culprit_before(wanted: list[int]) -> Iterator[None]:
    """Lets the culprit of an error of making the group of the ranks `wanted` be a rank of the group that is shrunk."""
    try:
        yield
    except (PeerLost, CollectiveTimeout) as error:
        error.args = (f"shrink: {error}",)
        if error.culprit >= 0:
            error.culprit = wanted[error.culprit]
        raise


def use_instead(store: KeyStore, group: ProcessGroupRing) -> None:
    """Makes torch use `store` as the store of the process group of `group`, and so of the smaller one.

    torch would make a copy of the store that the group was made with. The copy of a `TCPStore` is a new connection, for
    which it waits for minutes if the launcher has died.
    """
    groups = dist.distributed_c10d._world.pg_map
    for process_group, (backend, _) in list(groups.items()):
        if found_in(process_group) is group:
            groups[process_group] = backend, store
