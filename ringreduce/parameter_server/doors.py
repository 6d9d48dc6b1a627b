"""Doors: how a process connects to the door of another one, on its own host or on another, and whether one is there.

On its own host a process connects to the Unix socket of a door. To doors on other hosts it makes TCP connections, as
ranks of a group do (`network.listener`); the first one is for control messages (`control`).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ringreduce.common.descriptors import above_streams
from ringreduce.config import Options
from ringreduce.coordination.endpoint import door_at
from ringreduce.coordination.process import own_pidfd
from ringreduce.errors import TopologyError
from ringreduce.groups.ready import location_of
from ringreduce.network.listener import Peer
from ringreduce.network.local import check_user, close_all, proof
from ringreduce.network.sockets import Address
from ringreduce.parameter_server.control import NONCE, is_proof, receive, send

GROUP = "parameter server"
"""The name by which processes of a parameter server recognise each other's doors between hosts."""


def called(server: int, its: dict[str, Any], replica: int = 0) -> str:
    """Returns the name of a server, or of its backup, in messages. `its` describes the process it is in."""
    return f"{'the backup of ' * (replica > 0)}server {server} ({its['host']}, pid {its['pid']})"


class Refused(ConnectionError):
    """The server does not let the worker in; the message is the server's reason."""


def ask(
    connection: socket.socket, message: dict[str, Any], given: list[int] | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Sends the first message of a connection to a door; returns its answer. Raises `Refused` if the door refuses it,
    and another `ConnectionError` if the server is not there any more."""
    send(connection, message, given)
    answer, descriptors = receive(connection)
    if "error" in answer:
        raise (ConnectionError if answer["error"][0] == "Moved" else Refused)(answer["error"][1])
    return answer, descriptors


def enter(
    address: bytes, secret: bytes, hello: dict[str, Any], given: Sequence[int], timeout: float, expected: int = 0
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Connects to a door on this host, and passes it the descriptors `given` and, after any, one of this process; it
    must pass `expected` ones back. Returns the connection, the answer, and these. Raises `Refused` if the door does not
    let this process in, and another `OSError` if it cannot be reached or does not serve these blocks."""
    connection = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        connection.settimeout(timeout)
        connection.connect(address)
        check_user(connection)
        theirs, ours, worker = connection.recv(NONCE), secrets.token_bytes(NONCE), int(hello["worker"])
        its_proof = proof(secret, b"worker", theirs, worker).hex()
        me = [own_pidfd()] if given else []
        try:
            answer, descriptors = ask(connection, hello | {"nonce": ours.hex(), "proof": its_proof}, [*given, *me])
        finally:
            close_all(me)
        knows = is_proof(answer.get("proof"), secret, b"server", ours, worker)
        if not knows or len(descriptors) != expected:
            close_all(descriptors)
            wrong = f"passed {len(descriptors)} descriptors, not {expected}" if knows else "does not know the secret"
            raise ConnectionError(f"what answered {wrong}")
        undo.pop_all()
    return connection, answer, descriptors


@dataclass
class Reached:
    """Connections to a door on another host."""

    control: socket.socket  # for control messages
    others: list[tuple[int, str]]  # for data: descriptor and path of each

    def take(self) -> Iterator[tuple[int, str]]:
        """Yields the connections for data, which the caller then owns."""
        while self.others:
            yield self.others.pop()

    def close(self) -> None:
        self.control.close()
        close_all(descriptor for descriptor, _ in self.take())


def reach(
    options: Options,
    secret: bytes,
    processes: dict[int, dict[str, Any]],
    number: int,
    deadline: float,
    undo: contextlib.ExitStack,
    look: Callable[[], None] | None = None,
) -> dict[int, Reached]:
    """Connects to the doors of processes on other hosts, as dialer `number`; returns the connections by process. `undo`
    closes them. Raises `TopologyError` if a process does not listen for other hosts."""
    peers = {}
    for process, its in processes.items():
        if not its["door"] or options.transport == "shared_memory":
            raise TopologyError(
                f"{called(process, its)} is on another host than this worker"
                + ("" if its["door"] else " and listens to none: found it with join(listen=True)"),
                process,
            )
        peers[process] = Peer(its["host"], its["pid"], [Address(*address) for address in its["door"]])
    reached: dict[int, Reached] = {}

    def deliver(process: int, descriptor: int, path: str) -> None:
        if process in reached:
            reached[process].others.append((descriptor, path))
        else:
            reached[process] = Reached(socket.socket(fileno=descriptor), [])
            undo.callback(reached[process].close)

    door = door_at(location_of(options), listens=False)
    connections = 1 + (options.connections or 1)
    try:
        door.open(number, GROUP, secret, peers, deliver, connections, options.dead_after or 0)
        door.connect(processes, deadline, look=look)
    finally:
        door.close()
    return reached


def lives(its: dict[str, Any], here: str) -> bool:
    """Whether the process that has told the store `its` is there, as far as a process of the host `here` can see."""
    if its["machine"] == here:
        connection = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with connection, contextlib.suppress(OSError):
            connection.connect(bytes.fromhex(its["address"]))
            return True
        return False
    for each in its["door"]:
        address = Address(*each)
        try:
            above_streams(socket.create_connection((str(address.ip.ip), address.port), timeout=1.0)).close()
            return True
        except (ConnectionError, TimeoutError):
            continue
        except OSError:  # this cannot be determined
            return True
    return False
