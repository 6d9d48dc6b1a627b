"""Runs a function on n real processes, the ranks of a group.

    def work(me, factor):
        with me.join():
            ...
        return value

    values = run(work, 4, 0.5)             # one per rank; a rank's traceback is the test's failure

Processes are forked from a server that has torch imported, so a rank starts in milliseconds and still has a process of
its own to be killed or stopped in. Every wait is bounded, and no process outlives its `Ranks`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

DEADLINE = 60.0
"""Seconds for all ranks of a test, however they hang."""

GROUP_TIMEOUT = 30.0
"""Seconds for a call of a group, unless a test says otherwise."""

_fresh = itertools.count()


class Rank:
    """What a rank knows of itself, in its own process."""

    def __init__(self, rank: int, size: int, port: int, prefix: str, pipe: connection.Connection) -> None:
        self.rank, self.size = rank, size
        self._pipe = pipe
        self._store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))

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
            store=dist.PrefixStore(name, self._store),
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
        self._store.add(name, 1)
        while self._store.add(name, 0) < self.size:
            time.sleep(0.001)

    def report(self, value: Any) -> None:
        """Tells the test something while the rank goes on."""
        self._pipe.send(("report", value))


class Ranks:
    """The processes, in the test's. A context manager, which kills those that are left."""

    def __init__(self, function: Callable[..., Any], size: int, *args: Any) -> None:
        context = _context()
        prefix, port = f"test{next(_fresh)}", _store().port
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, size, port, prefix, theirs, function, args))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE)
        for pipe in self._pipes:
            pipe.close()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Returns when that was, by the clock all processes share."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def reports(self, but: tuple[int, ...] = ()) -> list[Any]:
        """The next report of every rank, except of those in `but`."""
        return self._collect("report", self._without(but))

    def results(self, but: tuple[int, ...] = ()) -> list[Any]:
        """What the function returned on every rank, except on those that were killed. Their processes have ended."""
        ranks = self._without(but)
        results = self._collect("result", ranks)
        for rank in ranks:
            self._processes[rank].join(DEADLINE)
            assert self._processes[rank].exitcode == 0, f"rank {rank} ended with {self._processes[rank].exitcode}"
        return results

    def _without(self, but: tuple[int, ...]) -> list[int]:
        return [rank for rank in range(len(self._pipes)) if rank not in but]

    def _collect(self, wanted: str, ranks: list[int]) -> list[Any]:
        """Fails at the first traceback, since what other ranks say after it may only be its consequence."""
        end = time.monotonic() + DEADLINE
        waiting = {self._pipes[rank]: rank for rank in ranks}
        values = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                pytest.fail(f"ranks {sorted(waiting.values())} had no {wanted} in time", pytrace=False)
            for pipe in ready:
                kind, value = self._receive(waiting[pipe])
                if kind == wanted:
                    values[waiting.pop(pipe)] = value
        return [values[rank] for rank in ranks]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(1)
            pytest.fail(f"rank {rank} died, with exit code {self._processes[rank].exitcode}", pytrace=False)
        if kind == "error":
            pytest.fail(f"rank {rank}:\n{value}", pytrace=False)
        return kind, value


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Calls `function(me, *args)` on `size` ranks and returns what each returned."""
    with Ranks(function, size, *args) as ranks:
        return ranks.results()


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What ranks import sooner or later; torch.testing imports distributed.tensor, which takes 1.3 s.
    slow = ["torch", "torch.distributed.tensor", "torch._dynamo", "ringreduce.backend", "hypothesis", "pytest"]
    context.set_forkserver_preload(slow)
    return context


@functools.cache
def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _main(
    rank: int,
    size: int,
    port: int,
    prefix: str,
    pipe: connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("result", function(Rank(rank, size, port, prefix, pipe), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
