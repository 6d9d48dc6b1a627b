"""What a process prepares before it meets the others of its group, and its endpoint, which tells them about it.

    prepared = PreparedEndpoint(location, config, listens=True)
    prepared.endpoint         # a JSON object for every process that is to make a group with this one

A rank usually puts its endpoint into the store when it meets the others. A member of a changing group publishes it
earlier, in its address, before it knows who will be in the next group. Then the ranks have all endpoints when they
begin to meet, and need no store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.coordination.process import Who, has_ended, identity, kernel
from ringreduce.network.secret import group_secret

if TYPE_CHECKING:
    from ringreduce._C import OpenMemory
    from ringreduce.coordination.protocol import Member
    from ringreduce.network.listener import Door

NONCE = 32

Endpoint = dict[str, Any]
"""What a rank tells of itself in the first phase; see `endpoint`."""


Config = Mapping[str, Any]
"""The options that must be equal on all ranks, by name."""


class Location(NamedTuple):
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


class PreparedEndpoint:
    """What a rank has prepared for one group: sockets, memory and its endpoint.

    The caller must close it. What the group has taken from it by then stays open.
    """

    def __init__(
        self, place: Location, config: Config, memory: OpenMemory | None = None, listens: bool = False, wire: Any = None
    ) -> None:
        """`memory`: this process's, if others may read it.

        `listens`: whether to listen for other hosts, too; done only if an address and a port are free. `wire`: what is
        known of the network between hosts. Raises `InvalidArgument` if the secret file or the ports are wrong.
        """
        group_secret(b"", place.secret_file)  # finds a mistake now, not only when the group has several hosts
        if place.ports:
            from ringreduce.network.sockets import parse_ports

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
        self.endpoint: Endpoint = {
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


def door_at(place: Location) -> Door:
    """Opens the door at which this rank accepts links from other hosts, as `place` says."""
    from ringreduce.network.interfaces import Filter, local_interfaces
    from ringreduce.network.listener import Door
    from ringreduce.network.sockets import parse_ports

    wanted = Filter.parse(place.interfaces)
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=parse_ports(place.ports))


def _machine(place: Location, nonce: bytes) -> str:
    """A text that is equal for ranks on one host."""
    if place.transport == "tcp":
        return nonce.hex()
    if place.host_id:
        return f"RINGREDUCE_HOST_ID={place.host_id}"
    # Processes can reach each other's abstract Unix sockets if they have the same kernel and network namespace.
    return f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"


# what a member's address in a view says about it, as JSON


def address_of_this_process(ledger: list[Any] | None, endpoint: Endpoint | None, settings: Mapping[str, float]) -> str:
    """This process's address as a member. `ledger`: where it has its ledger open.

    `endpoint`: of its part of the next group, if that is prepared. `settings`: those that it was started with.
    """
    return json.dumps({**identity()._asdict(), "ledger": ledger, "endpoint": endpoint, "settings": settings})


@functools.lru_cache(maxsize=256)
def _facts(address: str) -> dict[str, Any]:
    """An address's content. Callers must not change it. Kept, since each change asks several times."""
    facts: dict[str, Any] = json.loads(address)
    return facts


def ledger_of(member: Member) -> list[Any] | None:
    """Where the member has its ledger open; None: it has none."""
    ledger: list[Any] | None = _facts(member.address)["ledger"]
    return ledger


def endpoint_of(member: Member) -> Endpoint | None:
    """The member's endpoint for the next group; None: it has prepared nothing."""
    endpoint: Endpoint | None = _facts(member.address)["endpoint"]
    return endpoint


def settings_of(member: Member) -> dict[str, float]:
    """What the member was started with."""
    settings: dict[str, float] = _facts(member.address)["settings"]
    return settings


def process_of(member: Member) -> Who:
    """The member's process."""
    facts = _facts(member.address)
    return Who(*(facts[name] for name in Who._fields))


def member_has_ended(member: Member) -> bool:
    """Whether the member's process has ended, as far as this process can see."""
    return has_ended(process_of(member))
