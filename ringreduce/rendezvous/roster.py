"""Who is in a group, by its store alone: for ranks that another backend joins, on one host or on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringreduce.common.failures import RingReduceError
from ringreduce.rendezvous.host import agree_on_config
from ringreduce.rendezvous.store import WHO, Exchange, identity

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

    exchange = Exchange(store, rank, size, timeout)

    def answer(ranks: list[Any]) -> dict[str, Any]:
        agree_on_config(ranks)
        return {"names": [each["who"][:2] for each in ranks], "decision": decide()}

    try:
        roster = exchange(WHO, {"who": identity(), "config": config}, answer)
    except RingReduceError as error:
        exchange.give_up(error)
        raise
    names = [(str(host), int(pid)) for host, pid in roster["names"]]
    return Roster(PrefixStore(exchange.prefix, store), names, str(roster["decision"]))
