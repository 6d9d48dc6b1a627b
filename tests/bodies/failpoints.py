"""Processes that end at a named point while a group is made or changes, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ringreduce.coordination import watch
from ringreduce.coordination.ledger import Ledger
from ringreduce.coordination.rounds import Membership
from ringreduce.coordination.store import Under
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.groups import arrivals, between_hosts, exchange, make, meet
from ringreduce.network import listener
from ringreduce.network.handshake import Handshake

CALLS: list[tuple[Any, str]] = [
    (Ledger, "__init__"),  # maps it
    (Ledger, "_write"),  # a record; after it comes the compare-and-swap
    (Ledger, "change"),
    (Under, "get"),
    (Under, "append"),
    (Membership, "leave"),
    (KeyStore, "set"),
    (KeyStore, "check"),
    (watch.Watch, "__init__"),
    (watch.Watch, "stop"),
    (meet, "receive"),
    (meet, "send"),
    (socket.socket, "connect"),
    (socket.socket, "accept"),
    (between_hosts.Links, "learn"),
    (between_hosts.Links, "connect_all"),
    (listener.Door, "_approach"),
    (Handshake, "introduce"),
    (Handshake, "admit"),
    (listener.Door, "_join"),
    (listener.Door, "_join_all"),
    (listener.Door, "_hand_over"),
    (Handshake, "_proof"),  # right before each message of the handshake, and after it was received
    (make._C, "ProcessGroupRing"),  # maps the regions
    (dist, "destroy_process_group"),
    (dist, "init_process_group"),
]


def at_each_point(reach: Callable[[str], None]) -> None:
    """Makes this process call `reach(point)` before and after each of CALLS, and at each stage of making a group.

    Only points in the main thread and in the thread of a door count.
    """

    @contextlib.contextmanager
    def points_at(label: str) -> Iterator[None]:
        told = threading.current_thread().name in ("MainThread", "ringreduce-door")
        if told:
            reach(f"before {label}")
        try:
            yield
        finally:
            if told:
                reach(f"after {label}")

    def around(owner: Any, name: str) -> None:
        inner, label = getattr(owner, name), f"{getattr(owner, '__name__', owner)}.{name}".rpartition("ringreduce.")[2]

        def outer(*args: Any, **named: Any) -> Any:
            with points_at(label):
                return inner(*args, **named)

        async def later(*args: Any, **named: Any) -> Any:
            with points_at(label):
                return await inner(*args, **named)

        setattr(owner, name, later if inspect.iscoroutinefunction(inner) else outer)

    for owner, name in CALLS:
        around(owner, name)
    for module in (arrivals, exchange, meet, make):
        module.passed = reach  # type: ignore[attr-defined]


def check(found: list[tuple[str, list[tuple[int, tuple[str, ...], int]]]]) -> None:
    """Checks how each member ended and what it has seen. An epoch has one view, and a step is committed in one epoch.

    The last step of a member that was left behind may be one that the others did again.
    """
    views: dict[int, tuple[str, ...]] = {}
    steps: dict[int, int] = {}
    for how, commits in sorted(found, key=lambda each: each[0] != "trained"):
        numbers = [step for _, _, step in commits]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)) if numbers else [])
        for epoch, names, step in commits:
            assert views.setdefault(epoch, names) == names
            assert steps.setdefault(step, epoch) == epoch or (how != "trained" and step == numbers[-1])
