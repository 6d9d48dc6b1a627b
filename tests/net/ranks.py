"""Runs a function on the ranks of several hosts, which are those of a `Network`; network.py's counterpart of
distributed/harness.py.

    def work(me, factor):
        with me.join():
            ...
        return value

    with Network(hosts=2) as network:
        values = run(network, 2, work, 0.5)         # 2 ranks a host; one value per rank, or RankFailed

        with Ranks(network, [0, 0, 1], work, 0.5) as ranks:     # the host of each rank; from outside:
            ranks.signal(2, signal.SIGKILL)
            network.flap(0, 2.0)
            values = ranks.outcomes(but=(2,))       # what each returned, or the exception it raised

Ranks are forked from a server that has torch imported, and then enter their host's namespace. The store is at the first
address of host 0, where torchrun would have it, and belongs to this process, so it outlives rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from net.network import Network, enter, mount_sysfs
from processes import DEADLINE, Member, Processes


class RankFailed(AssertionError):
    """A rank raised, died, or was late; the message has its traceback."""


class Rank(Member):
    """What a rank knows of itself, in its own process. The variables of torchrun are set too."""

    def __init__(self, rank: int, hosts: Sequence[int], pipe: connection.Connection) -> None:
        super().__init__(rank, len(hosts), pipe)
        self.host = hosts[rank]
        self.local_rank = hosts[:rank].count(self.host)

    @functools.cached_property
    def store(self) -> dist.Store:  # type: ignore[override]
        """That all ranks of this run share."""
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def hear(self) -> Any:
        """What the process outside says next by `Ranks.tell`."""
        return self._pipe.recv()


class Ranks(Processes):
    """The processes, in the one outside. A context manager, which kills those that are left."""

    def __init__(
        self,
        network: Network,
        placement: int | Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = DEADLINE,
    ) -> None:
        """
        placement: how many ranks on every host (the first ones on host 0), or the host of each rank.
        env: variables of the ranks. timeout: seconds that `results`, `outcomes` and `reports` wait.
        """
        super().__init__()
        if isinstance(placement, int):
            placement = [host for host in range(network.hosts) for _ in range(placement)]
        self._timeout = timeout
        open_store = functools.partial(dist.TCPStore, is_master=True, wait_for_workers=False)
        self._store = network.call(0, open_store, network.address(0), 0)
        torchrun = {
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(len(placement)),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        for rank, host in enumerate(placement):
            own = (network.path(host), rank, list(placement), torchrun | dict(env or {}))
            self._start(_main, *own, tail=(function, args))

    def tell(self, value: Any) -> None:
        """Every rank finds it by `Rank.hear`."""
        for pipe in self._pipes:
            pipe.send(value)

    def reports(self, but: Sequence[int] = ()) -> list[Any]:
        """The next report of every rank, except of those in `but`. Raises RankFailed at the first that raised."""
        return self._collect("report", but)

    def results(self, but: Sequence[int] = ()) -> list[Any]:
        """What the function returned on every rank, except of those in `but`. Raises RankFailed as `reports` does."""
        return self._collect("result", but)

    def outcomes(self, but: Sequence[int] = ()) -> list[Any]:
        """What the function returned, or the exception that it raised; RankFailed for a rank that died or was late."""
        return self._collect("result", but, keep_errors=True)

    def _collect(self, wanted: str, but: Sequence[int], keep_errors: bool = False) -> list[Any]:
        """The first failure is raised, since what other ranks say after it may only be its consequence."""
        end = time.monotonic() + self._timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in but}
        values: dict[int, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                kind, value = self._receive(waiting[pipe])
                if kind == "error" and not keep_errors:
                    raise RankFailed(f"rank {waiting[pipe]}: {getattr(value, 'traceback', value)}") from value
                if kind in (wanted, "error"):
                    values[waiting.pop(pipe)] = value
            if not ready:
                late = {rank: RankFailed(f"rank {rank} had no {wanted} in time") for rank in waiting.values()}
                if not keep_errors:
                    raise RankFailed(f"ranks {sorted(late)} had no {wanted} in time")
                values |= late
                break
        return [values[rank] for rank in sorted(values)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(1)
            return "error", RankFailed(f"rank {rank} died, with exit code {self._processes[rank].exitcode}")
        return kind, value


def run(
    network: Network,
    placement: int | Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = DEADLINE,
) -> list[Any]:
    """Calls `function(me, *args)` on the ranks and returns what each returned; the arguments are those of `Ranks`."""
    with Ranks(network, placement, function, *args, env=env, timeout=timeout) as ranks:
        return ranks.results()


def _main(
    namespace: str,
    rank: int,
    hosts: list[int],
    env: dict[str, str],
    pipe: connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    enter(namespace)
    mount_sysfs()
    me = Rank(rank, hosts, pipe)
    os.environ.update(
        env,
        RANK=str(rank),
        LOCAL_RANK=str(me.local_rank),
        LOCAL_WORLD_SIZE=str(hosts.count(me.host)),
        GROUP_RANK=str(me.host),
    )
    torch.set_num_threads(1)
    try:
        pipe.send(("result", function(me, *args)))
    except BaseException as error:
        pipe.send(("error", _portable(error)))


def _portable(error: BaseException) -> BaseException:
    """The exception, with its traceback as an attribute, if it can go to another process; else one that says it."""
    text = traceback.format_exc()
    with contextlib.suppress(Exception):
        error.traceback = text
        pickle.loads(pickle.dumps(error))
        return error
    return RankFailed(text)


def until_told(me: Rank, call: Callable[[int], object]) -> list[float]:
    """Makes calls until `Ranks.tell`, the same number on all ranks; returns the seconds that each took."""
    told, ends, took = threading.Event(), torch.zeros(1), list[float]()
    threading.Thread(target=lambda: (me.hear(), told.set()), daemon=True).start()
    while ends[0] == 0:
        start = time.monotonic()
        call(len(took))
        ends[0] = float(told.is_set())
        dist.all_reduce(ends)
        took.append(time.monotonic() - start)
    return took
