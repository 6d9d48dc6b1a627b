"""Ranks on several hosts: combine inside each host, exchange between hosts, spread inside again.

Inside a host memory is cheap: a value is written once and read by every rank there.  Between hosts the wire is dear.
So all that a host has to say about a chunk is combined first, by the one of its ranks that *carries* the chunk;
carriers of different hosts exchange by any plan among hosts (`ACROSS`: hosts take the part of ranks in it); and what
comes of it is spread inside by its carrier.  A host then sends what a single rank in its place would: 2 (H - 1) / H of
the tensor for all_reduce by ring or two_shot among H hosts, however many ranks it has, which is the least there is
(Patarasuk and Yuan 2009; for hierarchies Cho et al., "BlueConnect", 2019).

How the data is cut.  One tensor (all_reduce, broadcast, reduce) is cut in *rails*, as many as the largest host has
ranks; rail `r` is carried by the rank with number ``r % ranks`` of each host, so every local rank has its share of the
wire and every host sends the same, uneven hosts included.  Each rail is cut again as the plan among hosts wants it:
chunk ``rail * chunks + c``.  With one rail, *leaders*, a tensor crosses in the fewest messages.  Where each rank has a
block of its own (reduce_scatter, all_gather), a block is carried by its owner at home, and elsewhere by one local rank
each in turn.  gather, scatter and all_to_all are direct: every block crosses once anyway.

What a rank does, in this order: it *gives* its input of each chunk to the chunk's carrier; it carries its own chunks,
where the gifts are operands of the step that first needs them and the result goes with one write both to other hosts
and to the ranks here; it *takes* all other chunks from their carriers.  Two ranks of a host have everything between
them in that order, each time by the carrier's steps, so what one sends and what the other receives stand in one order.
What a root has to broadcast its host's ranks read from it, the carriers among them at once passing it on.

Roots.  The engine replaces rank `r` by ``(r - root) % size``, which moves ranks to other hosts.  A plan for another
root than 0 is therefore written for hosts that have been moved likewise, and is right for that root only.

Slots: as many as a rank sends messages in a round; rails are reduced until `slot_depth` suffices for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from math import ceil, inf
from operator import itemgetter
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan import builders, direct, tree
from ringreduce.plan import choose as sizes
from ringreduce.plan.builders import BUILDERS, Builder
from ringreduce.plan.by_cost import BLOCKS, MARGIN
from ringreduce.plan.cost import WINDOW
from ringreduce.plan.model import Channel, Layout, Plan, Program, Read, Slicing, Step, layout, slot_depth

Hosts = Sequence[Sequence[int]]
"""The ranks of each host, in any order.  The order of hosts is that of a ring among them."""


def _star(size: int) -> Plan:
    """reduce in one hop: everyone sends its input to the root."""
    return tree.reduce_over([((None, *(0 for _ in range(1, size))), 1)], "star")


ACROSS: Mapping[str, Mapping[str, Builder]] = {**BUILDERS, "reduce": {**BUILDERS["reduce"], "star": _star}}
"""By collective and name, the plans among hosts."""

BY_BLOCKS = ("reduce_scatter", "all_gather")
"""Collectives in which each rank has a block of its own, which is not cut in rails."""

PLAIN = ("gather", "scatter", "all_to_all")
"""Collectives in which every block goes straight from its source to its target, whatever the hosts."""

MESSAGE, HOP, MEMORY = 5e-6, 1e-6, 5e9
"""Seconds of a host to send or receive one more message, apart from its bytes; seconds from rank to rank inside a host;
bytes per second that a rank combines or copies.  Round figures that nobody measured."""


def build(collective: str, across: str, hosts: Hosts, root: int = 0, rails: int | None = None) -> Plan:
    """The plan of `collective` among all ranks of `hosts`, by the entry `across` of `ACROSS` between hosts.

    `root` matters to rooted collectives only.  `rails` is for collectives of one tensor: at most so many (default: as
    many as the largest host has ranks).  The plan is called ``hosts_`` and `across`, with one rail by request
    ``leaders_``.  Raises PlanError for hosts that do not have each rank once, and for a name or number there is not.
    """
    hosts = _for_root(collective, hosts, root)
    if collective not in ACROSS:
        raise PlanError(f"collective {collective!r} is unknown; known are {', '.join(ACROSS)}")
    if across not in ACROSS[collective]:
        known = ", ".join(ACROSS[collective])
        raise PlanError(f"{collective} has no plan {across!r} between hosts; known are {known}")
    if rails is not None and rails < 1:
        raise PlanError(f"rails is {rails}; it must be at least 1, or None for as many as the largest host has ranks")
    size = sum(map(len, hosts))
    name = f"leaders_{across}" if rails == 1 else f"hosts_{across}"
    if collective == "all_to_all":
        return Plan(name, collective, size, (Channel(1, 1, tuple(_all_to_all(rank, hosts) for rank in range(size))),))
    if collective in PLAIN:
        return Plan(name, collective, size, ACROSS[collective][across](size).channels)
    first = next(number for number, host in enumerate(hosts) if 0 in host)
    if collective in sizes.ROOTED:  # the root's host takes the part of rank 0
        hosts = (*hosts[first:], *hosts[:first])
    between = ACROSS[collective][across](len(hosts))
    most = max(map(len, hosts))
    for number in range(min(rails or most, most), 0, -1):
        channels = tuple(_channel(collective, channel, hosts, number) for channel in between.channels)
        sends = (sum(1 for step in program if step.send) for channel in channels for program in channel.programs)
        if max(sends) <= slot_depth(size):
            break
    return Plan(name, collective, size, channels)


def choose(
    collective: str,
    hosts: Hosts,
    latency: float,
    bandwidth: float,
    root: int = 0,
    *,
    slicing: Slicing | None = None,
    packed: float = 1.0,
    few_roundings: bool = False,
) -> list[tuple[int, int | None, Plan]]:
    """Which plan runs for blocks of `begin` bytes or more and less than `end`: (begin, end, plan), ascending, no gaps.

    `latency`: seconds from host to host, one way.  `bandwidth`: bytes per second that a host sends, and receives at
    the same time.  `slicing`: the engine's options (default: its defaults).  `packed`: bytes that go to other hosts for
    each of all_reduce, by plans that allow it: not one_shot, where all ranks complete the sum from what they were sent.
    `few_roundings`: each step that combines rounds, as with 16-bit and 8-bit floats.

    The model is that of `cost`, ``first + (rounds - 1) * max(work, first / window)``, with the figures of `shapes`: it
    walks no programs.  It has one latency and bandwidth for all hosts and knows no contention.  So, as in `choose`,
    only a clear promise (`MARGIN`) leads away from the plan that asks least of a network, a ring, where each host hears
    from one other; and, above the smallest slice, to one in which not every local rank carries its share.  With
    `few_roundings` this plan gives way to the one that rounds least often, among those in which as many local ranks
    carry, that send no more bytes and are not slower by a clear margin.  A single host gets the built-in plans.
    """
    if not 0 <= latency < inf:
        raise PlanError(f"latency is {latency}; it must be a number of seconds, at least 0")
    if not 0 < bandwidth < inf:
        raise PlanError(f"bandwidth is {bandwidth}; it must be bytes per second, above 0")
    if not 0 < packed <= 1:
        raise PlanError(f"packed is {packed}; it must be a share of the bytes, above 0 and at most 1")
    candidates = shapes(collective, hosts)
    size = sum(map(len, hosts))
    depth = slot_depth(size)
    cut = slicing or Slicing(4, 16384, max(4 * 1024**2 // depth // 4096 * 4096, 4096))
    chosen = []

    def packs(name: str) -> bool:
        """Whether a plan may send fewer bytes."""
        return collective == "all_reduce" and not name.endswith("one_shot")

    for block_bytes in BLOCKS:
        times = {
            name: shape.seconds(block_bytes, cut, depth, latency, bandwidth / (packed if packs(name) else 1.0))
            for name, shape in candidates.items()
        }
        name = _choice(candidates, times, block_bytes <= cut.least_slice_bytes, few_roundings)
        chosen.append((block_bytes, name, 0))
    rules = list(sizes.ranges_between(collective, chosen))
    if len(hosts) == 1:
        rules = list(_built_in(collective, size))
    plans = {rule.algorithm: _named(collective, rule.algorithm, hosts, root) for rule in rules}
    return [(rule.begin, rule.end, plans[rule.algorithm]) for rule in rules]


def _built_in(collective: str, size: int) -> Iterator[sizes.Rule]:
    begin = 0
    for end, algorithm, _ in sizes.table(size)[collective]:
        yield sizes.Rule(collective, algorithm, begin, end)
        begin = end or 0


def _named(collective: str, name: str, hosts: Hosts, root: int) -> Plan:
    kind, _, across = name.partition("_")
    if kind == "hosts":
        return build(collective, across, hosts, root)
    if kind == "leaders":
        return build(collective, across, hosts, root, rails=1)
    return builders.build(collective, name, sum(map(len, hosts)))


class Shape(NamedTuple):
    """What `choose` knows of a plan.  Bytes are in blocks of the collective."""

    delays: int
    """Messages between hosts, one after the other."""
    hops: int
    """The same inside a host."""
    messages: int
    """Of the host that has most, to others or from them."""
    sends: int
    """Of the rank that has most, in one round, about."""
    wire: float
    """Bytes that the host that has most sends, or receives."""
    path: float
    """Bytes that cross one after the other in a round."""
    local: float
    """Bytes that the rank that has most combines or copies, about."""
    chunk: float
    """Bytes of a chunk."""
    roundings: int = 0
    """Of a reduction: the steps that combine on the way of an input to the result, at most."""

    def seconds(self, block_bytes: int, cut: Slicing, depth: int, latency: float, bandwidth: float) -> float:
        """What a plan of this shape takes."""
        chunk = block_bytes * self.chunk
        rounds = max(1.0, chunk / cut.slice_bytes(chunk))
        in_round = block_bytes / rounds
        first = self.delays * latency + self.hops * HOP + self.messages * MESSAGE
        first += in_round * (self.path / bandwidth + self.local / MEMORY)
        work = max(self.messages * MESSAGE + in_round * self.wire / bandwidth, in_round * self.local / MEMORY)
        window = min(WINDOW, max(1, 2 * depth // max(self.sends, 1)))  # a slot is in use for about half of a round
        return first + (rounds - 1) * max(work, first / window)


def _choice(candidates: dict[str, Shape], times: dict[str, float], small: bool, few_roundings: bool) -> str:
    usual, *_ = times
    best = min((name for name in times if name.startswith("hosts_")), key=times.__getitem__)
    name = best if times[best] < MARGIN * times[usual] else usual
    best = min(times, key=times.__getitem__)  # also where not every local rank carries its share
    if times[best] < (1 if small else MARGIN) * times[name]:
        name = best
    if few_roundings:
        kind, most = name.partition("_")[0], times[name] / MARGIN
        alike = [each for each in times if each.startswith(kind) and times[each] <= most]
        as_short = [each for each in alike if candidates[each].wire <= candidates[name].wire]
        name = min(as_short, key=lambda each: (candidates[each].roundings, each != name, times[each]))
    return name


def shapes(collective: str, hosts: Hosts) -> dict[str, Shape]:
    """The plans that `choose` compares, by name, first the one that it takes in doubt."""
    _check(hosts)
    if collective not in ACROSS:
        raise PlanError(f"collective {collective!r} is unknown; known are {', '.join(ACROSS)}")
    counts = [len(host) for host in hosts]
    number, size, least, most = len(counts), sum(counts), min(counts), max(counts)
    inside = int(most > 1)
    flat = max(ranks * (size - ranks) for ranks in counts)
    found: dict[str, Shape] = {}
    if collective in PLAIN:
        return {"hosts_direct": Shape(1, 0, flat, 1 if collective == "gather" else size - 1, flat, flat, size, 1)}
    if collective in BY_BLOCKS:
        around = size - least
        once = max(around, (number - 1) * most)
        gathers = collective == "all_gather"
        carried = ceil(size / least) if gathers else size - 1
        at_once = 1 if gathers and not inside else carried
        found["hosts_ring"] = Shape(number - 1, inside, around, carried, around, around, size, 1, number - 1 + inside)
        found["hosts_direct"] = Shape(1, inside, once, at_once, once, once, size, 1, 1 + inside)
        if most > 1:
            found["direct"] = Shape(1, 0, flat, 1 if gathers else size - 1, flat, flat, size, 1, 1)
        return found
    for across, way in _between(collective, number).items():
        for kind, rails in (("hosts", most), ("leaders", 1)):
            if kind == "leaders" and most == 1:
                continue
            own = {ranks: min(ceil(rails / ranks), rails) for ranks in counts}
            local = max((own[ranks] * (ranks + 2 * way.wire - 1) + rails) / rails for ranks in counts)
            sends = max(
                own[ranks] * (way.sends if ranks > 1 else way.alone) + (rails - own[ranks]) * way.chunks
                for ranks in counts
            )
            found[f"{kind}_{across}"] = Shape(
                delays=way.delays,
                hops=2 * inside,
                messages=way.messages * rails,
                sends=sends,
                wire=way.wire,
                path=way.path,
                local=local,
                chunk=1 / (rails * way.chunks * way.channels),
                roundings=way.roundings + inside,
            )
    if most > 1 and collective == "all_reduce":
        found["one_shot"] = Shape(1, 0, flat, 1, flat, flat, size, 1, 1)
    return found


class _Way(NamedTuple):
    """A plan among single ranks, in the terms of `Shape`; `alone`: what is sent without other ranks beside it."""

    delays: int
    messages: int
    sends: int
    alone: int
    wire: float
    path: float
    roundings: int = 0
    chunks: int = 1
    channels: int = 1


def _between(collective: str, hosts: int) -> Mapping[str, _Way]:
    """By name, for so many hosts."""
    others = hosts - 1
    some = min(others, 1)
    two = min(others, 2)  # children in a tree
    if collective == "all_reduce":
        least = 2 * others / hosts
        deep = max(map(_depth, tree.complementary_trees(hosts)))
        return {
            "ring": _Way(2 * others, 2 * others, 2 * hosts - 1, 2 * others, least, least, others, hosts),
            "two_shot": _Way(2 * some, 2 * others, 2 * hosts - 1, hosts, least, least, some, hosts),
            "one_shot": _Way(some, others, 2, 1, others, others, some),
            "tree": _Way(2 * deep, 2 * two, 2, 2, two, two * deep, deep, channels=2),
        }
    depth = hosts.bit_length() - 1  # of the heap-ordered tree
    return {
        "ring": _Way(others, some, 1, 1, some, others, others),
        "tree": _Way(depth, two, 1, 1, two, two * depth, depth),
        "direct" if collective == "broadcast" else "star": _Way(some, others, 1, 1, others, others, some),
    }


def _depth(parents: tree.Tree) -> int:
    """The most links from a rank to the root."""

    def above(rank: int) -> int:
        parent = parents[rank]
        return 0 if parent is None else 1 + above(parent)

    return max(map(above, range(len(parents))))


class _Unit(NamedTuple):
    """What a block of the plan between hosts stands for: a rail of the tensor, or the block of one rank."""

    number: int
    """Of the rail, or of the block."""
    carriers: tuple[int, ...]
    """By host."""


def _units(collective: str, hosts: Hosts, rails: int) -> list[list[_Unit]]:
    """By block of the plan between hosts."""
    if collective not in BY_BLOCKS:
        return [[_Unit(rail, tuple(host[rail % len(host)] for host in hosts)) for rail in range(rails)]]
    numbers = count()

    def carriers(owner: int, home: int) -> tuple[int, ...]:
        number = next(numbers)
        return tuple(owner if at == home else host[number % len(host)] for at, host in enumerate(hosts))

    return [[_Unit(owner, carriers(owner, home)) for owner in host] for home, host in enumerate(hosts)]


_GIVE, _CARRY, _TAKE = range(3)
"""When a step runs: first by these, then by the number of the carrier's step, then by that of the unit."""

_Task = tuple[int, tuple[int, int, int], Step]
"""A step, of which rank, and when."""


def _channel(collective: str, between: Channel, hosts: Hosts, rails: int) -> Channel:
    """What one channel of the plan between hosts becomes for all ranks."""
    size = sum(map(len, hosts))
    shape = layout(collective, size)
    units = _units(collective, hosts, rails)
    chunks = between.chunks * (1 if collective in BY_BLOCKS else rails)
    tasks: list[list[_Task]] = [[] for _ in range(size)]
    for number, host in enumerate(hosts):
        for task in _tasks(shape, between, chunks, host, number, units):
            tasks[task[0]].append(task)
    programs = (tuple(step for _, _, step in sorted(own, key=itemgetter(1))) for own in tasks)
    return Channel(between.share, chunks, tuple(programs))


def _tasks(
    shape: Layout, between: Channel, chunks: int, host: Sequence[int], number: int, units: list[list[_Unit]]
) -> Iterator[_Task]:
    """The steps of one host's ranks.

    The first step of the program between hosts that reads a chunk is given what all ranks here have for it; if another
    one reads it again, the combination has been left in the output.  The last one that writes a chunk has the result.
    """

    @cache
    def giving(block: int) -> list[int]:
        return [rank for rank in host if shape.has_input(rank, block)]

    @cache
    def taking(block: int) -> list[int]:
        """Who needs the block and does not have it anyway."""
        have = giving(block) if shape.one_buffer else ()
        return [rank for rank in host if shape.needs_output(rank, block) and rank not in have]

    program = between.programs[number]
    reads = [(step.chunk, at) for at, step in enumerate(program) if step.read is Read.INPUT]
    first = dict(reversed(reads))
    again = {chunk for chunk, at in reads if at > first[chunk]}
    last = {step.chunk: at for at, step in enumerate(program) if step.write}
    for at, step in enumerate(program):
        group, piece = divmod(step.chunk, between.chunks)
        for order, unit in enumerate(units[group]):
            chunk = unit.number * between.chunks + piece
            block, carrier = chunk // chunks, unit.carriers[number]
            givers = giving(block)
            takers = [rank for rank in taking(block) if rank != carrier]
            from_root = len(givers) == 1 and carrier not in givers
            partial = len(givers) > 1 and step.chunk in again
            read, write = step.read, step.write and shape.needs_output(carrier, block)
            recv = [unit.carriers[peer] for peer in step.recv]
            send = [unit.carriers[peer] for peer in step.send]
            if first.get(step.chunk) == at and from_root:
                (root,) = givers
                yield root, (_GIVE, at, order), Step(chunk, Read.INPUT, send=(carrier, *takers))
                take = Step(chunk, recv=(root,), write=True)
                yield from ((rank, (_CARRY, at, order), take) for rank in takers)
                read, recv = Read.NONE, [root]
            elif first.get(step.chunk) == at:
                others = [rank for rank in givers if rank != carrier]
                give = Step(chunk, Read.INPUT, send=(carrier,))
                yield from ((rank, (_GIVE, at, order), give) for rank in others)
                recv += others
                write |= partial
            elif read is Read.INPUT and partial:
                read = Read.OUTPUT
            if last.get(step.chunk) == at and not from_root:
                take = Step(chunk, recv=(carrier,), write=True)
                yield from ((rank, (_TAKE, at, order), take) for rank in takers)
                send += takers
            yield carrier, (_CARRY, at, order), Step(chunk, read, tuple(recv), write, tuple(send))


def _all_to_all(rank: int, hosts: Hosts) -> Program:
    """As `direct.all_to_all`, with other hosts first, as their messages take longest.

    In rotated order, so that they are sent to by different ones.
    """
    size = sum(map(len, hosts))
    (home,) = (number for number, host in enumerate(hosts) if rank in host)
    place = hosts[home].index(rank)
    turned = [hosts[(home + hop) % len(hosts)] for hop in (*range(1, len(hosts)), 0)]
    targets = [peer for host in turned for peer in _rotated(host, place) if peer != rank]
    turned = [hosts[home - hop] for hop in range(len(hosts))]
    sources = [peer for host in turned for peer in _rotated(host, place) if peer != rank]
    return direct.exchange(rank, size, targets, sources)


def _rotated(host: Sequence[int], place: int) -> Sequence[int]:
    return (*host[place % len(host) :], *host[: place % len(host)])


def _for_root(collective: str, hosts: Hosts, root: int) -> tuple[tuple[int, ...], ...]:
    """The hosts by the numbers that ranks have in a plan for `root`, checked."""
    _check(hosts)
    size = sum(map(len, hosts))
    if not 0 <= root < size:
        raise PlanError(f"root is {root}; the hosts have ranks 0..{size - 1}")
    shift = root if collective in sizes.ROOTED else 0
    return tuple(tuple((rank - shift) % size for rank in host) for host in hosts)


def _check(hosts: Hosts) -> None:
    for number, host in enumerate(hosts):
        if not len(host):
            raise PlanError(f"hosts: host {number} of {hosts} has no ranks; leave it out")
    ranks = sorted(rank for host in hosts for rank in host)
    if ranks != list(range(len(ranks))) or not ranks:
        last = max(len(ranks) - 1, 0)
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        missing = sorted(set(range(len(ranks))) - set(ranks))
        fault = (
            f"rank {twice[0]} is there twice" if twice else f"rank {missing[0]} is missing" if missing else "no rank"
        )
        raise PlanError(f"hosts: {hosts}: {fault}; each of the ranks 0..{last} must be in one of the hosts")
