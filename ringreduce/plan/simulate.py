"""How long a plan takes over a network: alpha-beta, with contention for links, and slices.

A message is what one step sends to one peer.  It is ready for the first link of its route when the step has ended, and
for each other link when the one before begins to serve it (switches cut through).  A link serves its messages in the
order in which they became ready for it, each for ``share * bytes / capacity`` seconds, and is never idle while one
waits; a message that waits for it holds up nobody on other links (switches buffer).  When all its links have served a
message, and the latency of its route has passed, it is there: over idle links, after ``latency + max(share * bytes /
capacity)``.

A step runs when all that it receives has come and the step before it has ended.  It takes no time: neither moving and
combining bytes inside a rank nor telling a sender that its message was read costs anything.

Slices are those of the engine (csrc/engine/execution.h): round `k` runs every program on slice `k` of each chunk; a
rank begins round `k` when its round ``k - WINDOW`` has ended, and writes a slot of its outbox (`slot_depth`) when what
it held has been read.  All this is a *marked graph* (see `verify`): every step waits for fixed other ones.  They are
executed in the order of time, ties in the order in which they came about, so equal arguments give equal results.

`simulate` walks every step of every rank.  Where all ranks do the same at the same time, over equal links, one of them
shows all: `simulate_symmetric` does groups of any size.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan.cost import WINDOW
from ringreduce.plan.marked_graph import Graph, Way, compile_round, wrong
from ringreduce.plan.model import Plan, Program, layout, slot_depth
from ringreduce.plan.network import LikeGroups, Network, Route
from ringreduce.plan.symbolic import describe
from ringreduce.plan.symmetric import SYMMETRIC

SATURATED = 0.99
"""A plan whose busiest link works for this share of its time gains little from slices."""

WORTHWHILE = 0.99
"""Slices are halved as long as that leaves no more than this share of the time."""

SEARCHED_STEPS = 2**21
"""The search for the best slices stops where all rounds together have more steps."""

FEW_STEPS = 2**17
"""A search that ends within so many steps always begins with whole chunks."""

MOST_STEPS = 2**26
"""Of all rounds: more are refused, since they would take minutes."""


Renumbering = Callable[[int, int], int]
"""The number of a group, where groups are renumbered so that the first becomes the one that is given."""


@dataclass(frozen=True)
class Simulated:
    """What one collective took."""

    seconds: float
    link_bytes: tuple[float, ...]
    """Over each link, by its number in the network."""
    link_busy_seconds: tuple[float, ...]
    messages: int
    """Of all rounds; a step that sends to three peers sends three."""
    steps: int
    """Of all ranks and rounds."""
    rounds: int
    """Slices of the largest chunk."""
    slice_bytes: float


def simulate(
    plan: Plan,
    network: Network,
    size_bytes: float,
    *,
    slice_bytes: float | None = None,
    groups: LikeGroups | None = None,
    rounds: int = 1,
) -> Simulated:
    """Run every step of `plan` over `network`.

    `size_bytes` is counted as nccl-tests do: the whole tensor for all_reduce, broadcast and reduce, all ranks' blocks
    together for reduce_scatter, all_gather, gather and scatter, one rank's blocks for all_to_all.  Stripes, chunks and
    slices are cut without rounding.

    `slice_bytes` is the most that a message carries.  Without it chunks are sent whole if, latencies aside, that keeps
    the busiest link busy all the time, as rings and direct exchanges do.  Trees and chains do not: for them the number
    of slices is doubled as long as that makes the plan faster.  `rounds` is a number of slices that is good for a
    smaller size: a long search begins there, and ends sooner.

    With `groups`, and a plan in which they do the same (`renumbered`), only the first group's ranks are walked: they
    get their own messages back, as in `simulate_symmetric`, and only their links are counted.

    The plan is not verified, so that any programs whose sends and receives match can be simulated.  Raises PlanError if
    they do not, or wait for one another, or if an argument is out of range.
    """
    renumber = renumbered(plan, groups.places) if groups else None
    if groups is None or renumber is None:
        graph = compile_round(plan, network.route, network.capacity)
        return _Simulation(plan, graph, network.capacity).run(size_bytes, slice_bytes, rounds)
    numbers = range(plan.size // groups.places)
    back = [next(by for by in numbers if renumber(group, by) == 0) for group in numbers]
    first = (replace(channel, programs=channel.programs[: groups.places]) for channel in plan.channels)
    plan = replace(plan, channels=tuple(first))
    return simulate_first(plan, network, size_bytes, groups, back.__getitem__, slice_bytes=slice_bytes, rounds=rounds)


class Hop(NamedTuple):
    """A message on one link of its route: times in seconds, the link by its number in the network."""

    link: int
    begin: float
    end: float
    channel: int
    source: int
    target: int
    """The ranks of the message; a link may lie between others."""
    chunk: int
    """That the receiving step works on."""
    slice: int


def hops(plan: Plan, network: Network, size_bytes: float, slice_bytes: float) -> list[Hop]:
    """Every message of `simulate` with these slices on every link, in the order of time.

    Raises PlanError where `simulate` does.
    """
    graph = compile_round(plan, network.route, network.capacity)
    simulation = _Simulation(plan, graph, network.capacity)
    chunk_of = [step.chunk for channel in plan.channels for program in channel.programs for step in program]
    ends = {}  # the ranks of a way, which all messages between them share
    for step, rank in enumerate(graph.rank):
        for message in range(graph.first[step], graph.first[step + 1]):
            ends[id(graph.way[message])] = rank, graph.rank[graph.reader[message]]
    found = []

    def note(way: Way, link: int, begin: float, end: float, receiver: int) -> None:
        number, step = divmod(receiver, len(graph.waits))
        found.append(Hop(link, begin, end, graph.channel[step], *ends[id(way)], chunk_of[step], number))

    simulation.walk(simulation.cut(simulation.chunks(size_bytes), slice_bytes), note_hop=note)
    return sorted(found, key=lambda hop: (hop.begin, hop.link))


def simulate_first(
    plan: Plan,
    network: Network,
    size_bytes: float,
    groups: LikeGroups,
    opposite: Callable[[int], int],
    *,
    slice_bytes: float | None = None,
    rounds: int = 1,
) -> Simulated:
    """`simulate` a plan that has the programs of the first group alone, where all groups do the same.

    `opposite` is what `symmetric.Symmetric` has by that name, for groups: what the first group receives from a group
    is what it sends to the opposite one.  The search for the best slices ends sooner than in `simulate`: groups are
    many.  Raises PlanError for a link that all groups share, too: what one of them
    sends does not show how busy that is.
    """
    places, size = groups.places, plan.size

    def route(source: int, target: int) -> Route:
        links, latency = network.route(source, target)
        for link, _ in links:
            if groups.links[link] < 0:
                raise wrong(
                    plan, f"all groups share the link {network.names[link]}, so one does not show how busy it is"
                )
        return Route(tuple((groups.links[link], share) for link, share in links), latency)

    def taken_as(source: int, target: int) -> tuple[int, int]:
        return opposite(target // places) * places + source, target % places

    graph = compile_round(plan, route, network.capacity, taken_as)
    simulation = _Simulation(plan, graph, network.capacity, SEARCHED_STEPS // 4)
    one = simulation.run(size_bytes, slice_bytes, rounds)
    return replace(one, messages=one.messages * size // places, steps=one.steps * size // places)


def renumbered(plan: Plan, places: int) -> Renumbering | None:
    """How the groups of `places` ranks follow from the first one, if all do the same: group `g` does what it does, with
    its peers' groups turned on by `g`, or each combined with `g` by exclusive or."""
    groups = plan.size // places

    def turned(group: int, by: int) -> int:
        return (group + by) % groups

    def alike(renumber: Renumbering, one: Program, other: Program, by: int) -> bool:
        def moved(peers: Sequence[int]) -> tuple[int, ...]:
            return tuple(renumber(peer // places, by) * places + peer % places for peer in peers)

        return len(one) == len(other) and all(
            step.recv == moved(first.recv) and step.send == moved(first.send)
            for first, step in zip(one, other, strict=True)
        )

    for renumber in (turned, operator.xor):
        if all(
            alike(renumber, channel.programs[rank % places], program, rank // places)
            for channel in plan.channels
            for rank, program in enumerate(channel.programs)
        ):
            return renumber
    return None


def simulate_symmetric(
    algorithm: str, size: int, size_bytes: float, bandwidth: float, latency: float = 0.0
) -> Simulated:
    """`simulate` an all_reduce of `size` ranks on one switch (`network.switch`) by the steps of rank 0 alone.

    In the algorithms of `SYMMETRIC` rank `r` does what rank 0 does, with its peers renumbered: rotated by `r`, or each
    combined with `r` by exclusive or.  On equal links it does so at the same time.  Hence what rank 0 receives from a
    peer comes when what it sends to the *opposite* peer gets there (the one to which it is what that peer is to it),
    and its incoming link is as busy as that of any other rank: rank 0 gets its own messages back.

    The result is that of `simulate` if chunks are sent whole.  In slices it may differ by a per cent: messages of
    several rounds can reach a link at once, and `simulate` takes them by rank, which is not the same to all.

    `link_bytes` and `link_busy_seconds` are of the two links of a rank, out and in; messages and steps are counted over
    all ranks.  Raises PlanError as `simulate` does, and for an algorithm or a size without that symmetry.
    """
    if algorithm not in SYMMETRIC["all_reduce"]:
        raise PlanError(
            f"algorithm {algorithm!r} is not known to be symmetric; those are {', '.join(SYMMETRIC['all_reduce'])}"
        )
    if size < 1:
        raise PlanError(f"a group of {size} ranks has no plan; the size must be at least 1")
    symmetry = SYMMETRIC["all_reduce"][algorithm]
    plan = Plan(algorithm, "all_reduce", size, symmetry.channels(size))  # with one program a channel
    route = Route(((0, 1.0), (1, 1.0)), latency)
    network = Network(("out", "in"), (bandwidth, bandwidth), lambda *_: route)
    return simulate_first(plan, network, size_bytes, LikeGroups(1, (0, 1)), lambda peer: symmetry.opposite(peer, size))


_Message = tuple[Way, int, float, float, int]
"""Its way, the next link there, its bytes, when the links before will have served it, and who reads it."""

NoteHop = Callable[[Way, int, float, float, int], None]
"""Hears of each message that a link serves: its way, the link, from when to when, and who reads it."""


@dataclass(frozen=True)
class _Simulation:
    """A plan on its network, to be run in slices of several sizes."""

    plan: Plan
    graph: Graph
    capacity: Sequence[float]
    searched: int = SEARCHED_STEPS

    def run(self, size_bytes: float, slice_bytes: float | None, rounds: int = 1) -> Simulated:
        """See `simulate`."""
        if not 0 <= size_bytes < math.inf:
            raise PlanError(f"size_bytes is {size_bytes}; it must be 0 or more")
        if slice_bytes is not None and not slice_bytes > 0:
            raise PlanError(f"slice_bytes is {slice_bytes}; it must be above 0")
        chunks = self.chunks(size_bytes)
        if slice_bytes is not None:
            return self.sliced(chunks, slice_bytes)
        best = self.sliced(chunks, max(chunks))
        if self.saturates(chunks, best):
            return best
        tried, searched = best, self.searched
        if FEW_STEPS < rounds * len(self.graph.waits) <= searched:
            searched //= 4
            tried = self.sliced(chunks, tried.slice_bytes / rounds)
            best = min(best, tried, key=lambda each: each.seconds)
        while len(self.graph.waits) * 2 * tried.rounds <= searched:
            tried = self.sliced(chunks, tried.slice_bytes / 2)
            if tried.seconds <= WORTHWHILE * best.seconds:
                best = tried
            elif tried.slice_bytes < min(chunks) / 2:  # else narrow channels are not sliced yet
                break
        return best

    def chunks(self, size_bytes: float) -> list[float]:
        """Bytes of a chunk, by channel."""
        if min((min(channel.share, channel.chunks) for channel in self.plan.channels), default=0) < 1:
            raise wrong(self.plan, "it needs channels, each with a share and chunks of at least 1")
        blocks = layout(self.plan.collective, self.plan.size).blocks
        block = size_bytes / (self.plan.size if blocks > 1 else 1)
        total = sum(channel.share for channel in self.plan.channels)
        return [block * channel.share / total / channel.chunks for channel in self.plan.channels]

    def saturates(self, chunks: Sequence[float], whole: Simulated) -> bool:
        """Whether the busiest link works all the time when chunks are sent whole, but for latencies."""
        enough = max(whole.link_busy_seconds, default=0.0) / SATURATED
        return whole.seconds <= enough or self.walk([[chunk] for chunk in chunks], latencies=False) <= enough

    def sliced(self, chunks: Sequence[float], slice_bytes: float) -> Simulated:
        """In slices of `slice_bytes`, the last of a chunk being what is left."""
        graph = self.graph
        slices = self.cut(chunks, slice_bytes)
        rounds = list(map(len, slices))
        busy = [0.0] * len(self.capacity)
        for chunk, per_byte in zip(chunks, graph.busy, strict=True):
            for link, seconds in per_byte.items():
                busy[link] += seconds * chunk
        return Simulated(
            seconds=self.walk(slices),
            link_bytes=tuple(map(operator.mul, busy, self.capacity)),
            link_busy_seconds=tuple(busy),
            messages=sum(map(operator.mul, graph.messages, rounds)),
            steps=sum(map(operator.mul, graph.steps, rounds)),
            rounds=max(rounds),
            slice_bytes=slice_bytes,
        )

    def cut(self, chunks: Sequence[float], slice_bytes: float) -> list[list[float]]:
        """Bytes of the slices of a chunk, by channel."""
        slices = []
        for chunk in chunks:
            number = chunk / slice_bytes if slice_bytes > 0 else 1.0
            if (steps := number * len(self.graph.waits)) > MOST_STEPS:
                raise PlanError(
                    f"{describe(self.plan)} in slices of {slice_bytes:g} bytes has {steps:.3g} steps; at most "
                    f"{MOST_STEPS} are simulated: use larger slices"
                )
            full = max(0, math.ceil(number * (1 - 1e-12)) - 1)
            slices.append([slice_bytes] * full + [chunk - full * slice_bytes])
        return slices

    def walk(
        self,
        slices: Sequence[Sequence[float]],
        latencies: bool = True,
        note_hop: NoteHop | None = None,
    ) -> float:
        """Execute all rounds, given the bytes of each by channel; when the last step has ended.

        The loop takes events in the order of time: that a step can run (its number, ``round * size + step``), or that a
        message reaches a link, having waited for one before.
        """
        graph, size, rounds = self.graph, len(self.graph.waits), max(map(len, slices))
        channel, chained, first, reader, ways = graph.channel, graph.chained, graph.first, graph.reader, graph.way
        depth = slot_depth(self.plan.size)
        followers = graph.followers(depth, WINDOW) if rounds > 1 or graph.most_sends > depth else {}
        waits = _waits(graph.waits, followers, rounds)
        due = [0.0] * len(waits)  # when the last thing has come that a step waits for, as far as is known
        events, note = _agenda()

        def come(time: float, number: int) -> None:
            """One of the things that a step waits for will be there at `time`."""
            if time > due[number]:
                due[number] = time
            waits[number] -= 1
            if waits[number] == 0:
                note(due[number], number)

        send = _sender(len(self.capacity), note, come, latencies, note_hop)
        for number, left in enumerate(waits):
            if left == 0 and number // size < len(slices[channel[number % size]]):
                note(0.0, number)
        ended, now = 0, 0.0
        for now, happening in events:
            for event in happening:  # to which the loop adds
                if isinstance(event, tuple):
                    send(event, now)
                    continue
                ended += 1
                at, step = divmod(event, size)
                lengths = slices[channel[step]]
                for message in range(first[step], first[step + 1]):
                    send((ways[message], 0, lengths[at], now, event - step + reader[message]), now)
                if chained[step + 1]:
                    come(now, event + 1)
                if followers:
                    for follower, later in followers.get(step, ()):
                        if at + later < len(lengths):
                            come(now, event - step + follower + later * size)
        if ended < sum(map(operator.mul, graph.steps, map(len, slices))):
            raise wrong(self.plan, "its ranks wait for one another")
        return now


def _agenda() -> tuple[Iterator[tuple[float, list[int | _Message]]], Callable[[float, int | _Message], None]]:
    """The times and what happens then, in the order in which it was noted; and what notes an event."""
    agenda: dict[float, list[int | _Message]] = {}
    times: list[float] = []  # a heap

    def note(time: float, event: int | _Message) -> None:
        events = agenda.get(time)
        if events is None:
            agenda[time] = [event]
            heappush(times, time)
        else:
            events.append(event)

    def events() -> Iterator[tuple[float, list[int | _Message]]]:
        while times:
            now = heappop(times)
            yield now, agenda[now]
            del agenda[now]

    return events(), note


def _sender(
    count: int,
    note: Callable[[float, int | _Message], None],
    come: Callable[[float, int], None],
    latencies: bool,
    note_hop: NoteHop | None,
) -> Callable[[_Message, float], None]:
    """What takes a message over the links of its way, as far as these are free, and notes when it goes on or comes."""
    free = [0.0] * count  # when a link has served all that has reached it

    def send(message: _Message, now: float) -> None:
        way, hop, length, served, receiver = message
        links, latency = way
        while hop < len(links):
            link, seconds = links[hop]
            begin = max(now, free[link])
            free[link] = begin + seconds * length
            served = max(served, free[link])
            if note_hop:
                note_hop(way, link, begin, free[link], receiver)
            hop += 1
            if begin > now and hop < len(links):
                note(begin, (way, hop, length, served, receiver))
                return
        come(served + latency if latencies else served, receiver)

    return send


def _waits(within: Sequence[int], followers: Mapping[int, Sequence[tuple[int, int]]], rounds: int) -> list[int]:
    """For how many others each step of each round waits."""
    row, waits = list(within), []
    more: defaultdict[int, list[int]] = defaultdict(list)  # steps, by the first round in which they wait for one more
    for each in followers.values():
        for follower, later in each:
            more[later].append(follower)
    for number in range(rounds):
        for follower in more[number]:
            row[follower] += 1
        waits += row
    return waits
