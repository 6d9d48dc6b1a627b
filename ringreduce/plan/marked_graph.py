"""One round of a plan as a marked graph: which step waits for which, and each message's way over the network."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan.model import Plan
from ringreduce.plan.network import Route
from ringreduce.plan.symbolic import describe


class Way(NamedTuple):
    """A route as messages take it: (link, seconds per byte of the message) of each link, and the latency."""

    links: tuple[tuple[int, float], ...]
    latency: float


@dataclass(frozen=True)
class Graph:
    """One round of a plan, flat.  Steps are numbered by channel, rank and program, messages by the step that sends."""

    channel: list[int]
    rank: list[int]
    chained: bytearray
    """Per step, and 0 at the end: whether the step before it is of the same program."""
    waits: list[int]
    """Per step: for how many others it waits, those that send to it and the one before it."""
    first: list[int]
    """Per step, and the count at the end: the number of the first message that it sends, or that comes after it."""
    reader: list[int]
    """Per message: the step that receives it."""
    way: list[Way]
    """Per message."""
    steps: list[int]
    """Per channel."""
    messages: list[int]
    """Per channel."""
    busy: list[Mapping[int, float]]
    """Per channel: the seconds that each link works for messages of one byte."""

    @property
    def most_sends(self) -> int:
        """Slots that a rank takes in a round, at the most."""
        return max((len(sending) for _, _, sending in self.programs()), default=0)

    def programs(self) -> Iterator[tuple[int, int, list[int]]]:
        """The first step of each program that has any, the one after its last, and those of its steps that send."""
        for begin, end in pairwise(step for step, chained in enumerate(self.chained) if not chained):
            yield begin, end, [step for step in range(begin, end) if self.first[step] < self.first[step + 1]]

    def followers(self, depth: int, window: int) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Who waits for a step because of the window or of a slot: (step, rounds later), by the step waited for."""
        followers: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin, end, sending in self.programs():
            followers[end - 1].append((begin, window))
            for number, step in enumerate(sending):
                rounds, next_there = divmod(number + depth, len(sending))  # who takes the same slot next
                for message in range(self.first[step], self.first[step + 1]):
                    followers[self.reader[message]].append((sending[next_there], rounds))
        return followers


def compile_round(
    plan: Plan,
    route: Callable[[int, int], Route],
    capacity: Sequence[float],
    taken_as: Callable[[int, int], tuple[int, int]] = lambda source, target: (source, target),
) -> Graph:
    """`taken_as(source, target)` is the message, as (source, target), that stands for the one which `target` receives
    from `source`; for symmetric plans it is one of rank 0's."""
    graph = Graph([], [], bytearray(), [], [0], [], [], [], [], [])
    ways: dict[tuple[int, int], Way] = {}
    for number, channel in enumerate(plan.channels):
        begin, sent = len(graph.waits), len(graph.way)
        unread: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)  # messages by (source, target)
        for rank, program in enumerate(channel.programs):
            for at, step in enumerate(program):
                graph.channel.append(number)
                graph.rank.append(rank)
                graph.chained.append(at > 0)
                graph.waits.append(len(step.recv) + (at > 0))
                for peer in step.send:
                    if (rank, peer) not in ways:
                        if not 0 <= peer < plan.size:
                            raise wrong(plan, f"rank {rank} sends to rank {peer}, which there is not")
                        ways[rank, peer] = _way(route(rank, peer), capacity)
                    unread[taken_as(rank, peer)].append(len(graph.way))
                    graph.way.append(ways[rank, peer])
                graph.first.append(len(graph.way))
        graph.steps.append(len(graph.waits) - begin)
        graph.messages.append(len(graph.way) - sent)
        graph.reader.extend([-1] * graph.messages[-1])
        steps = ((rank, step) for rank, program in enumerate(channel.programs) for step in program)
        for at, (rank, step) in enumerate(steps, begin):
            for peer in step.recv:
                if not unread[peer, rank]:
                    raise wrong(plan, f"rank {rank} receives more from rank {peer} than that sends to it")
                graph.reader[unread[peer, rank].popleft()] = at
        for (source, target), left in unread.items():
            if left:
                raise wrong(plan, f"rank {target} does not receive all that rank {source} sends to it")
        busy: defaultdict[int, float] = defaultdict(float)
        for way, count in Counter(graph.way[sent:]).items():
            for link, seconds in way.links:
                busy[link] += seconds * count
        graph.busy.append(busy)
    graph.chained.append(0)
    return graph


def _way(route: Route, capacity: Sequence[float]) -> Way:
    for link, _ in route.links:
        if capacity[link] <= 0:
            raise PlanError(f"link {link} of the network has a capacity of {capacity[link]}; it must be above 0")
    return Way(tuple((link, share / capacity[link]) for link, share in route.links), route.latency)


def wrong(plan: Plan, what: str) -> PlanError:
    return PlanError(f"{describe(plan)} cannot be simulated: {what}; `verify` says which step is wrong")
