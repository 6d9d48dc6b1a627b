"""Ranks that die, leave, or call something else, and what the others must then raise."""

from __future__ import annotations

import inspect
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank
from processes import no_memory

import ringreduce
from ringreduce.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
)
from ringreduce.groups.choices import Choices

MB16 = 4 * 1024 * 1024  # float32 elements
NOTICED = 1.0  # seconds in which all ranks must know of a death or a mismatch


def joins(me: Rank) -> None:
    with me.join():
        pass


def leftovers() -> dict[str, list[str]]:
    shared = [*Path("/dev/shm").iterdir(), *Path("/tmp").glob("*ringreduce*")]  # others use /tmp too
    # Names of multiprocessing, of any program, and of another's `ringreduce bench`.
    shared = [path for path in shared if not path.name.startswith(("sem.mp-", "ringreduce-bench-"))]
    us = psutil.Process()
    family = [us, *us.children(recursive=True)]
    descriptors = [fd for process in family for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {
        "files": sorted(map(str, shared)),
        "processes": sorted(str(process.pid) for process in family),
        "memory": [str(fd) for fd in descriptors if "memfd:ringreduce" in read_link(fd)],
    }


def read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # iterdir's own descriptor
        return ""


def error_of(call: Callable[[], Any]) -> tuple[type[RingReduceError], str, int, float]:
    """(class, message, culprit, when) of the error that `call` must raise."""
    with pytest.raises(RingReduceError) as raised:
        call()
    return raised.type, str(raised.value), raised.value.culprit, time.monotonic()


def regroup(me: Rank, members: list[int]) -> None:
    """A new group of the survivors works."""
    with me.join("afterwards", members):
        tensor = torch.full((1000,), float(me.rank))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((1000,), float(sum(members))))


def reduce_in_a_loop(me: Rank, seconds: float, timeout: float, survivors: list[int]) -> None:
    """With `survivors`, the loop must end with an error, which is reported, and they go on in a new group."""
    with me.join(timeout=timeout):
        tensor, ends = torch.zeros(MB16), torch.zeros(1)
        dist.barrier()
        me.report("in the loop")
        end = time.monotonic() + seconds

        def loop() -> None:
            while ends[0] == 0:
                dist.all_reduce(tensor)
                ends[0] = float(time.monotonic() > end)
                dist.all_reduce(ends)  # all ranks stop at the same turn

        if not survivors:
            loop()
            return
        error = error_of(loop)
        me.report(error)
        assert error_of(lambda: dist.all_reduce(tensor))[:3] == error[:3]  # again, and at once
    regroup(me, survivors)


def waits_while_all_are_stopped(me: Rank) -> list[float]:
    """Rank 0 waits for a message and in a call; rank 1 comes when somebody says so in the store."""
    with me.join(call_timeout=2.0):
        sum_, message = torch.ones(3), torch.zeros(3)
        if me.rank == 0:
            arriving = dist.irecv(message, 1)
        me.report("ready")
        if me.rank == 1:
            me.store.wait(["go on"])
        dist.all_reduce(sum_)
        if me.rank == 1:
            dist.send(sum_, 0)
        else:
            assert arriving is not None
            arriving.wait()
        return [*sum_.tolist(), *message.tolist()]


def recv_from_nobody(me: Rank) -> None:
    with me.join():
        me.report("here")
        if me.rank == 1:
            signal.pause()
        me.report(error_of(lambda: dist.recv(torch.zeros(10), 1)))
    regroup(me, [0, 2])


def stop_in_the_middle(me: Rank, stops: int, shared: bool) -> None:
    with me.join(call_timeout=1.5):
        whole = (ringreduce.empty if shared else torch.empty)(2 * MB16).fill_(me.rank)
        tensor = whole[5:-5]
        dist.barrier()
        if me.rank == stops:  # at a moment when it is most likely writing what the others lent it
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()

        def loop() -> None:
            while True:
                ringreduce.all_reduce(tensor, dist.ReduceOp.MAX)

        kind, *_ = error_of(loop)
        if me.rank != stops:
            assert kind is CollectiveTimeout
            whole.fill_(10.0 + me.rank)
            me.report("has its tensor back")
        me.meet("all calls have ended")
        assert me.rank == stops or whole.eq(10.0 + me.rank).all()


def gather_late(me: Rank, shared: bool) -> None:
    with me.join(call_timeout=1.5):
        mine = torch.full((MB16 // 8,), 1.0)  # from which rank 0 lends, or else
        gathered = (ringreduce.empty if shared else torch.empty)(me.size * mine.numel()).fill_(0.0)
        dist.barrier()
        if me.rank == 1:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()

        def loop() -> None:
            while True:
                ringreduce.all_gather_into_tensor(gathered, mine)
                assert gathered[:: mine.numel() // 16].eq(1.0).all()

        error_of(loop)
        if me.rank == 0:
            mine.fill_(2.0)
            gathered.fill_(2.0)
            me.report("wrote over what it had lent")


def wait_for_a_late_rank(me: Rank) -> float:
    """The share of a core that this rank used while it waited."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    with me.join():
        dist.barrier()
        if me.rank == 2:
            time.sleep(2.5)
        start, before = time.monotonic(), used()
        tensor = torch.full((1000,), float(me.rank))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((1000,), 3.0))
        waited = time.monotonic() - start
        assert waited > 2 or me.rank == 2
        return (used() - before) / 2.5


# What rank 1 calls, what the others call, and what the message must hold.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
    "collective": (
        lambda: dist.broadcast(torch.ones(100), 0),
        lambda: dist.all_reduce(torch.ones(100)),
        ("broadcast(count=100", "all_reduce(count=100"),
    ),
    "barrier": (dist.barrier, lambda: dist.all_reduce(torch.ones(100)), ("barrier()", "all_reduce(")),
    "size": (
        lambda: dist.all_reduce(torch.ones(101)),
        lambda: dist.all_reduce(torch.ones(100)),
        ("count=101", "count=100"),
    ),
    "size of another plan": (
        lambda: dist.all_reduce(torch.ones(MB16)),
        lambda: dist.all_reduce(torch.ones(100)),
        (f"count={MB16}", "count=100"),
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(100, dtype=torch.int32)),
        lambda: dist.all_reduce(torch.ones(100)),
        ("dtype=int32", "dtype=float32"),
    ),
    "operation": (
        lambda: dist.all_reduce(torch.ones(100), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(100)),
        ("op=max", "op=sum"),
    ),
    # A rank that got what it wanted from a root may go on; it knows by its next call.
    "root": (
        lambda: (dist.broadcast(torch.ones(100), 1), dist.barrier()),
        lambda: (dist.broadcast(torch.ones(100), 0), dist.barrier()),
        ("root=1", "root=0"),
    ),
    # A root need not wait for its receivers; it knows by its next call, too.
    "a root that goes on": (
        lambda: (dist.broadcast(torch.ones(100), 1), dist.barrier()),
        lambda: dist.all_reduce(torch.ones(100)),
        ("broadcast(count=100", "all_reduce(count=100"),
    ),
    "all_to_all": (
        lambda: dist.all_to_all_single(torch.ones(9), torch.ones(9)),
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)),
        ("all_to_all(count=3", "all_to_all(count=2"),
    ),
    "split sizes": (
        lambda: dist.all_to_all_single(torch.ones(9), torch.ones(9), [3, 3, 3], [3, 3, 3]),
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
        ("elements to rank", "which expects"),
    ),
    "no split sizes": (
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)),
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
        ("all_to_all(count=2", "all_to_all with split sizes"),
    ),
}


def call_something_else(me: Rank, late: float) -> dict[str, Any]:
    """By mismatch, each in a group of its own: the error, and when this rank began its call."""
    found = {}
    for what, (odd, usual, _) in MISMATCHES.items():
        starts = [time.monotonic()]

        def call(mine: Callable[[], Any] = odd if me.rank == 1 else usual, starts: list[float] = starts) -> None:
            dist.barrier()  # a rank that is slow to come out of it may hear there of what the others did next
            time.sleep(late if me.rank == 1 else 0)
            starts.append(time.monotonic())
            mine()

        with me.join(what):
            dist.all_reduce(torch.ones(10))
            found[what] = *error_of(call), starts[-1]
    regroup(me, list(range(me.size)))
    return found


def mismatches_are_known(outcomes: list[dict[str, Any]], noticed: float) -> None:
    """To all ranks at once, each with both calls."""
    for what, (_, _, words) in MISMATCHES.items():
        starts = [outcome[what][-1] for outcome in outcomes]
        for kind, message, _, when, _ in (outcome[what] for outcome in outcomes):
            assert kind is CollectiveMismatch, f"{what}: {message}"
            assert all(part in message for part in words), f"{what}: {message}"
            assert starts[1] <= when < max(starts) + noticed, what


def death_is_known(ranks: Any, victim: int, noticed: float) -> None:
    """Kills a rank while all are in a call: all others name it at once, and end well."""
    ranks.reports()
    time.sleep(0.3)
    killed = ranks.signal(victim, signal.SIGKILL)
    for kind, message, culprit, when in ranks.reports(but=(victim,)):
        assert (kind, culprit) == (PeerLost, victim), message
        assert f"rank {victim} ({socket.gethostname()}, pid {ranks.pid(victim)})" in message
        assert killed < when < killed + noticed
    ranks.results(but=(victim,))


def goes_on_late(ranks: Any) -> None:
    """Rank 1, which has stopped itself, when the others have given it up."""
    ranks.reports(but=(1,))
    ranks.signal(1, signal.SIGCONT)
    ranks.results()


def is_stopped_for_a_second(ranks: Any) -> None:
    """Rank 1."""
    ranks.reports()
    ranks.signal(1, signal.SIGSTOP)
    time.sleep(1)
    ranks.signal(1, signal.SIGCONT)
    ranks.results()


def abort_is_known(outcomes: list[Any], noticed: float) -> None:
    """Of `abort_while_waiting`."""
    for kind, message, _, when, start in outcomes:
        assert kind is Aborted and "rank 0 aborted the group" in message
        assert start + 0.4 < when < start + 0.5 + noticed


def leaving_out_is_known(outcomes: list[Any]) -> None:
    """Of `leave_out_a_call`."""
    for kind, message, *_ in outcomes:
        assert kind is CollectiveMismatch
        assert "count=13" in message and "count=14" in message


def leave_out_a_call(me: Rank) -> Any:
    with me.join():
        return error_of(lambda: [dist.all_reduce(torch.ones(n)) for n in range(10, 20) if (me.rank, n) != (1, 13)])


def recv_another_size(me: Rank) -> None:
    with me.join():
        if me.rank == 0:
            for tag in range(3):
                dist.send(torch.ones(10), 1, tag=tag)
        elif me.rank == 1:
            for tag, tensor in enumerate((torch.zeros(11), torch.zeros(10, dtype=torch.int32))):
                kind, message, *_ = error_of(lambda tensor=tensor, tag=tag: dist.recv(tensor, 0, tag=tag))
                assert kind is CollectiveMismatch and "40" in message
            tensor = torch.zeros(10)
            dist.recv(tensor, 0, tag=2)
            assert torch.equal(tensor, torch.ones(10))
        dist.all_reduce(torch.ones(10))


@contextmanager
def no_threads() -> Iterator[None]:
    """No thread can start: there is no room for its stack, and none is left of threads that have ended."""
    over = threading.Event()
    with no_memory(1 << 20):
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                while True:
                    threading.Thread(target=over.wait).start()
            yield
        finally:
            over.set()


def begin_without_threads(me: Rank) -> None:
    """Calls that rank 0 begins while no thread can start: each breaks its group, and the other rank hears why."""
    tensor = torch.ones(MB16)
    calls: list[Callable[[], Any]] = [
        lambda: dist.isend(tensor, 1),
        lambda: dist.irecv(tensor, 1),
        lambda: dist.all_reduce(tensor, async_op=True),
    ]
    for number, call in enumerate(calls):
        with me.join(str(number)):
            if me.rank == 0:
                with no_threads():
                    kind, message, *_ = error_of(call)
            else:
                kind, message, *_ = error_of(dist.barrier)
                assert "reported by rank 0" in message
            assert kind is SystemFailure and "cannot start a thread" in message
            me.meet(f"{number} has failed")


def reduce_without_memory(me: Rank) -> list[Any]:
    """Rank 1 has no memory for what it needs before, or between, the steps of a call."""
    values = torch.ones(8 * MB16)
    sparse = torch.sparse_coo_tensor(torch.arange(MB16)[None], torch.ones(MB16), (MB16,), check_invariants=True)
    rests = ringreduce.Feedback()
    cases: list[tuple[ringreduce.Options, Callable[[], Any]]] = [
        (ringreduce.Options(), lambda: dist.all_reduce(sparse)),
        (
            ringreduce.Options(transport="tcp"),
            lambda: ringreduce.all_reduce(values, wire_dtype="int8", feedback=rests),
        ),
        *((ringreduce.Options(transport=name), lambda: dist.reduce(values, 0)) for name in ("shared_memory", "gloo")),
    ]
    found, ask = [], Choices.ask

    def asked(choices: Choices, collective: str, *call: Any) -> Any:
        if me.rank == 1 and collective == "reduce":
            raise MemoryError("for a plan")
        return ask(choices, collective, *call)

    for number, (options, call) in enumerate(cases):
        with mock.patch.object(Choices, "ask", asked), me.join(str(number), options=options):
            ringreduce.all_reduce(values[:MB16].clone(), wire_dtype="float32")
            starts = time.monotonic()
            if me.rank == 0:
                kind, message, culprit, ends = error_of(call)
                found.append((kind, message, culprit, ends - starts))
            else:
                with no_memory(1 << 20), pytest.raises((MemoryError, RuntimeError)):
                    call()
                with pytest.raises(SystemFailure):
                    dist.barrier()
            me.meet(f"{number} has failed")  # a rank that leaves first would be what the other one hears of
    return found


def destroy_early(me: Rank) -> Any:
    with me.join():
        dist.barrier()
        me.meet("after the barrier")  # which may still be under way on others
        works = [] if me.rank == 1 else [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(10)]
        if me.rank == 1:
            time.sleep(0.5)
        start = time.monotonic()
    assert time.monotonic() - start < NOTICED
    for work in works:
        assert error_of(work.wait)[0] is Aborted
    regroup(me, list(range(me.size)))


def abort_while_waiting(me: Rank) -> Any:
    with me.join():
        dist.barrier()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        start = time.monotonic()
        if me.rank == 0:
            threading.Timer(0.5, backend.abort).start()
        error = error_of(lambda: dist.all_reduce(torch.ones(10)) if me.rank != 2 else dist.recv(torch.ones(10), 1))
        me.meet("all have their error")
    regroup(me, list(range(me.size)))
    return *error, start


THREE = torch.ones(3)
# The call, and what its message must hold, in a group of 3.
ARGUMENTS: list[tuple[Callable[..., Any], str]] = [
    (lambda **how: ringreduce.all_reduce(torch.ones(3, device="meta"), **how), "tensor is on meta; .*CPU"),
    (lambda **how: ringreduce.broadcast(THREE.to_sparse(), **how), "layout Sparse"),
    (
        lambda **how: ringreduce.all_reduce(torch.ones(3, dtype=torch.complex32), **how),
        "dtype complex32 can be moved, but not reduced",
    ),
    (lambda **how: ringreduce.broadcast(THREE, src=3, **how), "src is 3; it must be the global rank of a member"),
    (lambda **how: ringreduce.reduce(THREE, dst=-1, **how), "dst is -1; it must be the global rank of a member"),
    (lambda **how: ringreduce.gather(THREE, dst=3, **how), "dst is 3; it must be the global rank of a member"),
    (lambda **how: ringreduce.scatter(THREE, src=7, **how), "src is 7; it must be the global rank of a member"),
    (
        lambda **how: ringreduce.gather(THREE, [THREE], dst=dist.get_rank(), **how),
        "gather_list holds 1 .*one per rank: 3",
    ),
    (
        lambda **how: ringreduce.gather(THREE, [THREE] * 3, dst=(dist.get_rank() + 1) % 3, **how),
        "destination rank only",
    ),
    (
        lambda **how: ringreduce.scatter(THREE, [THREE], src=dist.get_rank(), **how),
        "scatter_list holds 1 .*one per rank: 3",
    ),
    (
        lambda **how: ringreduce.scatter(THREE, [torch.ones(4)] * 3, src=dist.get_rank(), **how),
        "has 4 elements, must have 3",
    ),
    (lambda **how: ringreduce.all_gather([THREE] * 2, THREE, **how), "tensor_list holds 2 .*one per rank: 3"),
    (
        lambda **how: ringreduce.all_gather([torch.ones(4) for _ in range(3)], THREE, **how),
        "has 4 elements, must have 3",
    ),
    (lambda **how: ringreduce.all_gather([THREE.double()] * 3, THREE, **how), "different dtypes"),
    (lambda **how: ringreduce.all_gather([torch.ones(3)] * 3, THREE, **how), "share memory"),
    (
        lambda **how: ringreduce.all_gather_into_tensor(torch.ones(10), THREE, **how),
        "10 elements, which do not divide evenly",
    ),
    (lambda **how: ringreduce.all_gather_into_tensor(torch.ones(12), THREE, **how), "has 4 elements, must have 3"),
    (lambda **how: ringreduce.reduce_scatter(THREE, [THREE] * 4, **how), "input_list holds 4 .*one per rank: 3"),
    (lambda **how: ringreduce.reduce_scatter(torch.ones(2), [THREE] * 3, **how), "output has 2 elements, must have 3"),
    (
        lambda **how: ringreduce.reduce_scatter_tensor(THREE, torch.ones(10), **how),
        "10 elements, which do not divide evenly",
    ),
    (
        lambda **how: ringreduce.reduce_scatter_tensor(THREE, torch.ones(12), **how),
        "output has 3 elements, must have 4",
    ),
    (
        lambda **how: ringreduce.all_to_all([THREE] * 2, [THREE] * 3, **how),
        "output_tensor_list holds 2 .*one per rank: 3",
    ),
    (
        lambda **how: ringreduce.all_to_all_single(torch.ones(4), torch.ones(4), **how),
        "4 elements, which do not divide evenly",
    ),
    (
        lambda **how: ringreduce.all_to_all_single(THREE, THREE, [1, 1, 2], [1, 1, 1], **how),
        "add up to the tensor's 3 rows",
    ),
    (
        lambda **how: ringreduce.all_to_all_single(THREE, THREE, [1, 1], [1, 1, 1], **how),
        "has 2 split sizes.* one per rank: 3",
    ),
    (lambda: ringreduce.send(THREE, dist.get_rank()), "must be another rank of the group, 0 to 2"),
    (lambda: ringreduce.recv(THREE, 3), "src is 3; it must be the global rank of a member"),
    (lambda: ringreduce.send(THREE, (dist.get_rank() + 1) % 3, tag=-1), "the tag is -1; it must be 0 or more"),
]


def wrong_arguments(me: Rank) -> None:
    with me.join():
        for call, pattern in ARGUMENTS:
            with pytest.raises(InvalidArgument, match=pattern):
                call()
            if call.__code__.co_flags & inspect.CO_VARKEYWORDS:  # at the call: nobody need wait for its end
                with pytest.raises(InvalidArgument, match=pattern):
                    call(async_op=True)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((10,), 3.0))
