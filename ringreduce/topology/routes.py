"""Routes: which links a transfer between two ranks takes.

Neither a PCIe tree nor an NVSwitch lets the sender choose, so every two ranks have one route: the shortest, by hops,
through nodes that are not ranks themselves; over PCIe, GPUs without access to each other's memory meet in a CPU's. Over
several equally short paths (several NVSwitches, two NICs beside a GPU) traffic is spread in proportion to what each of
them carries. Inside a host no route leaves it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ringreduce.common.failures import TopologyError
from ringreduce.plan.network import LikeGroups, Network, Route
from ringreduce.topology.graph import FABRIC, Link, LinkGraph, LinkKind, NodeKind

LATENCY: Mapping[LinkKind, float] = {
    LinkKind.NVLINK: 2e-6,
    LinkKind.XGMI: 2e-6,
    LinkKind.C2C: 4e-6,
    LinkKind.PCIE: 4e-6,
    LinkKind.SMP: 5e-6,
    LinkKind.NETWORK: 15e-6,
    LinkKind.MEMORY: 0.5e-6,
}
"""Seconds from a send until its receiver sees the first bytes; of a route, its slowest link's.  Orders of magnitude, to
choose between algorithms with few and with many hops: not measured."""

Share = tuple[int, float]
"""A link by its number in `Routes.links`, and the share of a transfer's bytes that crosses it."""


@dataclass(frozen=True)
class Routes:
    """The ranks of a graph, the links that their transfers may take, and the routes between them.

    `ranks` are the names of the graph's GPUs, or of its cores where it has no GPUs; rank `r` of a plan is ``ranks[r]``.
    """

    graph: LinkGraph
    ranks: tuple[str, ...]
    links: tuple[Link, ...]
    between: dict[tuple[int, int], tuple[Share, ...]]
    """Per ordered pair of ranks that have one."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def words(self, parts: Sequence[Sequence[int]]) -> str:
        """Sets of ranks, by name: "GPU0-3 | GPU4-7". Of more than eight, the first four."""
        few = parts if len(parts) <= 8 else parts[:4]
        names = [" ".join(in_runs(self.ranks[rank] for rank in part)) for part in few]
        return " | ".join(names + [f"... ({len(parts)} in all)"] * (len(few) < len(parts)))

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that reach each other both ways, other ranks passing on; each ascending."""
        after: dict[int, list[int]] = {rank: [] for rank in range(self.size)}
        before: dict[int, list[int]] = {rank: [] for rank in range(self.size)}
        for one, other in self.between:
            after[one].append(other)
            before[other].append(one)

        def reached(start: int, near: dict[int, list[int]]) -> set[int]:
            found = {start}
            for rank in (todo := [start]):
                todo += (fresh := set(near[rank]) - found)
                found |= fresh
            return found

        left, parts = set(range(self.size)), []
        while left:
            part = reached(min(left), after) & reached(min(left), before)
            left -= part
            parts.append(tuple(sorted(part)))
        return tuple(parts)

    @cached_property
    def following(self) -> Mapping[str, tuple[Link, ...]]:
        """The links that leave each node, of those that may be taken."""
        return {node: tuple(link for link in self.links if link.src == node) for node in self.graph.by_name}

    def loads(self, transfers: dict[tuple[int, int], float]) -> list[float]:
        """What crosses each link if so much goes from rank to rank."""
        crossing = [0.0] * len(self.links)
        for pair, amount in transfers.items():
            for link, share in self.between[pair]:
                crossing[link] += share * amount
        return crossing

    @cached_property
    def like_hosts(self) -> LikeGroups | None:
        """The hosts, if every one has the same ranks and links, and all are on the same switches of the network, whose
        links to each other they share."""
        node, number = self.graph.by_name, {(link.src, link.dst): at for at, link in enumerate(self.links)}
        hosts = [node[name].host for name in self.ranks]
        places = hosts.count(hosts[0])

        def first(name: str) -> str:
            at = node[name]
            return name if at.kind is NodeKind.NETWORK else f"host{hosts[0]}/{name.removeprefix(f'host{at.host}/')}"

        if [first(name) for name in self.ranks] != [self.ranks[at % places] for at in range(self.size)]:
            return None
        images = []
        for link in self.links:
            shared = {node[link.src].kind, node[link.dst].kind} == {NodeKind.NETWORK}
            image = -1 if shared else number.get((first(link.src), first(link.dst)))
            if image is None or (not shared and self.links[image].capacity != link.capacity):
                return None
            images.append(image)
        return LikeGroups(places, tuple(images))

    def network(self) -> Network:
        """The same for simulation: bytes per second, and the latencies of the links' kinds."""

        def route(source: int, target: int) -> Route:
            shares = self.between[source, target]
            latency = max((LATENCY[self.links[link].kind] for link, _ in shares), default=0.0)
            return Route(shares, latency)

        names = tuple(f"{link.src} -> {link.dst}" for link in self.links)
        return Network(names, tuple(1e9 * link.capacity for link in self.links), route)


def fabric_routes(graph: LinkGraph) -> Routes:
    """Over the links that accelerators have for each other; ranks that these do not join have no route."""
    return _routes(graph, FABRIC)


def all_routes(graph: LinkGraph) -> Routes:
    """Over every link.  Ranks that the accelerators' own links join keep to those."""
    whole = _routes(graph, tuple(LinkKind))
    own = _routes(graph, FABRIC)
    number = {(link.src, link.dst): at for at, link in enumerate(whole.links)}
    moved = [number[link.src, link.dst] for link in own.links]
    between = {pair: tuple((moved[link], share) for link, share in shares) for pair, shares in own.between.items()}
    return Routes(graph, whole.ranks, whole.links, {**whole.between, **between})


def _routes(graph: LinkGraph, kinds: Collection[LinkKind]) -> Routes:
    if not graph.ranks:
        raise TopologyError(f"{graph.name}: it has neither GPUs nor cores, so no rank could run there")
    ranks = tuple(node.name for node in graph.ranks)
    links = tuple(link for link in graph.links if link.kind in kinds)
    leaving: dict[str, list[int]] = {node.name: [] for node in graph.nodes}
    for at, link in enumerate(links):
        leaving[link.src].append(at)
    between = {}
    for source, name in enumerate(ranks):
        paths = _shortest_paths(graph, links, leaving, name)
        blocked = LinkKind.PCIE in kinds and not all(graph.by_name[rank].peer_access for rank in ranks)
        over_memory = _shortest_paths(graph, links, leaving, name, over_memory=True) if blocked else paths
        for target, other in enumerate(ranks):
            peers = graph.by_name[name].peer_access and graph.by_name[other].peer_access
            if target != source and (found := (paths if peers else over_memory).get(other)):
                between[source, target] = _spread(links, found)
    return Routes(graph, ranks, links, between)


Path = tuple[int, ...]


def _shortest_paths(
    graph: LinkGraph, links: Sequence[Link], leaving: dict[str, list[int]], source: str, over_memory: bool = False
) -> dict[str, list[Path]]:
    """All shortest paths from a rank to each other node, those inside the host not leaving it.  With `over_memory`,
    only those that pass a CPU."""
    home = graph.by_name[source].host
    found: dict[str, list[Path]] = {}
    for inside in (True, False):
        start = source, not over_memory  # a node, and whether the way there has passed what it must
        hops = {start: 0}
        paths: dict[tuple[str, bool], list[Path]] = {start: [()]}
        todo = deque([start])
        while todo:
            here = node, passed = todo.popleft()
            if here != start and graph.by_name[node].kind in (NodeKind.GPU, NodeKind.CORE):
                continue  # ranks do not forward what is not theirs
            for at in leaving[node]:
                end = graph.by_name[links[at].dst]
                elsewhere = end.host != home and end.kind is not NodeKind.NVSWITCH  # which several hosts may share
                if inside and (elsewhere or end.kind in (NodeKind.NIC, NodeKind.NETWORK)):
                    continue
                after = end.name, passed or end.kind is NodeKind.CPU
                if after not in hops:
                    hops[after], paths[after] = hops[here] + 1, []
                    todo.append(after)
                if hops[after] == hops[here] + 1:
                    paths[after] += [(*path, at) for path in paths[here]]
        found = {**{node: ways for (node, passed), ways in paths.items() if passed}, **found}
    return found


def _spread(links: Sequence[Link], paths: Sequence[Path]) -> tuple[Share, ...]:
    width = [min(links[at].capacity for at in path) for path in paths]
    crossing: dict[int, float] = {}
    for path, wide in zip(paths, width, strict=True):
        for at in path:
            crossing[at] = crossing.get(at, 0.0) + wide / sum(width)
    return tuple(sorted(crossing.items()))


def in_runs(names: Iterable[str]) -> list[str]:
    """Three or more names in a row that count up become one: "GPU0", "GPU1", "GPU2" become "GPU0-2"."""
    numbered = [(stem := name.rstrip("0123456789"), name.removeprefix(stem)) for name in names]
    found: list[str] = []
    # In a run, a name's number and its place among the names grow alike.
    for _, run in groupby(enumerate(numbered), lambda at: (at[1][0], int(at[1][1]) - at[0] if at[1][1] else None)):
        same = [each for _, each in run]
        (stem, first), (_, last) = same[0], same[-1]
        if len(same) > 2 and first:
            found.append(f"{stem}{first}-{last}")
        else:
            found += [stem + number for stem, number in same]
    return found
