"""Where ranks listen for those on other hosts, and the options of the TCP sockets between them."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from ipaddress import ip_interface
from typing import NamedTuple

from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.network.interfaces import Interface, IPInterface

_MIN_RTT = 148  # where struct tcp_info of linux/tcp.h has tcpi_min_rtt


class Address(NamedTuple):
    """Where a door listens. As JSON it is a list."""

    interface: str
    address: str
    """With the subnet: "10.0.0.1/24"."""
    port: int

    @property
    def ip(self) -> IPInterface:
        return ip_interface(self.address)

    def __str__(self) -> str:
        return f"{host_and_port(str(self.ip.ip), self.port)} ({self.interface})"


def listen(address: IPInterface, interface: Interface, ports: Sequence[int]) -> socket.socket:
    """Raises `OSError`: the last port's, saying of which ports if there are several."""
    for port in ports:
        listener = above_streams(socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6))
        try:
            listener.setblocking(False)
            # A port of the user's may still have connections of an earlier group; one that is listened at stays taken.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
            listener.bind(sockaddr(address, port, interface.index))
            listener.listen(4096)  # the kernel cuts it to net.core.somaxconn
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            if len(ports) > 1:
                raise OSError(f"{reason(error)} (the last of ports {ports[0]} to {ports[-1]})") from None
            raise
    raise ValueError("no ports")


def listen_at(interfaces: Iterable[Interface], ports: Sequence[int]) -> list[tuple[socket.socket, Address]]:
    """Listens at all addresses of the interfaces that can be bound. Raises `SystemFailure` if none can."""
    listeners, failures = [], []
    for interface in interfaces:
        for address in interface.addresses:
            try:
                listener = listen(address, interface, ports)
            except OSError as error:
                failures.append(f"{address.ip} ({interface.name}): {reason(error)}")
            else:
                listeners.append((listener, Address(interface.name, str(address), listener.getsockname()[1])))
    if not listeners:
        raise SystemFailure(f"cannot listen for other hosts: {'; '.join(failures) or 'no interface is given'}")
    return listeners


def parse_ports(text: str) -> Sequence[int]:
    """What RINGREDUCE_PORTS says: "20000-20100", both included; "20000"; "": as the kernel picks.

    Raises `InvalidArgument` for anything else.
    """
    if not text.strip():
        return (0,)
    first, dash, last = text.partition("-")
    try:
        ports = range(int(first), int(last if dash else first) + 1)
        if ports and ports[0] > 0 and ports[-1] < 1 << 16:
            return ports
    except ValueError:
        pass
    raise InvalidArgument(f"RINGREDUCE_PORTS={text!r} is no range of ports; write such as '20000-20100'")


def sockaddr(address: IPInterface, port: int, index: int = 0) -> tuple[str, int] | tuple[str, int, int, int]:
    """`index` is the interface's on this host, which link-local addresses are nothing without."""
    if address.version == 4:
        return str(address.ip), port
    return str(address.ip), port, 0, index if address.ip.is_link_local else 0


def set_options(connection: socket.socket, dead_after: float) -> None:
    """After `dead_after` seconds the connection breaks: if what was sent is not acknowledged, or probes in silence."""
    interval = max(1, round(dead_after / 5))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(dead_after) - 3 * interval)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * dead_after)),
    ):
        connection.setsockopt(level, option, value)


def round_trip(connection: socket.socket) -> float:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
    (microseconds,) = struct.unpack_from("=I", info, _MIN_RTT)
    return float(microseconds) * 1e-6


def reason(error: BaseException) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
