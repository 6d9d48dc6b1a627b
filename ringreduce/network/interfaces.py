"""The network interfaces of this machine, and which of them a group uses.

    filter = Filter.parse("eth,ib")         # RINGREDUCE_SOCKET_IFNAME
    for interface in filter.choose(local_interfaces()):
        interface.name, interface.addresses

They are asked of the kernel by netlink (man 7 rtnetlink) rather than read from /sys, which may belong to another
network namespace than the process. Standard library only.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network, ip_address, ip_interface, ip_network
from pathlib import Path

from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import InvalidArgument

VARIABLE = "RINGREDUCE_SOCKET_IFNAME"

IPInterface = IPv4Interface | IPv6Interface
IPNetwork = IPv4Network | IPv6Network

LEAST_MEGABITS, MOST_MEGABITS = 10, 4_000_000
"""What a driver says is a speed; -1 and what it becomes in other types is not."""

# Bridges to the containers and virtual machines of one host, which other hosts do not reach.
BRIDGES = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "cni", "podman")


@dataclass(frozen=True)
class Interface:
    """An interface with the addresses that others can connect to; "10.0.0.1/24" also says the subnet."""

    name: str
    index: int
    addresses: tuple[IPInterface, ...]
    up: bool = True
    loopback: bool = False

    def __str__(self) -> str:
        state = "" if self.up else ", down"
        return f"{self.name} ({', '.join(map(str, self.addresses)) or 'no address'}{state})"


@dataclass(frozen=True)
class Filter:
    """Which interfaces a group uses, in NCCL's grammar and by CIDR.

    "eth,ib": whose names begin so. "=eth0": exactly this one. "^docker,lo": a list that begins with ^ says what to
    leave out. "10.1.0.0/16": addresses of that network. A leading =, ^ or ^= holds for the whole list, and later
    entries may have their own: "eth,^eth3". What is down is left out; so is, unless it is named, a bridge to
    containers, and loopback unless it alone has an address that is routed to.
    """

    text: str = ""
    wanted: tuple[_Entry, ...] = ()
    unwanted: tuple[_Entry, ...] = ()

    @staticmethod
    def parse(text: str) -> Filter:
        """Raises `InvalidArgument` for a list with an empty entry."""
        entries = text.replace(" ", "").split(",") if text.strip() else []
        all_out = text.strip().startswith("^")
        all_exact = text.strip().lstrip("^").startswith("=")
        wanted: list[_Entry] = []
        unwanted: list[_Entry] = []
        for entry in entries:
            name = entry.removeprefix("^").removeprefix("=")
            if not name:
                raise InvalidArgument(
                    f"{VARIABLE}={text!r} has an empty entry; write names and networks with commas between them, such "
                    "as 'eth,ib', '=eth0', '^docker,lo' or '10.1.0.0/16'"
                )
            out = all_out or entry.startswith("^")
            exact = all_exact or entry.removeprefix("^").startswith("=")
            (unwanted if out else wanted).append(_Entry(name, exact, _network(name)))
        return Filter(text, tuple(wanted), tuple(unwanted))

    @property
    def names_some(self) -> bool:
        """Whether it says which to use, rather than only which not."""
        return bool(self.wanted)

    def choose(self, interfaces: Iterable[Interface]) -> list[Interface]:
        """Those of `interfaces` that fit, with the addresses that fit.

        In the order of the filter's entries, then as given. Raises `InvalidArgument` if there are none.
        """
        there = list(interfaces)
        fitting = [self._fitting(interface) for interface in there if interface.up]
        chosen = [interface for interface in fitting if interface.addresses]
        if self.wanted:
            chosen.sort(key=lambda interface: min(i for i, e in enumerate(self.wanted) if e.some_fit(interface)))
        else:
            usual = [i for i in chosen if not i.loopback and not i.name.startswith(BRIDGES)]
            loopback = [i for i in chosen if i.loopback]
            # A host that is routed to by BGP may have its address on lo, and only link-local ones on its cables.
            chosen = next(filter(None, (_routable(usual), _routable(loopback), usual, loopback)), [])
        if not chosen:
            what = f"{VARIABLE}={self.text!r} leaves no interface" if self.text else "no interface can be used"
            raise InvalidArgument(f"{what}; there are {'; '.join(map(str, there)) or 'none'}")
        return [replace(interface, addresses=_reachable(interface.addresses)) for interface in chosen]

    def _fitting(self, interface: Interface) -> Interface:
        def fits(address: IPInterface) -> bool:
            if any(entry.fits(interface.name, address) for entry in self.unwanted):
                return False
            return not self.wanted or any(entry.fits(interface.name, address) for entry in self.wanted)

        return replace(interface, addresses=tuple(filter(fits, interface.addresses)))


@dataclass(frozen=True)
class _Entry:
    name: str
    exact: bool
    network: IPNetwork | None

    def fits(self, name: str, address: IPInterface) -> bool:
        if self.network is not None:
            return address.ip in self.network
        return name == self.name if self.exact else name.startswith(self.name)

    def some_fit(self, interface: Interface) -> bool:
        return any(self.fits(interface.name, address) for address in interface.addresses)


def _network(text: str) -> IPNetwork | None:
    """Of "10.1.0.0/16", also of "10.1.0.7/16" and of a whole address; None for a name."""
    if "/" in text:
        try:
            return ip_network(text, strict=False)
        except ValueError as error:
            raise InvalidArgument(f"{VARIABLE}: {error}; a network is written as '10.1.0.0/16'") from None
    try:
        return ip_network(ip_address(text))
    except ValueError:
        return None


def _routable(interfaces: list[Interface]) -> list[Interface]:
    """Those with an address that means something beyond this host and its cables."""
    return [one for one in interfaces if not all(a.ip.is_link_local or a.ip.is_loopback for a in one.addresses)]


def _reachable(addresses: tuple[IPInterface, ...]) -> tuple[IPInterface, ...]:
    """Without those that only mean something on this host or on their own cable, if there are others."""
    return tuple(a for a in addresses if not (a.ip.is_link_local or a.ip.is_loopback)) or addresses


NET = Path("/sys/class/net")


def speed_of(name: str) -> float | None:
    """Bytes per second that an interface of this machine can send, by its driver; None if nobody knows.

    What has no hardware (veth, tap) has a driver that makes a speed up, so only hardware and what stands on it counts:
    bonds, VLANs, bridges with one port.
    """
    folder = NET / name
    try:
        if int((folder / "ifindex").read_text()) != socket.if_nametoindex(name):
            return None  # /sys is of another network namespace
        if not (folder / "device").exists() and not (folder / "bonding").exists():
            below = [path.name.removeprefix("lower_") for path in folder.glob("lower_*")]
            return speed_of(below[0]) if len(below) == 1 else None
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return 125_000.0 * megabits if LEAST_MEGABITS <= megabits <= MOST_MEGABITS else None


# netlink: linux/netlink.h, rtnetlink.h, if_link.h and if_addr.h

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_ERROR, _DONE, _GET_LINK, _GET_ADDRESS = 2, 3, 18, 22
_REQUEST_DUMP = 0x301
_IFLA_IFNAME, _IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 3, 1, 2, 8
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
# Not yet, no longer or not at all to be used, or soon replaced by another: temporary, failed, deprecated, tentative.
_IFA_F_UNSTEADY = 0x01 | 0x08 | 0x20 | 0x40


def local_interfaces() -> list[Interface]:
    """All interfaces of the network namespace that this thread is in, up or down, as the kernel orders them."""
    addresses: dict[int, list[IPInterface]] = {}
    for (family, prefix, flags, _, index), attributes in _dump(_GET_ADDRESS, _ADDRESS):
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        all_flags = struct.unpack("=I", attributes[_IFA_FLAGS])[0] if _IFA_FLAGS in attributes else flags
        if family == socket.AF_INET6 and all_flags & _IFA_F_UNSTEADY:
            continue
        if family in (socket.AF_INET, socket.AF_INET6) and packed:
            addresses.setdefault(index, []).append(ip_interface((packed, prefix)))
    return [
        Interface(
            attributes[_IFLA_IFNAME].rstrip(b"\0").decode(),
            index,
            tuple(addresses.get(index, ())),
            flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING,
            bool(flags & _IFF_LOOPBACK),
        )
        for (_, _, index, flags, _), attributes in _dump(_GET_LINK, _LINK)
    ]


def _dump(what: int, kind: struct.Struct) -> Iterator[tuple[tuple[int, ...], dict[int, bytes]]]:
    """All links or addresses: the fields of each, and its attributes by type."""
    with above_streams(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + kind.size, what, _REQUEST_DUMP, 1, 0) + bytes(kind.size))
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, answer, *_ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if answer == _DONE:
                    return
                if answer == _ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise OSError(code, "netlink")
                yield kind.unpack_from(message), dict(_attributes(message[kind.size :]))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
