"""all_reduce of ringreduce by ring, two-way ring, tree, direct exchange and its own choice, next to Gloo.

    python bench/ring_vs_tree.py --json ring_vs_tree.json            2 and 4 ranks on this machine
    python bench/plot.py ring_vs_tree.json ring_vs_tree.png          its picture

The timed call is dist.all_reduce(tensor, group=group), a sum of float32 in place, from Python, one CPU thread per rank,
on zeros, which stay zeros; sums of sums would overflow. Calls follow back to back after a barrier and one untimed call,
for --min-time seconds in --rounds batches; variants take turns batch by batch. The first size is measured twice and the
first measurement dropped, to keep start-up out of the figures.

    us            batch duration on the slowest rank / calls
    busbw         size / us x 2(n-1)/n, GB/s, GB = 1e9 bytes
    min_us, median_us, p99_us   single calls, each timed on the rank where it took longest
    speedup       Gloo's median over the variant's, same run
    wrong         elements that differ from the exact result on any rank, in a call before and a call after the timing
"""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Literal

import harness
import torch
import torch.distributed as dist
from torch import Tensor

import ringreduce

Variant = Literal["ring", "bidirectional_ring", "tree", "direct", "auto", "gloo"]
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
    found = (buffer != expected).sum()
    dist.all_reduce(found)
    return int(found)


def open_group(variant: str) -> dist.ProcessGroup:
    """A group of all ranks for this variant."""
    algorithms = "" if variant == "auto" else f"all_reduce:{variant}"
    options = None if variant == "gloo" else ringreduce.Options(algorithms=algorithms)
    backend = "gloo" if variant == "gloo" else "ringreduce"
    group: dist.ProcessGroup = dist.new_group(backend=backend, pg_options=options, timeout=harness.TIMEOUT)
    return group


def measure(sizes: list[int], variants: tuple[Variant, ...], schedule: harness.Schedule) -> list[dict[str, Any]]:
    """One rank; every rank returns all rows."""
    ranks, groups, numbers = dist.get_world_size(), {name: open_group(name) for name in variants}, itertools.count()
    rows = []
    for number, size in enumerate([sizes[0], *sizes]):  # the first is dropped: the ranks have only just started
        buffer = torch.zeros(size // 4)
        before = {name: wrong(group, buffer, next(numbers)) for name, group in groups.items()}
        buffer.zero_()
        calls = {name: functools.partial(dist.all_reduce, buffer, group=group) for name, group in groups.items()}
        timings = harness.time_alternating(calls, schedule, torch.device("cpu"))
        after = {name: wrong(group, buffer, next(numbers)) for name, group in groups.items()}
        for name, found in timings.items() if number else ():
            row = {"ranks": ranks, "bytes": size, "variant": name, "us": found.mean}
            row |= {"busbw": size / found.mean / 1e3 * 2 * (ranks - 1) / ranks}
            row |= {"min_us": found.min, "median_us": found.median, "p99_us": found.p99}
            row |= {"speedup": timings["gloo"].median / found.median} if "gloo" in timings else {}
            rows.append(row | {"wrong": before[name] + after[name]})
    return rows


def ring_vs_tree(
    ranks: tuple[int, ...] = (2, 4),
    sizes: tuple[harness.Bytes, ...] = (*(8 << 3 * step for step in range(7)), 16 << 20, 64 << 20),
    variants: tuple[Variant, ...] = ("ring", "bidirectional_ring", "tree", "direct", "auto", "gloo"),
    warmup: int = 3,
    rounds: int = 4,
    min_time: float = 0.2,
) -> Iterator[dict[str, Any]]:
    if min(warmup, rounds) < 1 or min_time <= 0 or min(sizes) < 4:
        raise harness.CannotRun("--warmup and --rounds must be at least 1, --min-time above 0, --sizes 4 B or more")
    schedule = harness.Schedule(warmup, rounds, min_time)
    for count in ranks:
        print(f"{count} ranks ...", file=sys.stderr, flush=True)
        yield from harness.start_ranks(count, measure, list(sizes), variants, schedule)


if __name__ == "__main__":
    sys.exit(harness.main(ring_vs_tree))
