"""The arena of a process: tensors that ranks read in place, in every group, after failures, and across forks."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, in_threads, on_ranks, run
from processes import Logged
from torch.utils.data import DataLoader, Dataset

import ringreduce
from ringreduce.errors import InvalidArgument, PeerLost, RingReduceError, SystemFailure

MB = 1024 * 1024
COPIED = ringreduce.Options(fetch=0)  # what is read in place is in the arena, then
MAPPING = re.compile(r"^(\w+)-(\w+) .*memfd:ringreduce-arena")


def mappings() -> list[range]:
    """Where this process has mapped arenas: its own, and those of the ranks that it is in a group with."""
    found = map(MAPPING.match, Path("/proc/self/maps").read_text().splitlines())
    return [range(int(m[1], 16), int(m[2], 16)) for m in found if m]


def shared(tensor: torch.Tensor) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in mappings())


def arena_memory() -> int:
    """Bytes that this process's arena takes."""
    links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and "ringreduce-arena" in os.readlink(fd)]
    assert len(links) == 1, links  # peers' arenas are mapped, and closed
    return os.stat(links[0]).st_blocks * 512


def lent(group: Any = None) -> int:
    name = (dist.group.WORLD if group is None else group).group_name
    return sum(call.lent for call in ringreduce.stats()[name].values())


def summed(tensor: torch.Tensor, group: Any = None) -> int:
    """All_reduces ones in place, checks the sums, and returns how many bytes peers have read in place."""
    before = lent(group)
    tensor.fill_(1)
    ringreduce.all_reduce(tensor, group=group)
    assert tensor.eq(dist.get_world_size(group)).all()
    return lent(group) - before


# groups


@on_ranks(4)
def test_all_groups_lend_a_tensor(me: Rank) -> None:
    early = ringreduce.empty(MB)  # before there is a group
    assert shared(early) and ringreduce.arena_stats().in_use == 4 * MB
    with me.join(options=COPIED):
        tensor = ringreduce.empty(MB)
        halves = [dist.new_group(ranks, pg_options=COPIED) for ranks in ([0, 1], [2, 3])]
        half = halves[me.rank // 2]
        for each in (early, tensor):
            assert summed(each) >= 3 * MB and summed(each, half) >= 2 * MB - 64
        assert len(mappings()) == me.size  # each arena once, however many groups there are
    with me.join("next", options=COPIED):
        assert summed(tensor) >= 3 * MB and len(mappings()) == me.size
    del halves, half
    assert len(mappings()) == 1 and tensor.eq(me.size).all()
    del early, tensor, each
    assert ringreduce.arena_stats().in_use == 0


def test_tensors_survive_the_failure_of_a_group() -> None:
    with Ranks(survivors_go_on, 3) as ranks:
        ranks.reports()
        time.sleep(0.2)  # until the others wait for rank 1 in a call
        ranks.signal(1, signal.SIGKILL)
        ranks.results(but=(1,))


def survivors_go_on(me: Rank) -> None:
    with me.join(options=COPIED):
        whole = ringreduce.empty(4 * MB).fill_(7)
        tensor, kept = whole[5 : 3 * MB - 5], ringreduce.empty(MB)
        assert summed(tensor) > 0
        me.report(None)
        if me.rank == 1:
            signal.pause()
        with pytest.raises(PeerLost):
            ringreduce.all_reduce(tensor, dist.ReduceOp.MAX)
        place = range(whole.data_ptr(), whole.data_ptr() + whole.nbytes)
    assert me.rank != 1 and whole[:5].eq(7).all() and whole[3 * MB - 5 :].eq(7).all()
    with me.join("survivors", [0, 2], options=COPIED):
        # The one that the call failed on is an ordinary tensor now; the others are what they were.
        for _ in range(2):
            assert summed(tensor) == 0 and summed(kept) > 0
        del tensor, whole
        assert ringreduce.arena_stats().lost == 16 * MB
        others = [ringreduce.empty(MB) for _ in range(16)]
        assert all(summed(each) > 0 for each in others)
        assert not any(other.data_ptr() in place for other in others)
        del others, kept
    assert ringreduce.arena_stats().in_use == 0
    assert arena_memory() == ringreduce.arena_stats().kept  # nothing of the lost one


def test_a_late_rank_of_a_failed_group_changes_nothing_in_the_next() -> None:
    with Ranks(stopped_in_one_group, 3) as ranks:
        ranks.reports(but=(1,))
        ranks.signal(1, signal.SIGCONT)
        ranks.results()


def stopped_in_one_group(me: Rank) -> None:
    with me.join(call_timeout=1.5):
        tensor = ringreduce.empty(8 * MB).fill_(me.rank)
        dist.barrier()
        if me.rank == 1:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with pytest.raises(RingReduceError):
            while True:
                ringreduce.all_reduce(tensor, dist.ReduceOp.MAX)
    if me.rank == 1:
        me.meet("it has gone on")
        return
    with me.join("next", [0, 2]):
        fresh = ringreduce.empty(8 * MB)
        summed(tensor), summed(fresh)
        me.report("stopped rank may go on")
        me.meet("it has gone on")
        assert tensor.eq(2).all() and fresh.eq(2).all()
        summed(tensor), summed(fresh)


@on_ranks(2)
def test_staged_and_fused_tensors_are_lent(me: Rank) -> None:
    with me.join(options=COPIED):
        grid = torch.empty(512, 1024).t()
        assert summed(grid) >= grid.nbytes // 2
        before, several = lent(), [torch.ones(5000) for _ in range(20)]
        ringreduce.all_reduce_coalesced(several)
        assert all(each.eq(2).all() for each in several) and lent() - before >= 200_000
        del grid
        assert ringreduce.arena_stats().in_use < MB  # the fusion buffer
    gc.collect()
    assert ringreduce.arena_stats().in_use == 0


# memory


def test_freed_memory_is_kept_up_to_a_bound() -> None:
    run(kept_memory, 1, 0)
    run(kept_memory, 1, 16 * MB)


def kept_memory(me: Rank, keep: int) -> None:
    os.environ["RINGREDUCE_ENGINE"] = f"arena_keep_bytes={keep}"
    tensors = [ringreduce.empty(size * MB // 4).fill_(1) for size in (4, 8, 2, 8)]
    assert arena_memory() == 22 * MB
    last = tensors[-1].data_ptr()
    while tensors:
        del tensors[0]
    stats = ringreduce.arena_stats()
    assert arena_memory() == stats.kept <= keep and stats.kept >= keep - 8 * MB and stats.in_use == 0
    again = ringreduce.empty(2 * MB)
    assert keep == 0 or (again.data_ptr() == last and again.eq(1).all())  # it has its pages


@on_ranks(1)
def test_no_room(me: Rank) -> None:
    os.environ["RINGREDUCE_ARENA_BYTES"] = "8M"
    ringreduce.share_allocations()
    tensors = [torch.full((MB // 2,), 3.0) for _ in range(6)]
    assert [shared(tensor) for tensor in tensors] == [True] * 4 + [False] * 2
    assert all(tensor.eq(3).all() for tensor in tensors)
    assert ringreduce.arena_stats().refusals == 2 and ringreduce.arena_stats().size == 8 * MB
    with pytest.raises(SystemFailure, match="RINGREDUCE_ARENA_BYTES"):
        ringreduce.empty(MB // 2)


@on_ranks(1)
def test_no_arena(me: Rank) -> None:
    os.environ["RINGREDUCE_ARENA_BYTES"] = "0"
    with pytest.raises(InvalidArgument, match="RINGREDUCE_ARENA_BYTES is 0"):
        ringreduce.share_allocations()
    with torch.device("meta"):  # where new tensors go by default
        assert ringreduce.empty(3).is_cpu
    assert ringreduce.arena_stats().size == 0
    os.environ["RINGREDUCE_ARENA_BYTES"] = "1M"
    for least in (0, -1, 1.5, True, "1M", 2**63):
        with pytest.raises(InvalidArgument, match="least_bytes is"):
            ringreduce.share_allocations(least_bytes=least)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "bytes", "arena"),
    [
        (resource.RLIMIT_AS, 64 << 30, 1 << 30),  # 1/64
        (resource.RLIMIT_FSIZE, 1 << 30, 1 << 30),
        (resource.RLIMIT_FSIZE, 3 << 30, 2 << 30),
        (resource.RLIMIT_FSIZE, 64 << 20, 64 << 20),
        (resource.RLIMIT_AS, 20 << 30, 320 << 20),
    ],
)
def test_a_smaller_arena_where_limits_leave_room_for_no_other(limit: int, bytes: int, arena: int) -> None:
    assert run(under_a_limit, 2, limit, bytes, {}) == [(arena, 0)] * 2


def test_no_arena_where_limits_leave_room_for_none() -> None:
    small = {"engine": "channel_bytes=64K,mailbox_bytes=64K"}
    assert run(under_a_limit, 2, resource.RLIMIT_FSIZE, 8 << 20, small) == [(0, 1)] * 2


def under_a_limit(me: Rank, limit: int, most: int, options: dict[str, Any]) -> tuple[int, int]:
    """The arena's size, and how many warnings there were of it."""
    logged = Logged("ringreduce.groups.arena", logging.WARNING)
    resource.setrlimit(limit, (most, most))
    for _ in range(2):
        with me.join(options=ringreduce.Options(**options)):
            ringreduce.share_allocations()
            tensor = ringreduce.empty(MB // 4).fill_(me.rank + 1)
            ringreduce.all_reduce(tensor)
            assert tensor.eq(3).all() and torch.zeros(MB).eq(0).all()
            assert shared(tensor) == (ringreduce.arena_stats().size > 0)
    return ringreduce.arena_stats().size, len(logged.messages)


# torch's allocator


@on_ranks(2)
def test_ordinary_tensors_are_lent(me: Rank) -> None:
    before = torch.ones(MB)
    with me.join(options=COPIED):
        ringreduce.share_allocations()
        small, large = torch.ones(MB // 8), torch.ones(MB)
        assert [shared(each) for each in (before, small, large)] == [False, False, True]
        assert summed(before) == 0 and summed(small) == 0 and summed(large) >= 2 * MB
        model = torch.nn.Linear(1024, 1024)
        assert shared(model.weight) and not shared(model.bias)
        model(large.view(-1, 1024)[:16]).sum().backward()
        assert model.weight.grad is not None and summed(model.weight.grad) >= 2 * MB

        ringreduce.share_allocations(least_bytes=4096)
        assert shared(torch.ones(1024)) and not shared(torch.ones(1000))
        ringreduce.share_allocations(False)
        after = torch.ones(MB)
        assert not shared(after) and shared(large) and summed(large) >= 2 * MB
        assert not shared(before.resize_(2 * MB))
    with me.join("next", options=COPIED):
        ringreduce.share_allocations()
        assert summed(large) >= 2 * MB and summed(torch.ones(MB)) >= 2 * MB
    assert large.eq(2).all()  # it outlives its groups
    del before  # which is older than the allocator


@on_ranks(3)
def test_each_rank_decides_for_itself(me: Rank) -> None:
    with me.join(options=COPIED):
        if me.rank == 1:
            ringreduce.share_allocations()
        tensor = torch.ones(MB)
        assert shared(tensor) == (me.rank == 1)
        assert (summed(tensor) > 0) == (me.rank == 1)
        gathered = torch.zeros(me.size * MB)
        ringreduce.all_gather_into_tensor(gathered, tensor)
        assert gathered.eq(me.size).all()


@on_ranks(1)
def test_what_torch_does_with_storages(me: Rank) -> None:
    image = torch.ones(1, 3, 256, 256)  # 768 KB
    convolution = torch.nn.Conv2d(3, 32, 3, padding=1)
    wanted = convolution(image)  # by oneDNN, whose memory comes from torch's raw allocator
    ringreduce.share_allocations()
    for _ in range(3):
        result = convolution(image)
        assert torch.equal(result, wanted) and shared(result) and not shared(wanted)

    tensor = torch.arange(float(MB))
    tensor.resize_(3 * MB)[MB:] = 5
    assert shared(tensor) and tensor[MB - 1] == MB - 1 and tensor[-1] == 5
    tensor.untyped_storage().resize_(1000)
    assert tensor.untyped_storage().nbytes() == 1000
    tensor.untyped_storage().resize_(0)
    array = torch.full((MB,), 4.0).numpy()  # the tensor is gone, the array has its memory
    gc.collect()
    others = [torch.zeros(MB) for _ in range(4)]
    assert (array == 4).all() and all(shared(each) for each in others)
    storage = others[0].untyped_storage().clone()
    assert bytes(storage[:16]) == bytes(16)
    moved = others[1].share_memory_()  # torch's own kind of shared memory
    assert moved.is_shared() and not shared(moved)
    lazy = torch._lazy_clone(others[2])
    lazy.add_(1)
    assert lazy.eq(1).all() and others[2].eq(0).all() and shared(lazy)
    made: list[torch.Tensor] = []
    in_threads([lambda: made.extend(torch.ones(MB) for _ in range(20))] * 4)
    assert all(each.eq(1).all() for each in made) and len({each.data_ptr() for each in made}) == 80
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = torch.empty(2 * MB)
    assert any(event.self_cpu_memory_usage >= kept.nbytes for event in profile.events())


PROGRAM = """
import threading, torch, torch.distributed as dist, ringreduce
dist.init_process_group("ringreduce", store=dist.HashStore(), rank=0, world_size=1)
kept = torch.ones(1 << 20)
class Late:
    def __del__(self):
        self.tensor = self.tensor + kept
late = Late()
late.tensor = torch.ones(1 << 20)
print(ringreduce.arena_stats().in_use)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("value", "in_use"), [("1", 8 * MB), ("0", 0)])
def test_the_variable_holds_from_the_first_group_to_the_end_of_the_program(value: str, in_use: int) -> None:
    environment = os.environ | {"RINGREDUCE_SHARE_ALLOCATIONS": value}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{in_use}\n", "")


@on_ranks(2)
def test_the_option_shares_from_the_first_group_on(me: Rank) -> None:
    with me.join(options=ringreduce.Options(fetch=0, share_allocations=1)):
        assert summed(torch.ones(MB)) >= 2 * MB


# forks


def in_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child; returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


@on_ranks(2)
def test_forked_children(me: Rank) -> None:
    with me.join():
        ringreduce.share_allocations()
        tensors = [torch.full((MB,), 3.0)]
        summed(tensors[0])

        def child() -> None:
            tensor = tensors.pop()
            tensor[5] = 17  # which the parent sees
            own = torch.ones(MB)
            assert not shared(own) and ringreduce.arena_stats().size == 0
            grown = tensor.clone().resize_(2 * MB)
            del tensor  # which frees nothing of the parent's
            assert grown[5] == 17 and own.eq(1).all()

        assert ended_well(in_child(child))
        assert tensors[0][5] == 17 and tensors[0][6] == 2
        assert summed(tensors[0]) > 0

    def child_without_a_group() -> None:
        tensor = ringreduce.empty(1000)
        assert shared(tensor) and ringreduce.arena_stats().in_use == 4096  # in an arena of its own
        assert shared(torch.ones(MB))  # as there is one now

    assert ended_well(in_child(child_without_a_group))


@on_ranks(1)
def test_children_keep_what_their_parent_frees(me: Rank) -> None:
    ringreduce.share_allocations()
    tensors = [torch.full((MB,), 3.0)]
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        os.read(reading, 1)  # until the parent has overwritten what it may
        assert tensors[0].eq(3).all()

    pid = in_child(child)
    os.close(reading)
    tensors.clear()
    others = [torch.zeros(MB) for _ in range(4)]
    assert all(shared(each) for each in others) and ringreduce.arena_stats().held == 4 * MB
    os.close(writing)
    assert ended_well(pid)
    others.append(torch.zeros(MB))
    assert ringreduce.arena_stats().held == 0  # it is used again


class Rows(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.arange(64.0)[:, None].repeat(1, MB // 4)  # shared: 1 MB a row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.zeros(MB // 4)  # 1 MB of the worker's own


@on_ranks(2)
def test_data_loader_workers(me: Rank) -> None:
    ringreduce.share_allocations()
    with me.join():
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            seen = 0
            for batch in loader:
                total = batch + 0  # shared, as what workers send is in torch's own shared memory
                assert shared(total)
                ringreduce.all_reduce(total)
                assert torch.equal(total, 2 * batch) and batch[:, 0].tolist() == [seen, seen + 1, seen + 2, seen + 3]
                seen += 4
            assert seen == 64
        del total
    end = time.monotonic() + 20
    while ringreduce.arena_stats().held and time.monotonic() < end:  # the last workers may still be ending
        time.sleep(0.01)
        torch.empty(MB)
    assert ringreduce.arena_stats().held == 0
