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
import secrets
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.cores import own_cores
from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.coordination.process import Who, has_ended, identity, local_network
from ringreduce.network.secret import group_secret

if TYPE_CHECKING:
    from ringreduce._C import OpenMemory
    from ringreduce.coordination.protocol import Member
    from ringreduce.network.listener import Door

NONCE = 32

Endpoint = dict[str, Any]
"""What a rank tells of itself in the first phase; `PreparedEndpoint` makes it."""


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
        self,
        location: Location,
        config: Config,
        memory: OpenMemory | None = None,
        listens: bool = False,
        wire: Any = None,
    ) -> None:
        """`memory`: this process's, if others may read it.

        `listens`: whether to listen for other hosts, too; done only if an address and a port are free. `wire`: what is
        known of the network between hosts. Raises `InvalidArgument` if the secret file or the ports are wrong.
        """
        group_secret(b"", location.secret_file)  # finds a mistake now, not only when the group has several hosts
        if location.ports:
            from ringreduce.network.sockets import parse_ports

            parse_ports(location.ports)
        self.memory = memory
        self.nonce = secrets.token_bytes(NONCE)
        self.door: Door | None = None
        if listens:
            with contextlib.suppress(SystemFailure, InvalidArgument):
                self.door = door_at(location)
        self.listener = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.listener.bind("")  # the kernel picks a free abstract address
        self.listener.listen(8)
        self.endpoint: Endpoint = {
            "who": identity(),
            "machine": machine(location, self.nonce.hex()),
            "config": config,
            "label": location.host_id or socket.gethostname(),
            "cores": sorted(own_cores()),
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


def door_at(location: Location, listens: bool = True) -> Door:
    """Opens the door at which this rank accepts links from other hosts, as `location` says.

    `listens`: whether it accepts any. Without, it only serves to go to the doors of others.
    """
    from ringreduce.network.interfaces import Filter, local_interfaces
    from ringreduce.network.listener import Door
    from ringreduce.network.sockets import parse_ports

    wanted, ports = Filter.parse(location.interfaces), parse_ports(location.ports) if listens else ()
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=ports)


def machine(location: Location, alone: str) -> str:
    """A text that is equal for ranks on one host. `alone`: a text that no other rank has, for transport 'tcp'.

    That transport means to share no memory, so it makes each rank a host of its own, whatever the host is called.
    """
    if location.transport == "tcp":
        return alone
    if location.host_id:
        return f"RINGREDUCE_HOST_ID={location.host_id}"
    return local_network()


class Address(NamedTuple):
    """What a member's address in a view says about it."""

    who: Who
    ledger: list[Any] | None
    """Where it has its ledger open; None: it has none."""
    endpoint: Endpoint | None
    """Of its part of the next group; None: it has prepared nothing."""
    settings: Mapping[str, float]
    """What it was started with."""

    def dump(self) -> str:
        return json.dumps(self._asdict())


@functools.lru_cache(maxsize=256)
def _load(address: str) -> Address:
    """Kept, since each change asks several times."""
    facts = json.loads(address)
    return Address(**facts | {"who": Who(*facts["who"])})


def address_of(member: Member) -> Address:
    return _load(member.address)


def member_has_ended(member: Member) -> bool:
    """Whether the member's process has ended, as far as this process can see."""
    return has_ended(address_of(member).who)
