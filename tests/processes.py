"""The processes that tests have for ranks: what distributed/harness.py (one host) and net/ranks.py (several) share.

Ranks are forked from a server that has torch imported, so one starts in milliseconds and still has a process of its own
to be killed or stopped in. No process outlives its `Processes`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]

DEADLINE = 60.0
"""Seconds for all ranks, however they hang, where a hand-over between them takes no longer than HAND_OVER_US."""

MOST = 170.0
"""Seconds that `deadline` gives at most: pytest ends a test after 180."""

HAND_OVER_US = 200.0
"""What one process waits for another on the stand-in for a GPU, on two busy cores (bench/gpu/probe.py)."""

GROUP_TIMEOUT = 30.0
"""Seconds for a call of a group, unless a test says otherwise."""


# torch.cuda.is_available() then asks NVML, not CUDA, which a process that forks others must not initialise.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 for servers that start soon.

    They lie below those that the kernel gives to connections, one of which could take a port before its server does.
    pytest's processes have ports of their own, since the one could give away what the other has just found free.
    """
    share = (32_768 - 20_000) // 8
    first = 20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8 * share
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            with contextlib.suppress(OSError):  # that port is in use
                port = first + random.randrange(share)
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


def until(holds: Callable[[], object], what: str = "it", seconds: float = 60.0) -> None:
    """Returns when `holds()` is true; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Of this process: `resource.RLIMIT_NOFILE`, say."""
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


@contextlib.contextmanager
def no_descriptors(most: int) -> Iterator[None]:
    """All of `most` descriptors are taken."""
    with contextlib.ExitStack() as taken, limited(resource.RLIMIT_NOFILE, most):
        with contextlib.suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(0))
        yield


def no_memory(more: int) -> contextlib.AbstractContextManager[None]:
    """There is address space for so many bytes more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limited(resource.RLIMIT_AS, used + more)


class Logged(logging.Handler):
    """What this process logs from here on."""

    def __init__(self, logger: str = "ringreduce", level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.messages: list[str] = []
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@functools.cache
def deadline() -> float:
    """DEADLINE; longer where processes share a GPU that takes long to go from one to another."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return DEADLINE
    measured = os.environ.get("RINGREDUCE_TEST_HAND_OVER_US") or _hand_over_us()
    return min(MOST, DEADLINE * max(1.0, float(measured) / HAND_OVER_US))


def _hand_over_us() -> float:
    """As bench/gpu/probe.py measures it now."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "probe.json")
        command = [sys.executable, "-m", "bench.gpu.probe", "--only", "by streams", "--json", str(found)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=MOST, stdout=subprocess.DEVNULL)
        return slowest_hand_over(found)


def slowest_hand_over(report: Path) -> float:
    """Microseconds, of those by streams that a report of bench/gpu/probe.py has."""
    rows = json.loads(report.read_text())["rows"] if report.exists() else []
    return max(
        (row["handover_us"] for row in rows if "by streams" in row["question"] and "handover_us" in row), default=0.0
    )


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
        call_timeout: float | None = None,
    ) -> Iterator[None]:
        """The default group is this one: `members`, or all. Groups of other names know nothing of each other.

        `timeout`: for making it, which a process that starts late would exceed if it were short, and for calls.
        `call_timeout`: for calls, if it is another one.
        """
        members = list(range(self.size)) if members is None else members
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, self.store),
            rank=members.index(self.rank),
            world_size=len(members),
            timeout=timedelta(seconds=timeout),
            pg_options=options,
        )
        if call_timeout and dist.group.WORLD:
            dist.group.WORLD.set_timeout(timedelta(seconds=call_timeout))
        try:
            yield
        finally:
            dist.destroy_process_group()

    def meet(self, name: str) -> None:
        """Returns when all ranks are here; needs no group."""
        self.store.add(name, 1)
        while self.store.add(name, 0) < self.size:
            time.sleep(0.0005 * self.size)

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
        ours, theirs = forking_context().Pipe()
        process = forking_context().Process(target=main, args=(*args, theirs, *tail))
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(deadline())
        for pipe in self._pipes:
            pipe.close()

    def pid(self, rank: int) -> int:
        pid: int = self._processes[rank].pid
        return pid

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Returns when that was, by the clock all processes share."""
        now = time.monotonic()
        os.kill(self.pid(rank), number)
        return now


@functools.cache
def forking_context() -> Any:
    """Its processes are forked by a server that has imported what they need. This starts the server."""
    context = multiprocessing.get_context("forkserver")
    # What ranks import sooner or later; torch.testing imports distributed.tensor, which takes 1.3 s. What is not
    # installed is passed over.
    slow = ["torch", "torch.distributed.tensor", "torch._dynamo", "hypothesis", "pytest", "psutil", "rich.console"]
    groups = ["api", "groups.make", "groups.between_hosts", "plan.by_cost", "tuning", "operators"]
    ours = [f"ringreduce.{each}" for each in (*groups, "parameter_server", "data", "elastic")]
    tests = ["distributed.harness", "fork_server"]
    context.set_forkserver_preload([*slow, *ours, *tests])
    folder = str(ROOT / "tests")  # which the server's Python must find, and before 3.13 is not told
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])):
        forkserver.ensure_running()
    return context
