"""Who is in a group, by its store alone: for ranks that another backend joins, on one host or on several."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringreduce.rendezvous.host import agree_on_config
from ringreduce.rendezvous.store import generation, get

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass
class Roster:
    """What a rank learns of the group."""

    store: Store
    """Of this making of the group alone."""
    names: list[tuple[str, int]]
    """Per rank: (host, pid)."""
    decision: str
    """What rank 0's `decide` said."""


def call_roll(store: Store, rank: int, size: int, config: str, timeout: float, decide: Callable[[], str]) -> Roster:
    """Joins this rank with the others of its group; returns when rank 0 has seen all.

    `config` must be equal on all ranks. `decide` is called on rank 0 alone. Raises `CollectiveTimeout` naming the rank
    that did not come within `timeout` seconds, `InvalidArgument` if configurations differ.
    """
    from torch._C._distributed_c10d import PrefixStore  # here, so that the package can be used without torch

    deadline = time.monotonic() + timeout
    own = PrefixStore(f"ringreduce/{generation(store, rank)}", store)
    own.set(f"rank/{rank}", json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "config": config}))
    if rank == 0:
        ranks = [json.loads(get(own, f"rank/{r}", f"rank {r}", deadline)) for r in range(size)]
        own.set("roster", json.dumps({"ranks": ranks, "decision": decide()}))
    roster = json.loads(get(own, "roster", "rank 0, which waits for all ranks,", deadline))
    agree_on_config(roster["ranks"])
    return Roster(own, [(str(r["host"]), int(r["pid"])) for r in roster["ranks"]], str(roster["decision"]))
