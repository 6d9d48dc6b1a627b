"""What the ranks of a host share: slots and a ledger, and how long a rank looks there before it sleeps."""

from __future__ import annotations

import mmap

from ringreduce import _C, plan
from ringreduce.config import (
    SPINS_SHARING_CORES,
    SPINS_WITH_LINKS,
    SPINS_WITH_OWN_CORE,
    YIELDS_SHARING_CORES,
    YIELDS_WITH_OWN_CORE,
    Options,
    slot_bytes_for,
)
from ringreduce.coordination.ledger import ledger_bytes
from ringreduce.groups.decision import Decision


def memory_for(size: int, options: Options, plan_channels: int) -> int:
    """The bytes that the ranks of a host share: their regions, then their ledger."""
    return ledger_at(geometry_for(size, options, plan_channels)) + ledger_bytes(size)


def ledger_at(geometry: _C.Geometry) -> int:
    """Where the ledger begins: behind the regions, on a page of its own."""
    return -(-geometry.segment_bytes() // mmap.PAGESIZE) * mmap.PAGESIZE


def geometry_for(size: int, options: Options, plan_channels: int) -> _C.Geometry:
    """The slots that fit the memory the options allow. More ranks mean more and smaller slots.

    `plan_channels` is what the topology's plans need; channels that no plan uses take address space only.
    """
    mailbox_depth = 4
    return _C.Geometry(
        ranks=size,
        channels=max(options.parts.channels, plan_channels),
        depth=plan.slot_depth(size),
        slot_bytes=slot_bytes_for(size, options),
        mailbox_depth=mailbox_depth,
        mailbox_slot_bytes=min(
            max(options.parts.mailbox_bytes // (size * mailbox_depth) // 4096 * 4096, 4096), 256 * 1024
        ),
    )


def patience_for(
    options: Options, decision: Decision, ranks: int, threads: int, cores: int, links: bool
) -> tuple[int, int, bool, bool]:
    """How long a waiting rank keeps its core: looks before it yields, yields before it sleeps, whether a call of a
    thread that waits itself looks on where it would yield, and whether in small calls the looks depend on the other
    ranks of its core instead. So many ranks share the cores of this host, and at most so many threads that compute
    for ranks."""
    crowded = ranks > cores
    looks = SPINS_WITH_LINKS if links else SPINS_SHARING_CORES if crowded else SPINS_WITH_OWN_CORE
    yields = (decision.yields or YIELDS_SHARING_CORES) if crowded else YIELDS_WITH_OWN_CORE
    return (
        options.parts.spins or looks,
        options.parts.yields or yields,
        threads <= cores and not links and not options.parts.yields,
        crowded and not links and not options.parts.spins,
    )
