"""System calls that containers and services may refuse to a process, by seccomp filters and the like."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable

from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import SystemFailure

_MEMORY = "free memory, or start fewer processes on this host"
WANTS = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
    errno.ETOOMANYREFS: "raise `ulimit -n`",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
}
"""By errno: what to do when a call fails because this process, or its host, has run out of something."""
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
    try:
        return os.fork()
    except OSError as error:
        fix = WANTS.get(error.errno or 0, "raise `ulimit -u` or the cgroup's pids.max")
        raise SystemFailure(f"cannot start a process: {error.strerror}; {fix}") from None


def start(thread: threading.Thread) -> None:
    """Starts a thread of Python. Raises `SystemFailure` if there can be no other one."""
    try:
        thread.start()
    except RuntimeError as error:
        fix = "raise `ulimit -u`, `ulimit -v` or the cgroup's pids.max"
        raise SystemFailure(f"cannot start a thread: {error}; {fix}") from None


def explained(error: OSError) -> str:
    """What to say of an error, and what to do; where the process is refused system calls, which they are."""
    if error.errno in WANTS:
        return f"{error.strerror}; {WANTS[error.errno]}"
    refused = ", ".join(refused_calls()) if error.errno in _REFUSED else ""
    if not refused:
        return str(error)
    return f"{refused}: {error.strerror}; let the container's or service's seccomp filter allow {refused}"
