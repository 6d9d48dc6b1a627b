"""Algorithms in which every rank does the same, so that rank 0's programs describe a group of any size.

The programs of rank `r` are those of rank 0 with every rank and chunk renumbered: rotated by `r`, or combined with `r`
by exclusive or.  Where there is one chunk only, it stays; else each chunk belongs to a rank, or to a pair of ranks.
What rank 0 receives from a peer is, renumbered, what it sends to that peer's *opposite*: in a ring, rank n - 1 sends to
rank 0 as rank 0 sends to rank 1, so rank 1 is the opposite of rank n - 1.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan import direct, halving_doubling, ring
from ringreduce.plan.model import Channel, Program, Step


class Symmetric(NamedTuple):
    """An algorithm, by what rank 0 does in it."""

    channels: Callable[[int], tuple[Channel, ...]]
    """By size: the channels, each with the program of rank 0 only."""
    turned: Callable[[int, int, int], int]
    """The rank that does for rank `by` what a given rank does for rank 0: (rank, by, size)."""
    opposite: Callable[[int, int], int]
    """Of a peer, by size."""
    generators: Callable[[int], tuple[int, ...]]
    """Ranks from which, by turning again and again, rank 0 gets to every other one, by size."""

    def turned_chunk(self, chunk: int, by: int, size: int, chunks: int) -> int:
        """The same for a chunk, of `chunks` in all: 1, one for each rank, or one for each pair of ranks."""
        if chunks == 1:
            return chunk
        if chunks == size:
            return self.turned(chunk, by, size)
        return self.turned(chunk // size, by, size) * size + self.turned(chunk % size, by, size)

    def turned_step(self, step: Step, by: int, size: int, chunks: int) -> Step:
        """What rank `by` does where rank 0 does `step`."""
        recv = tuple(self.turned(peer, by, size) for peer in step.recv)
        send = tuple(self.turned(peer, by, size) for peer in step.send)
        return Step(self.turned_chunk(step.chunk, by, size, chunks), step.read, recv, step.write, send)


def _rotating(channels: Callable[[int], tuple[Channel, ...]]) -> Symmetric:
    return Symmetric(
        channels,
        turned=lambda rank, by, size: (rank + by) % size,
        opposite=lambda peer, size: -peer % size,
        generators=lambda size: (1 % size,),
    )


def _direct(program: Callable[[int, int], Program], chunks: Callable[[int], int] = lambda size: 1) -> Symmetric:
    return _rotating(lambda size: (Channel(1, chunks(size), (program(0, size),)),))


def _rings(
    rings: Callable[[int], ring.Rings],
    program: Callable[[ring.Order, int], Program],
    chunks: Callable[[int], int] = lambda size: 1,
) -> Symmetric:
    return _rotating(
        lambda size: tuple(
            Channel(weight, chunks(size), (program(order, order.index(0)),)) for order, weight in rings(size)
        )
    )


def _halving_doubling(size: int) -> tuple[Channel, ...]:
    if size != halving_doubling.chunks(size):
        raise PlanError(f"halving_doubling of {size} ranks is not symmetric; the size must be a power of two")
    return (Channel(1, size, (halving_doubling.program(0, size),)),)


def _one_each(size: int) -> int:
    return size


SYMMETRIC: Mapping[str, Mapping[str, Symmetric]] = {
    "all_reduce": {
        "one_shot": _direct(direct.one_shot_program),
        "two_shot": _direct(direct.two_shot_program, _one_each),
        "ring": _rings(ring.one_ring, ring.all_reduce_program, _one_each),
        "bidirectional_ring": _rings(ring.both_ways, ring.all_reduce_program, _one_each),
        "halving_doubling": Symmetric(
            _halving_doubling,
            turned=lambda rank, by, size: rank ^ by,
            opposite=lambda peer, size: peer,
            generators=lambda size: tuple(1 << bit for bit in range(size.bit_length() - 1)),
        ),
    },
    "reduce_scatter": {
        "direct": _direct(direct.reduce_scatter_program),
        "ring": _rings(ring.one_ring, ring.reduce_scatter_program),
        "bidirectional_ring": _rings(ring.both_ways, ring.reduce_scatter_program),
    },
    "all_gather": {
        "direct": _direct(direct.all_gather_program),
        "ring": _rings(ring.one_ring, ring.all_gather_program),
        "bidirectional_ring": _rings(ring.both_ways, ring.all_gather_program),
    },
    "all_to_all": {"direct": _direct(direct.all_to_all_program)},
}
"""By the names of `BUILDERS`; halving_doubling is symmetric only among a power of two of ranks."""


def symmetric(collective: str, algorithm: str, size: int) -> Symmetric | None:
    """The algorithm, if it is symmetric among so many ranks."""
    if algorithm == "halving_doubling" and size != halving_doubling.chunks(size):
        return None
    return SYMMETRIC.get(collective, {}).get(algorithm)
