"""What the rendezvous needs of a store, so that it works with torch's and without torch."""

from __future__ import annotations

import time
from typing import Protocol

from ringreduce.errors import CollectiveTimeout


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def get(store: Store, key: str, whom: str, deadline: float) -> str:
    """What the store has under `key`; waits for it, for `whom`, until `deadline`, then raises `CollectiveTimeout`."""
    # A store that is asked to wait keeps its lock, so ask it briefly and often: ranks may be threads that share one.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"making the group: {whom} did not come in time")
        time.sleep(0.002)
    return str(store.get(key).decode())


def generation(store: Store, rank: int) -> int:
    """How often this rank has been here: a group may be made again under the same store prefix."""
    return store.add(f"ringreduce/generation/{rank}", 1)
