"""all_reduce of ringreduce by ring, two-way ring, tree, direct exchange and its own choice, next to Gloo (and NCCL).

    python bench/ring_vs_tree.py --json ring_vs_tree.json            2 and 4 ranks on this machine
    python bench/plot.py ring_vs_tree.json ring_vs_tree.png          its picture
    torchrun --nproc-per-node=8 bench/ring_vs_tree.py --device cuda  the ranks torchrun started, on any number of hosts

The timed call is dist.all_reduce(tensor, group=group), a sum of float32 in place, from Python, one CPU thread per rank,
on zeros, which stay zeros; sums of sums would overflow. Calls follow back to back after a barrier and one untimed call,
for --min-time seconds in --rounds batches; variants take turns batch by batch. The first size is measured twice and the
first measurement dropped, to keep start-up out of the figures.

    us            batch duration on the slowest rank / calls
    busbw         size / us x 2(n-1)/n, GB/s, GB = 1e9 bytes
    min_us, median_us, p99_us   single calls, each timed on the rank where it took longest
    speedup       Gloo's median, with --device cuda NCCL's, over the variant's, same run
    wrong         elements that differ from the exact result on any rank, in a call before and a call after the timing
"""

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

import harness
import torch
import torch.distributed as dist
from torch import Tensor

import ringreduce

Variant = Literal["ring", "bidirectional_ring", "tree", "direct", "auto", "gloo", "nccl"]
SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)
PERIOD = 65521
"""After so many elements the inputs repeat: a prime, so that data in the wrong place shows."""


def values(rank: int, call: int, count: int) -> Tensor:
    """What `rank` contributes to call number `call`: integers whose sums float32 has, in any order."""
    some = torch.randint(-(2**16), 2**16, (PERIOD,), generator=torch.Generator().manual_seed(call << 10 | rank))
    return some.float().repeat(-(-count // PERIOD))[:count]


def wrong(group: dist.ProcessGroup, buffer: Tensor, call: int) -> int:
    """Elements that a fresh call leaves wrong, on all ranks together."""
    ranks = dist.get_world_size()
    buffer.copy_(values(dist.get_rank(), call, len(buffer)))
    dist.all_reduce(buffer, group=group)
    expected = sum(values(rank, call, len(buffer)) for rank in range(ranks))
    found = (buffer.cpu() != expected).sum()
    dist.all_reduce(found)
    return int(found)


def open_group(variant: str) -> dist.ProcessGroup:
    """A group of all ranks for this variant."""
    algorithms = "" if variant == "auto" else f"all_reduce:{variant}"
    options = None if variant in ("gloo", "nccl") else ringreduce.Options(algorithms=algorithms)
    backend = "ringreduce" if options else variant
    group: dist.ProcessGroup = dist.new_group(backend=backend, pg_options=options, timeout=harness.TIMEOUT)
    return group


def measure(
    device: str, sizes: list[int], variants: tuple[Variant, ...], baseline: str, schedule: harness.Schedule
) -> list[dict[str, Any]]:
    """One rank; every rank returns all rows."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    ranks, groups, numbers = dist.get_world_size(), {name: open_group(name) for name in variants}, itertools.count()
    rows = []
    for number, size in enumerate([sizes[0], *sizes]):  # the first is dropped: the ranks have only just started
        buffer = torch.zeros(size // 4, device=device)
        before = {name: wrong(group, buffer, next(numbers)) for name, group in groups.items()}
        buffer.zero_()
        calls = {name: functools.partial(dist.all_reduce, buffer, group=group) for name, group in groups.items()}
        timings = harness.time_alternating(calls, schedule, buffer.device)
        after = {name: wrong(group, buffer, next(numbers)) for name, group in groups.items()}
        for name, found in timings.items() if number else ():
            row = {"ranks": ranks, "bytes": size, "variant": name, "us": found.mean}
            row |= {"busbw": size / found.mean / 1e3 * 2 * (ranks - 1) / ranks}
            row |= {"min_us": found.min, "median_us": found.median, "p99_us": found.p99}
            row |= {"speedup": timings[baseline].median / found.median} if baseline in timings else {}
            rows.append(row | {"wrong": before[name] + after[name]})
    return rows


def ring_vs_tree(
    ranks: tuple[int, ...] = (),
    sizes: tuple[harness.Bytes, ...] = SIZES,
    device: Literal["cpu", "cuda"] = "cpu",
    variants: tuple[Variant, ...] = (),
    warmup: int = 3,
    rounds: int = 4,
    min_time: float = 0.2,
) -> Iterator[dict[str, Any]]:
    if min(warmup, rounds) < 1 or min_time <= 0 or min(sizes) < 4:
        raise harness.CannotRun("--warmup and --rounds must be at least 1, --min-time above 0, --sizes 4 B or more")
    if device == "cuda" and not torch.cuda.is_available():
        raise harness.CannotRun("--device cuda: torch finds no GPU here")
    world = os.environ.get("WORLD_SIZE")
    if world and ranks:
        raise harness.CannotRun(f"--ranks is for runs without torchrun, which has started {world} ranks already")
    nccl: tuple[Variant, ...] = ("nccl",) if device == "cuda" and dist.is_nccl_available() else ()
    variants = variants or ("ring", "bidirectional_ring", "tree", "direct", "auto", "gloo", *nccl)
    baseline = "nccl" if "nccl" in variants else "gloo"
    yield {"header": {"hosts": int(os.environ.get("GROUP_WORLD_SIZE", "1")), "device": device, "baseline": baseline}}
    settings = device, list(sizes), variants, baseline, harness.Schedule(warmup, rounds, min_time)
    if world:
        yield from harness.become_rank(measure, *settings)
    for count in () if world else ranks or (2, 4):
        print(f"{count} ranks ...", file=sys.stderr, flush=True)
        yield from harness.start_ranks(count, measure, *settings)


if __name__ == "__main__":
    sys.exit(harness.main(ring_vs_tree))
