"""Runs a function on n real processes, the ranks of a group.

    def work(me, factor):
        with me.join():
            ...
        return value

    values = run(work, 4, 0.5)             # one per rank; a rank's traceback is the test's failure
    by_case = run_cases(work, 4, {"half": (0.5,), "double": (2.0,)})  # on the same processes, which saves starts

    @on_ranks(2, 4)                        # a test on 2 ranks, and one on 4
    def test_that(me): ...

See processes.py for the processes. Every wait is bounded.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import itertools
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any
from unittest import mock

import fork_server
import pytest
import torch
import torch.distributed as dist
from processes import Member, Processes, deadline

_fresh = itertools.count()


class Rank(Member):
    """What a rank knows of itself, in its own process."""

    def __init__(self, rank: int, size: int, port: int, prefix: str, pipe: connection.Connection) -> None:
        super().__init__(rank, size, pipe)
        self.store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))

    def begin(self, case: str) -> None:
        """The deadline begins anew."""
        self._pipe.send(("case", case))
        faulthandler.dump_traceback_later(deadline() - 5.0)  # where it hangs, before the test gives it up


class Ranks(Processes):
    """The processes, in the test's. A context manager, which kills those that are left."""

    def __init__(self, function: Callable[..., Any], size: int, *args: Any) -> None:
        super().__init__()
        self._cases: dict[int, str] = {}  # of each rank the one it is in
        self.prefix, port = f"test{next(_fresh)}", _store().port
        self.store = dist.PrefixStore(self.prefix, _store())
        for rank in range(size):
            self._start(_main, rank, size, port, self.prefix, tail=(function, args))

    def reports(self, but: tuple[int, ...] = ()) -> list[Any]:
        """The next report of every rank, except of those in `but`."""
        return self._collect("report", self._without(but))

    def results(self, but: tuple[int, ...] = ()) -> list[Any]:
        """What the function returned on every rank, except on those that were killed. Their processes have ended."""
        ranks = self._without(but)
        results = self._collect("result", ranks)
        for rank in ranks:
            self._processes[rank].join(deadline())
            assert self._processes[rank].exitcode == 0, f"rank {rank} ended with {self._processes[rank].exitcode}"
        return results

    def _without(self, but: tuple[int, ...]) -> list[int]:
        return [rank for rank in range(len(self._pipes)) if rank not in but]

    def _collect(self, wanted: str, ranks: list[int]) -> list[Any]:
        """Fails at the first traceback, since what other ranks say after it may only be its consequence."""
        end = time.monotonic() + deadline()
        waiting = {self._pipes[rank]: rank for rank in ranks}
        values = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(f"{rank}{self._in_case(rank)}" for rank in sorted(waiting.values()))
                pytest.fail(f"ranks {late} had no {wanted} in time", pytrace=False)
            for pipe in ready:
                kind, value = self._receive(waiting[pipe])
                if kind == "case":
                    self._cases[waiting[pipe]] = value
                    end = time.monotonic() + deadline()
                elif kind == wanted:
                    values[waiting.pop(pipe)] = value
        return [values[rank] for rank in ranks]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(1)
            died = f"rank {rank} died{self._in_case(rank)}, with exit code {self._processes[rank].exitcode}"
            pytest.fail(died, pytrace=False)
        if kind == "error":
            pytest.fail(f"rank {rank}{self._in_case(rank)}:\n{value}", pytrace=False)
        return kind, value

    def _in_case(self, rank: int) -> str:
        return f" in the case {self._cases[rank]!r}" if rank in self._cases else ""


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Calls `function(me, *args)` on `size` ranks and returns what each returned."""
    with Ranks(function, size, *args) as ranks:
        return ranks.results()


def on_ranks(
    *sizes: Any,
    returns: list[Any] | None = None,
    through: tuple[Any, ...] = (),
    start: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a test of a function for ranks, or one for each of `sizes`. `returns`: what it returns on each rank.

    What it takes beside `me` is what pytest gives the test. `through=(other, a)`: `other(me, a, function)` is to call
    it. `start(function, size, **given)` is used instead of `run`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def test(*me: Any, **given: Any) -> Any:
            if me:  # in a rank, which finds the function by the test's name
                return function(*me, **given)
            size = given.pop("ranks", sizes[0])
            first, *others = (*through, functools.partial(test, **given))
            found = start(test, size, **given) if start else run(first, size, *others)
            assert returns is None or found == returns

        taken = list(inspect.signature(function).parameters.values())[1:]
        if len(sizes) > 1:
            taken.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
            pytest.mark.parametrize("ranks", sizes)(test)
        test.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        return test

    return decorate


def run_cases(function: Callable[..., Any], size: int, cases: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """As `run(function, size, *args)` for the arguments of each case, one after the other on the same processes.

    Each case has a store and variables of its own. A failure names the case, and ends the test.
    """
    by_rank = run(_in_turn, size, function, dict(cases))
    return {name: [values[name] for values in by_rank] for name in cases}


def _in_turn(me: Rank, function: Callable[..., Any], cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    store, values = me.store, {}
    for name, args in cases.items():
        me.begin(name)
        me.store = dist.PrefixStore(name, store)
        with mock.patch.dict(os.environ):
            values[name] = function(me, *args)
    return values


@functools.cache
def _store() -> dist.TCPStore:
    """Its socket is of IPv4: /etc/hosts has the names of addresses that connect, and no name server is asked."""
    socket_ = socket.create_server(("127.0.0.1", 0))
    port = socket_.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=socket_.detach(), use_libuv=True
    )


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
    faulthandler.dump_traceback_later(deadline() - 5.0)  # as in `Rank.begin`
    try:
        fork_server.check()
        pipe.send(("result", function(Rank(rank, size, port, prefix, pipe), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Runs all at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
