"""What a rank prepares before it meets the others of its group, and the card that tells them about it.

    ready = Ready(place, config, listens=True)
    ready.card         # a JSON object for every process that is to make a group with this one

A rank usually puts its card into the store when it meets the others. A member of a changing group publishes it earlier,
before it knows who will be in the next group. Then the ranks have all cards when they begin to meet, and need no store.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.rendezvous.secret import group_secret
from ringreduce.rendezvous.store import Card, identity, kernel

if TYPE_CHECKING:
    from ringreduce._C import OpenMemory
    from ringreduce.rendezvous.links import Door

NONCE = 32

Config = Mapping[str, Any]
"""The options that must be equal on all ranks, by name."""


class Place(NamedTuple):
    """The options that say on which host a rank is, and how other hosts reach it."""

    transport: str = "auto"
    """'auto': ranks that can share memory are on one host; 'shared_memory': all have to be; 'tcp': each is alone."""
    host_id: str = ""
    """RINGREDUCE_HOST_ID: ranks with the same text are on one host; '': the kernel and its namespaces decide."""
    interfaces: str = ""
    """RINGREDUCE_SOCKET_IFNAME: see `interfaces.Filter`."""
    secret_file: str = ""
    """RINGREDUCE_SECRET_FILE: see `secret.group_secret`."""
    ports: str = ""
    """RINGREDUCE_PORTS: see `sockets.parse_ports`."""


class Ready:
    """What a rank has prepared for one group: sockets, memory and its card.

    The caller must close it. What the group has taken from it by then stays open.
    """

    def __init__(
        self, place: Place, config: Config, memory: OpenMemory | None = None, listens: bool = False, wire: Any = None
    ) -> None:
        """`memory`: this process's, if others may read it.

        `listens`: whether to listen for other hosts, too; done only if an address and a port are free. `wire`: what is
        known of the network between hosts. Raises `InvalidArgument` if the secret file or the ports are wrong.
        """
        group_secret(b"", place.secret_file)  # finds a mistake now, not only when the group has several hosts
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
        """Closes the sockets at which this rank listens."""
        self.listener.close()
        if self.door:
            self.door.close()


class Prepared(NamedTuple):
    """What makes a group without a store: this rank's preparations and the cards of all ranks."""

    ready: Ready
    cards: Sequence[Card]
    """By rank."""


prepared: contextvars.ContextVar[Prepared | None] = contextvars.ContextVar("prepared", default=None)
"""Set while a group is made without a store."""


def door_at(place: Place) -> Door:
    """Opens the door at which this rank accepts links from other hosts, as `place` says."""
    from ringreduce.rendezvous.interfaces import Filter, local_interfaces
    from ringreduce.rendezvous.links import Door
    from ringreduce.rendezvous.sockets import parse_ports

    wanted = Filter.parse(place.interfaces)
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=parse_ports(place.ports))


def _machine(place: Place, nonce: bytes) -> str:
    """A text that is equal for ranks on one host."""
    if place.transport == "tcp":
        return nonce.hex()
    if place.host_id:
        return f"RINGREDUCE_HOST_ID={place.host_id}"
    # Processes can reach each other's abstract Unix sockets if they have the same kernel and network namespace.
    return f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"
