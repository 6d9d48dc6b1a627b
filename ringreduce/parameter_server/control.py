"""Control messages between workers and servers: JSON objects for joining, making keys, and questions.

On one host they use a Unix socket. When a worker has connected, both sides prove that they know the store's secret, and
the kernel confirms that both belong to the same user. The worker then passes the descriptors of its window, of its
process (pidfd) and of a socket on which servers tell it about their backups. The server passes those of its values, its
bell and its process. Between hosts, control messages use a TCP connection whose ends have proved that they know the
secret (`network.listener`); each message follows its length, and there are no descriptors.

After that the worker asks, and the server answers. A message has at most MOST bytes. It is parsed as JSON, so it cannot
contain code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ringreduce.config import Options
from ringreduce.coordination.process import kernel, own_pidfd
from ringreduce.errors import SystemFailure
from ringreduce.network.local import check_user, exactly
from ringreduce.network.local import receive as receive_message
from ringreduce.network.sockets import Address

MOST = 64 * 1024
NONCE = 32
_MOST_DESCRIPTORS = 5
_LENGTH = struct.Struct("!I")
_PROCESS = secrets.token_hex(8)


def proof(secret: bytes, role: str, nonce: bytes, worker: int) -> str:
    return hmac.digest(secret, role.encode() + nonce + worker.to_bytes(4, "big"), hashlib.sha256).hex()


def same(left: str, right: object) -> bool:
    return isinstance(right, str) and hmac.compare_digest(left, right)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Sends a message, over a Unix socket with descriptors. Raises `SystemFailure` if it is longer than MOST bytes."""
    data = json.dumps(message).encode()
    if len(data) > MOST:
        raise SystemFailure(f"a control message has {len(data)} bytes; the most is {MOST}")
    if connection.family == socket.AF_UNIX:
        socket.send_fds(connection, [data], descriptors or [])
    else:
        connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a message and its descriptors. Raises `ConnectionError` at the end of the connection and for data that is
    no message."""
    if connection.family != socket.AF_UNIX:
        (length,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
        if length > MOST:
            raise ConnectionError(f"a message is longer than {MOST} bytes")
        return _parsed(exactly(connection, length)), []
    data, descriptors = receive_message(connection, MOST, _MOST_DESCRIPTORS)
    try:
        if not data:
            raise ConnectionError("the other side closed the connection")
        return _parsed(data), descriptors
    except ConnectionError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(str(error)) from None
    if not isinstance(message, dict):
        raise ConnectionError("a message is no JSON object")
    return message


class Arriving:
    """Collects the bytes of messages that arrive over TCP. Never waits."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, connection: socket.socket) -> list[dict[str, Any]]:
        """Returns the messages that are complete. Raises as `receive`."""
        some = connection.recv(MOST, socket.MSG_DONTWAIT)
        if not some:
            raise ConnectionError("the other side closed the connection")
        self._data += some
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST:
                raise ConnectionError(f"a message is longer than {MOST} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(_parsed(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages


def connect(
    address: bytes, secret: bytes, hello: dict[str, Any], client: Any, timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Joins a worker to a server on this host. Returns the connection, the server's answer, and the descriptors of its
    values, bell and process.

    `hello["of"]` is the number of the server (default: 0). Raises `Refused` if the server does not let the worker in,
    and another `OSError` if it cannot be reached or does not serve these blocks.
    """
    pidfd = own_pidfd()
    try:
        return enter(address, secret, hello, [client.window, pidfd, client.news], timeout)
    finally:
        os.close(pidfd)


def connect_again(address: bytes, secret: bytes, hello: dict[str, Any], timeout: float) -> socket.socket:
    """Connects a worker to a server that knows it already, because it was the backup of the worker's server.

    Raises as `connect`.
    """
    connection, _, descriptors = enter(address, secret, hello | {"again": True}, [], timeout)
    for descriptor in descriptors:
        os.close(descriptor)
    return connection


class Refused(ConnectionError):
    """The server does not let the worker in; the message is the server's reason."""


def enter(
    address: bytes, secret: bytes, hello: dict[str, Any], given: list[int], timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Connects to a door on this host, and passes it the descriptors `given`. Returns the connection, the answer, and
    three descriptors. Raises as `connect`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        connection.settimeout(timeout)
        connection.connect(address)
        check_user(connection)
        theirs, ours, worker = connection.recv(NONCE), new_nonce(), int(hello["worker"])
        its_proof = proof(secret, "worker", theirs, worker)
        send(connection, hello | {"nonce": ours.hex(), "proof": its_proof}, given)
        answer, descriptors = receive(connection)
        if "error" in answer:
            raise (ConnectionError if answer["error"][0] == "Moved" else Refused)(answer["error"][1])
        if len(descriptors) != 3 or not same(proof(secret, "server", ours, worker), answer.get("proof")):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionError("what answered does not know the secret")
        undo.pop_all()
    return connection, answer, descriptors


@dataclass
class Reached:
    """Connections to a door on another host."""

    control: socket.socket
    """For control messages."""
    others: list[tuple[int, str]]
    """For data: descriptor and path of each."""

    def take(self) -> Iterator[tuple[int, str]]:
        """Yields the connections for data, which the caller then owns."""
        while self.others:
            yield self.others.pop()

    def close(self) -> None:
        self.control.close()
        for descriptor, _ in self.take():
            os.close(descriptor)


def listens(address: bytes) -> bool:
    """Whether a process of this host has its door at a Unix address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.connect(address)
        return True
    return False


def lives(its: dict[str, Any], here: str) -> bool:
    """Whether a process with servers is there, as far as a process of the host `here` can see. `its` is what the store
    knows about it."""
    return listens(bytes.fromhex(its["address"])) if its["machine"] == here else answers(its["door"])


def answers(addresses: list[list[Any]]) -> bool:
    """Whether a process listens at one of the addresses of a door. Also True if this cannot be determined."""
    for each in addresses:
        address = Address(*each)
        try:
            socket.create_connection((str(address.ip.ip), address.port), timeout=1.0).close()
            return True
        except (ConnectionError, TimeoutError):
            continue
        except OSError:
            return True
    return False


def machine(options: Options) -> str:
    """Returns a name of this host. It is equal for processes with the same kernel and network namespace, unless
    RINGREDUCE_HOST_ID or RINGREDUCE_TRANSPORT says otherwise."""
    if options.host_id:
        return f"host {options.host_id}"
    here = f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"{here}/{os.getpid()}/{_PROCESS}" if options.transport == "tcp" else here
