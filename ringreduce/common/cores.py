"""The cores of a process, and whether the ranks of a host have enough of them."""

from __future__ import annotations

import os


def own_cores() -> frozenset[int]:
    """The cores that this thread may use; all, if the kernel does not say."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


def crowded(ranks: int, threads: int, cores: int) -> tuple[str, str] | None:
    """What is wrong if so many ranks of a host each compute with so many threads, and what to do; None: nothing.

    Threads that wait for each other spin, and so keep the cores from those of other ranks that they wait for.
    """
    if ranks < 2 or threads < 2 or ranks * threads <= cores:
        return None
    fitting = max(1, cores // ranks)
    return (
        f"{ranks} ranks x {threads} threads on {cores} cores",
        f"set OMP_NUM_THREADS={fitting}, or call torch.set_num_threads({fitting})",
    )
