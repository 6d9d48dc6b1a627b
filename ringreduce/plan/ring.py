"""Rings: every rank receives from the rank before it and sends to the one after it, all links busy all the time.

A ring is an *order* of the ranks; *position* `p` of it is rank ``order[p]``, and chunk `r` is owned by rank `r`.

reduce_scatter: the chunk of each owner starts one position after it, travels once around and is combined at every
stop, so that after ``size - 1`` hops the owner adds the last contribution, its own.  all_gather: each owner's chunk
travels once around, written at every stop.  Each rank sends ``(size - 1) / size`` of the data in either phase, the
lower bound, however long the ring is (Patarasuk and Yuan 2009; Rabenseifner 2004 for all_reduce as the composition of
the two).  broadcast and reduce are the ring cut open at the root, a chain, pipelined because rounds overlap.

Several rings are several channels: each carries a stripe in proportion to its weight, for instance the number of
links it uses on a hop.  The reverse of a ring is another ring, on the other direction of the same links.

Slots: a rank has at most two messages under way (it sends before it knows that the next rank has consumed the one
before), so two slots suffice; more let neighbours run apart.  Chains run with one.
"""

from collections.abc import Callable, Sequence

from ringreduce.common.failures import PlanError
from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, Program, Read, Step

Order = Sequence[int]
Rings = Sequence[tuple[Order, int]]
"""The rings of a plan: (order of the ranks, weight) of each."""


def one_ring(size: int) -> Rings:
    """The ring 0, 1, ..., size - 1."""
    return ((range(size), 1),)


def both_ways(size: int) -> Rings:
    """The ring 0, 1, ..., size - 1 and its reverse, each with half of the data."""
    return ((range(size), 1), (range(size)[::-1], 1))


def all_reduce(rings: Rings, name: str = "ring") -> Plan:
    """all_reduce over the given rings: reduce_scatter then all_gather, one chunk per rank."""
    return _plan(name, "all_reduce", rings, all_reduce_program, chunks=len(rings[0][0]))


def all_reduce_program(order: Order, position: int) -> Program:
    """What the rank at one position does in the `all_reduce` of one ring."""
    return compose(reduce_scatter_program(order, position), all_gather_program(order, position))


def reduce_scatter(rings: Rings, name: str = "ring") -> Plan:
    """reduce_scatter over the given rings."""
    return _plan(name, "reduce_scatter", rings, reduce_scatter_program)


def all_gather(rings: Rings, name: str = "ring") -> Plan:
    """all_gather over the given rings."""
    return _plan(name, "all_gather", rings, all_gather_program)


def broadcast(rings: Rings, name: str = "ring") -> Plan:
    """broadcast along each ring, from the root to the rank before it.  The root's write is onto itself."""

    def program(order: Order, position: int) -> Program:
        hop = (position - order.index(0)) % len(order)
        if hop == 0:
            return (Step(0, Read.INPUT, write=True, send=_following(order, position, hop)),)
        return (Step(0, recv=(order[position - 1],), write=True, send=_following(order, position, hop)),)

    return _plan(name, "broadcast", rings, program)


def reduce(rings: Rings, name: str = "ring") -> Plan:
    """reduce along each ring, from the rank after the root to the root."""

    def program(order: Order, position: int) -> Program:
        hop = (position - order.index(0) - 1) % len(order)
        peers = (order[position - 1],) if hop > 0 else ()
        following = _following(order, position, hop)
        return (Step(0, Read.INPUT, recv=peers, write=not following, send=following),)

    return _plan(name, "reduce", rings, program)


def reduce_scatter_owner(position: int, hop: int, size: int) -> int:
    """The position that owns the chunk which `position` handles in `hop` 0 .. size - 1 of the reduce_scatter."""
    return (position - hop - 1) % size


def all_gather_owner(position: int, hop: int, size: int) -> int:
    """The position that owns the chunk which `position` handles in `hop` 0 .. size - 1 of the all_gather."""
    return (position - hop) % size


def reduce_scatter_program(order: Order, position: int) -> Program:
    """Hop 0 sends, hops between receive, combine and send on, the last one completes the own chunk."""
    size = len(order)
    return tuple(
        Step(
            chunk=order[reduce_scatter_owner(position, hop, size)],
            read=Read.INPUT,
            recv=(order[position - 1],) if hop > 0 else (),
            write=hop == size - 1,
            send=_following(order, position, hop),
        )
        for hop in range(size)
    )


def all_gather_program(order: Order, position: int) -> Program:
    """Hop 0 sends the own chunk, hops between write and send on, the last one only writes."""
    size = len(order)
    return tuple(
        Step(
            chunk=order[all_gather_owner(position, hop, size)],
            read=Read.NONE if hop > 0 else Read.INPUT,
            recv=(order[position - 1],) if hop > 0 else (),
            write=True,
            send=_following(order, position, hop),
        )
        for hop in range(size)
    )


def _following(order: Order, position: int, hop: int) -> tuple[int, ...]:
    """The rank to send to: the next of the ring, or nobody in the last hop."""
    size = len(order)
    return (order[(position + 1) % size],) if hop < size - 1 else ()


def _plan(name: str, collective: str, rings: Rings, program: Callable[[Order, int], Program], chunks: int = 1) -> Plan:
    size = len(rings[0][0])
    for index, (order, _) in enumerate(rings):
        if sorted(order) != list(range(size)):
            raise PlanError(f"{name}: ring {index} is {tuple(order)}; it must visit each rank 0..{size - 1} once")
    channels = (
        Channel(weight, chunks, tuple(program(order, order.index(rank)) for rank in range(size)))
        for order, weight in rings
    )
    return Plan(name, collective, size, tuple(channels))
