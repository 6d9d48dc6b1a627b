"""Which process this is, on which machine, and whether another process has ended."""

from __future__ import annotations

import errno
import functools
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import SystemFailure
from ringreduce.common.files import text_of
from ringreduce.common.system import WANTS


class Who(NamedTuple):
    """A process: how others name it and, on the same machine, see its end."""

    host: str
    pid: int
    pids: str
    """Processes for which it is equal have the same numbers for processes."""
    began: int
    """When the kernel started the process. Once it has ended, its number may go to a process that began later. 0: the
    kernel does not say."""
    clock: str = ""
    """Processes for which it is equal see the same `began` of a process: it is in the time namespace of who looks."""


@functools.cache
def identity() -> Who:
    """This process's."""
    try:
        began = _began(os.getpid())
    except OSError:
        began = 0
    return Who(socket.gethostname(), os.getpid(), _pid_namespace(), began, _namespace("time"))


@functools.cache
def process_began() -> float:
    """When this process was started, in seconds of `time.time()`."""
    if not (began := identity().began):
        return _imported
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK"))


_imported = time.time()
os.register_at_fork(after_in_child=identity.cache_clear)
os.register_at_fork(after_in_child=process_began.cache_clear)


def boot_id() -> str:
    """The kernel's; "": it tells none, as gVisor's does not."""
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


@functools.cache
def kernel() -> str:
    """Equal for processes of one machine, until it is started anew. Without a boot id it is the host's name, which
    several may have: those who then share memory prove by a Unix socket that they can."""
    return boot_id() or socket.gethostname()


def local_network() -> str:
    """Equal for processes of one kernel and network namespace: they reach each other's abstract Unix sockets."""
    return f"{kernel()}/{_namespace('net')}"


def _pid_namespace() -> str:
    kernels, space = boot_id(), _namespace("pid")
    if not (kernels and space):  # processes that cannot be told from those of another host are not to be seen
        return secrets.token_hex(8)
    return f"{kernels[:13]}/{space}"


def _namespace(kind: str) -> str:
    """The namespace that this thread is in; "": nobody knows. The process's is not to be seen once its main thread has
    ended."""
    try:
        return str(os.stat(f"/proc/thread-self/ns/{kind}").st_ino)
    except OSError:
        return ""


def _began(pid: int) -> int:
    """When a process was started, in clock ticks since its machine was."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])  # the name before ")" may contain anything


def open_process(who: Who) -> int:
    """A pidfd of a process.

    Raises `ProcessLookupError` if the process has ended, and another `OSError` if that cannot be found out: processes
    of other PID namespaces cannot be seen.
    """
    if who.pids != identity().pids:
        raise OSError(f"process {who.pid} of {who.host} is in another PID namespace")
    pidfd = above_streams(os.pidfd_open(who.pid))
    try:
        began = _began(who.pid) if who.began and who.clock == identity().clock else who.began
    except OSError:  # it has just ended, which the descriptor shows, or /proc hides it from this user
        began = who.began
    if began != who.began:
        os.close(pidfd)
        raise ProcessLookupError(f"process {who.pid} has ended, and another one has its number")
    return pidfd


def lives(who: Who) -> bool:
    """Whether this process sees that the other one has not ended."""
    return who.pids == identity().pids and not has_ended(who)


def has_ended(who: Who) -> bool:
    """Whether the process has, as far as this one can see. It sees only processes of its own PID namespace."""
    try:
        pidfd = open_process(who)
    except ProcessLookupError:
        return True
    except OSError:  # nobody knows
        return False
    try:
        return bool(ended_among([pidfd], 0.0))
    finally:
        os.close(pidfd)


def ended_among(pidfds: Iterable[int], seconds: float) -> list[int]:
    """The descriptors of processes that have ended. Waits up to `seconds` for the first one."""
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, event in poll.poll(1000 * seconds) if event & select.POLLIN]


def own_pidfd() -> int:
    try:
        return above_streams(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise SystemFailure(f"pidfd_open: {error.strerror}{pidfd_fix(error)}") from None


def pidfd_fix(error: OSError) -> str:
    """What to do where pidfd_open has failed, to be put behind the reason."""
    fixes = {
        errno.ENOSYS: "ringreduce needs Linux 5.3 or newer",
        errno.EPERM: "let the container's or service's seccomp filter allow pidfd_open",
    }
    fix = (WANTS | fixes).get(error.errno or 0)
    return f"; {fix}" if fix else ""
