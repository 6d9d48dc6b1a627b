"""Several hosts on one machine: network namespaces joined by Ethernets, with a rate, a delay and losses if wanted.

    with Network(hosts=4, rate="1gbit") as network:
        network.popen(2, ["iperf3", "--server"])
        network.call(0, socket.create_connection, (network.address(2), 5201))
        network.set_link(2, up=False)

Interface i of host h is `eth<i>` with the addresses 10.77.<i>.<h+1>/24 and fd77:0:0:<i>::<h+1>/64; a subnet is an
Ethernet of its own. Hosts know each other's hardware addresses, so nothing waits for ARP, which losses would delay by
seconds. What a host sends is shaped by tc-tbf on its interface. Needs root and iproute2: `unavailable` says what lacks.

Without delay and loss, hosts are joined by veth and bridges in a namespace of their own. Delay and loss come from
netem where the kernel has it. Else the interfaces are TAP devices, and switch.py carries their frames.

Nothing has a name on the machine: namespaces are held by open files of this process and by the processes in them, and
TAP devices by those of the switch, so they end with these. warden.py ends them all, also when this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

FOLDER = Path(__file__).parent
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
MS_REC, MS_SLAVE = 0x4000, 0x80000  # linux/mount.h
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST = 2e-3
"""Seconds of sending at the rate that a burst may be; tc's timers are finer, but a busy machine runs them late."""
QUEUE = 50e-3
"""Seconds of sending at the rate that may wait in a host. TCP of one machine holds back before a packet is dropped."""

_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """The hosts. A context manager; on leaving it, all processes in the hosts are killed."""

    def __init__(
        self,
        hosts: int = 4,
        rate: str | None = None,
        delay: float | None = None,
        loss: float = 0.0,
        interfaces: int = 1,
        seed: int = 0,
    ) -> None:
        """
        rate: of every interface, for what is sent, as tc writes it ("100mbit"); none: as fast as the machine is.
        delay: seconds from a host to any other. loss: share of the frames that are lost on the way, drawn from `seed`.
        """
        if not 1 <= hosts <= 200 or not 1 <= interfaces <= 8:
            raise ValueError(f"hosts={hosts}, interfaces={interfaces}: give 1 to 200 and 1 to 8")
        if not 0 <= loss < 1 or (delay or 0) < 0:
            raise ValueError(f"delay={delay}, loss={loss}: give seconds from 0, and a share from 0 to below 1")
        self.hosts, self.interfaces, self.rate = hosts, interfaces, rate
        self.delay, self.loss, self.seed = delay or 0.0, loss, seed
        self.carrier = "veth"
        """What joins the hosts: "veth", "netem" or "switch"."""
        self._cuts: set[tuple[int, int]] = set()
        self._exit = contextlib.ExitStack()
        self._namespaces: list[int] = []
        self._bridges = -1
        self._switch: subprocess.Popen[str] | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Network:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def address(self, host: int, interface: int = 0, family: int = 4) -> str:
        """Of an interface; `family` is 4 or 6."""
        return f"10.77.{interface}.{host + 1}" if family == 4 else f"fd77:0:0:{interface:x}::{host + 1:x}"

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host, as subprocess.Popen does. It sees the host's interfaces in /sys too."""
        mounted = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh", *argv]
        process = subprocess.Popen(self._entered(self._namespaces[host], mounted), **options)
        self._processes.append(process)
        return process

    def call(self, host: int, function: Callable[..., Value], *args: Any) -> Value:
        """Calls a function in a thread of this process that is on a host. Its sockets stay there."""
        return _in_thread(lambda: (enter(self.path(host)), function(*args))[1])

    def path(self, host: int) -> str:
        """The host's namespace as a file, for `enter`, while this process is alive."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[host]}"

    def bytes_out(self, host: int) -> int:
        """That the host's interfaces have sent, with headers; a packet that the card would cut counts one header."""
        return sum(
            int(counters["stats64"]["tx"]["bytes"])
            for counters in json.loads(self._run(self._namespaces[host], "ip", "-json", "-statistics", "link"))
            if counters["ifname"] != "lo"
        )

    def set_link(self, host: int, up: bool, interface: int = 0) -> None:
        """Plugs the host's cable in or out. The host sees no carrier; its addresses stay."""
        if self._switch:
            self._tell_switch(f"{'up' if up else 'down'} {self._port(host, interface)}")
        else:
            state = "up" if up else "down"
            self._run(self._bridges, "ip", "link", "set", _port_name(host, interface), state)

    def flap(self, host: int, seconds: float, interface: int = 0) -> None:
        """Takes the link down and returns when it is up again, after so many seconds."""
        self.set_link(host, False, interface)
        time.sleep(seconds)
        self.set_link(host, True, interface)

    def cut(self, host: int, peer: int, cut: bool = True) -> None:
        """Loses all that a host sends to another, from now on, or no longer; the host does not notice."""
        for interface in range(self.interfaces):
            to = _mac(self.hosts + 1, interface) if cut else _mac(peer, interface)  # nobody's
            for family in (4, 6):
                line = f"ip neigh replace {self.address(peer, interface, family)} lladdr {to} dev eth{interface}"
                self._run(self._namespaces[host], *line.split())
        (self._cuts.add if cut else self._cuts.discard)((host, peer))

    def heal(self) -> None:
        """Ends every `cut`."""
        for host, peer in list(self._cuts):
            self.cut(host, peer, cut=False)

    def set_rate(self, host: int, rate: str, interface: int = 0) -> None:
        """Of what the host sends by that interface, from now on. Packets that wait are lost if there was none."""
        line = f"tc qdisc replace dev eth{interface} root handle 1: tbf {_tbf(rate)}"
        self._run(self._namespaces[host], *line.split())

    # ---- making it -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._namespaces = [self._new_namespace() for _ in range(self.hosts)]
        self._bridges = self._new_namespace()
        self._warden = self._start("warden.py", *map(_inode, self._namespaces))
        if self.delay or self.loss:
            self.carrier = "netem" if self._has_netem() else "switch"
        if self.carrier == "switch":
            self._join_by_switch()
        else:
            self._join_by_bridges()
        for host in range(self.hosts):
            self._batch(self._namespaces[host], self._configure(host))
            for interface in range(self.interfaces if self.rate else 0):
                self.set_rate(host, str(self.rate), interface)

    def _close(self) -> None:
        for process in self._processes:
            process.kill()  # also those on their way into a namespace
        if self._warden:
            self._warden.communicate(b"end")
        for process in self._processes:
            process.wait()
        if self._switch:
            self._switch.communicate()
        self._exit.close()

    def _join_by_bridges(self) -> None:
        lines = ["link set lo up"]
        for interface in range(self.interfaces):
            lines += [f"link add br{interface} type bridge mcast_snooping 0", f"link set br{interface} up"]
        for host, interface in self._ends():
            port, mac, path = _port_name(host, interface), _mac(host, interface), self.path(host)
            lines += [
                f"link add {port} type veth peer name eth{interface} address {mac} netns {path}",
                f"link set {port} master br{interface} up",
            ]
        self._batch(self._bridges, lines)
        if self.carrier == "netem":
            for host, interface in self._ends():
                line = f"tc qdisc add dev {_port_name(host, interface)} root {self._netem()}"
                self._run(self._bridges, *line.split())

    def _netem(self) -> str:
        return f"netem limit 1000000 delay {self.delay * 1e6:.0f}us loss {self.loss:%}"

    def _has_netem(self) -> bool:
        line = f"tc qdisc add dev lo root {self._netem()}".split()
        return subprocess.run(self._entered(self._bridges, line), capture_output=True, check=False).returncode == 0

    def _join_by_switch(self) -> None:
        taps = [self.call(host, _open_tap, f"eth{interface}") for host, interface in self._ends()]
        settings = [str(self.interfaces), str(self.delay), str(self.loss), str(self.seed)]
        self._switch = self._start("switch.py", *settings, *map(str, taps), pass_fds=taps, text=True)
        for tap in taps:
            os.close(tap)
        for host, interface in self._ends():
            self._batch(self._namespaces[host], [f"link set eth{interface} address {_mac(host, interface)}"])

    def _configure(self, host: int) -> list[str]:
        """The lines for `ip -batch` that give a host its addresses."""
        lines = ["link set lo up"]
        for interface in range(self.interfaces):
            device = f"eth{interface}"
            if self.loss and self.carrier == "netem":
                lines.append(f"link set {device} gso_max_segs 1")  # else netem drops up to 64 KB at once
            lines += [
                f"link set {device} up",
                f"addr add {self.address(host, interface)}/24 dev {device}",
                f"addr add {self.address(host, interface, 6)}/64 dev {device} nodad",
            ]
            lines += [
                f"neigh replace {self.address(peer, interface, family)} lladdr {_mac(peer, interface)} dev {device}"
                for peer in range(self.hosts)
                if peer != host
                for family in (4, 6)
            ]
        return lines

    def _ends(self) -> Iterator[tuple[int, int]]:
        """(host, interface) of every cable, as the switch numbers its ports."""
        return itertools.product(range(self.hosts), range(self.interfaces))

    def _port(self, host: int, interface: int) -> int:
        return host * self.interfaces + interface

    def _new_namespace(self) -> int:
        namespace = _in_thread(_unshared)
        self._exit.callback(os.close, namespace)
        return namespace

    def _start(self, script: str, *args: str, **options: Any) -> subprocess.Popen[Any]:
        command = [sys.executable, "-I", "-S", str(FOLDER / script), str(os.getpid()), *args]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen(command, **pipes, **options)

    def _tell_switch(self, line: str) -> None:
        assert self._switch and self._switch.stdin and self._switch.stdout
        print(line, file=self._switch.stdin, flush=True)
        assert self._switch.stdout.readline() == line + "\n", "the switch has ended"

    def _entered(self, namespace: int, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", *argv]

    def _run(self, namespace: int, *argv: str, text: str | None = None) -> str:
        done = subprocess.run(self._entered(namespace, argv), input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}\n{text or ''}")
        return done.stdout

    def _batch(self, namespace: int, lines: Sequence[str]) -> None:
        self._run(namespace, "ip", "-batch", "-", text="\n".join(lines))


@functools.cache
def unavailable() -> str | None:
    """Why there can be no `Network` here; None if there can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    if missing := [name for name in ("ip", "tc", "nsenter", "unshare") if not shutil.which(name)]:
        return f"needs iproute2 and util-linux; missing: {', '.join(missing)}"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun, for networks with delay"
    steps = (
        "mount -t sysfs sysfs /sys",
        "ip link add name eth0 type veth peer name eth1",
        f"tc qdisc add dev eth0 root tbf {_tbf('1gbit')}",
    )
    command = ["unshare", "--net", "--mount", "sh", "-c", " && ".join(steps)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def enter(path: str) -> None:
    """Moves the calling thread, and those it starts, to the network namespace that `path` is."""
    with open(path) as namespace:
        _check(_libc.setns(namespace.fileno(), CLONE_NEWNET), f"setns {path}")


def mount_sysfs() -> None:
    """Shows the calling process, in /sys, the interfaces of the namespace that it has entered."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "mount /")
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


def _unshared() -> int:
    _check(_libc.unshare(CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _in_thread(function: Callable[[], Value]) -> Value:
    """Calls it in a thread of its own, which may go to another namespace since it ends there."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    value, error = outcome
    if error:
        raise error
    return value


def _inode(namespace: int) -> str:
    return str(os.fstat(namespace).st_ino)


def _mac(host: int, interface: int) -> str:
    return f"02:00:00:00:{interface:02x}:{host + 1:02x}"


def _port_name(host: int, interface: int) -> str:
    return f"port{host}.{interface}"


def _tbf(rate: str) -> str:
    """What tc-tbf needs to know for a rate."""
    for unit, bits in UNITS.items():
        if rate.endswith(unit):
            speed = float(rate.removesuffix(unit)) * bits / 8  # bytes a second
            burst, queue = max(16_000, int(speed * BURST)), max(250_000, int(speed * QUEUE))
            return f"rate {rate} burst {burst} limit {burst + queue}"
    raise ValueError(f"rate={rate!r}: give a number and one of {', '.join(UNITS)}")
