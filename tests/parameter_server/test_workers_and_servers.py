"""Workers and servers as real processes, on one host or on several: bits, membership, and what a killed one does.

test_several_hosts.py has what is different where they reach each other by TCP.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from bodies.parameter_server import APART, NEAR, SMALL, alone, join, on_any_hosts, placed, train
from distributed.harness import Rank, Ranks, on_ranks, run
from processes import Logged

import ringreduce.parameter_server as ps
from ringreduce.coordination import wait
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, ServerLost

# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.NAdam, {"lr": 0.01}),
        (torch.optim.Adadelta, {"lr": 0.5}),
        (torch.optim.Rprop, {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("size", (1, 3))
def test_sync_has_the_bits_of_one_process(kind: Any, arguments: dict[str, Any], size: int) -> None:
    average = size == 3
    wanted = alone(kind, arguments, size, average)
    for values in run(train, size, kind, arguments, average):
        for step, (value, expected) in enumerate(zip(values, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {step}"


# ---- the value that is its own history -------------------------------------------------------------------------------

PUSHES = 60


def history(me: Rank, mode: ps.Mode) -> list[list[float]]:
    """Worker w's i-th push adds 1 to element (w, i). Every pull is checked by its worker."""
    with join(me, block_bytes=1024) as kv:
        value = torch.zeros(me.size, PUSHES)
        kv.init("h", value, update=ps.reduce("sum"), mode=mode)
        before = value.clone()
        for i in range(PUSHES):
            push = torch.zeros(me.size, PUSHES)
            push[me.rank, i] = 1
            late = kv.push("h", push).wait()
            assert late == [] or mode.quorum
            versions = kv.pull("h", value)["h"]
            assert value.max() <= 1, "a push was applied twice"
            assert (value >= before).all(), "a push was lost"
            assert (value[me.rank].sum() == i + 1) or mode.quorum, "a pull misses the worker's own push"
            if mode.mode == "sync" and not mode.quorum:
                assert versions == [i + 1] * len(versions)
                assert (value.sum(1) == i + 1).all(), "a round has not one push of every worker"
            else:
                assert all((row[:-1] >= row[1:]).all() for row in value) or mode.quorum, "pushes are out of order"
            if mode.mode == "ssp":
                assert (value.sum(1) >= i - mode.staleness).all(), "the bound is broken"
                kv.clock()
            before = value.clone()
        kv.barrier()
        kv.pull("h", value)
        return value.tolist()


@pytest.mark.slow
@on_any_hosts
@pytest.mark.parametrize("mode", (ps.sync(), ps.asynchronous(), ps.ssp(0), ps.ssp(2)), ids=str)
def test_every_pull_shows_its_history(mode: ps.Mode, hosts: tuple[int, ...]) -> None:
    for final in run(placed, 3, hosts, history, mode):
        assert final == [[1.0] * PUSHES] * 3


# ---- membership ------------------------------------------------------------------------------------------------------


def quorum(me: Rank) -> tuple[list[str], list[str], float]:
    with join(me) as kv:
        w = torch.zeros(10)
        kv.init("w", w, update=ps.reduce("sum"), mode=ps.sync(quorum=2))
        kv.barrier()
        if me.rank == 2:
            me.meet("two have pushed")
            first = kv.push("w", torch.ones(10)).wait()
            kv.pull("w", w)
            kv.barrier()
        else:
            first = kv.push("w", torch.ones(10)).wait()
            me.meet("two have pushed")
            kv.barrier()
        second = kv.push("w", torch.ones(10)).wait()
        kv.barrier()
        kv.pull("w", w)
        return first, second, float(w[0])


def test_who_comes_after_a_quorum_is_told_and_goes_on_in_the_present_round() -> None:
    results = run(quorum, 3)
    assert [first for first, _, _ in results] == [[], [], ["w"]]
    assert sum(second == ["w"] for _, second, _ in results) <= 1  # again two are enough
    assert len({value for _, _, value in results}) == 1 and results[0][2] >= 4


@on_ranks(3, returns=[[]] * 3)
def test_a_push_of_another_group_is_combined_and_ends_no_round_for_a_member(me: Rank) -> list[str]:
    """Ranks 0 and 1 are the members; rank 2 is of another group."""
    if me.rank == 2:
        me.meet("made")
        with ps.join(me.store, role="worker", group="guests", timeout=30.0) as kv:
            pushed = kv.push("w", torch.full((10,), 100.0))
            kv.clock()  # after which the servers have the push
            me.meet("the guest has pushed")
            me.meet("one member is not enough")
            return pushed.wait()
    with ps.join(me.store, rank=me.rank, size=2, **SMALL) as kv:
        w = torch.zeros(10)
        kv.init("w", w, mode=ps.sync(quorum=2, average=False))
        kv.barrier()
        me.meet("made")
        me.meet("the guest has pushed")
        if me.rank == 0:
            pushed = kv.push("w", torch.ones(10))
            with pytest.raises(CollectiveTimeout, match="waits for worker 1 "):
                pushed.wait(timeout=0.3)
        me.meet("one member is not enough")
        if me.rank == 1:
            pushed = kv.push("w", torch.ones(10))
        late = pushed.wait()
        kv.pull("w", w)
        assert w[0] == 102
        return late


def with_late_worker(me: Rank) -> list[float]:
    if me.rank == 2:
        me.meet("founded")
        with ps.join(me.store, role="worker", timeout=30.0) as kv:
            w = torch.empty(2000)
            kv.pull("w", w)  # a key that it did not make
            kv.push_pull("w", torch.full((2000,), 100.0), out=w).wait()
            me.meet("all have pushed")
            assert kv.worker == 2 and kv.servers == 2
            return [float(w[0]), float(w[-1])]
    with ps.join(me.store, rank=me.rank, size=2, **SMALL) as kv:
        w = torch.zeros(2000)
        kv.init("w", w, update=ps.reduce("sum"), mode=ps.asynchronous())
        kv.push("w", torch.ones(2000)).wait()
        kv.barrier()
        me.meet("founded")
        me.meet("all have pushed")
        kv.pull("w", w)
        return [float(w[0]), float(w[-1])]


@on_any_hosts
def test_a_worker_may_come_later(hosts: tuple[int, ...]) -> None:
    assert run(placed, 3, hosts, with_late_worker) == [[102.0, 102.0]] * 3


def waits_in_vain(me: Rank) -> tuple[str, list[str], list[str]]:
    wait.WARN_AFTER = 0.4
    with join(me) as kv:
        w = torch.zeros(10)
        kv.init({"w": w}, update=ps.reduce("sum"))
        me.meet("made")
        said, late, logged = "", list[str](), Logged("ringreduce.parameter_server.client")

        def tell_when_logged() -> None:
            while not logged.messages:
                time.sleep(0.01)
            me.store.set("told", "")

        if me.rank == 0:
            pending = kv.push("w", torch.ones(10))
            with pytest.raises(CollectiveTimeout) as raised:
                pending.wait(timeout=0.3)
            said = str(raised.value)
            lets_go_on = threading.Thread(target=tell_when_logged)
            lets_go_on.start()
            late = pending.wait()  # it lives on
            lets_go_on.join()
        else:
            me.store.wait(["told"])
            kv.push("w", torch.ones(10)).wait()
        kv.pull("w", w)
        assert w[0] == 2
        return said, late, logged.messages


@on_any_hosts
def test_who_is_waited_for_is_logged_and_named_by_a_timeout_which_harms_nothing(hosts: tuple[int, ...]) -> None:
    (said, late, logged), _ = run(placed, 2, hosts, waits_in_vain)
    for text in said, logged[0]:
        assert "'w' on server 0 (" in text and "waits for worker 1 (" in text and "pid" in text
    assert late == [] and "; worker 0 has waited 0 s, and will wait " in logged[0]


def is_interrupted(me: Rank) -> None:
    """Rank 0's signal handler runs while rank 0 waits for a round: the rest of its push goes out, and rank 1 uses its
    server, before the handler ends. Rank 1 is stopped until then, so that little of the push has gone."""
    me.store.set(f"pid {me.rank}", str(os.getpid()))
    w, counted = torch.zeros(2 << 20), torch.zeros(3)
    with join(me, window=32 << 20, memory=64 << 20, block_bytes=1 << 20) as kv:
        kv.init("w", w)
        kv.init("counted", counted, update=ps.reduce("sum"), mode=ps.asynchronous())
        kv.barrier()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            kv.push_pull("w", torch.ones_like(w), out=w).wait()
            me.store.set("rank 1 has gone on", "")
            return
        other, handled = int(me.store.get("pid 1")), []

        def handler(*_: object) -> None:
            os.kill(other, signal.SIGCONT)
            handled.append(kv.stats()["servers"])
            kv.push_pull("counted", torch.ones(3), out=counted).wait()
            me.store.wait(["rank 1 has gone on"], timedelta(seconds=20))

        signal.signal(signal.SIGALRM, handler)
        while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        kv.push_pull("w", torch.ones_like(w), out=w).wait()
        assert w.eq(1).all() and counted.eq(1).all() and None not in handled[0].values()


@on_any_hosts
def test_a_signal_handler_keeps_nothing_from_the_others_and_may_use_the_servers(hosts: tuple[int, ...]) -> None:
    run(placed, 2, hosts, is_interrupted)


# ---- founding --------------------------------------------------------------------------------------------------------


def founds_again(me: Rank) -> tuple[str, float]:
    """The ranks first differ in block_bytes. Rank 1 has also tried alone before, so it has tried more often."""
    if me.rank == 1:
        with pytest.raises(CollectiveTimeout):
            join(me, timeout=0.5)
    me.meet("rank 1 has tried")
    with pytest.raises(InvalidArgument) as raised:
        join(me, block_bytes=4096 << me.rank)
    w = torch.zeros(10)
    with join(me) as kv:
        kv.init("w", w)
        kv.push_pull("w", torch.ones(10), out=w).wait()
    return str(raised.value), float(w[0])


def test_founders_that_differ_are_both_told_and_meet_when_they_try_again() -> None:
    for rank, (said, value) in enumerate(run(founds_again, 2)):
        its, other = 4096 << rank, 4096 << (1 - rank)
        assert re.match(f"block_bytes is {its} here and {other} on (another rank|rank [01]); give all the same", said)
        assert value == 1


@on_ranks(3)
def test_founders_meet_when_one_of_them_has_been_started_again(me: Rank) -> None:
    """Ranks 0 and 1 wait for rank 2, which comes as rank 1, as one does that was killed and started again."""
    if me.rank < 2:
        with pytest.raises(PeerLost, match="a second process has come as rank 1"):
            join(me)
    else:
        me.store.wait([f"ringreduce/parameter server/default/attempt 0/rank {rank}" for rank in range(2)])
    with ps.join(me.store, rank=2 * me.rank % 3, size=3, **SMALL) as kv:
        kv.barrier()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


def outlives_worker(me: Rank, mode: ps.Mode) -> float | None:
    """Ranks 0 and 1 are the servers; rank 2 is a worker alone, and is killed in the middle."""
    if me.rank == 2:
        me.meet("founded")
        kv = ps.join(me.store, role="worker", timeout=30.0)
        kv.pull("w", torch.empty(5000))
        me.meet("three workers")
        for _ in range(2):  # in sync, the first may be late for the round during which it came
            late = kv.push("w", torch.ones(5000)).wait()
        assert late == []
        me.report("has pushed")
        time.sleep(600)
    with ps.join(me.store, rank=me.rank, size=2, **SMALL) as kv:
        w = torch.zeros(5000)
        kv.init("w", w, update=ps.reduce("sum"), mode=mode)
        if mode.mode == "sync":
            kv.push("w", torch.ones(5000)).wait()  # the round during which the third comes is not its own
        kv.barrier()
        me.meet("founded")
        me.meet("three workers")
        if mode.mode == "sync":
            for _ in range(2):
                kv.push("w", torch.ones(5000)).wait()
        me.report("ready")
        for _ in range(5):
            kv.push("w", torch.ones(5000)).wait()
            kv.clock()
            kv.pull("w", w)
        kv.barrier()
        kv.pull("w", w)
        return float(w[0])


@on_any_hosts
@pytest.mark.parametrize("mode", (ps.sync(), ps.asynchronous(), ps.ssp(1)), ids=lambda mode: mode.mode)
def test_the_others_go_on_when_a_worker_is_killed(mode: ps.Mode, hosts: tuple[int, ...]) -> None:
    with Ranks(placed, 3, hosts, outlives_worker, mode) as ranks:
        assert ranks.reports()[:2] == ["ready", "ready"]
        ranks.signal(2, signal.SIGKILL)
        values = ranks.results(but=(2,))
    before = (2 + 2 + 3, 2 + 3 + 3) if mode.mode == "sync" else (2,)
    assert values[0] == values[1] and values[0] - 10 in before


def outlives_server(me: Rank) -> tuple[str, float]:
    kv = join(me, timeout=60.0)
    w = torch.zeros(5000)
    kv.init("w", w, update=ps.reduce("sum"))
    parts = kv.calls.keys["w"].parts
    assert {server for server, *_ in parts} == {0, 1}
    kv.push("w", torch.ones(5000)).wait()
    me.report("ready")
    if me.rank == 1:
        time.sleep(600)
    pending = kv.push("w", torch.ones(5000))  # waits for rank 1, as worker and as server
    with pytest.raises(ServerLost) as raised:
        pending.wait()
    ended = time.monotonic()
    with pytest.raises(ServerLost, match="server 1"):
        kv.pull("w", w)
    with pytest.raises(ServerLost, match="server 1"):
        kv.push("w", w)
    kv.leave()
    return str(raised.value), ended


@on_any_hosts
def test_a_killed_server_is_named_within_a_second_and_the_process_lives(hosts: tuple[int, ...]) -> None:
    with Ranks(placed, 2, hosts, outlives_server) as ranks:
        ranks.reports()
        time.sleep(0.2)
        killed = ranks.signal(1, signal.SIGKILL)
        ((said, ended),) = ranks.results(but=(1,))
    how = "has ended" if hosts == NEAR else "is lost to this worker: it closed the connection"
    assert said.startswith("server 1 (") and how in said
    assert ended - killed < 1.0


# ---- windows ---------------------------------------------------------------------------------------------------------


def full_window(me: Rank) -> tuple[str, float]:
    with join(me, window=64 << 10, block_bytes=16 << 10) as kv:
        w = torch.zeros(4096)  # a block of 16 KB: four fill the window
        kv.init("w", w, update=ps.reduce("sum"))
        kv.barrier()
        said = ""
        if me.rank == 0:
            pending = [kv.push("w", torch.ones(4096)) for _ in range(4)]
            with pytest.raises(CollectiveTimeout) as raised:
                kv.push("w", torch.ones(4096), timeout=0.2)
            said = str(raised.value)
            me.meet("full")
            kv.wait(*pending)
        else:
            me.meet("full")
            for _ in range(4):
                kv.push("w", torch.ones(4096)).wait()
        kv.pull("w", w)
        return said, float(w[0])


@pytest.mark.parametrize("hosts", [NEAR, (1, 0)], ids=["one host", "several hosts"])
def test_a_full_window_makes_pushes_wait(hosts: tuple[int, ...]) -> None:
    (said, value), (_, other) = run(placed, 2, hosts, full_window)
    assert "the window of 65536 bytes has had no room for 16384 in time" in said
    assert value == other == 8


def lends(me: Rank) -> float:
    with join(me) as kv:
        w = torch.zeros(100, 30)
        kv.init("w", w, update=ps.reduce("sum"))
        for _ in range(50):  # far more than the window holds, if what is lent were not given back
            g = kv.empty(100, 30)
            g.fill_(1)
            pending = kv.push("w", g)
            del g
            pending.wait()
        g = kv.empty(1000000)
        del g
        kv.pull("w", w)
        return float(w.min())


@on_any_hosts
def test_tensors_in_the_window_are_lent_and_given_back(hosts: tuple[int, ...]) -> None:
    assert run(placed, 2, hosts, lends) == [100.0, 100.0]


def test_weights_and_dictionaries() -> None:
    with ps.join(**SMALL) as kv:
        a, b = torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)
        kv.init({"a": a, "b": b}, mode=ps.sync(average=False))
        kv.push({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float64)}, weight=2.5, priority=3).wait()
        assert kv.pull({"a": a, "b": b}) == {"a": [1], "b": [1]}
        assert a.tolist() == [2.5] * 3 and b.tolist() == [[2.5] * 2] * 2
        transposed = torch.zeros(2, 2, dtype=torch.float64).t()
        kv.push("b", torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).t()).wait()
        kv.pull("b", transposed)
        assert transposed.tolist() == [[1, 3], [2, 4]]
        stats = kv.stats()
        assert stats["worker"] == 0 and stats["outstanding"] == 0
        assert [s["updates"] for s in stats["servers"].values()] == [3]


@on_ranks(2, returns=[0.75, 0.75])
def test_sync_averages_by_weight(me: Rank) -> float:
    with join(me) as kv:
        w = torch.zeros(10)
        kv.init("w", w)
        kv.push_pull("w", torch.full((10,), float(me.rank)), out=w, weight=1.0 + 2 * me.rank).wait()
        return float(w[0])


# ---- ends without death ----------------------------------------------------------------------------------------------


def closes(me: Rank) -> str:
    """Rank 1 leaves its `with` block by an error, and its process goes on."""
    said = ""
    try:
        with join(me) as kv:
            w = torch.zeros(5000)
            kv.init("w", w, update=ps.reduce("sum"))
            kv.push("w", w).wait()
            me.meet("one round")
            if me.rank == 1:
                raise KeyError("some error of the program's")
            with pytest.raises(ServerLost) as raised:
                while True:  # rounds end without rank 1, until its server has ended too
                    kv.push("w", w).wait()
            said = str(raised.value)
            me.meet("said")
    except KeyError:
        me.meet("said")
    return said


@pytest.mark.parametrize(("hosts", "ended"), [(NEAR, "has ended"), (APART, "is lost to this worker: it has left")])
def test_a_worker_that_ends_by_an_error_ends_its_server_for_the_others_too(hosts: tuple[int, ...], ended: str) -> None:
    said, _ = run(placed, 2, hosts, closes)
    assert said.startswith("server 1 (") and ended in said


def worker_closes(me: Rank, forks: bool = False) -> float:
    """A worker without a server does; the round of the others ends without it."""
    if me.rank == 2:
        me.meet("founded")
        kv = ps.join(me.store, role="worker", timeout=30.0)
        me.meet("three workers")
        kv.pull("w", torch.empty(10))  # which says what round it is
        for _ in range(2):  # the first may be late: others need not wait for it in the round during which it came
            kv.push("w", torch.ones(10)).wait()
        child = os.fork() if forks else 0
        if forks and child == 0:  # as a DataLoader's worker has copies of all that its parent has
            time.sleep(120)
            os._exit(0)
        kv.calls.close()
        me.meet("done")
        if forks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return 0.0
    with ps.join(me.store, rank=me.rank, size=2, **SMALL) as kv:
        w = torch.zeros(10)
        kv.init("w", w, update=ps.reduce("sum"))
        kv.push("w", torch.ones(10)).wait()
        kv.barrier()
        me.meet("founded")
        me.meet("three workers")
        for _ in range(5):
            kv.push("w", torch.ones(10)).wait()
        kv.pull("w", w)
        me.meet("done")
        return float(w[0])


@pytest.mark.parametrize(("hosts", "forks"), [(NEAR, False), (NEAR, True), (APART, False)])
def test_a_worker_that_closes_in_a_living_process_is_not_waited_for(hosts: tuple[int, ...], forks: bool) -> None:
    values = run(placed, 3, hosts, worker_closes, forks)
    assert values[0] == values[1] in (2 + 10 + 1, 2 + 10 + 2)
