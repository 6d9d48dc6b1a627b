"""The launcher's store, which may die or hang: members do not need it."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from bodies.elastic import train
from distributed.harness import Rank, Ranks, on_ranks

from ringreduce import elastic


def with_a_store_in_rank_2(me: Rank) -> dict[str, Any]:
    if me.rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(me.store.get("port")), is_master=False)
    me.store = store
    return train(me, 3, {"size": 2, "step": 1})


def test_the_launchers_store_dies_with_a_rank() -> None:
    with Ranks(with_a_store_in_rank_2, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert [each["size"] for each in ranks.results(but=(2,))] == [2, 2]


class Hangs(dist.Store):
    """A store that does not answer while `hangs` is set."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.hangs = inner, False

    def _asked(self) -> dist.Store:
        while self.hangs:
            time.sleep(0.05)
        return self.inner

    def set(self, *arguments: Any) -> None:
        self._asked().set(*arguments)

    def get(self, key: str) -> bytes:
        return self._asked().get(key)

    def add(self, *arguments: Any) -> int:
        return self._asked().add(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._asked().check(keys)

    def compare_set(self, *arguments: Any) -> bytes:
        return self._asked().compare_set(*arguments)

    def wait(self, *arguments: Any) -> None:
        self._asked().wait(*arguments)

    def has_extended_api(self) -> bool:
        return False


@on_ranks(3, returns=[(0, 3, True)] * 3)
def test_members_do_not_wait_for_the_launchers_store(me: Rank) -> tuple[int, int, bool]:
    """The store does not answer from step 5 on. `timeout` and `expel_after` are shorter than its requests."""
    store = Hangs(me.store)
    world = elastic.start(store=store, rank=me.rank, world_size=3, timeout=timedelta(seconds=4), expel_after=1.0)
    longest = 0.0
    for step in range(40):
        store.hangs = step >= 5
        began = time.monotonic()
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.05)
    return world.epoch, world.size, longest < 3


@on_ranks(4, returns=[4] * 4)
def test_a_process_is_let_in_while_rank_0_gets_no_answer(me: Rank) -> int:
    """Rank 0's store does not answer any more once rank 3 waits. The others invite it."""
    store = Hangs(me.store)
    if me.rank == 3:
        me.store.wait(["begun"], timedelta(seconds=60))
    world = elastic.start(
        store=store, rank=me.rank % 3, world_size=3, timeout=timedelta(seconds=8), expel_after=1.0, patience=2.0
    )
    world.state(step=0)

    def body() -> None:
        me.store.set("begun", "")
        if world.rank == 0 and not world._joiners_wait:
            store.hangs = bool(world._join_watcher.found())
        dist.all_reduce(torch.ones(1))

    world.attempt(body)
    while world.size == 3:
        world.attempt(body)
    return world.size
