"""This process's arena: memory for tensors that the ranks of its host read in place, in every group.

    ringreduce.share_allocations()          # or RINGREDUCE_SHARE_ALLOCATIONS=1
    model = MyModel()                       # torch's CPU tensors of 1 MB and more are in the arena from now on

What the arena is, and what forks and failed calls mean for it, is in csrc/transport/arena.h and docs/memory.md.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ringreduce import _C
from ringreduce.config import Options, resolve
from ringreduce.errors import InvalidArgument

log = logging.getLogger(__name__)


class ArenaStats(NamedTuple):
    """Of this process's arena, in bytes. All zero as long as there is none."""

    size: int
    """Address space."""
    in_use: int
    """Of shared tensors."""
    kept: int
    """Of freed tensors; memory that the next ones get (`Options.arena_keep_bytes`)."""
    held: int
    """Of freed tensors that forked children may still read; used again when these have ended."""
    lost: int
    """Address space, not memory, of freed tensors on which a call failed; it is not used again."""
    refusals: int
    """How many allocations found no room: those of `share_allocations` got ordinary memory."""


def arena_stats() -> ArenaStats:
    """What this process's arena holds."""
    return ArenaStats(*_C.arena_statistics())


def share_allocations(enabled: bool = True, least_bytes: int = 1024 * 1024) -> None:
    """Puts torch's CPU tensors of `least_bytes` and more in memory as `ringreduce.empty` gives it, from now on.

    So collectives read and write a program's ordinary tensors in place. It concerns what torch itself allocates for
    storages, in all threads: not `pin_memory()`, `share_memory_()`, or tensors made from NumPy arrays. A tensor for
    which the arena has no room is an ordinary one. May be called before or after groups are made, and any number of
    times; with `enabled=False` new tensors are ordinary ones again, and those that there are stay as they are.

    A child made by fork shares these tensors with its parent, as after `torch.Tensor.share_memory_()`: either sees what
    the other writes. The child's own tensors are ordinary ones, until it makes a group.

    Raises `InvalidArgument` for sizes below 1 and if RINGREDUCE_ARENA_BYTES is 0, `SystemFailure` if the kernel gives
    no address space for the arena, or another library keeps torch from getting another allocator.
    """
    if not enabled:
        _C.share_allocations(None)
        return
    if not isinstance(least_bytes, int) or isinstance(least_bytes, bool) or not 1 <= least_bytes < 2**63:
        raise InvalidArgument(f"least_bytes is {least_bytes!r}; it must be a whole number from 1")
    if open_arena(resolve(None)[0]) < 0:
        raise InvalidArgument("RINGREDUCE_ARENA_BYTES is 0, so this process has no arena; set it higher, or not at all")
    _C.share_allocations(least_bytes)


def open_arena(options: Options) -> int:
    """The descriptor of this process's arena, which is made if there is none yet; -1 if `options` want none."""
    size = options.arena_bytes // 4096 * 4096
    if size == 0:
        return -1
    descriptor = _C.open_arena(size, options.arena_keep_bytes)
    there = arena_stats().size
    if there != size:
        log.info("this process's arena has %d bytes already; arena_bytes=%d has no effect", there, size)
    return descriptor
