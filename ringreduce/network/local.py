"""Unix sockets between processes of one host, and the file descriptors and memory that they pass on."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterable

from ringreduce.common.descriptors import above_streams, duplicate
from ringreduce.common.failures import SystemFailure

_CUT, _FDS_CUT = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)  # members of an enum take microseconds to combine


def shared_memory(segment_bytes: int) -> int:
    memfd = above_streams(os.memfd_create("ringreduce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(memfd, segment_bytes)
        # A rank that made it smaller would end all others, by SIGBUS.
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(memfd)
        raise SystemFailure(
            f"cannot make {segment_bytes} bytes of shared memory: {error.strerror} (channel_bytes and mailbox_bytes in "
            "RINGREDUCE_ENGINE lower this; `ulimit -f` limits it)"
        ) from None
    return memfd


def written(text: str) -> int:
    """A descriptor from which others can read it."""
    fd = above_streams(os.memfd_create("ringreduce roster", os.MFD_CLOEXEC))
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(text.encode())
    except BaseException:
        os.close(fd)
        raise
    return fd


def send(connection: socket.socket, message: bytes, fds: list[int], deadline: float) -> None:
    """Sends descriptors, however many are on their way already.

    The kernel lets a user have as many under way as a process may have open, and large groups send more.
    """
    while True:
        try:
            if fds:
                socket.send_fds(connection, [message], fds)
            else:
                connection.send(message)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(0.001)  # until others have received theirs


def receive(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """A message and its descriptors, which no program that another thread starts meanwhile inherits.

    Empty if the other side has gone. Raises `ConnectionError` if it has more than `size` bytes or `most` descriptors,
    `SystemFailure` if this process has no room for them.
    """
    fds = array.array("i")
    asked = size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC  # recv_fds() ignores flags
    try:
        message, ancillary, flags, _ = connection.recvmsg(*asked)
    except ConnectionResetError:  # the other side ended with a message unread; what it had said comes after this error
        message, ancillary, flags, _ = connection.recvmsg(*asked)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (_CUT | _FDS_CUT):
        close_all(fds)
        if flags & _CUT:
            raise ConnectionError(f"a message is longer than {size} bytes")
        if len(fds) == most:
            raise ConnectionError(f"a message has more than {most} descriptors")
        raise SystemFailure("this process has no descriptors left; raise `ulimit -n`")
    return message, list(map(above_streams, fds))


def require_room(count: int, fd: int) -> None:
    """Raises `OSError` (EMFILE) unless this process may have so many more descriptors; `fd` is any that it has."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, duplicate(fd))


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next so many, or `ConnectionError`."""
    data = b""
    while len(data) < size:
        some = connection.recv(size - len(data))
        if not some:
            raise ConnectionError("the other side closed the connection")
        data += some
    return data


def check_user(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"a process of user {uid} connected; this one runs as user {os.geteuid()}")


def proof(secret: bytes, role: bytes, nonce: bytes, number: int) -> bytes:
    """That the one of this role and number, a rank or a worker, knows the secret. `nonce`: what the other side drew."""
    return hmac.digest(secret, role + nonce + number.to_bytes(4, "big"), "sha256")


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
