"""Who is left of a group: the ranks as members of `membership`, and how survivors meet again.

    agreed = ringreduce.agree(group)         # after PeerLost, say: the same on all survivors
    smaller = dist.shrink_group(agreed.lost)

Every group has a directory from its birth. Ranks of one host share a ledger, which lies in the group's memory after the
regions; ranks of several hosts use the store that the group was made with. So survivors of one host need no store, and
they can go on even if the launcher dies.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _ProcessGroupWrapper

from ringreduce._C import ProcessGroupRing
from ringreduce.errors import CollectiveTimeout, PeerLost
from ringreduce.membership.ledger import Ledger
from ringreduce.rendezvous import store

if TYPE_CHECKING:
    from ringreduce.membership.directory import Directory, Values
    from ringreduce.membership.rounds import Membership

DEVICES = (torch.device("cpu"), torch.device("cuda"))

_living: WeakValueDictionary[int, Survivors] = WeakValueDictionary()


class Agreement(NamedTuple):
    """What all survivors of a group have agreed on; ranks are those in the group."""

    round: int
    """How many agreements there have been in the whole chain of groups that were shrunk from one another."""
    ranks: list[int]
    """The survivors, ascending: all that have called and live."""
    lost: list[int]
    """All others, ascending: those lost now or in an earlier round."""


class Lineage:
    """A group and the smaller ones that were made of it: one chain of views. Members are named by their first ranks."""

    def __init__(self, rank: int, size: int, source: Store | Ledger, prefix: str = "") -> None:
        """`source`: where ranks find each other when their group is no more: a ledger, or a store, under `prefix`."""
        self._rank, self._size, self._source, self._prefix = rank, size, source, prefix
        self.lock = threading.Lock()
        """Held while the membership is used."""

    @functools.cached_property
    def membership(self) -> Membership:
        """Made at the first loss, so that making a group does not wait for its modules."""
        from ringreduce.membership.directory import OfStore
        from ringreduce.membership.protocol import Member, View
        from ringreduce.membership.rounds import Membership

        source = self._source
        directory: Directory = source if isinstance(source, Ledger) else OfStore(source, f"{self._prefix}/members")
        return Membership(directory, str(self._rank), View(0, tuple(Member(str(r)) for r in range(self._size))))

    def place(self, epoch: int) -> Store:
        """For making the group of the members of a view. Needs no other process on one host."""
        if isinstance(self._source, Ledger):
            return KeyStore(self._source, f"epoch {epoch}/")
        return PrefixStore(f"{self._prefix}/epoch {epoch}", self._source)


class Survivors:
    """This rank's part in what becomes of its group."""

    def __init__(self, number: int, lineage: Lineage, names: list[str]) -> None:
        """`number`: of the group, in this process. `names`: of its ranks, in the lineage."""
        self.lineage, self.names = lineage, names
        _living[number] = self

    def agree(self, group: ProcessGroupRing, silent_after: float, without: Sequence[int] = ()) -> Agreement:
        from ringreduce.membership.protocol import Report

        report = Report(without=tuple(self.names[rank] for rank in without))
        with self.lineage.lock:
            view = self.lineage.membership.leave(report, lambda: self.ended(group), silent_after)
        ranks = [rank for rank, name in enumerate(self.names) if name in view.names]
        return Agreement(view.epoch, ranks, [rank for rank in range(len(self.names)) if rank not in ranks])

    def ended(self, group: ProcessGroupRing) -> list[str]:
        """The names of the group's ranks whose end shows in it. One that only destroyed it may be in a later one."""
        return [self.names[rank] for rank in group.ended()]


def survivors_of(group: ProcessGroupRing) -> Survivors:
    return _living[group.number]


@contextlib.contextmanager
def shrinking(group: ProcessGroupRing, survivors: Survivors, wanted: list[int], timeout: float) -> Iterator[Store]:
    """Where the ranks `wanted` of a group can be made a group, once all of them have agreed to go on as these.

    Raises `PeerLost` on all of them if another is lost, too.
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
    """While a group of the ranks `wanted` of `group` is made: one whose end shows in `group` is not waited for."""
    known = store.ended.set(lambda: [wanted.index(rank) for rank in group.ended() if rank in wanted])
    try:
        yield
    finally:
        store.ended.reset(known)


def found_in(group: dist.ProcessGroup) -> ProcessGroupRing | None:
    """The backend of a process group, if it is ours."""
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


class KeyStore(Store):
    """A store of torch in a ledger, or in etcd: its keys begin with `prefix`. Thread-safe."""

    def __init__(self, values: Values, prefix: str) -> None:
        super().__init__()
        self._values, self._prefix, self._seconds = values, prefix, 300.0

    def directory(self, name: str) -> Directory:
        """With keys of its own in the same place."""
        from ringreduce.membership.directory import Under

        return Under(self._values, f"{self._prefix}{name}/")

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises `CollectiveTimeout`."""
        while (value := self.value(key)) is None:
            self.wait([key])
        return value

    def value(self, key: str) -> bytes | None:
        """What is there now; None: nothing."""
        return self._values.value(self._prefix + key)

    def add(self, key: str, value: int) -> int:
        return self._values.add(self._prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        return self._values.check([self._prefix + key for key in keys])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = (
            each.decode() if isinstance(each, bytes) else each for each in (expected_value, desired_value)
        )
        found = self._values.compare_set(self._prefix + key, expected, desired)
        if found or not expected:
            return found.encode()
        now = self.value(key)  # it may be there by now; if it is not, torch's stores say what was expected
        return expected.encode() if now is None else now

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def num_keys(self) -> int:
        return sum(key.startswith(self._prefix) for key in self._values.names())

    def delete_key(self, key: str) -> bool:
        """Nothing is forgotten; nobody needs it to be."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        began = time.monotonic()
        seconds = timeout.total_seconds() if timeout is not None else self._seconds
        while not self.check(keys):
            waited = time.monotonic() - began
            if waited > seconds:
                raise CollectiveTimeout(f"the store: not all of {keys} came within {seconds:.1f} s")
            time.sleep(min(max(waited / 4, 0.0002), 0.02))
