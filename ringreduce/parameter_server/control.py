"""What workers and servers tell each other before and beside the data: JSON, one message at a time.

On one host it goes over a Unix socket. A worker connects and both sides prove that they know the store's secret; the
kernel tells both that the other is the same user. The worker then gives its window and a pidfd of itself, the server
its values, its bell and a pidfd. Between hosts it goes over a TCP connection whose ends have proved the same
(`rendezvous.links`), each message after its length, without descriptors. After that the worker asks, and the server
answers. A message is at most MOST bytes, and is JSON: no code ever comes out of one.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from typing import Any

from ringreduce.config import Options
from ringreduce.errors import SystemFailure

MOST = 64 * 1024
NONCE = 32
_MOST_DESCRIPTORS = 4
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
        (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        if length > MOST:
            raise ConnectionError(f"a message is longer than {MOST} bytes")
        return _parsed(_exactly(connection, length)), []
    descriptors = array.array("i")
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(MOST, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        if not data:
            raise ConnectionError("the other side closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ConnectionError(f"a message is longer than {MOST} bytes")
        return _parsed(data), list(descriptors)
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


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        some = connection.recv(size - len(data))
        if not some:
            raise ConnectionError("the other side closed the connection")
        data += some
    return data


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


def check_user(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"a process of user {uid} connected; this one runs as user {os.geteuid()}")


def own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SystemFailure(f"pidfd_open: {error.strerror}; ringreduce needs Linux 5.3 or newer") from None


def machine(options: Options) -> str:
    """Equal for processes of one host: of one kernel and one network namespace, unless the options say otherwise."""
    if options.host_id:
        return f"host {options.host_id}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        here = f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"{here}/{os.getpid()}/{_PROCESS}" if options.transport == "tcp" else here
