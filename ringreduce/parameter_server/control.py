"""Control messages between workers and servers: JSON objects for joining, making keys, and questions.

On one host they use a Unix socket. When a worker has connected, both sides prove that they know the store's secret, and
the kernel confirms that both belong to the same user. The worker then passes the descriptors of its window, of its
process (pidfd) and of a socket on which servers tell it about their backups. The server passes those of its values, its
bell and its process. Between hosts, control messages use a TCP connection whose ends have proved that they know the
secret (`network.listener`); each message follows its length, and there are no descriptors.

After that the worker asks, and the server answers. A message has at most MOST bytes. It is JSON, so it has no code.
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import struct
import time
from typing import Any

from ringreduce.errors import SystemFailure
from ringreduce.network.local import close_all, exactly, proof
from ringreduce.network.local import receive as receive_message

MOST = 64 * 1024
NONCE = 32
_MOST_DESCRIPTORS = 5
_SHORT_OF_MEMORY = 0.5
"""A message for which the kernel has no memory is tried for so many seconds: without it the worker would be lost."""
_AGAIN = 0.005
"""Seconds between two attempts."""
_LENGTH = struct.Struct("!I")


def is_proof(said: object, secret: bytes, role: bytes, nonce: bytes, worker: int) -> bool:
    """Whether a message has the proof (`network.local.proof`), as JSON has it."""
    return isinstance(said, str) and hmac.compare_digest(said, proof(secret, role, nonce, worker).hex())


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Sends a message, over a Unix socket with descriptors. Raises `SystemFailure` if it is longer than MOST bytes."""
    data = json.dumps(message).encode()
    if len(data) > MOST:
        raise SystemFailure(f"a control message has {len(data)} bytes; the most is {MOST}")
    if connection.family != socket.AF_UNIX:
        return connection.sendall(_LENGTH.pack(len(data)) + data)
    until = time.monotonic() + _SHORT_OF_MEMORY
    while True:
        try:
            socket.send_fds(connection, [data], descriptors or [])
            return
        except OSError as error:  # nothing has been sent
            if error.errno not in (errno.ENOBUFS, errno.ENOMEM) or time.monotonic() > until:
                raise
            time.sleep(_AGAIN)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a message and its descriptors. Raises `ConnectionError` at the end, and for data that is no message."""
    if connection.family != socket.AF_UNIX:
        return _parsed(exactly(connection, _length(exactly(connection, _LENGTH.size)))), []
    data, descriptors = receive_message(connection, MOST, _MOST_DESCRIPTORS)
    try:
        if not data:
            raise ConnectionError("the other side closed the connection")
        return _parsed(data), descriptors
    except ConnectionError:
        close_all(descriptors)
        raise


def _length(data: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack_from(data)
    if length > MOST:
        raise ConnectionError(f"a message is longer than {MOST} bytes")
    return int(length)


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
            end = _LENGTH.size + _length(self._data)
            if len(self._data) < end:
                break
            messages.append(_parsed(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages
