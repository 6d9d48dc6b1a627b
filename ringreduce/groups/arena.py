"""This process's arena: memory for tensors that the ranks of its host read in place, in every group.

    ringreduce.share_allocations()          # or RINGREDUCE_SHARE_ALLOCATIONS=1
    model = MyModel()                       # torch's CPU tensors of 1 MB and more are in the arena from now on

What the arena is, and what forks and failed calls mean for it, is in csrc/transport/arena.h and docs/memory.md.
"""

from __future__ import annotations

import functools
import logging
import resource
from typing import NamedTuple

from ringreduce import _C
from ringreduce.common.checks import whole
from ringreduce.common.system import refused_calls
from ringreduce.config import Options, resolve
from ringreduce.errors import InvalidArgument, SystemFailure

log = logging.getLogger(__name__)

LEAST_ARENA = 16 * 1024**2
"""A smaller one is not worth having, unless it was asked for."""
OF_LIMIT = 64
"""Where address space is limited, an arena takes at most this part of the limit."""


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

    Where the process's limits leave no room for an arena, a warning says so, and tensors are ordinary ones.

    Raises `InvalidArgument` for sizes below 1 and if RINGREDUCE_ARENA_BYTES is 0, `SystemFailure` if another library
    keeps torch from getting another allocator.
    """
    if not enabled:
        _C.share_allocations(None)
        return
    least_bytes = whole("least_bytes", least_bytes, 1, "a whole number from 1")
    options = resolve(None)[0]
    if not options.arena_bytes:
        raise InvalidArgument("RINGREDUCE_ARENA_BYTES is 0, so this process has no arena; set it higher, or not at all")
    if open_arena(options) >= 0:
        _C.share_allocations(least_bytes)


def open_arena(options: Options) -> int:
    """The descriptor of this process's arena, which is made if there is none yet; -1 if there is to be none.

    There is none if `options` want none, or, with a warning, if the process's limits leave no room for one.
    """
    wanted = options.arena_bytes // 4096 * 4096
    if wanted == 0:
        return -1
    size, refused = wanted if arena_stats().size else min(wanted, _affordable()), ""
    while size >= min(wanted, LEAST_ARENA):
        try:
            descriptor = _C.open_arena(size, options.parts.arena_keep_bytes)
        except SystemFailure as error:
            size, refused = size // 2 // 4096 * 4096, str(error)
            continue
        if (there := arena_stats().size) != size:
            log.info("this process's arena has %d bytes already; arena_bytes=%d has no effect", there, wanted)
        elif size < wanted:
            log.info("this process's limits leave room for an arena of %d bytes, not arena_bytes=%d", size, wanted)
        return descriptor
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] / 2**30
    _warn_without_arena(refused or f"its address space is limited to {limit:.3g} GiB (RLIMIT_AS)")
    return -1


def _affordable() -> int:
    """The most address space that an arena may take.

    Where address space is limited, each process of a host also maps the arenas of all others, and torch needs its own.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 2**63 if limit == resource.RLIM_INFINITY else limit // OF_LIMIT // 4096 * 4096


@functools.cache  # once for a process
def _warn_without_arena(why: str) -> None:
    log.warning(
        "this process has no arena: %s. Tensors of ringreduce.empty and share_allocations are ordinary ones here. "
        "%s, or set RINGREDUCE_ARENA_BYTES=0 to go without",
        why,
        "Let seccomp allow memfd_create" if "memfd_create" in refused_calls() else "Raise `ulimit -v` and `ulimit -f`",
    )
