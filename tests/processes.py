"""The processes that tests have for ranks: what distributed/harness.py (one host) and net/ranks.py (several) share.

Ranks are forked from a server that has torch imported, so one starts in milliseconds and still has a process of its own
to be killed or stopped in. No process outlives its `Processes`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

DEADLINE = 60.0
"""Seconds for all ranks, however they hang."""

GROUP_TIMEOUT = 30.0
"""Seconds for a call of a group, unless a test says otherwise."""


class Member:
    """What a rank knows of itself, in its own process."""

    store: dist.Store
    """That all ranks of this run share."""

    def __init__(self, rank: int, size: int, pipe: connection.Connection) -> None:
        self.rank, self.size = rank, size
        self._pipe = pipe

    @contextlib.contextmanager
    def join(
        self,
        name: str = "first",
        members: list[int] | None = None,
        backend: str = "ringreduce",
        timeout: float = GROUP_TIMEOUT,
        options: Any = None,
    ) -> Iterator[None]:
        """The default group is this one: `members`, or all. Groups of other names know nothing of each other."""
        members = list(range(self.size)) if members is None else members
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, self.store),
            rank=members.index(self.rank),
            world_size=len(members),
            timeout=timedelta(seconds=timeout),
            pg_options=options,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    def meet(self, name: str) -> None:
        """Returns when all ranks are here; needs no group."""
        self.store.add(name, 1)
        while self.store.add(name, 0) < self.size:
            time.sleep(0.001)

    def report(self, value: Any) -> None:
        """Tells the process outside something while the rank goes on."""
        self._pipe.send(("report", value))


class Processes:
    """The ranks, in the process outside. A context manager, which kills those that are left."""

    def __init__(self) -> None:
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []

    def _start(self, main: Any, *args: Any, tail: tuple[Any, ...]) -> None:
        """Starts the next rank: `main(*args, its end of the pipe, *tail)`."""
        ours, theirs = _context().Pipe()
        process = _context().Process(target=main, args=(*args, theirs, *tail))
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE)
        for pipe in self._pipes:
            pipe.close()

    def pid(self, rank: int) -> int:
        pid: int = self._processes[rank].pid
        return pid

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Returns when that was, by the clock all processes share."""
        os.kill(self.pid(rank), number)
        return time.monotonic()


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What ranks import sooner or later; torch.testing imports distributed.tensor, which takes 1.3 s. What is not
    # installed is passed over.
    slow = ["torch", "torch.distributed.tensor", "torch._dynamo", "ringreduce.backend", "hypothesis", "pytest"]
    context.set_forkserver_preload(slow)
    return context
