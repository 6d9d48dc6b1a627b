"""Ranks lend one another their ordinary tensors, if all of them can, or copy them, or store them past the caches."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run

import ringreduce
import ringreduce.groups.stats  # before a rank becomes a user who may not read files here
from ringreduce import _C
from ringreduce.errors import RingReduceError
from ringreduce.plan import BUILDERS
from ringreduce.tuning import fetches

KERNEL_LETS = fetches(ringreduce.Options(fetch=1))  # not with kernel.yama.ptrace_scope above 0, unless for root
COUNTS = (1, 1000, 100_003)
WAYS = 4  # lend, copy, stream, stream_out: the first four calls of each collective try one each
SMALL: dict[str, Any] = {"engine": "least_fetch_bytes=64,channel_bytes=256K,least_slice_bytes=4096"}


def check_all(me: Rank) -> None:
    """Every collective with a plan, over integers in float32, so that sums are exact."""
    size, last = me.size, me.size - 1
    for count in COUNTS:
        mine = (torch.arange(count * size) % 100).float() + me.rank
        total = (torch.arange(count * size) % 100).float() * size + sum(range(size))
        rows = mine.view(size, count)

        summed = mine.clone()
        ringreduce.all_reduce(summed)
        assert summed.equal(total)
        scaled = mine.clone()
        ringreduce.all_reduce(scaled, dist._make_nccl_premul_sum(2.0))
        assert scaled.equal(2 * total)
        averaged = mine.clone()
        ringreduce.all_reduce(averaged, dist.ReduceOp.AVG)
        assert torch.allclose(averaged, total / size)

        part = torch.empty(count)
        ringreduce.reduce_scatter_tensor(part, mine)
        assert part.equal(total.view(size, count)[me.rank])
        in_place = mine.clone()
        ringreduce.reduce_scatter_tensor(in_place.view(size, count)[me.rank], in_place)
        assert in_place.view(size, count)[me.rank].equal(part)

        gathered = torch.empty(size, count)
        ringreduce.all_gather_into_tensor(gathered, rows[0])
        assert gathered.equal(torch.stack([rows[0] - me.rank + r for r in range(size)]))
        exchanged = torch.empty(size, count)
        ringreduce.all_to_all_single(exchanged, rows)
        assert exchanged.equal(torch.stack([rows[me.rank] - me.rank + r for r in range(size)]))

        sent = mine.clone()
        ringreduce.broadcast(sent, last)
        assert sent.equal(mine - me.rank + last)
        reduced = mine.clone()
        ringreduce.reduce(reduced, last)
        assert reduced.equal(total if me.rank == last else mine)
        blocks = [torch.empty(count) for _ in range(size)] if me.rank == last else None
        ringreduce.gather(rows[0], blocks, last)
        assert blocks is None or torch.stack(blocks).equal(gathered)
        dealt = torch.empty(count)
        ringreduce.scatter(dealt, list(rows) if me.rank == last else None, last)
        assert dealt.equal(rows[me.rank] - me.rank + last)


def lent(me: Rank, options: dict[str, Any], reaches: bool = True) -> int:
    """Checks all collectives; returns how many bytes this rank's all_reduces lent."""
    if not reaches:
        _C.can_access = lambda *key: False  # type: ignore[misc, assignment]
    with me.join(options=ringreduce.Options(**SMALL, **options)):
        for _ in range(WAYS):
            check_all(me)
        return ringreduce.stats()[dist.group.WORLD.group_name]["all_reduce"].lent  # type: ignore[union-attr]


@pytest.mark.parametrize("size", (2, 3, 4))
def test_ordinary_tensors_are_lent_if_the_kernel_lets(size: int) -> None:
    largest = COUNTS[-1] * size * 4
    assert all((bytes_lent > largest / 2) if KERNEL_LETS else bytes_lent == 0 for bytes_lent in run(lent, size, {}))


def test_without_fetch_they_are_copied() -> None:
    assert run(lent, 2, {"fetch": 0}) == [0, 0]


@pytest.mark.parametrize("blind", (0, 2))
@on_ranks(3, returns=[0, 0, 0])
def test_if_one_rank_cannot_read_the_others_all_copy(me: Rank, blind: int) -> int:
    return lent(me, {}, reaches=me.rank != blind)


def test_memory_is_open_until_the_group_ends_and_only_if_it_is_read() -> None:
    assert run(threads_of_groups, 2, True) == [(int(KERNEL_LETS), 0)] * 2
    assert run(threads_of_groups, 2, False) == [(0, 0)] * 2


def threads_of_groups(me: Rank, reaches: bool) -> tuple[int, int]:
    """How many threads a group takes, and how many are left after its end while there are references to it."""
    if not reaches:
        _C.can_access = lambda *key: False  # type: ignore[misc, assignment]
    with me.join():
        before = threads()
        group = dist.new_group()
        made = threads() - before
        dist.destroy_process_group(group)
        return made, threads() - before


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("number", range(max(map(len, BUILDERS.values()))))
def test_every_algorithm(number: int) -> None:
    algorithms = ";".join(f"{name}:{[*known][number % len(known)]}" for name, known in BUILDERS.items())
    run(lent, 4, {"algorithms": algorithms})


# access that ends while the group lives

READ, WRITE = {"x86_64": (310, 311)}.get(platform.machine(), (270, 271))
"""The numbers of process_vm_readv and process_vm_writev."""

LOSSES = {
    "setuid": lambda: os.setuid(12345),
    "read and write": lambda: forbid(READ, WRITE),
    "write": lambda: forbid(WRITE),
}


def forbid(*calls: int) -> None:
    """Lets these system calls fail with EPERM in all threads of this process from now on."""
    load, equal, give, permit, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
    program = [(load, 0, 0, 0)]
    program += [(equal, len(calls) - number, 0, call) for number, call in enumerate(calls)]
    program += [(give, 0, 0, permit), (give, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    seccomp = {"x86_64": 317}.get(platform.machine(), 277)
    assert libc.syscall(seccomp, 1, 1, filter) == 0, os.strerror(ctypes.get_errno())  # to all threads


def loses(me: Rank, how: str, who: tuple[int, ...], options: dict[str, Any]) -> tuple[int, int]:
    """Checks all collectives before, while and after some ranks lose access; returns what all_reduces lent after."""
    with me.join(options=ringreduce.Options(**SMALL, **options)):
        check_all(me)
        over = torch.zeros(1, dtype=torch.int64)
        waiting = threading.Timer(0.002 * (1 + me.rank), LOSSES[how]) if me.rank in who else None
        if waiting:
            waiting.start()
        while over.item() < len(who):
            check_all(me)
            over.fill_(waiting is not None and not waiting.is_alive())
            ringreduce.all_reduce(over)
        for count in COUNTS:  # who has lost access finds out when a peer lends, as all do in 1 of 512 calls at least
            for _ in range(520):
                ringreduce.all_reduce(torch.ones(count * me.size))
        before = all_reduce_lent()
        check_all(me)
        return before, all_reduce_lent()


def all_reduce_lent() -> int:
    return ringreduce.stats()[dist.group.WORLD.group_name]["all_reduce"].lent  # type: ignore[union-attr]


def needs_root(how: str) -> None:
    if how == "setuid" and os.geteuid() != 0:
        pytest.skip("only root may become another user")


# all ways in turn


@on_ranks(2, 3)
def test_ranks_pass_values_on_in_all_ways_in_turn(me: Rank) -> None:
    with me.join():
        ranks = torch.arange(me.size, dtype=torch.float64)
        for size in (40_003, 700_001):
            lent = []
            for call in range(140):  # which begin with trials of all, and end with others
                x, out = torch.full((size,), float(me.rank + call), dtype=torch.float64), None
                before = all_reduce_lent() if call else 0
                if call % 3 == 0:
                    out = torch.empty_like(x)
                ringreduce.all_reduce(x, out=out)
                lent.append(all_reduce_lent() - before)
                assert (x if out is None else out).eq(float((ranks + call).sum())).all(), (size, call)
                assert out is None or x.eq(float(me.rank + call)).all()
                gathered = torch.empty(me.size * size, dtype=torch.float64)
                if call % 20 < 3:
                    ringreduce.all_gather_single(gathered, ranks[me.rank].expand(size).contiguous())
                    assert gathered.view(me.size, size).equal(ranks[:, None].expand(me.size, size))
            assert not KERNEL_LETS or (min(lent[1:]) == 0 < max(lent[1:])), f"{size}: always or never lent: {lent}"


@pytest.mark.slow
@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize(("size", "who"), [(2, (1,)), (2, (0, 1)), (3, (2,)), (4, (0, 2))])
def test_a_group_goes_on_with_copies_when_access_ends(how: str, size: int, who: tuple[int, ...]) -> None:
    needs_root(how)
    lent = run(loses, size, how, who, {})
    assert not KERNEL_LETS or all(before > 0 for before, _ in lent)
    assert all(after == before for before, after in lent)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(map(len, BUILDERS.values()))))
def test_every_algorithm_goes_on_with_copies(number: int) -> None:
    algorithms = ";".join(f"{name}:{[*known][number % len(known)]}" for name, known in BUILDERS.items())
    lent = run(loses, 3, "read and write", (1,), {"algorithms": algorithms})
    assert all(after == before for before, after in lent)


def test_ranks_of_different_users_make_no_group() -> None:
    needs_root("setuid")
    for error in run(becomes_another, 2):
        assert "a process of user 12345 connected; this one runs as user 0" in error


def becomes_another(me: Rank) -> str:
    if me.rank == 1:
        os.setuid(12345)
    with pytest.raises(RingReduceError) as raised, me.join(timeout=20):
        pass
    return str(raised.value)
