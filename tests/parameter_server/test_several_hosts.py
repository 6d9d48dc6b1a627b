"""What is different where workers and servers reach each other by TCP, placed on several hosts by RINGREDUCE_HOST_ID.

test_workers_and_servers.py has what is the same on one host. tests/net has real networks.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from bodies.parameter_server import APART, SMALL, alone, join, placed, train
from distributed.harness import Rank, Ranks, on_ranks, run

import ringreduce.parameter_server as ps
from ringreduce.errors import CollectiveTimeout, SystemFailure, TopologyError
from ringreduce.parameter_server.client.pending import Pulls


@pytest.mark.parametrize("hosts", [APART, (0, 0, 1)], ids=str)
@pytest.mark.parametrize(
    ("kind", "arguments"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.NAdam, {"lr": 0.01})]
)
def test_the_bits_are_those_of_one_process(hosts: tuple[int, ...], kind: Any, arguments: dict[str, Any]) -> None:
    wanted = alone(kind, arguments, 3, True)
    for values in run(placed, 3, hosts, train, kind, arguments, True):
        for step, (value, expected) in enumerate(zip(values, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {step}"


@on_ranks(2, returns=[[True, False], [False, True]], through=(placed, (0, 0)))
def test_tcp_takes_each_process_for_a_host_whatever_its_host_is_called(me: Rank) -> list[bool]:
    os.environ["RINGREDUCE_TRANSPORT"] = "tcp"
    with join(me) as kv:
        return [kv.calls.client.is_near(server) for server in range(2)]


@on_ranks(2, returns=[[2.0, 2.0]] * 2, through=(placed, APART))
def test_a_pull_that_was_given_up_writes_nothing(me: Rank) -> list[float]:
    """A pull whose time is over writes nothing any more."""
    with join(me) as kv:
        w, out = torch.zeros(5000), torch.full((5000,), -1.0)
        kv.init("w", w, update=ps.reduce("sum"))
        if me.rank == 0:
            pending = kv.push_pull("w", torch.ones(5000), out=out)
            with pytest.raises(CollectiveTimeout):
                pending.wait(timeout=0.2)
            me.meet("late")
            kv.barrier()
            time.sleep(0.1)
            assert (out[2048:3072] == -1).all()  # a block of the other's server; nothing came after the error
            pending.wait()
        else:
            me.meet("late")
            kv.push("w", torch.ones(5000)).wait()
            kv.barrier()
            kv.pull("w", out)
        return [float(out.min()), float(out.max())]


def comes_from_elsewhere(me: Rank, listen: bool) -> str:
    """The founder is alone on its host; the other rank comes from another one."""
    if me.rank == 0:
        with ps.join(me.store, rank=0, size=1, listen=listen, **SMALL) as kv:
            kv.init("w", torch.ones(10))
            me.meet("founded")
            me.meet("done")
        return ""
    me.meet("founded")
    said = ""
    try:
        with ps.join(me.store, role="worker", timeout=30.0) as kv:  # with the founder's window of 4 MB
            w = torch.zeros(10)
            kv.pull("w", w)
            said = f"{w.sum():g}"
            with pytest.raises(SystemFailure, match="are left of the window's 4194304"):
                kv.empty(1 << 22)
    except TopologyError as error:
        said = str(error)
    me.meet("done")
    return said


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        (False, "is on another host than this worker and listens to none: found it with join(listen=True)"),
        (True, "10"),
    ],
)
def test_who_comes_from_elsewhere_is_let_in_where_servers_listen(listen: bool, said: str) -> None:
    assert said in run(placed, 2, APART, comes_from_elsewhere, listen)[1]


def test_a_secret_file_counts(tmp_path: Any) -> None:
    """The one who has another cannot join; those of the store alone would let it in."""
    for rank, content in enumerate(("a" * 32, "b" * 32)):
        (tmp_path / str(rank)).write_text(content)
        (tmp_path / str(rank)).chmod(0o600)
    said = run(placed, 2, APART, joins_with, str(tmp_path))
    assert all("secret" in each for each in said)


def joins_with(me: Rank, folder: str) -> str:
    os.environ["RINGREDUCE_SECRET_FILE"] = f"{folder}/{me.rank}"
    with pytest.raises(SystemFailure) as raised:
        join(me, timeout=10.0)
    return str(raised.value)


LARGE = 4 << 20
"""Elements: 16 MB, of which a worker that has stopped has asked for eight."""


def reads_slowly(me: Rank) -> float:
    sizes: dict[str, Any] = {"window": 16 << 20, "memory": 100 << 20, "block_bytes": 1 << 20, "timeout": 60.0}
    if me.rank == 0:
        with ps.join(me.store, rank=0, size=1, listen=True, **sizes) as kv:
            kv.init("w", torch.ones(LARGE), mode=ps.asynchronous())
            kv.push("w", torch.full((LARGE,), 2.0)).wait()  # both buffers are touched
            before = resident()
            me.meet("founded")
            me.report("ready")
            grown = []
            while me.store.add("goes on", 0) == 0:
                grown.append(resident() - before)
                time.sleep(0.01)
            return max(grown)
    me.meet("founded")
    with ps.join(me.store, role="worker", **sizes) as kv:
        outs = [torch.zeros(LARGE) for _ in range(8)]
        deadline = time.monotonic() + 60
        pulls = [Pulls(kv.calls, {"w": out}, deadline) for out in outs]
        me.report("ready")
        os.kill(os.getpid(), signal.SIGSTOP)
        for pull in pulls:
            pull.wait(deadline)
        me.store.add("goes on", 1)
        return float(min(out.min() for out in outs))


def resident() -> float:
    """Megabytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_a_worker_that_reads_nothing_costs_its_server_little_memory() -> None:
    with Ranks(placed, 2, APART, reads_slowly) as ranks:
        ranks.reports()
        time.sleep(1.5)
        ranks.signal(1, signal.SIGCONT)
        grown, least = ranks.results()
    assert least == 2 and grown < 32  # 8 MB are copied at a time; 128 were asked for
