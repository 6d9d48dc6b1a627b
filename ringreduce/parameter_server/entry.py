"""What a joining process knows about a parameter server (`Entry`), and connecting to doors on other hosts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringreduce import errors
from ringreduce.config import Options
from ringreduce.errors import RingReduceError, TopologyError
from ringreduce.parameter_server import control
from ringreduce.parameter_server.host import GROUP, Host
from ringreduce.parameter_server.serving import once
from ringreduce.rendezvous.interfaces import Filter, local_interfaces
from ringreduce.rendezvous.links import Door, Peer
from ringreduce.rendezvous.sockets import Address
from ringreduce.rendezvous.store import get


@dataclass
class Entry:
    """What a founder or a worker needs in order to join. `deadline` is a time of the monotonic clock."""

    name: str
    group: str
    window: int
    block_bytes: int
    deadline: float
    timeout: float
    options: Options
    store: Any = None
    """The store, under a prefix of this incarnation of the parameter server."""
    making: int = 0
    """The number of this incarnation; the same store can be used for several, one after the other."""
    worker: int = -1
    """The number of this worker; for a founder, that of its process."""
    founders: int = 0
    servers: int = 0
    backups: int = 0
    has_far_backups: bool = False
    """Whether backups are reached by TCP."""
    secret: bytes = b""
    host: Host | None = None

    @property
    def machine(self) -> str:
        return control.machine(self.options)

    @functools.cached_property
    def machines(self) -> list[str]:
        """The host of each founder (`control.machine`). Waits until all have told the store."""
        return [self._wait(f"machine/{process}", process) for process in range(self.founders)]

    def process(self, process: int) -> dict[str, Any]:
        """Returns what a process with servers has told the store about itself. Waits for it."""
        place: dict[str, Any] = json.loads(self._wait(f"server/{process}", process))
        return place | {"number": process, "name": called(process, place)}

    def _wait(self, key: str, process: int) -> str:
        return get(self.store, key, f"server {process}", self.deadline, self.check_founding)

    def check_founding(self) -> None:
        """Raises the error with which a founder has given up this incarnation, if one has."""
        if self.store.check(["founded"]) and not (founded := self.store.get("founded").decode()).isdigit():
            kind, text = json.loads(founded)
            raise getattr(errors, kind)(text)

    def give_up(self, error: RingReduceError) -> None:
        """Lets the other founders raise `error`, since this one has given up. No effect if all have entered."""
        with contextlib.suppress(Exception):  # the store may have ended
            once(self.store, "founded", json.dumps([type(error).__name__, str(error)]))

    def hello(self) -> dict[str, Any]:
        """Returns what a worker tells a server about itself."""
        return {"worker": self.worker, "host": socket.gethostname(), "pid": os.getpid(), "group": self.group}


def called(server: int, its: dict[str, Any], replica: int = 0) -> str:
    """Returns the name of a server, or of its backup, in messages. `its` describes the process it is in."""
    return f"{'the backup of ' * (replica > 0)}server {server} ({its['host']}, pid {its['pid']})"


def make_door(options: Options, ports: Sequence[int]) -> Door:
    wanted = Filter.parse(options.socket_ifname or "")
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=ports)


def reach(
    entry: Entry,
    processes: dict[int, dict[str, Any]],
    number: int,
    deadline: float,
    undo: contextlib.ExitStack,
    look: Callable[[], None] | None = None,
) -> dict[int, control.Reached]:
    """Connects to the doors of processes on other hosts, as visitor `number`; returns the connections by process.

    `undo` closes them. Raises `TopologyError` if a process does not listen for other hosts.
    """
    peers = {}
    for process, its in processes.items():
        if not its["door"] or entry.options.transport == "shared_memory":
            raise TopologyError(
                f"{called(process, its)} is on another host than this worker"
                + ("" if its["door"] else " and listens to none: found it with join(listen=True)"),
                process,
            )
        peers[process] = Peer(its["host"], its["pid"], [Address(*address) for address in its["door"]])
    reached: dict[int, control.Reached] = {}

    def deliver(process: int, descriptor: int, path: str) -> None:
        if process in reached:
            reached[process].others.append((descriptor, path))
        else:
            reached[process] = control.Reached(socket.socket(fileno=descriptor), [])
            undo.callback(reached[process].close)

    door = make_door(entry.options, ())
    connections = 1 + (entry.options.connections or 1)
    try:
        door.open(number, GROUP, entry.secret, peers, deliver, connections, entry.options.dead_after or 0)
        door.connect(processes, deadline, look=look)
    finally:
        door.close()
    return reached


def greet(entry: Entry, connection: socket.socket, server: int, replica: int, timeout: float) -> None:
    """Asks a server or backup on another host to let this worker in. `timeout` is in seconds.

    Raises `control.Refused` if it does not, and another `ConnectionError` if that replica is not there any more.
    """
    connection.settimeout(timeout)
    hello = {"of": server, "replica": replica, "window": entry.window}
    control.send(connection, entry.hello() | hello)
    answer, _ = control.receive(connection)
    if "error" in answer:
        raise (ConnectionError if answer["error"][0] == "Moved" else control.Refused)(answer["error"][1])
