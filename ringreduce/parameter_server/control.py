"""What workers and servers of one host tell each other before and beside the data: JSON over a Unix socket.

A worker connects and both sides prove that they know the store's secret; the kernel tells both that the other is the
same user. The worker then gives its window and a pidfd of itself, the server its values, its bell and a pidfd. After
that the worker asks, and the server answers, one message at a time. A message is at most MOST bytes, and is JSON: no
code ever comes out of one.
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

from ringreduce.errors import SystemFailure

MOST = 64 * 1024
NONCE = 32
_MOST_DESCRIPTORS = 4


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
    socket.send_fds(connection, [data], descriptors or [])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message and its descriptors. Raises `ConnectionError` at the end, and for what is no message."""
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
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ConnectionError("a message is no JSON object")
    except (ConnectionError, ValueError, RecursionError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError(str(error)) from None
    return message, list(descriptors)


def check_user(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"a process of user {uid} connected; this one runs as user {os.geteuid()}")


def own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SystemFailure(f"pidfd_open: {error.strerror}; ringreduce needs Linux 5.3 or newer") from None


def machine() -> str:
    """Equal for processes that can share memory: of one kernel and one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
