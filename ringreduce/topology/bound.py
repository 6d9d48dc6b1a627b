"""Bounds: how fast a collective can be at most over given links, and the cut that proves it.

All bounds count what must cross between parts of the ranks, whatever the algorithm, as long as only ranks combine and
copy, over the links that are used; `in_switches` counts what switches that combine and copy (NVLS) can do as well.
`S` is the size of the whole tensor, of all_to_all of one rank's, ``out(U)`` what
can leave the ranks `U` in a second over any paths; rank 0 is the root.

all_reduce: with the ranks in `k` parts, each part one big rank, at least ``2 (k - 1) S`` bytes leave parts in sum
(Patarasuk and Yuan 2009), so the bandwidth is at most ``sum(out(part)) / (2 (k - 1))``.  On full-duplex links between
ranks the minimum over all partitions is reached, by packing spanning trees (Tutte 1961, Nash-Williams 1961): each tree
reduces on one direction of its links and broadcasts on the other.  Where switches combine, only partitions count that
leave the ranks of such a switch together, and single cuts: all of `S` leaves any ranks, and enters them.
all_gather: ``|U| / n`` of `S` leaves any ranks `U`, the rest of it enters them; reduce_scatter: the other way round.
broadcast, reduce: all of `S` leaves any set with the root (enters it).
all_to_all, gather, scatter: a cut carries what ranks on one side have for those on the other.

The number of partitions is astronomic, so some are tried: every one is a proof, the best of them is the bound; of
single cuts, `tightest` finds the best of all. Those that matter follow from the structure: single ranks, hosts and
switches, what is left when the widest connections are merged first, and what the prices of the tree packing show to be
full (`trees.Packing.prices`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ringreduce.topology.graph import LinkKind, NodeKind
from ringreduce.topology.routes import Routes

Partition = tuple[tuple[int, ...], ...]
"""Disjoint sets of ranks that make up all of them, each ascending."""


@dataclass(frozen=True)
class Bound:
    """No algorithm moves more than `bandwidth` GB/s of a collective over these links; `proof` is the cut, in words."""

    bandwidth: float
    partition: Partition
    proof: str


class Cuts:
    """What can leave and enter sets of ranks over any paths, in GB/s."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        self._leaving: dict[tuple[int, ...], float] = {}

    def leaving(self, part: tuple[int, ...]) -> float:
        """From these ranks to all others together."""
        if part not in self._leaving:
            self._leaving[part] = self.between(part, self.others(part))
        return self._leaving[part]

    def others(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that are not in the part."""
        inside = set(part)
        return tuple(rank for rank in range(self.routes.size) if rank not in inside)

    def between(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> float:
        """The maximum flow from one set of ranks to a disjoint one; ranks in neither do not forward."""
        key = sources, targets
        if key not in self._known:
            self._known[key] = self._flow(sources, targets)
        return self._known[key]

    def _flow(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> float:
        side = {self.routes.ranks[rank]: "sources" for rank in sources}
        side |= {self.routes.ranks[rank]: "targets" for rank in targets}
        idle = {name for name in self.routes.ranks if name not in side}
        direct, through = 0.0, dict[tuple[str, str], float]()
        for link in self.routes.links:
            ends = side.get(link.src, link.src), side.get(link.dst, link.dst)
            if ends == ("sources", "targets"):
                direct += link.capacity
            elif ends[0] != ends[1] and link.src not in idle and link.dst not in idle:
                through[ends] = through.get(ends, 0.0) + link.capacity
        return direct + (_maximum_flow(through, "sources", "targets")[0] if through else 0.0)

    @cached_property
    def widest_first(self) -> tuple[Partition, ...]:
        """Partitions from single ranks on; the next two parts to be merged have the widest routes between them, in the
        mean over their ranks."""
        size = self.routes.size
        wide = np.zeros((size, size))
        for pair, shares in self.routes.between.items():
            narrowest = min(self.routes.links[link].capacity / share for link, share in shares)
            wide[pair] += narrowest
            wide[pair[::-1]] += narrowest
        np.fill_diagonal(wide, -1.0)
        parts: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in range(size)}
        found: list[Partition] = [tuple(parts.values())]
        while len(parts) > 2:
            one, other = sorted(divmod(int(wide.argmax()), size))
            mine, its = len(parts[one]), len(parts[other])
            wide[one] = wide[:, one] = (mine * wide[one] + its * wide[other]) / (mine + its)
            wide[other], wide[:, other], wide[one, one] = -1.0, -1.0, -1.0
            parts[one] = tuple(sorted(parts[one] + parts.pop(other)))
            found.append(tuple(sorted(parts.values())))
        return tuple(found)


def bound(
    collective: str, cuts: Cuts, tried: Iterable[Partition] = (), in_switches: bool = False, hosts: int = 1
) -> Bound:
    """The lowest of the bounds that the partitions give: the structural ones, and those in `tried`; for ranks alone, or
    with what switches can do.

    Infinite for a single rank, which moves nothing.  With `hosts`, all_reduce over so many that are alike: `cuts` are
    of the first, and of a second that is as wide as all others together.
    """
    routes = cuts.routes
    if routes.size == 1:
        return Bound(float("inf"), ((0,),), "one rank moves nothing")
    best: Bound | None = None
    partitions = dict.fromkeys((*_structural(routes), *cuts.widest_first, *tried))
    if hosts > 1:
        partitions = dict.fromkeys(part for each in partitions if (part := _of_first_half(each, routes.size)))
    domains = reducing_domains(routes) if in_switches else []
    tried_cuts: set[tuple[int, ...]] = set()
    for partition in partitions:
        for found in _bounds(collective, cuts, partition, domains, hosts, tried_cuts):
            if best is None or found.bandwidth < best.bandwidth * (1 - 1e-9):
                best = found
    assert best is not None
    return best


def _of_first_half(partition: Partition, size: int) -> Partition | None:
    """The parts of the first host, and all of the second in one; None if a part has ranks of both."""
    first = tuple(part for part in partition if part[0] < size // 2)
    second = tuple(range(size // 2, size))
    return (*first, second) if sum(map(len, first)) == size // 2 and max(map(max, first)) < size // 2 else None


def _structural(routes: Routes) -> Iterator[Partition]:
    """By the network's switches, by host, by NUMA node and by the switch next to a rank, where that gives more than one
    part."""
    nodes = [routes.graph.by_name[name] for name in routes.ranks]
    nearest: dict[str, str] = {}
    for link in routes.links:
        if link.dst not in routes.ranks:
            nearest.setdefault(link.src, link.dst)
    uplinks: dict[int, set[str]] = {}
    for link in routes.links:
        if link.kind is LinkKind.NETWORK and routes.graph.by_name[link.src].kind is NodeKind.NIC:
            uplinks.setdefault(routes.graph.by_name[link.src].host, set()).add(link.dst)
    keys: tuple[Sequence[Any], ...] = (
        [frozenset(uplinks.get(node.host, ())) for node in nodes],
        [node.host for node in nodes],
        [(node.host, node.numa) for node in nodes],
        [nearest.get(node.name, node.name) for node in nodes],
    )
    for key in keys:
        parts = tuple(tuple(r for r, mine in enumerate(key) if mine == value) for value in dict.fromkeys(key))
        if len(parts) > 1:
            yield parts


def reducing_domains(routes: Routes) -> list[frozenset[int]]:
    """Of every switch that combines: the ranks with links to it; of such a network: all ranks."""
    of: dict[str, set[int]] = {
        node.name: set(range(routes.size)) if node.kind is NodeKind.NETWORK else set()
        for node in routes.graph.nodes
        if node.reduces and any(link.dst == node.name for link in routes.links)
    }
    number = {name: rank for rank, name in enumerate(routes.ranks)}
    for link in routes.links:
        if link.dst in of and link.src in number:
            of[link.dst].add(number[link.src])
    return [frozenset(domain) for domain in of.values() if domain]


def _bounds(
    collective: str,
    cuts: Cuts,
    partition: Partition,
    domains: Sequence[frozenset[int]],
    hosts: int,
    tried: set[tuple[int, ...]],
) -> Iterator[Bound]:
    """What a partition proves, and what its parts prove one by one, except those in `tried`, to which they are added.

    `domains` are the ranks of each switch that combines, where that counts.
    """
    size = cuts.routes.size
    if collective == "all_reduce" and not all(any(each <= set(part) for part in partition) for each in domains):
        collective = "one cut"
    if hosts > 1:
        partition = partition[:-1]
    if collective == "all_reduce":
        crossing, parts = hosts * sum(map(cuts.leaving, partition)), hosts * len(partition)
        alike = f", and the like on all {hosts} hosts," if hosts > 1 else ""
        leave = f"{crossing:.6g} GB/s leave {_words(cuts, partition)}{alike} in all"
        proof = f"{leave}, and {2 * (parts - 1)} times the bytes of the tensor must"
        yield Bound(crossing / (2 * (parts - 1)), partition, proof)
        collective = "one cut"
    for part in partition:
        if part in tried:
            continue
        tried.add(part)
        rest = cuts.others(part)
        a, b = len(part), len(rest)
        # What crosses the cut, out of the part and into it, as a share of S.
        out, into = {
            "one cut": (1.0, 1.0),
            "reduce_scatter": (b / size, a / size),
            "all_gather": (a / size, b / size),
            "broadcast": (float(0 in part), float(0 in rest)),
            "reduce": (float(0 in rest), float(0 in part)),
            "scatter": (b / size * (0 in part), a / size * (0 in rest)),
            "gather": (a / size * (0 in rest), b / size * (0 in part)),
            "all_to_all": (a * b / size, a * b / size),
        }[collective]
        two = _words(cuts, (part,))
        for share, flow, way in ((out, cuts.leaving(part), "leave"), (into, cuts.between(rest, part), "enter")):
            if share > 0:
                yield Bound(
                    flow / share,
                    (part, rest),
                    f"{flow:.6g} GB/s {way} {two}, and {share:.3g} times the bytes of the tensor must",
                )


def _words(cuts: Cuts, partition: Partition) -> str:
    if len(partition) == cuts.routes.size:
        return "each single rank"
    return cuts.routes.words(partition)


def tightest(collective: str, cuts: Cuts) -> Partition:
    """The cut with the lowest bound of all there are, for a collective whose blocks go to all, or from or to the root.

    A cut is guessed, that of the rank with the narrowest links, and what its bound asks of the links is tried as a
    flow: from the root, or from all ranks with a block each. A flow that falls short shows a cut with a lower bound,
    which is tried next.
    """
    links = {(link.src, link.dst): link.capacity for link in cuts.routes.links}
    if collective in ("reduce_scatter", "reduce", "gather"):  # on the way back
        links = {ends[::-1]: capacity for ends, capacity in links.items()}
    ranks, size = cuts.routes.ranks, cuts.routes.size
    rooted, single = collective in ("scatter", "gather"), collective in ("broadcast", "reduce")

    def proved(side: Collection[str]) -> float:
        """The bound of the cut around these nodes."""
        share = sum(rank in side for rank in ranks) / size
        crossing = sum(capacity for (one, other), capacity in links.items() if one in side and other not in side)
        return crossing / (1.0 if single else 1 - share if rooted else share)

    def flows(bandwidth: float) -> Iterator[set[str]]:
        """What flows of so much cut off."""
        if single:
            yield from (_maximum_flow(links, ranks[0], rank)[1] for rank in ranks[1:])
        elif rooted:
            wanted = {(rank, "all"): bandwidth / size for rank in ranks[1:]}
            yield _maximum_flow({**links, **wanted}, ranks[0], "all")[1]
        else:
            blocks = {("all", rank): bandwidth / size for rank in ranks}
            yield from (_maximum_flow({**links, **blocks}, "all", rank)[1] for rank in ranks)

    first = [{rank} for rank in ranks]
    if rooted or single:
        first = [{node for ends in links for node in ends} - {rank} for rank in ranks[1:]]
    found = min(first, key=proved)
    while lower := [side for side in flows(proved(found)) if 0 < sum(rank in side for rank in ranks) < size]:
        best = min(lower, key=proved)
        if proved(best) >= proved(found) * (1 - 1e-9):
            break
        found = best
    inside = tuple(rank for rank in range(size) if ranks[rank] in found)
    return inside, cuts.others(inside)


def _maximum_flow(flows: Mapping[tuple[str, str], float], source: str, target: str) -> tuple[float, set[str]]:
    """Over links with these capacities, in GB/s, and the nodes that the full links cut off with the source (Dinic)."""
    left: dict[str, dict[str, float]] = {source: {}, target: {}}
    for (src, dst), capacity in flows.items():
        left.setdefault(src, {})
        left.setdefault(dst, {})
        left[src][dst] = left[src].get(dst, 0.0) + capacity
        left[dst].setdefault(src, 0.0)
    least = 1e-12 * max(flows.values(), default=0.0)
    total = 0.0
    while True:
        level = {source: 0}
        for node in (todo := [source]):
            for after, capacity in left[node].items():
                if capacity > least and after not in level:
                    level[after] = level[node] + 1
                    todo.append(after)
        if target not in level:
            return total, set(level)
        ways = {node: [after for after in left[node] if level.get(after) == level[node] + 1] for node in level}
        path = [source]
        while path:
            node = path[-1]
            if node == target:
                hops = list(pairwise(path))
                amount = min(left[one][other] for one, other in hops)
                for one, other in hops:
                    left[one][other] -= amount
                    left[other][one] += amount
                total += amount
                full = next(at for at, (one, other) in enumerate(hops) if left[one][other] <= least)
                del path[full + 1 :]
            elif not ways[node]:
                path.pop()
                if path:
                    ways[path[-1]].pop()
            elif left[node][ways[node][-1]] > least:
                path.append(ways[node][-1])
            else:
                ways[node].pop()
