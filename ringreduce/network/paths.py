"""The ways from this host's interfaces to the addresses of another host, and which of them links use.

`named`: whether the user has named this host's interfaces. Then connections are bound to their addresses, and if they
are several each is used, with that of the peer that has its name or position in the order.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ringreduce.network.interfaces import Interface, IPInterface, local_interfaces
from ringreduce.network.sockets import Address, host_and_port, sockaddr

Made = TypeVar("Made")
Rail = tuple[str, str]
"""The names of the interfaces at both ends."""

GRACE_SECONDS = 1.0
"""For further interfaces, once a peer has been reached over one."""


@dataclass(frozen=True)
class Path:
    """One way to a door: from an address of this host, or from any, to one of its addresses."""

    rail: Rail
    """The interfaces at both ends; "" if it is left to the kernel."""
    source: tuple[str, int] | tuple[str, int, int, int] | None
    target: tuple[str, int] | tuple[str, int, int, int]

    def __str__(self) -> str:
        source = f" from {self.source[0]} ({self.rail[0]})" if self.source else ""
        return f"{host_and_port(*self.target[:2])} ({self.rail[1]}){source}"


def paths_to(addresses: Sequence[Address], interfaces: Sequence[Interface], named: bool) -> list[Path]:
    """From all addresses of the same subnet; if there is none, from each named interface or as the kernel likes."""
    paths = []
    for there in addresses:
        alike = [
            (interface, here)
            for interface in interfaces
            for here in interface.addresses
            if _scope(here) == _scope(there.ip)
        ]
        near = [(interface, here) for interface, here in alike if here.network == there.ip.network]
        if not near and not named and alike:
            paths.append(Path(("", there.interface), None, sockaddr(there.ip, there.port)))
            continue
        first = {interface.name: (interface, here) for interface, here in reversed(alike)}
        for interface, here in near or first.values():
            source, target = sockaddr(here, 0, interface.index), sockaddr(there.ip, there.port, interface.index)
            paths.append(Path((interface.name, there.interface), source, target))
    return paths


def _scope(address: IPInterface) -> tuple[int, bool, bool]:
    """Equal for addresses of which one may reach the other."""
    return address.version, address.ip.is_link_local, address.ip.is_loopback


def rails_to(addresses: Sequence[Address], interfaces: Sequence[Interface], named: bool) -> list[Rail]:
    """The pairs of interfaces, here and there, that are to be used if they work; like with like first."""
    theirs = list(dict.fromkeys(address.interface for address in addresses))
    ours = [interface.name for interface in interfaces]
    alike = [(name, name) for name in ours if name in theirs]
    rest = zip(*([name for name in side if (name, name) not in alike] for side in (ours, theirs)), strict=False)
    matched = [*alike, *rest]
    shared = {
        (interface.name, there.interface)
        for interface in interfaces
        for there in addresses
        if any(here.network == there.ip.network and not here.ip.is_link_local for here in interface.addresses)
    }
    together = named and len(ours) > 1
    return [rail for rail in matched if together or rail in shared] + sorted(shared - set(matched))


def interface_of(connection: socket.socket, path: Path) -> str:
    """This host's interface that a connection goes through."""
    if path.rail[0]:
        return path.rail[0]
    here = connection.getsockname()[0]
    some = (i.name for i in local_interfaces() if any(here == str(address.ip) for address in i.addresses))
    return next(some, "an unknown interface")


def spread(rails: Iterable[Rail]) -> list[Rail]:
    """Without those of which both interfaces are used by earlier ones."""
    use: list[Rail] = []
    for here, there in rails:
        if here not in {rail[0] for rail in use} or there not in {rail[1] for rail in use}:
            use.append((here, there))
    return use


async def first_made(tasks: dict[asyncio.Task[Made], Path], wanted: list[Rail]) -> list[Made]:
    """What `tasks` make by these paths: one for each pair of interfaces to be used; none if none does."""
    reached: dict[Rail, Made] = {}
    until: float | None = None
    while tasks and not (reached and set(reached).issuperset(set(wanted) & {path.rail for path in tasks.values()})):
        left = None if until is None else max(0.0, until - time.monotonic())
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        for task in done:
            path = tasks.pop(task)
            if task.exception() is None:
                reached.setdefault(path.rail, task.result())
        if reached and until is None:
            until = time.monotonic() + GRACE_SECONDS
    use = spread([rail for rail in wanted if rail in reached]) or list(reached)[:1]
    return [reached[rail] for rail in use]
