"""What workers and servers tell each other before and beside the data: JSON, one message at a time.

On one host it goes over a Unix socket. A worker connects and both sides prove that they know the store's secret; the
kernel tells both that the other is the same user. The worker then gives its window, a pidfd of itself and a socket, by
which servers tell it of their backups; the server gives its values, its bell and a pidfd. Between hosts it goes over a
TCP connection whose ends have proved the same (`rendezvous.links`), each message after its length, without descriptors.
After that the worker asks, and the server answers. A message is at most MOST bytes, and is JSON: no code ever comes out
of one.
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
from ringreduce.errors import SystemFailure
from ringreduce.rendezvous.host import check_user, exactly, own_pidfd
from ringreduce.rendezvous.host import receive as receive_message
from ringreduce.rendezvous.sockets import Address
from ringreduce.rendezvous.store import kernel

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
    data = json.dumps(message).encode()
    if len(data) > MOST:
        raise SystemFailure(f"a control message has {len(data)} bytes; the most is {MOST}")
    if connection.family == socket.AF_UNIX:
        socket.send_fds(connection, [data], descriptors or [])
    else:
        connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message and its descriptors. Raises `ConnectionError` at the end, and for what is no message."""
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
    """Messages over TCP, of which bytes come now and then. Never waits."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, connection: socket.socket) -> list[dict[str, Any]]:
        """What has come whole. Raises as `receive`."""
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
    """Joins a worker to a server: the connection, what the server says, and its values, bell and pidfd.

    `hello` may have the number of the server, as "of". Raises `Refused` if that does not let it in, and another
    `OSError` if it does not work.
    """
    pidfd = own_pidfd()
    try:
        return enter(address, secret, hello, [client.window, pidfd, client.news], timeout)
    finally:
        os.close(pidfd)


def connect_again(address: bytes, secret: bytes, hello: dict[str, Any], timeout: float) -> socket.socket:
    """A worker's connection to the door of a server that knows it, since its backup did. Raises as `connect`."""
    connection, _, descriptors = enter(address, secret, hello | {"again": True}, [], timeout)
    for descriptor in descriptors:
        os.close(descriptor)
    return connection


class Refused(ConnectionError):
    """The server has said why, and will not let it in."""


def enter(
    address: bytes, secret: bytes, hello: dict[str, Any], given: list[int], timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Goes to a door of this host: the connection, what it says, and three descriptors. Raises as `connect`."""
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
    """Connections to the door of another host: one for control messages, and others, descriptors and paths."""

    control: socket.socket
    others: list[tuple[int, str]]

    def take(self) -> Iterator[tuple[int, str]]:
        """The others, which from here on belong to the caller."""
        while self.others:
            yield self.others.pop()

    def close(self) -> None:
        self.control.close()
        for descriptor, _ in self.take():
            os.close(descriptor)


def answers(addresses: list[list[Any]]) -> bool:
    """Whether somebody listens at one of the addresses of a door between hosts, or that cannot be found out."""
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
    """Equal for processes of one host: of one kernel and one network namespace, unless the options say otherwise."""
    if options.host_id:
        return f"host {options.host_id}"
    here = f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"{here}/{os.getpid()}/{_PROCESS}" if options.transport == "tcp" else here
