"""Finds ranks that make their groups in different orders, and would wait for each other until the timeout.

torch numbers the groups of a world: every rank counts its calls of `new_group`, also for groups that it is not in. The
numbers are in the keys of the store, so a rank that makes [0, 1] as its first group does not meet one that makes it as
its second. A rank that has waited for a while therefore tells which group it makes, under a key without a number, and
looks what the ranks that it waits for make. Where all ranks come in time, the store is asked nothing more.

Numbers only grow: a rank that makes a group comes to none with a lower number any more. Groups by local synchronization
and by `split_group` have other names. There two ranks are taken to wait for each other only if both make their group in
their main thread, since another thread could still come to the other one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.common.failures import CollectiveMismatch
from ringreduce.common.ranks import call_ranks
from ringreduce.coordination.process import Who, identity
from ringreduce.coordination.store import Store, value_of
from ringreduce.coordination.wait import CHECK_BY_RANK, CHECK_PROCESSES

TELLS_AFTER = 0.5
"""Seconds."""

_heard: set[tuple[int, str]] = set()
"""A rank of this process, and the id of another's group for which it has raised. The program may go on after that."""


class Making(NamedTuple):
    """What a rank tells of the group that it makes."""

    id: str
    """Random."""
    who: Who
    rank: int
    """Its global rank."""
    name: str
    ranks: list[int]
    main_thread: bool

    @property
    def number(self) -> int:
        """0: torch has not numbered it."""
        return int(self.name) if self.name.isdecimal() else 0

    def __str__(self) -> str:
        rank = call_ranks([self.rank], range(self.rank + 1), f"{self.who.host}, pid {self.who.pid}")
        return f"{rank} makes a group of the ranks {self.ranks}" + (f" as number {self.number}" if self.number else "")


class Order:
    """The place of a group among those that a rank makes of a world's ranks."""

    def __init__(self, store: Store, world: str, rank: int, name: str, ranks: Sequence[int], begun: set[str]) -> None:
        """`store`: one that groups of all names have in common. `world`: the attempt that has made the world. `rank`:
        the global one, as those in `ranks`. `begun`: the names of the world's groups that this rank has begun."""
        main_thread = threading.current_thread() is threading.main_thread()
        self._store, self._world = store, world
        self._mine = Making(secrets.token_hex(8), identity(), rank, name, list(ranks), main_thread)
        self._told, self._again = False, time.monotonic() + TELLS_AFTER
        self._begun = begun
        begun.add(name)

    def look(self, missing: Sequence[int]) -> None:
        """Raises `CollectiveMismatch` if one of these ranks of the group makes another group and will not come."""
        if time.monotonic() < self._again:
            return
        if not self._told:
            self._told = True
            self._store.set(self._key(self._mine.rank), json.dumps(self._mine))
        for rank in missing:
            if text := value_of(self._store, self._key(self._mine.ranks[rank])):
                identifier, who, *rest = json.loads(text)
                self._compare(rank, Making(identifier, Who(*who), *rest))
        self._again = time.monotonic() + max(CHECK_PROCESSES, CHECK_BY_RANK * len(self._mine.ranks))

    def withdraw(self) -> None:
        """To be called when this rank has given the group up: it may make another one with who looks later."""
        if self._told:
            with contextlib.suppress(Exception):  # the store's; the error that the group is given up for is the better
                self._store.set(self._key(self._mine.rank), "")

    def _key(self, global_rank: int) -> str:
        return f"ringreduce/{self._world}/makes/{global_rank}"

    def _compare(self, rank: int, its: Making) -> None:
        mine = self._mine
        heard = mine.rank, its.id
        if its.name in self._begun or heard in _heard or not self._waits_in_vain(its):
            return
        _heard.add(heard)
        advice = "instead; all ranks must make the same groups in the same order, also those that they are not in"
        if mine.ranks == its.ranks and not (mine.number and its.number):
            advice = "under another name: by local synchronization it contains the number of groups that a rank is in"
        raise CollectiveMismatch(f"making the group: {mine}, and {its} {advice}", rank)

    def _waits_in_vain(self, its: Making) -> bool:
        """For a rank that makes this group, which this rank has not begun."""
        mine = self._mine
        numbered = mine.number > 0 and its.number > 0
        if numbered and mine.number < its.number:
            return True
        return mine.rank in its.ranks and (numbered or (mine.main_thread and its.main_thread))
