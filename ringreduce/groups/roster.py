"""Who is in a group, by its store alone: for ranks that another backend joins, on one host or on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringreduce.coordination.endpoint import Config
from ringreduce.coordination.process import identity
from ringreduce.groups.exchange import WHO, Exchange
from ringreduce.groups.meet import agree_on_config


@dataclass
class Roster:
    """What a rank learns of the group."""

    names: list[tuple[str, int]]
    """Per rank: (host, pid)."""
    decision: str
    """What rank 0's `decide` said."""


def call_roll(exchange: Exchange, config: Config, decide: Callable[[], str]) -> Roster:
    """Joins this rank with the others of its group; returns when rank 0 has seen all.

    `config` must be equal on all ranks. `decide` is called on rank 0 alone. Raises `CollectiveTimeout` naming the rank
    that did not come in time, `InvalidArgument` if configurations differ.
    """

    def answer(ranks: list[Any]) -> dict[str, Any]:
        agree_on_config(exchange, ranks)
        names = [each["who"][:2] for each in ranks]
        return {"names": names, "ids": [each["id"] for each in ranks], "decision": decide()}

    try:
        exchange.arrive({"who": identity(), "config": config})
        if exchange.rank == 0:
            roster = exchange.publish(WHO, exchange.decide(answer, exchange.collect(WHO)))
        else:
            roster = exchange.come_to_roster(WHO)
    except BaseException as error:
        exchange.give_up(error)
        raise
    names = [(str(host), int(pid)) for host, pid in roster["names"]]
    return Roster(names, str(roster["decision"]))
