"""Halving and doubling: the ring's traffic in a logarithmic number of hops.

Recursive halving: in the hop of distance `d` (``power / 2``, ..., 2, 1, with `power` ranks, a power of two) rank `r`
exchanges with ``r ^ d`` half of the chunks it is still responsible for, keeping those whose number agrees with its own
in bit `d`; after the last hop it holds chunk `r`, reduced.  Recursive doubling runs the same hops backwards and
gathers all chunks (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005, section 4.5).

Seen from one chunk both phases are trees, and so they are written.  With ``x = r ^ chunk``, rank `r` receives the
chunk's partial results in the hops of distance above `x` (until then rank and chunk agree), combines them all in one
step, and sends the result in the hop whose bit is the highest of `x`, where they first differ; ``x == 0`` is the
owner.  Going through the chunks by descending `x` is going through the hops in order, and gives partners the same
order on both ends.  Doubling is the mirror image: by ascending `x`, receive the chunk in the hop of the highest bit of
`x`, write it, and send it in all later hops, which is one message to many readers.

Any size: beyond the largest power of two the *extra* ranks are folded into a *host* each (Rabenseifner's fold of the
first ``2 * extras`` ranks in pairs): the extra sends its whole input to the host, as one more operand of the step in
which the host first touches a chunk, and is one more reader of every finished chunk.

Slots: ``power // 2 + 1``.  The first hop sends half of the chunks before any is consumed, and the step that consumes
the first of them sends as well.
"""

from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, Program, Read, Step


def all_reduce(size: int) -> Plan:
    """all_reduce by halving then doubling, in as many chunks as the largest power of two not above `size`."""
    programs = tuple(program(rank, size) for rank in range(size))
    return Plan("halving_doubling", "all_reduce", size, (Channel(1, chunks(size), programs),))


def chunks(size: int) -> int:
    """The largest power of two not above `size`."""
    return 1 << (size.bit_length() - 1)


def program(rank: int, size: int) -> Program:
    """What one rank does."""
    power = chunks(size)
    extras = size - power
    if rank < 2 * extras and rank % 2 == 0:
        return _extra(rank // 2, host=rank + 1, power=power)
    hosts = tuple(2 * core + 1 if core < extras else core + extras for core in range(power))
    distances = tuple(1 << bit for bit in range(power.bit_length() - 1))
    core = hosts.index(rank)
    folded = (2 * core,) if core < extras else ()
    return compose(_halving(core, hosts, distances, folded), _doubling(core, hosts, distances, folded))


def _halving(core: int, hosts: tuple[int, ...], distances: tuple[int, ...], folded: tuple[int, ...]) -> Program:
    """reduce_scatter among the hosts; `core` is the host's number among them, `folded` its extra rank, if any."""
    return tuple(
        Step(
            chunk=core ^ x,
            read=Read.INPUT,
            recv=(*folded, *_later(core, x, hosts, distances)),
            write=x == 0,
            send=_hop(core, x, hosts),
        )
        for x in reversed(range(len(hosts)))
    )


def _doubling(core: int, hosts: tuple[int, ...], distances: tuple[int, ...], folded: tuple[int, ...]) -> Program:
    """all_gather among the hosts, the mirror image of `_halving`."""
    return tuple(
        Step(
            chunk=core ^ x,
            read=Read.INPUT if x == 0 else Read.NONE,
            recv=_hop(core, x, hosts),
            write=True,
            send=(*folded, *_later(core, x, hosts, distances)),
        )
        for x in range(len(hosts))
    )


def _extra(core: int, host: int, power: int) -> Program:
    """Send every chunk to the host, in the order of its halving, and take the results, in that of its doubling."""
    fold_in = tuple(Step(core ^ x, Read.INPUT, send=(host,)) for x in reversed(range(power)))
    fold_out = tuple(Step(core ^ x, recv=(host,), write=True) for x in range(power))
    return fold_in + fold_out


def _hop(core: int, x: int, hosts: tuple[int, ...]) -> tuple[int, ...]:
    """The partner in the hop of the highest bit of `x`; nobody for the own chunk."""
    return (hosts[core ^ (1 << (x.bit_length() - 1))],) if x > 0 else ()


def _later(core: int, x: int, hosts: tuple[int, ...], distances: tuple[int, ...]) -> tuple[int, ...]:
    """The partners in the hops of all distances above `x`."""
    return tuple(hosts[core ^ distance] for distance in distances if distance > x)
