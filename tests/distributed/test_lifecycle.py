"""Groups in several threads, works that nobody waits for, forked children, and groups that come and go by the thousand.

Every wait of a child is bounded by an alarm, so that one that hangs is a failure that says so.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import COLLECTIVES, SMALL_SLOTS, all_reduce, same, total, values
from bodies.lifecycle import in_child, leave_a_child_behind, outlived_by_a_child
from distributed.harness import Rank, Ranks, in_threads, on_ranks, run

import ringreduce
import ringreduce.groups.make
from ringreduce import _C
from ringreduce.errors import Aborted, PeerLost, RingReduceError
from ringreduce.groups.lookup import backend_of

# threads


@on_ranks(3)
def test_groups_are_used_from_several_threads_at_once(me: Rank) -> None:
    kinds = [f for name, f in COLLECTIVES.items() if name not in ("barrier", "send_and_recv", "recv_from_any")]

    with me.join(options=SMALL_SLOTS):
        groups = [dist.new_group(pg_options=SMALL_SLOTS) for _ in range(4)]

        def work(thread: int) -> None:
            group, order = groups[thread], random.Random(thread)
            after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
            for call in range(60):
                count = order.choice((1, 100, 3001, 20_000))
                tensor = values(me.rank, count, call + thread)
                pending = dist.all_reduce(tensor, group=group, async_op=True)
                inbox = torch.full((count,), -1.0)
                messages = [
                    dist.isend(values(me.rank, count, call), after, group, tag=call),
                    dist.irecv(inbox, before, group, tag=call),
                ]
                output = torch.full((me.size * count,), -1.0)
                dist.all_gather_into_tensor(output, values(me.rank, count, call - thread), group)
                same(output, torch.cat([values(rank, count, call - thread) for rank in range(me.size)]))
                for message in messages:
                    message.wait()
                same(inbox, values(before, count, call))
                pending.wait()
                same(tensor, total(me.size, count, call + thread))

        def work_in_the_default_group() -> None:
            for call in range(60):
                kinds[call % len(kinds)](me, 1 + call * 37, call)

        in_threads([*(lambda thread=thread: work(thread) for thread in range(4)), work_in_the_default_group])


@on_ranks(3)
def test_messages_of_one_group_from_several_threads(me: Rank) -> None:
    """Messages may be in any order, so threads need not agree."""
    with me.join(options=SMALL_SLOTS):

        def exchange(thread: int) -> None:
            for call in range(50):
                tag, count = thread * 1000 + call, 1 + (call * 997) % 9000
                sends = [dist.isend(values(me.rank, count, tag), peer, tag=tag) for peer in peers]
                for peer in reversed(peers):
                    tensor = torch.full((count,), -1.0)
                    dist.recv(tensor, peer, tag=tag)
                    same(tensor, values(peer, count, tag))
                for work in sends:
                    work.wait()

        peers = [rank for rank in range(me.size) if rank != me.rank]
        in_threads([lambda thread=thread: exchange(thread) for thread in range(4)])


# works


@on_ranks(3)
def test_hundreds_of_works_in_flight_are_waited_for_in_any_order(me: Rank) -> None:
    with me.join(options=SMALL_SLOTS):
        other = dist.new_group()
        tensors = [values(me.rank, 1 + call % 700, call) for call in range(800)]
        works = [
            dist.all_reduce(t, group=other if call % 3 == 0 else None, async_op=True) for call, t in enumerate(tensors)
        ]
        order = list(enumerate(works))
        random.Random(me.rank).shuffle(order)
        for call, work in order:
            work.wait()
            same(tensors[call], total(me.size, 1 + call % 700, call))


@on_ranks(2)
def test_works_may_be_dropped(me: Rank) -> None:
    with me.join(options=SMALL_SLOTS):
        after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        tensors = [values(me.rank, 500, call) for call in range(200)]
        inbox = [torch.full((500,), -1.0) for _ in range(100)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        for call, tensor in enumerate(inbox):
            dist.irecv(tensor, before, tag=call)
        for call in range(100):
            dist.isend(values(me.rank, 500, call), after, tag=call)
        gc.collect()
        all_reduce(me, 10, 0)  # after all calls before it
        for call, tensor in enumerate(tensors):
            same(tensor, total(me.size, 500, call))
        # Messages with one tag keep their order: when the last has come, all have.
        dist.isend(torch.ones(1), after, tag=1000)
        dist.recv(torch.zeros(1), before, tag=1000)
        for call, tensor in enumerate(inbox):
            while tensor[-1] == -1:
                time.sleep(0.001)
            same(tensor, values(before, 500, call))
        dist.barrier()


@on_ranks(2)
def test_tensors_of_a_call_under_way_may_be_deleted(me: Rank) -> None:
    count = 50_000

    def overwrite() -> list[torch.Tensor]:
        """Takes the memory that was freed, if it was."""
        return [torch.full((count,), -9.0) for _ in range(6)]

    with me.join(options=SMALL_SLOTS):
        after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        for call in range(20):
            outputs = [torch.full((me.size * count,), -1.0) for _ in range(3)]
            inputs = [values(me.rank, count, call + i) for i in range(3)]
            works = [dist.all_gather_into_tensor(o, i, async_op=True) for o, i in zip(outputs, inputs, strict=True)]
            dist.isend(inputs[0], after)
            array = values(me.rank, count, call).numpy()
            works.append(ringreduce.all_reduce(array, async_op=True))
            del inputs, array
            overwrite()
            inbox = torch.full((count,), -1.0)
            dist.recv(inbox, before)
            same(inbox, values(before, count, call))
            for work in works:
                work.wait()
            for i, output in enumerate(outputs):
                same(output, torch.cat([values(rank, count, call + i) for rank in range(me.size)]))
        dist.barrier()  # nobody has waited for the last message


@on_ranks(3)
def test_a_group_is_destroyed_with_work_in_flight_while_another_works(me: Rank) -> None:
    """Rank 1 makes no calls, so that those of the others cannot end."""
    with me.join():
        doomed = [dist.new_group() for _ in range(3)]
        ended = threading.Semaphore(0)
        works = []
        for group in doomed:
            if me.rank == 1:
                break
            works += [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(20)]
            works += [dist.irecv(torch.ones(10), 1, group, tag) for tag in range(20)]
        me.meet("all have begun")
        for work in works:
            work.get_future().add_done_callback(lambda future: ended.release())
        for group in doomed:
            dist.destroy_process_group(group)
        for work in works:
            with pytest.raises(RingReduceError) as raised:
                work.wait()
            assert raised.type in (Aborted, PeerLost), raised.value
        for _ in works:
            assert ended.acquire(timeout=20), "a callback was not called"
        del doomed
        all_reduce(me, 1000, 0)


# forks


USES: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "async": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "direct": lambda: ringreduce.all_reduce(torch.ones(4)),
    "barrier": dist.barrier,
    "send": lambda: dist.send(torch.ones(4), (dist.get_rank() + 1) % 2),
    "recv": lambda: dist.recv(torch.ones(4), (dist.get_rank() + 1) % 2),
    "recv from any": lambda: dist.recv(torch.ones(4)),
    "fail": lambda: backend_of(None).fail("the child has no memory"),
}


def _bases(text: str) -> list[str]:
    """The classes of the error that a child reported."""
    kind = getattr(ringreduce.errors, text.partition(":")[0], object)
    return [base.__name__ for base in kind.__mro__]


@pytest.mark.parametrize("busy", (False, True), ids=("idle", "busy"))
@pytest.mark.parametrize("name", USES)
@on_ranks(2)
def test_a_forked_child_that_uses_its_parents_group_is_told(me: Rank, name: str, busy: bool) -> None:
    with me.join():
        all_reduce(me, 1000, 0)
        works = []
        if busy:  # the threads of the group are there, and hold locks now and then
            works = [dist.all_reduce(torch.ones(30_000), async_op=True) for _ in range(50)]
            works += [dist.isend(torch.ones(10), 1 - me.rank, tag=tag) for tag in range(20)]
        ends = [in_child(USES[name]) for _ in range(3)]
        for tag in range(20 if busy else 0):
            dist.recv(torch.ones(10), 1 - me.rank, tag=tag)
        for call in range(20):
            all_reduce(me, 5000, call)
        for end in ends:
            text = end()
            assert "fork" in text and "RingReduceError" in _bases(text), text
        for work in works:
            work.wait()
        all_reduce(me, 1000, 3)


def waits_in_kernel(task: Path) -> str:
    """Where in the kernel a thread waits."""
    try:
        return (task / "wchan").read_text()
    except OSError:
        return ""


@on_ranks(1)
def test_a_fork_while_a_call_ends(me: Rank) -> None:
    """Standard error takes no more, so the thread that ends the call stays where it prints the call's line."""
    with me.join(options=ringreduce.Options(debug=2)):
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        sys.stderr.flush()
        usual, (reader, writer) = os.dup(2), os.pipe()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1))
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        try:
            work = dist.all_reduce(torch.ones(10), async_op=True)
            while not any("pipe_write" in waits_in_kernel(task) for task in Path("/proc/self/task").iterdir()):
                time.sleep(0.01)
            end = in_child(work.wait)  # type: ignore[union-attr]
            text = end()
        finally:
            os.dup2(usual, 2)  # and the thread finds a reader gone, or room
            os.set_blocking(reader, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.read(reader, 65536)
            work.wait()  # type: ignore[union-attr]
            for fd in (usual, reader, writer):
                os.close(fd)
        assert "fork" in text and "RingReduceError" in _bases(text), text


@on_ranks(2)
def test_a_forked_child_makes_a_group_of_its_own(me: Rank, tmp_path: Path) -> None:
    def child() -> float:
        dist.destroy_process_group()
        store = dist.FileStore(f"{tmp_path}/store", me.size)
        dist.init_process_group("ringreduce", store=store, rank=me.rank, world_size=me.size)
        tensor = torch.full((10_000,), 1.0 + me.rank)
        for _ in range(20):
            dist.all_reduce(tensor.fill_(1.0 + me.rank))
        dist.all_reduce(tensor, async_op=True).wait()
        dist.destroy_process_group()
        return float(tensor.sum())

    with me.join():
        works = [dist.all_reduce(torch.ones(30_000), async_op=True) for _ in range(10)]
        end = in_child(child)
        for call in range(50):
            all_reduce(me, 5000, call)
        assert end() == str(float(me.size * 3 * 10_000))
        all_reduce(me, 5000, 1)  # the child, which is gone, took nothing with it
        for work in works:
            work.wait()


def test_a_rank_is_dead_though_a_child_of_it_lives() -> None:
    with Ranks(leave_a_child_behind, 3) as ranks:
        outlived_by_a_child(ranks)


@on_ranks(3)
def test_a_multiprocessing_child_that_ends_has_left(me: Rank) -> None:
    """The process ends as a multiprocessing child does, with the group still there: it has left, and is not dead."""
    dist.init_process_group(
        "ringreduce",
        store=dist.PrefixStore("x", me.store),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=20),
    )
    dist.barrier()
    if me.rank == 1:
        return
    other = 2 - me.rank
    for tag in range(20):  # messages between the others go on
        time.sleep(0.05)
        tensor = torch.full((10,), float(me.rank))
        calls = [dist.send, dist.recv] if me.rank == 0 else [dist.recv, dist.send]
        received = torch.zeros(10)
        for call in calls:
            call(tensor if call is dist.send else received, other, tag=tag)
        assert received.eq(other).all()
    with pytest.raises(PeerLost, match="left the group") as raised:
        dist.all_reduce(torch.ones(10))
    assert raised.value.culprit == 1


@on_ranks(1)
def test_ctrl_c_while_a_group_is_destroyed(me: Rank) -> None:
    """What Python raises while a group's last reference goes cannot be raised there."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    size = _C.Geometry(ranks=2, channels=1, depth=8, slot_bytes=4096, mailbox_depth=4, mailbox_slot_bytes=4096)
    memfd = os.memfd_create("test")
    os.ftruncate(memfd, size.segment_bytes())
    group = _C.ProcessGroupRing(
        memfd=memfd,
        geometry=size,
        rank=0,
        pidfds=[-1, -1],
        names=[("here", 1, -1), ("there", 2, -1)],
        memory=None,
        memory_threads=[],
        elsewhere=[False, True],
        connect=lambda peer, timeout: None,
        disconnect=interrupted,
        settings=_C.Settings(
            slices=1,
            least_slice_bytes=64,
            most_slice_bytes=4096,
            timeout=10.0,
            name="interrupted",
            global_ranks=[0, 1],
            recorded_calls=0,
            dump_when_broken=False,
            print_calls=False,
            regroup=lambda *_: None,
            join_gpus=lambda *_: None,
            topology="",
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        del group
        for _ in range(2000):  # the signal is delivered between two lines of Python, not within a sleep
            time.sleep(0.01)


SCRIPT = """
    import os, sys, torch, torch.distributed as dist, ringreduce
    path, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("ringreduce", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1000), async_op=True).wait()
    pid = os.fork()
    if pid:  # the child goes on to the end, as any interpreter does
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((1000,), 2.0))
        dist.destroy_process_group()
"""


def test_a_forked_child_ends_as_any_process_does(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(r)], stderr=subprocess.PIPE, text=True, start_new_session=True)
        for r in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=60)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()


# what groups leave behind

KB = 1024
FIRST = 100  # groups, after which nothing may grow


def held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split()[0].split("-") for line in maps if "memfd:ringreduce" in line]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(maps),
        "shared KB": sum(int(end, 16) - int(start, 16) for start, end in shared) // KB,
        "resident KB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // KB,
    }


def use(me: Rank, call: int, group: dist.ProcessGroup | None) -> Any:
    """Starts every thread of a group; every tenth time returns works that cannot end."""
    tensor = values(me.rank, 100, call)
    dist.all_reduce(tensor, group=group)
    same(tensor, total(me.size, 100, call))
    dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    received = torch.zeros(100)
    dist.irecv(received, 1 - me.rank, group)
    dist.send(tensor, 1 - me.rank, group)
    dist.barrier(group)
    works: list[Any] = []
    if call % 10 == 0:
        with contextlib.suppress(PeerLost):  # a peer that was faster may have left the group by now
            works.append(dist.irecv(torch.zeros(10), 1 - me.rank, group, tag=7))
            works.append(dist.isend(tensor, 1 - me.rank, group, tag=8))
    return works


def subgroups(me: Rank, count: int) -> Iterator[None]:
    with me.join():
        for call in range(count):
            group = dist.new_group()
            works = use(me, call, group)
            dist.destroy_process_group(group)
            del group, works
            yield


def default_groups(me: Rank, count: int) -> Iterator[None]:
    for call in range(count):
        with me.join(f"life {call}"):
            works = use(me, call, None)
        del works
        yield


def growth(me: Rank, groups: Callable[[Rank, int], Iterator[None]], count: int) -> dict[str, int]:
    looks = [FIRST + (count - FIRST) * quarter // 4 for quarter in range(5)]
    at = [held() for number, _ in enumerate(groups(me, count), start=1) if number in looks]
    grown = {what: at[-1][what] - at[0][what] for what in at[0]}
    # What leaks grows in every quarter. A heap that threads on a busy machine needed for once grows in some.
    resident = [state["resident KB"] for state in at]
    return grown | {"resident KB": 4 * min(after - before for before, after in pairwise(resident))}


@pytest.mark.slow
@pytest.mark.parametrize("groups", (subgroups, default_groups))
def test_a_thousand_groups_leave_nothing_behind(groups: Callable[[Rank, int], Iterator[None]]) -> None:
    for grown in run(growth, 2, groups, 1000):
        assert grown.pop("resident KB") < KB, grown
        assert grown.pop("mappings") < 10, grown  # torch keeps a closure per default group: now and then a heap
        assert not any(grown.values()), grown


def join_on_a_build_for_cuda(me: Rank) -> str | None:
    """As in a torch that is built for CUDA, on a machine without a GPU."""

    def poisoned() -> bool:
        raise AssertionError("after this a forked child cannot use CUDA")

    os.environ.pop("DDP_DISABLE_COMM_MEM", None)
    torch.version.cuda = "13.0"
    torch.cuda.is_available = poisoned
    with me.join():
        return os.environ.get("DDP_DISABLE_COMM_MEM")


def test_making_a_group_does_not_ask_for_gpus() -> None:
    expected = None if any(map(os.path.exists, ringreduce.groups.make.GPU_DEVICES)) else "0"
    assert run(join_on_a_build_for_cuda, 2) == [expected] * 2
