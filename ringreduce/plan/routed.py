"""Blocks with routes of their own: each travels over hops that are given, ranks on the way passing it on.

A *shape* is the hops of one block, as pairs of ranks in the direction in which it moves: a tree out of the rank that
has the block (broadcast, all_gather), a tree into the rank that wants its sum (reduce, reduce_scatter), or the path
from the one to the other (scatter, gather, all_to_all).  That of all_reduce is a tree into some rank, and then one out
of it.

Every rank takes its blocks by their depth there, those of equal depth by number: whoever sends is one less deep (in a
tree inwards, one deeper), so both ends of a link have the same order, and nobody waits in a circle.  The blocks of
all_to_all go in rounds: in the k-th those from every rank to the k-th after it.

Slots: `size` if every rank sends a block at most once, `2 * size` for all_to_all, whose rounds have no more messages
than ranks.
"""

from collections.abc import Iterator, Mapping, Sequence

from ringreduce.plan.model import Channel, Plan, Program, Read, Step, layout

Shape = Sequence[tuple[int, int]]


def routed(collective: str, size: int, channels: Sequence[tuple[int, Mapping[int, Shape]]], name: str) -> Plan:
    """The plan whose channels have these shares, and these shapes by the number of the block.  A block that its owner
    keeps needs none."""
    made = (Channel(share, 1, tuple(programs(collective, size, shapes))) for share, shapes in channels)
    return Plan(name, collective, size, tuple(made))


def programs(collective: str, size: int, shapes: Mapping[int, Shape]) -> Iterator[Program]:
    """Of every rank in one channel."""
    if collective == "all_reduce":
        yield from _in_and_out(size, shapes[0])
        return
    shape = layout(collective, size)
    steps: list[list[tuple[tuple[int, int, int], Step]]] = [[] for _ in range(size)]
    for block in range(shape.blocks):
        distance = (block - block // size) % size if collective == "all_to_all" else 0
        hops = shapes.get(block, ())
        before = _neighbours(hop[::-1] for hop in hops)
        after = _neighbours(iter(hops))
        holders = [rank for rank in range(size) if shape.has_input(rank, block)]
        wanted = [rank for rank in range(size) if shape.needs_output(rank, block)]
        depth = _depths(wanted[0], before, -1) if shape.reduces else _depths(holders[0], after, 1)
        for rank, deep in depth.items():
            step = Step(
                block,
                Read.INPUT if rank in holders else Read.NONE,
                recv=tuple(before.get(rank, ())),
                write=rank in wanted,
                send=tuple(after.get(rank, ())),
            )
            steps[rank].append(((distance, deep, block), step))
    for mine in steps:
        yield tuple(step for _, step in sorted(mine, key=lambda each: each[0]))


def _in_and_out(size: int, hops: Shape) -> Iterator[Program]:
    inwards, outwards = hops[: size - 1], hops[size - 1 :]
    above, below = _neighbours(iter(outwards)), _neighbours(hop[::-1] for hop in inwards)
    to, source = dict(inwards), {rank: one for one, rank in outwards}
    for rank in range(size):
        own, after = tuple(below.get(rank, ())), tuple(above.get(rank, ()))
        if rank in to:
            yield (
                Step(0, Read.INPUT, recv=own, send=(to[rank],)),
                Step(0, recv=(source[rank],), write=True, send=after),
            )
        else:
            yield (Step(0, Read.INPUT, recv=own, write=True, send=after),)


def _neighbours(hops: Iterator[tuple[int, int]]) -> dict[int, list[int]]:
    near: dict[int, list[int]] = {}
    for one, other in sorted(hops):
        near.setdefault(one, []).append(other)
    return near


def _depths(start: int, near: Mapping[int, Sequence[int]], step: int) -> dict[int, int]:
    """Of every rank that is reached, counted in steps of 1 or -1."""
    depth = {start: 0}
    for rank in (todo := [start]):
        for other in near.get(rank, ()):
            depth[other] = depth[rank] + step
            todo.append(other)
    return depth
