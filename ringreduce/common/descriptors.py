"""Descriptors with numbers of 3 or higher.

A process may run with its standard streams closed: a daemon, or one started as `ssh host "program <&- >&- 2>&-"`. The
next descriptor that it makes gets the number 0, 1 or 2, and what a library prints goes into whatever that is: shared
memory, or a connection. So every descriptor of ours is made through one of these functions, or in C++ through those of
core/descriptors.h; .ci/check_calls.py finds those that are not. torch's and the program's own are left alone, and
so are the closed streams: a program may open them later.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from typing import TypeVar

FIRST = 3

_Descriptor = TypeVar("_Descriptor", int, socket.socket)
_Object = TypeVar("_Object")


def above_streams(made: _Descriptor) -> _Descriptor:
    """Returns a descriptor or socket that has just been made; another one of the same file if its number is too low."""
    fd = made if isinstance(made, int) else made.fileno()
    if fd >= FIRST:
        return made
    try:
        moved = duplicate(fd)
        if isinstance(made, int):
            return moved
        another = socket.socket(fileno=moved)
        another.settimeout(made.gettimeout())
        return another
    finally:
        os.close(made) if isinstance(made, int) else made.close()


def duplicate(fd: int) -> int:
    """Returns another descriptor of the same file."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST)


def make_above_streams(make: Callable[[], _Object]) -> _Object:
    """Returns what `make()` makes, for objects that keep descriptors of their own, such as selectors.

    Those that took a low number are held until one did not, so `make` is called up to four times.
    """
    low: list[_Object] = []
    try:
        while True:
            before = _streams()
            made = make()
            if _streams() == before:
                return made
            low.append(made)
    finally:
        for each in low:
            if hasattr(each, "close"):  # others, such as stores of torch, close with their last reference
                each.close()


def open_above_streams(path: str, flags: int) -> int:
    """An opener for `open`, where a file is written."""
    return above_streams(os.open(path, flags, 0o666))


def _streams() -> list[tuple[int, int] | None]:
    """Which file each standard stream is; None for one that is closed."""
    return [_file(fd) for fd in range(FIRST)]


def _file(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino
