"""Algorithms for all_reduce in which every rank does the same, so that rank 0's programs describe a group of any size.

The programs of rank `r` are those of rank 0 with every peer renumbered: rotated by `r`, or combined with `r` by
exclusive or.  (The chunks are renumbered too, but that does not change the time.)  What rank 0
receives from a peer is, renumbered, what it sends to that peer's *opposite*: in a ring, rank n - 1 sends to rank 0 as
rank 0 sends to rank 1, so rank 1 is the opposite of rank n - 1.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan import direct, halving_doubling, ring
from ringreduce.plan.model import Channel


class Symmetric(NamedTuple):
    """An algorithm, by what rank 0 does in it."""

    channels: Callable[[int], tuple[Channel, ...]]
    """By size: the channels, each with the program of rank 0 only."""
    opposite: Callable[[int, int], int]
    """Of a peer, by size."""


def _rings(rings: Callable[[int], ring.Rings]) -> Callable[[int], tuple[Channel, ...]]:
    return lambda size: tuple(
        Channel(weight, size, (ring.all_reduce_program(order, order.index(0)),)) for order, weight in rings(size)
    )


def _two_shot(size: int) -> tuple[Channel, ...]:
    return (Channel(1, size, (direct.two_shot_program(0, size),)),)


def _halving_doubling(size: int) -> tuple[Channel, ...]:
    if size != halving_doubling.chunks(size):
        raise PlanError(f"halving_doubling of {size} ranks is not symmetric; the size must be a power of two")
    return (Channel(1, size, (halving_doubling.program(0, size),)),)


def _rotated(peer: int, size: int) -> int:
    return -peer % size


SYMMETRIC: Mapping[str, Symmetric] = {
    "ring": Symmetric(_rings(ring.one_ring), _rotated),
    "bidirectional_ring": Symmetric(_rings(ring.both_ways), _rotated),
    "two_shot": Symmetric(_two_shot, _rotated),
    "halving_doubling": Symmetric(_halving_doubling, lambda peer, size: peer),
}
"""By the names of `BUILDERS`; halving_doubling is symmetric only among a power of two of ranks."""
