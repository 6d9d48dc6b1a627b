"""A rank that waits for long says for whom, what that rank does, and for how long it still waits. It says so while it
waits, not after, and one rank speaks for all of a host."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, run
from distributed.test_hosts import Hosts, placed
from processes import GROUP_TIMEOUT

import ringreduce
from ringreduce.coordination import wait
from ringreduce.errors import CollectiveMismatch

AFTER = 0.4
"""Seconds after which a rank of these tests says for whom it waits."""


class Told:
    """What this rank has written to its standard error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sys.stderr.flush()
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)

    def lines(self) -> list[str]:
        return [line for line in self.path.read_text().splitlines() if "has waited" in line]

    def wait_for(self, begin: str, times: int = 1) -> str:
        """The latest line with `begin`, once there are so many."""
        end = time.monotonic() + GROUP_TIMEOUT
        while len(found := [line for line in self.lines() if begin in line]) < times:
            assert time.monotonic() < end, f"no line has {begin!r}: {self.lines()}"
            time.sleep(0.01)
        return found[-1]


def waits_long(me: Rank, folder: Path) -> list[str]:
    """Rank 2 comes only when rank 0 has said that it waits for it. Returns what ranks 0 and 1 have said."""
    wait.WARN_AFTER = AFTER
    told, x = Told(folder / str(me.rank)), torch.ones(1000)
    lines: list[str] = []
    me.store.set(f"pid {me.rank}", str(os.getpid()))
    with me.join():
        pair, broken = dist.new_group([0, 2]), dist.new_group([0, 2])
        dist.barrier()
        if me.rank != 1:
            with pytest.raises(CollectiveMismatch):  # afterwards nobody is in a call of this group
                dist.barrier(broken) if me.rank else dist.all_reduce(x, group=broken)
        if me.rank == 0:
            work = dist.all_reduce(x, async_op=True)
            me.store.set("rank 0 waits", "")
            lines.append(told.wait_for("all_reduce(count=1000", 2))
            os.kill(int(me.store.get("pid 2")), signal.SIGCONT)
            work.wait()

            work = dist.broadcast(x, 2, async_op=True)
            lines.append(told.wait_for("broadcast(count=1000"))
            (folder / "go on").touch()
            work.wait()

            work = dist.barrier(async_op=True)
            lines.append(told.wait_for("barrier(), seq 4"))
            dist.all_reduce(x, group=pair)
            work.wait()

            works = [dist.irecv(x, 2), dist.irecv(torch.zeros(1), 2, tag=7)]
            lines.append(told.wait_for("recv(4000 bytes"))
            me.store.set("send", "")
            for work in works:
                work.wait()

            comes = threading.Thread(target=ringreduce.monitored_barrier)
            comes.start()
            me.store.set("rank 0 is in the monitored barrier", "")
            lines.append(told.wait_for("monitored_barrier"))
            me.store.set("come to it", "")
            comes.join()
            return lines
        me.store.wait(["rank 0 waits"])
        if me.rank == 1:
            ringreduce.all_reduce(x)
            dist.broadcast(x, 2)
            dist.barrier()
            me.store.wait(["rank 0 is in the monitored barrier"])
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(x)
            while not (folder / "go on").exists():
                sum(range(10_000))
            dist.broadcast(x, 2)
            dist.all_reduce(x, group=pair)
            dist.barrier()
            me.store.wait(["send"])
            dist.send(x, 0)
            dist.send(torch.ones(1), 0, tag=7)
            me.store.wait(["come to it"])
        ringreduce.monitored_barrier()
    return told.lines()


@pytest.mark.parametrize("hosts", ([0, 0, 0], [0, 0, 1]), ids=("1 host", "2 hosts"))
def test_a_rank_that_waits_for_long_says_for_whom(hosts: Hosts, tmp_path: Path) -> None:
    (stopped, busy, elsewhere, message, monitored), others, _ = run(placed, 3, hosts, waits_long, tmp_path)
    assert others == []  # rank 0 has spoken for rank 1
    late = f"rank 2 ({socket.gethostname()}, pid "
    for line in stopped, busy, elsewhere, message, monitored:
        assert 'of group "0" (3 ranks): rank 0 (' in line and " more" in line and late in line, line
    assert "dtype=float32, op=sum" in stopped and "seq 2 of group" in stopped and "and will wait 2" in stopped
    assert "0 bytes have moved" in message and "Later messages wait, too: 1." in message
    if hosts == [0, 0, 0]:
        assert all("Also waiting for rank 2: rank 1." in line for line in (stopped, busy, elsewhere))
        assert "is stopped; `kill -CONT" in stopped and "It is in" not in stopped
        assert "lives; its main thread is running" in busy
        assert "It is in all_reduce(count=1000" in elsewhere and ", where it waits for rank 0." in elsewhere


def slice_of_this_thread() -> int:
    """For how many nanoseconds it may have its core before others; 0 on kernels that do not tell, before 6.12."""
    attributes = ctypes.create_string_buffer(48)  # the kernel's sched_attr
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, len(attributes), 0) == 0
    return int(struct.unpack("IIQiIQQQ", attributes)[5])


def waits_for_the_other(me: Rank) -> tuple[int, int, int]:
    with me.join():
        before, niceness = slice_of_this_thread(), os.nice(3)
        if me.rank == 1:
            time.sleep(0.05)
        ringreduce.all_reduce(torch.ones(1))
        return before, slice_of_this_thread(), os.nice(0) - niceness


def test_a_thread_that_waits_has_short_slices() -> None:
    before, after, nicer = run(waits_for_the_other, 2)[0]
    assert (after, nicer) == (min(before, 100_000), 0)
