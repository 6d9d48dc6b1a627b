"""What the rendezvous needs of a store, so that it works with torch's and without torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

from ringreduce.common.failures import CollectiveTimeout

LOOK_EVERY = 50
"""Questions that `get` asks between two calls of `look`: some 0.1 s."""


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def get(store: Store, key: str, whom: str, deadline: float, look: Callable[[], None] = lambda: None) -> str:
    """What the store has under `key`; waits for it, for `whom`, until `deadline`, then raises `CollectiveTimeout`.

    While it waits it calls `look` now and then, which raises if that is in vain.
    """
    # A store that is asked to wait keeps its lock, so ask it briefly and often: ranks may be threads that share one.
    for times in itertools.count(1):
        if store.check([key]):
            break
        if times % LOOK_EVERY == 0:
            look()
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"making the group: {whom} did not come in time")
        time.sleep(0.002)
    return str(store.get(key).decode())


def generation(store: Store, rank: int) -> int:
    """How often this rank has been here: a group may be made again under the same store prefix."""
    return store.add(f"ringreduce/generation/{rank}", 1)
