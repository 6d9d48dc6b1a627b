"""System calls that containers and services may refuse to a process, by seccomp filters and the like."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import SystemFailure

T = TypeVar("T")

_MEMORY = "free memory, or start fewer processes on this host"
WANTS = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
    errno.ETOOMANYREFS: "raise `ulimit -n`",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
}
"""By errno: what to do when a call fails because this process, or its host, has run out of something."""
NO_THREAD = "raise `ulimit -u`, `ulimit -v` or the cgroup's pids.max"
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)


def _ioctl() -> None:
    with above_streams(socket.socket(socket.AF_UNIX)) as one:
        one.settimeout(0.0)  # by ioctl, as all timeouts of Python's sockets


def _netlink() -> None:
    above_streams(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)).close()


_NEEDED: dict[str, Callable[[], None]] = {
    "memfd_create": lambda: os.close(above_streams(os.memfd_create("ringreduce tries it", os.MFD_CLOEXEC))),
    "pidfd_open": lambda: os.close(above_streams(os.pidfd_open(os.getpid()))),
    "ioctl": _ioctl,
    "socket(AF_NETLINK)": _netlink,
}


def refused_calls() -> list[str]:
    """The system calls that groups need and this process may not make."""
    refused = []
    for name, attempt in _NEEDED.items():
        try:
            attempt()
        except OSError as error:
            if error.errno in _REFUSED:
                refused.append(name)
    return refused


def fork() -> int:
    """`os.fork`. Raises `SystemFailure` if no process can be started."""
    return starting(os.fork)


def starting(process: Callable[[], T]) -> T:
    """What `process()` returns, which starts one. Raises `SystemFailure` if there can be no other one."""
    try:
        return process()
    except OSError as error:
        fix = {errno.EAGAIN: "raise `ulimit -u` or the cgroup's pids.max", **WANTS}.get(error.errno or 0)
        if fix is None:
            raise
        raise SystemFailure(f"cannot start a process: {error.strerror}; {fix}") from None


def start(thread: threading.Thread) -> None:
    """Starts a thread of Python. Raises `SystemFailure` if there can be no other one."""
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemFailure(f"cannot start a thread: {error}; {NO_THREAD}") from None


def explained(error: BaseException) -> str:
    """What to say of an error, and what to do; where the process is refused system calls, which they are."""
    if not isinstance(error, OSError):
        return str(error) or repr(error)
    if error.errno in WANTS:
        return f"{error.strerror}; {WANTS[error.errno]}"
    refused = ", ".join(refused_calls()) if error.errno in _REFUSED else ""
    if not refused:
        return str(error)
    return f"{refused}: {error.strerror}; let the container's or service's seccomp filter allow {refused}"
