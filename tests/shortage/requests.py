"""Makes one request of this process for a resource fail, or take long: the k-th of some kinds, counted from a mark.

    with requests.failing("allocation", 17) as asked:
        ringreduce.all_reduce(tensor)
    asked.count  # how many requests of that kind there were
    asked.place  # where the module made the one that failed, an offset; 1: not in the module; 0: there were fewer

ringreduce's own C++ is reached through requests.cpp, which changes the loaded module's table of addresses; Python's
system calls through its audit events, and through functions that have none.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("allocation", "mapping", "thread", "descriptor", "socket_call", "wait", "tensor", "process", "disk")
"""The bits of requests.cpp, in its order; the last two are Python's alone."""

_EVENTS = {
    "open": "descriptor",
    "socket.__new__": "descriptor",
    "socket.connect": "socket_call",
    "socket.bind": "socket_call",
    "mmap.__new__": "mapping",
    "os.truncate": "mapping",
    "_thread.start_new_thread": "thread",
    "os.fork": "process",
    "subprocess.Popen": "process",
}

_FUNCTIONS: list[tuple[Any, str, str]] = [
    (os, "memfd_create", "descriptor"),
    (os, "pidfd_open", "descriptor"),
    (os, "dup", "descriptor"),
    (os, "eventfd", "descriptor"),
    (os, "ftruncate", "mapping"),
    (os, "posix_fallocate", "disk"),
    (os, "fsync", "disk"),
    (os, "replace", "disk"),
    (os, "rename", "disk"),
    (os, "write", "disk"),
    (os, "pwrite", "disk"),
    (socket, "recv_fds", "descriptor"),
    (socket, "send_fds", "socket_call"),
    (socket, "socketpair", "descriptor"),
]

_ERRORS: dict[str, Callable[[], BaseException]] = {
    "mapping": lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "thread": lambda: RuntimeError("can't start new thread"),
    "descriptor": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "socket_call": lambda: OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
    "process": lambda: OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    "disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


@dataclass
class Asked:
    count: int = 0
    place: int = 0


@functools.cache
def functions() -> list[tuple[int, int, str]]:
    """Of ringreduce's module: where each begins and ends, as offsets, and its name. Sorted."""
    from ringreduce import _C

    command = ["nm", "--demangle", "--print-size", "--defined-only", str(_C.__file__)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(None, 3) for line in listed.stdout.splitlines()]
    found = [(int(line[0], 16), int(line[1], 16), line[3]) for line in lines if len(line) == 4 and line[2] in "tTwW"]
    return sorted((begin, begin + size, name) for begin, size, name in found)


def place_name(offset: int) -> str:
    """The function that holds an offset."""
    found = bisect.bisect(functions(), (offset + 1,)) - 1
    return (
        functions()[found][2].replace("(anonymous namespace)::", "").split("(")[0]
        if offset > 1 and found >= 0
        else "outside the module"
    )


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    """Of requests.cpp, which now stands between ringreduce's module and the system.

    pybind11 is left out: an object that it has begun to make and has no memory to list drops what it does not hold.
    """
    library = ctypes.CDLL(str(path))
    parts = [edge for begin, end, name in functions() if "pybind11::" in name.split("(")[0] for edge in (begin, end)]
    library.parts = (ctypes.c_uint64 * len(parts))(*parts)
    if library.requests_install(library.parts, ctypes.c_size_t(len(parts) // 2)) < 20:
        raise RuntimeError(f"{path} found too few calls to stand for: is ringreduce._C loaded?")
    library.requests_ask.argtypes = [ctypes.c_uint]
    library.requests_arm.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_int64]
    library.requests_disarm.restype = ctypes.c_uint64

    def ask(kind: str) -> None:
        if library.requests_ask(1 << KINDS.index(kind)):
            raise _ERRORS[kind]()

    def heard(event: str, args: tuple[Any, ...]) -> None:
        kind = _EVENTS.get(event)
        if not kind:
            return
        caller = sys._getframe(1)
        imports = event == "open" and caller.f_code.co_filename.startswith("<frozen")
        has_it = event == "socket.__new__" and caller.f_locals.get("fileno") is not None
        if not imports and not has_it:
            ask(kind)

    sys.addaudithook(heard)
    for owner, name, kind in _FUNCTIONS:
        setattr(owner, name, _asking(getattr(owner, name), functools.partial(ask, kind)))
    return library


def _asking(function: Callable[..., Any], ask: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(*args: Any, **named: Any) -> Any:
        ask()
        return function(*args, **named)

    return asked


@contextlib.contextmanager
def failing(library: Path, kind: str, number: int, seconds: float = 0.0) -> Iterator[Asked]:
    """The `number`-th request of `kind` fails, or takes `seconds` longer; with 0, all are only counted."""
    found, asked, place = _library(library), Asked(), ctypes.c_uint64()
    found.requests_arm(1 << KINDS.index(kind), number, int(seconds * 1e9))
    try:
        yield asked
    finally:
        asked.count = found.requests_disarm(ctypes.byref(place))
        asked.place = place.value
