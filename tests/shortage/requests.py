"""Makes one request for a resource fail, or take long: the k-th of some kinds, counted from a mark. Those of processes
that are forked meanwhile count too.

    with requests.failing("allocation", 17) as asked:
        ringreduce.all_reduce(tensor)
    asked.count  # how many requests of that kind there were
    asked.place  # where the one that failed was made: an offset in the module, or a line of Python; "": none failed
    asked.when   # and when, by time.monotonic()

ringreduce's own C++ is reached through requests.cpp, which changes the loaded module's table of addresses; Python's
system calls through its audit events, and through functions that have none.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

KINDS = ("allocation", "mapping", "thread", "descriptor", "socket_call", "wait", "tensor", "process", "disk")
"""The bits of requests.cpp, in its order."""

ANY = "any"
"""All of them but "wait", which cannot fail."""

ANEW = (1 << 64) - 1
"""Instead of a number: the first request that is made at a place where none has failed before in this process."""

_OF_PYTHON = 1 << 62
"""In numbers of places: a line of Python."""

_EVENTS = {
    "open": "descriptor",
    "socket.__new__": "descriptor",
    "socket.connect": "socket_call",
    "socket.bind": "socket_call",
    "mmap.__new__": "mapping",
    "os.truncate": "mapping",
    "os.fork": "process",
    "subprocess.Popen": "process",
}

_FUNCTIONS: list[tuple[Any, str, str]] = [
    (os, "memfd_create", "descriptor"),
    (os, "pidfd_open", "descriptor"),
    (os, "dup", "descriptor"),
    (os, "eventfd", "descriptor"),
    (os, "pipe", "descriptor"),
    (os, "ftruncate", "mapping"),
    (os, "posix_fallocate", "disk"),
    (os, "fsync", "disk"),
    (os, "mkdir", "disk"),
    (os, "link", "disk"),
    (os, "replace", "disk"),
    (os, "rename", "disk"),
    (os, "write", "disk"),
    (os, "pwrite", "disk"),
    (socket.socket, "accept", "descriptor"),
    (socket.socket, "send", "socket_call"),
    (socket, "recv_fds", "descriptor"),
    (socket, "send_fds", "socket_call"),
    (socket, "socketpair", "descriptor"),
    (
        threading,
        "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread",
        "thread",
    ),
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
    place: str = ""
    when: float = 0.0


@functools.cache
def functions() -> list[tuple[int, int, str]]:
    """Of ringreduce's module: where each begins and ends, as offsets, and its name. Sorted."""
    from ringreduce import _C

    command = ["nm", "--demangle", "--print-size", "--defined-only", str(_C.__file__)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(None, 3) for line in listed.stdout.splitlines()]
    found = [(int(line[0], 16), int(line[1], 16), line[3]) for line in lines if len(line) == 4 and line[2] in "tTwW"]
    return sorted((begin, begin + size, name) for begin, size, name in found)


def place_name(place: str) -> str:
    """The function that holds an offset; a line of Python as it is."""
    if not place.startswith("0x"):
        return place
    found = bisect.bisect(functions(), (int(place, 16) + 1,)) - 1
    return functions()[found][2].replace("(anonymous namespace)::", "").split("(")[0]


def places() -> list[str]:
    """All calls of the module by which it asks for a resource that requests.cpp can refuse."""
    from ringreduce import _C

    names = set(re.findall(r'^    \{"ringreduce/_C", "(\w+)"', Path(__file__).with_suffix(".cpp").read_text(), re.M))
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--section=.text", str(_C.__file__)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    calls = re.compile(r"call +[0-9a-f]+ <(\w+)@plt>")
    found = [after for line, after in itertools.pairwise(code) if (call := calls.search(line)) and call[1] in names]
    return [hex(int(after.split(":")[0], 16)) for after in found]


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    """Of requests.cpp, which now stands between ringreduce's module and the system.

    pybind11 is left out: an object that it has begun to make and has no memory to list drops what it does not hold. So
    are torch's dictionaries, which end the process where memory runs out.
    """
    library = ctypes.CDLL(str(path))
    left_out = [each for each in functions() if re.search("pybind11::|c10::Dict", each[2].split("(")[0])]
    parts = [edge for begin, end, _ in left_out for edge in (begin, end)]
    library.parts = (ctypes.c_uint64 * len(parts))(*parts)
    if library.requests_install(library.parts, ctypes.c_size_t(len(parts) // 2)) < 20:
        raise RuntimeError(f"{path} found too few calls to stand for: is ringreduce._C loaded?")
    library.requests_ask.argtypes = [ctypes.c_uint, ctypes.c_size_t, ctypes.c_char_p]
    library.requests_arm.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_int64]
    library.requests_disarm.restype = ctypes.c_uint64

    def ask(kind: str) -> None:
        line = _line().encode()
        if library.requests_ask(1 << KINDS.index(kind), _OF_PYTHON + zlib.crc32(line), line):
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


def _line() -> str:
    """Of ringreduce's Python, the one that asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/ringreduce/")
        if found:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the module"


def _asking(function: Callable[..., Any], ask: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(*args: Any, **named: Any) -> Any:
        if "asyncio" not in sys._getframe(1).f_code.co_filename:  # whose loop wakes itself by a socket
            ask()
        return function(*args, **named)

    return asked


@contextlib.contextmanager
def failing(library: Path, kind: str, number: int, seconds: float = 0.0) -> Iterator[Asked]:
    """The `number`-th request of `kind` fails, or takes `seconds` longer; with 0, all are only counted."""
    found, asked = _library(library), Asked()
    place, line, when = ctypes.c_uint64(), ctypes.c_char_p(), ctypes.c_int64()
    kinds = sum(1 << bit for bit, name in enumerate(KINDS) if kind in (name, ANY) and (kind, name) != (ANY, "wait"))
    found.requests_arm(kinds, number, int(seconds * 1e9))
    try:
        yield asked
    finally:
        asked.count = found.requests_disarm(*map(ctypes.byref, (place, line, when)))
        asked.when = when.value / 1e9
        asked.place = _place(place.value, (line.value or b"").decode())


def _place(number: int, line: str) -> str:
    if number >= _OF_PYTHON:
        return line
    return hex(number) if 0 < number < 1 << 32 else "another library" if number else ""
