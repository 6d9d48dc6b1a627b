"""What readers and servers tell each other, over Unix sockets that keep messages apart."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from typing import NamedTuple

from ringreduce.common.descriptors import above_streams
from ringreduce.common.system import WANTS
from ringreduce.network.local import check_user, receive

Key = tuple[int, int]
"""Which batch: its positions in the order, first and last + 1."""

WANT, DONE, LAST, ANEW, KEEP = 1, 2, 3, 4, 5
ASKED = struct.Struct("<qqqq")
"""What, the request's number (0 if it is no WANT), and a key. A reader sends several in one message.

WANT: prepare this batch. DONE: it is not needed any more. LAST: the reader wants nothing any more. ANEW: the reader may
have lost what it was told; it needs only the batches that it names in the rest of this message, by WANT or by KEEP,
which says that it holds the batch. LAST and ANEW have no key.

Each WANT has a new number, which comes back with the batch. So if a batch is let go and asked for again while the first
answer is under way, the reader does not take that answer for the second one.
"""

WELCOME, WHERE = b"welcome?", b"where?"
"""What a reader asks a supervisor: to be let in; what the servers are doing."""

FILLED = struct.Struct("<qqqqqqq")
"""The number of a request, and where its batch is (`Filled`). The slot's memory comes along if this reader lacks it."""

LONGEST = 64 * 1024
"""Bytes of a message."""
MOST_IN_ADVANCE = 64
"""The largest `ahead`. What a reader asks for at once must fit in a message."""


class Filled(NamedTuple):
    """Where a batch is: its key, the slot's number and bytes, and where in it the description begins and ends."""

    begin: int
    end: int
    slot: int
    bytes: int
    tensors_end: int
    description_end: int


def address(name: str) -> bytes:
    """Abstract, so it leaves nothing in a file system and ends with the last process that listens there."""
    return b"\0ringreduce data " + hashlib.sha256(f"{os.geteuid()} {name}".encode()).hexdigest()[:32].encode()


def listen(name: str) -> socket.socket | None:
    """None if another process listens under this name."""
    listener = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        listener.bind(address(name))
    except OSError as error:
        listener.close()
        if error.errno in WANTS:
            raise
        return None
    listener.listen(1024)
    return listener


def connect(name: str) -> socket.socket | None:
    """None if no process listens under this name. Raises `ConnectionError` if another user's does."""
    connection = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.connect(address(name))
    except OSError:
        connection.close()
        return None
    try:
        check_user(connection)
    except ConnectionError:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket) -> socket.socket | None:
    """A connection of this user, or None."""
    connection = above_streams(listener.accept()[0])
    try:
        check_user(connection)
    except OSError:
        connection.close()
        return None
    return connection


def next_message(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors. Raises `ConnectionError` where the other side has gone."""
    message, fds = receive(connection, LONGEST, 1)
    if not message:
        raise ConnectionError("the other side closed the connection")
    return message, fds
