"""Direct exchange: every rank talks to every other, no value makes more hops than it must.

The lowest latency, and over shared memory also the least copying: a value sent to many peers is one write into the
outbox that all of them read.  Ranks address their peers in *rotated order* (rank + 1, rank + 2, ...), so that at any
time all ranks work with different peers.

Slots: one_shot, all_gather, broadcast and gather run with any depth, as one message is all that a rank has under way;
so does scatter, which is read as it is sent.  reduce_scatter, reduce and all_to_all need ``size - 1`` slots, two_shot
`size`: a rank hands out all that it has for others before it takes what they gave it, and in two_shot the collecting
step sends as well.
"""

from collections.abc import Sequence

from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, Program, Read, Step


def others(rank: int, size: int) -> tuple[int, ...]:
    """The peers of a rank in rotated order."""
    return tuple((rank + hop) % size for hop in range(1, size))


def one_shot(size: int) -> Plan:
    """all_reduce in one hop: everyone publishes its whole input once, everyone combines all inputs.

    Each rank reads ``size - 1`` times the tensor, so this is for tensors whose time is all latency.
    """
    programs = tuple(one_shot_program(rank, size) for rank in range(size))
    return Plan("one_shot", "all_reduce", size, (Channel(1, 1, programs),))


def one_shot_program(rank: int, size: int) -> Program:
    """What one rank does in `one_shot`."""
    peers = others(rank, size)
    combine = Step(0, Read.INPUT, recv=peers, write=True)
    return (Step(0, Read.INPUT, send=peers), combine) if peers else (combine,)


def two_shot(size: int) -> Plan:
    """all_reduce in two hops: reduce_scatter then all_gather, chunk `r` owned by rank `r`.

    The owner combines all contributions in one step and publishes the result once; each rank reads ``2 (size - 1) /
    size`` of the tensor, the lower bound of any all_reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009).
    """
    programs = tuple(two_shot_program(rank, size) for rank in range(size))
    return Plan("two_shot", "all_reduce", size, (Channel(1, size, programs),))


def two_shot_program(rank: int, size: int) -> Program:
    """What one rank does in `two_shot`."""
    return compose(reduce_scatter_program(rank, size), all_gather_program(rank, size))


def reduce_scatter(size: int) -> Plan:
    """Everyone sends each block to its owner, who combines them in one step."""
    programs = tuple(reduce_scatter_program(rank, size) for rank in range(size))
    return Plan("direct", "reduce_scatter", size, (Channel(1, 1, programs),))


def all_gather(size: int) -> Plan:
    """Everyone publishes its block once and reads the others'."""
    programs = tuple(all_gather_program(rank, size) for rank in range(size))
    return Plan("direct", "all_gather", size, (Channel(1, 1, programs),))


def broadcast(size: int) -> Plan:
    """The root publishes once, everyone reads it.  The root's own write is onto itself: nothing moves."""

    def program(rank: int) -> Program:
        if rank == 0:
            return (Step(0, Read.INPUT, write=True, send=others(0, size)),)
        return (Step(0, recv=(0,), write=True),)

    return Plan("direct", "broadcast", size, (Channel(1, 1, tuple(map(program, range(size)))),))


def reduce(size: int) -> Plan:
    """Two hops, so that the combining is shared: chunk `r` is reduced by rank `r`, then sent to the root."""

    def program(rank: int) -> Program:
        *contributions, combine = reduce_scatter_program(rank, size)
        if rank == 0:
            collect = (Step(owner, recv=(owner,), write=True) for owner in others(0, size))
            return (*contributions, combine, *collect)
        return (*contributions, Step(rank, Read.INPUT, recv=combine.recv, send=(0,)))

    return Plan("direct", "reduce", size, (Channel(1, size, tuple(map(program, range(size)))),))


def gather(size: int) -> Plan:
    """Everyone sends its block to the root."""

    def program(rank: int) -> Program:
        if rank > 0:
            return (Step(rank, Read.INPUT, send=(0,)),)
        collect = (Step(peer, recv=(peer,), write=True) for peer in others(0, size))
        return (Step(0, Read.INPUT, write=True), *collect)

    return Plan("direct", "gather", size, (Channel(1, 1, tuple(map(program, range(size)))),))


def scatter(size: int) -> Plan:
    """The root sends each rank its block."""

    def program(rank: int) -> Program:
        if rank > 0:
            return (Step(rank, recv=(0,), write=True),)
        deal = (Step(peer, Read.INPUT, send=(peer,)) for peer in others(0, size))
        return (*deal, Step(0, Read.INPUT, write=True))

    return Plan("direct", "scatter", size, (Channel(1, 1, tuple(map(program, range(size)))),))


def all_to_all(size: int) -> Plan:
    """Each rank sends every other one its block, and then receives theirs; its own block it moves itself.

    If receives came in between, a rank's next send would wait for its last receive. Where ranks share cores, each such
    wait hands a core on: 8 ranks on 2 cores took 1.7 times as long for small blocks.
    """
    programs = tuple(all_to_all_program(rank, size) for rank in range(size))
    return Plan("direct", "all_to_all", size, (Channel(1, 1, programs),))


def all_to_all_program(rank: int, size: int) -> Program:
    """What one rank does in `all_to_all`."""
    targets = others(rank, size)
    return exchange(rank, size, targets, targets[::-1])


def exchange(rank: int, size: int, targets: Sequence[int], sources: Sequence[int]) -> Program:
    """One rank's part of an all_to_all that sends to `targets` in this order, and receives from `sources`."""
    return (
        *(Step(rank * size + peer, Read.INPUT, send=(peer,)) for peer in targets),
        Step(rank * size + rank, Read.INPUT, write=True),
        *(Step(peer * size + rank, recv=(peer,), write=True) for peer in sources),
    )


def reduce_scatter_program(rank: int, size: int) -> Program:
    """Hand out the others' chunks, then combine all contributions to the own one; chunk `r` belongs to rank `r`."""
    peers = others(rank, size)
    contributions = (Step(owner, Read.INPUT, send=(owner,)) for owner in peers)
    return (*contributions, Step(rank, Read.INPUT, recv=peers, write=True))


def all_gather_program(rank: int, size: int) -> Program:
    """Publish the own chunk, then read the others'."""
    peers = others(rank, size)
    collect = (Step(owner, recv=(owner,), write=True) for owner in peers)
    return (Step(rank, Read.INPUT, write=True, send=peers), *collect)
