"""What a rank has ready before it meets the others of its group, and its card, which tells them.

    ready = Ready(place, config, listens=True)
    ready.card         # a JSON object, for whoever is to make a group with this process

A rank tells the store its card when it meets the others. Members of a changing group tell theirs before they know who
will be in the next one: then the ranks know all cards when they begin to meet, and need not ask any store.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.rendezvous.secret import group_secret
from ringreduce.rendezvous.store import identity, kernel

if TYPE_CHECKING:
    from ringreduce._C import OpenMemory
    from ringreduce.rendezvous.links import Door

Card = dict[str, Any]

NONCE = 32


class Place(NamedTuple):
    """Where a rank counts itself to be, and how it is reached from elsewhere. What the options say of it."""

    transport: str = "auto"
    """'auto': ranks that can share memory are on one host; 'shared_memory': all have to be; 'tcp': each is alone."""
    host_id: str = ""
    """RINGREDUCE_HOST_ID: ranks with the same are on one host, whatever else says so; '': as the kernel says."""
    interfaces: str = ""
    """RINGREDUCE_SOCKET_IFNAME: see `interfaces.Filter`."""
    secret_file: str = ""
    """RINGREDUCE_SECRET_FILE: see `secret.group_secret`."""
    ports: str = ""
    """RINGREDUCE_PORTS: see `sockets.parse_ports`."""


class Ready:
    """What a rank has ready for one group. To be closed; what the group takes from it stays."""

    def __init__(
        self, place: Place, config: str, memory: OpenMemory | None = None, listens: bool = False, wire: Any = None
    ) -> None:
        """`memory`: this process's. `listens`: for other hosts, too, if an address and a port are free. `wire`: what is
        known of the network between hosts, if anything is."""
        group_secret(b"", place.secret_file)  # what is wrong with these should not wait for several hosts to show
        if place.ports:
            from ringreduce.rendezvous.sockets import parse_ports

            parse_ports(place.ports)
        self.memory = memory
        self.nonce = secrets.token_bytes(NONCE)
        self.door: Door | None = None
        if listens:
            with contextlib.suppress(SystemFailure, InvalidArgument):
                self.door = door_at(place)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("")  # the kernel picks a free abstract address
        self.listener.listen(8)
        self.card: Card = {
            "who": identity(),
            "machine": _machine(place, self.nonce),
            "config": config,
            "label": place.host_id or socket.gethostname(),
            "cores": sorted(os.sched_getaffinity(0)),
            "memory": memory.key if memory else None,
            "socket": [self.listener.getsockname().hex(), self.nonce.hex()],
            "secret": secrets.token_hex(32),  # rank 0's is the group's
            "door": self.door.addresses if self.door else None,
            "wire": wire,
        }

    def close(self) -> None:
        self.listener.close()
        if self.door:
            self.door.close()


class Prepared(NamedTuple):
    """For a group whose ranks know of each other already."""

    ready: Ready
    """This rank's."""
    cards: Sequence[Card]
    """Of all ranks, as they have come by a store."""


prepared: contextvars.ContextVar[Prepared | None] = contextvars.ContextVar("prepared", default=None)
"""For the group that is being made."""


def door_at(place: Place) -> Door:
    """Where other hosts come in."""
    from ringreduce.rendezvous.interfaces import Filter, local_interfaces
    from ringreduce.rendezvous.links import Door
    from ringreduce.rendezvous.sockets import parse_ports

    wanted = Filter.parse(place.interfaces)
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=parse_ports(place.ports))


def _machine(place: Place, nonce: bytes) -> str:
    """Equal for ranks that are on one host."""
    if place.transport == "tcp":
        return nonce.hex()
    if place.host_id:
        return f"RINGREDUCE_HOST_ID={place.host_id}"
    # Those can reach each other's abstract Unix sockets that have the same kernel and the same network namespace.
    return f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"
