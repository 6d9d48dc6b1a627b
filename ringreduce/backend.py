"""Makes a group: options, rendezvous, plans, and the C++ process group that does the rest."""

from __future__ import annotations

import functools
import os
from typing import Any

from ringreduce import _C, plan
from ringreduce.config import Options, resolve
from ringreduce.rendezvous import meet

ANY_SIZE = 2**64 - 1

# Looks before a yield: with a core for every rank a peer answers sooner than the kernel could switch; with fewer, the
# peer may need our core to answer at all (2 000 looks then cost 100 us a hop, 50 cost 5 us, on 2 cores with 4 ranks).
SPINS_WITH_OWN_CORE = 2000
SPINS_SHARING_CORES = 50


def create(dist_backend_opts: Any, pg_options: Options | None) -> _C.ProcessGroupRing:
    """Called by torch for every new group on every rank in it. Returns when all ranks are there.

    Raises the errors of `ringreduce.errors`; see `rendezvous.meet`.
    """
    rank, size = dist_backend_opts.group_rank, dist_backend_opts.group_size
    timeout = dist_backend_opts.timeout.total_seconds()
    options, _ = resolve(pg_options)
    geometry = geometry_for(size, options)
    meeting = meet(dist_backend_opts.store, rank, size, geometry.segment_bytes(), str(options), timeout)
    group = _C.ProcessGroupRing(
        memfd=meeting.memfd,
        geometry=geometry,
        rank=rank,
        pidfds=meeting.pidfds,
        names=meeting.names,
        spins=options.spins or default_spins(size),
        slices=options.slices,
        least_slice_bytes=options.least_slice_bytes,
        timeout=timeout,
    )
    rules = plan.parse_algorithms(options.algorithms or "")
    for collective, ranges in plan.table(size, rules).items():
        for end, algorithm in ranges:
            lowered, digest = lowered_plan(collective, algorithm, size)
            group.add_plan(collective, lowered, digest, ANY_SIZE if end is None else end - 1)
    return group


def geometry_for(size: int, options: Options) -> _C.Geometry:
    """The slots that fit the memory the options allow. More ranks mean more and smaller slots."""
    depth = plan.slot_depth(size)
    mailbox_depth = 4
    channels, channel_bytes, mailbox_bytes = options.channels, options.channel_bytes, options.mailbox_bytes
    assert channels is not None and channel_bytes is not None and mailbox_bytes is not None  # resolved
    return _C.Geometry(
        ranks=size,
        channels=channels,
        depth=depth,
        slot_bytes=max(channel_bytes // depth // 4096 * 4096, 4096),
        mailbox_depth=mailbox_depth,
        mailbox_slot_bytes=min(max(mailbox_bytes // (size * mailbox_depth) // 4096 * 4096, 4096), 256 * 1024),
    )


def default_spins(size: int) -> int:
    cores = len(os.sched_getaffinity(0))
    return SPINS_WITH_OWN_CORE if size <= cores else SPINS_SHARING_CORES


@functools.lru_cache(maxsize=256)
def lowered_plan(collective: str, algorithm: str, size: int) -> tuple[list[int], int]:
    built = plan.build(collective, algorithm, size)
    return plan.lower(built), plan.digest(built)
