"""Ranks that are threads of one process, a fresh one, with tensors on device "cuda" (bench/gpu/threads.py).

run_threads(work, 4, devices=2)    # work(member) on 4 ranks, of which two share each of 2 devices
@on_threads(4, devices=2)          # makes a test of such a function
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from stand_in import torch_cuda

import ringreduce
from bench.gpu import threads
from bench.gpu.threads import ThreadRank as Member

__all__ = ["Member", "all_collectives", "on_threads", "run_threads"]


def run_threads(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    devices: int,
    prepare: Callable[[], None] | None = None,
    **options: Any,
) -> Any:
    """What `function(member, *arguments)` returns, for each of `size` ranks; the first failure of one is the test's.

    Rank r is on device r % devices. `prepare` is called first, in the process of the threads: before it has devices.
    `options` are the group's, and its `timeout`.
    """
    if torch.version.cuda is not None and torch.cuda.device_count() < devices:
        pytest.skip(f"{devices} GPUs are needed, and {torch.cuda.device_count()} are here")
    (results,) = run(_in_threads, 1, function, size, devices, arguments, prepare, options)
    return results


def on_threads(
    *sizes: int, returns: list[Any] | None = None, runs: Callable[..., Any] = run_threads, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As the harness's `on_ranks`, by `runs`: `run_threads` or what has its arguments."""

    def start(function: Callable[..., Any], size: int, **given: Any) -> Any:
        return runs(functools.partial(function, **given), size, **options)

    return on_ranks(*sizes, returns=returns, start=start)


def _in_threads(
    _: Rank,
    function: Callable[..., Any],
    size: int,
    devices: int,
    arguments: Any,
    prepare: Callable[[], None] | None,
    options: dict[str, Any],
) -> list[Any]:
    os.environ["RINGREDUCE_STAND_IN_DEVICES"] = str(max(2, devices))
    if "gpu_mode=run" in options.get("engine", ""):
        os.environ.update(threads.RESIDENT)
    if prepare is not None:
        prepare()
    torch_cuda.activate()
    return threads.run(function, size, arguments, devices=devices, **options)


def all_collectives(rank: int, size: int, group: dist.ProcessGroup | None, n: int) -> None:
    def own(r: int) -> torch.Tensor:
        return (torch.arange(n, device="cuda") % 5 + r).float()

    def same(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(got, expected), (got, expected)

    root = size - 1
    total = torch.stack([own(r) for r in range(size)]).sum(0)
    everyones = torch.cat([own(r) for r in range(size)])

    x = own(rank)
    ringreduce.all_reduce(x, group=group)
    same(x, total)
    x = own(rank)
    ringreduce.all_reduce(x, dist.ReduceOp.AVG, group=group)
    same(x, total / size)
    x = own(rank)
    ringreduce.broadcast(x, root, group=group)
    same(x, own(root))
    x = own(rank)
    ringreduce.reduce(x, root, group=group)
    same(x, total if rank == root else own(rank))
    x = torch.empty(size * n, device="cuda")
    ringreduce.all_gather_into_tensor(x, own(rank), group=group)
    same(x, everyones)
    x = torch.empty(n, device="cuda")
    ringreduce.reduce_scatter_tensor(x, everyones + rank, group=group)
    same(x, own(rank) * size + sum(range(size)))
    x = torch.empty(size * n, device="cuda")
    ringreduce.all_to_all_single(x, everyones + 10 * rank, group=group)
    same(x, torch.cat([own(rank) + 10 * r for r in range(size)]))
    parts = [torch.empty(n, device="cuda") for _ in range(size)] if rank == root else None
    ringreduce.gather(own(rank), parts, root, group=group)
    if parts:
        same(torch.cat(parts), everyones)
    x = torch.empty(n, device="cuda")
    ringreduce.scatter(x, list(everyones.split(n)) if rank == root else None, root, group=group)
    same(x, own(rank))

    tensors = [own(rank) + i for i in range(5)]
    works = [ringreduce.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for i, work in enumerate(works):
        assert work is not None
        work.wait()
        same(tensors[i], total + i * size)
    torch.cuda.current_stream().synchronize()  # not the whole GPU: another rank's next kernel may wait for this rank
