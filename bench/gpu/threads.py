"""Ranks of a group that are threads of one process. Each makes its group by itself, as c10d knows one default group for
a process.

    run(work, 4, arguments, devices=1)    # work(rank, *arguments) on 4 ranks that share device 0
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import ringreduce
from ringreduce.config import resolve
from ringreduce.groups import make

RESIDENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""What a process needs, before it uses CUDA, whose ranks run on one GPU and wait for each other in kernels: a kernel
that is loaded at its first launch would wait for those that run, and streams that share a hardware queue for each
other."""


class ThreadRank:
    """A rank of a group that is a thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: int, timeout: float, options: Any) -> None:
        self.rank, self.size, self.store = rank, size, store
        torch.cuda.set_device(device)
        if options.parts.gpu_mode == "run":  # kernels that wait for each other must not come one after the other
            torch.cuda.set_stream(torch.cuda.Stream())
        resolved, _ = resolve(options)
        with make._exchange(store, rank, list(range(size)), timeout, None, "group") as exchange:
            self.backend = make.GroupSpec(exchange, "group", timeout, resolved).make()
        self.group = dist.ProcessGroup(store, rank, size)
        self.group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.CUSTOM, self.backend)

    def meet(self, name: str) -> None:
        """Returns when all ranks are here."""
        self.store.set(f"{name}{self.rank}", "")
        self.store.wait([f"{name}{rank}" for rank in range(self.size)])


def run(
    function: Callable[..., Any],
    size: int,
    arguments: Sequence[Any] = (),
    *,
    devices: int = 1,
    timeout: float = 30,
    **options: Any,
) -> list[Any]:
    """What `function(rank, *arguments)` returns, for each of `size` ranks. Rank r is on device r % devices.

    Raises AssertionError with the tracebacks of those that failed.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * size
    failures: list[str] = []

    def main(number: int) -> None:
        rank = None
        try:
            rank = ThreadRank(store, number, size, number % devices, timeout, ringreduce.Options(**options))
            results[number] = function(rank, *arguments)
        except BaseException:
            failures.append(f"rank {number}: {traceback.format_exc()}")
            if rank is not None:
                rank.backend.abort()
        finally:
            if rank is not None:
                rank.backend.shutdown()

    threads = [threading.Thread(target=main, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)
    return results
