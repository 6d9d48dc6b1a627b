"""Bounds: how fast a collective can be at most over given links, and the cut that proves it.

All bounds count what must cross between parts of the ranks, whatever the algorithm, as long as only ranks combine and
copy, over the links that are used.  `S` is the size of the whole tensor, of all_to_all of one rank's, ``out(U)`` what
can leave the ranks `U` in a second over any paths; rank 0 is the root.

all_reduce: with the ranks in `k` parts, each part one big rank, at least ``2 (k - 1) S`` bytes leave parts in sum
(Patarasuk and Yuan 2009), so the bandwidth is at most ``sum(out(part)) / (2 (k - 1))``.  On full-duplex links between
ranks the minimum over all partitions is reached, by packing spanning trees (Tutte 1961, Nash-Williams 1961): each tree
reduces on one direction of its links and broadcasts on the other.
all_gather: ``|U| / n`` of `S` leaves any ranks `U`, the rest of it enters them; reduce_scatter: the other way round.
broadcast, reduce: all of `S` leaves any set with the root (enters it).
all_to_all, gather, scatter: a cut carries what ranks on one side have for those on the other.

The number of partitions is astronomic, so some are tried: every one is a proof, the best of them is the bound.  Those
that matter follow from the structure: single ranks, hosts and switches, what is left when the widest connections are
merged first, and what the prices of the tree packing show to be full (`trees.Packing.prices`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linprog

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

    def leaving(self, part: tuple[int, ...]) -> float:
        """From these ranks to all others together."""
        return self.between(part, self.others(part))

    def entering(self, part: tuple[int, ...]) -> float:
        """From all others to these ranks."""
        return self.between(self.others(part), part)

    def others(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that are not in the part."""
        return tuple(rank for rank in range(self.routes.size) if rank not in part)

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
        return direct + (_maximum_flow(through) if through else 0.0)

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


def bound(collective: str, cuts: Cuts, tried: Iterable[Partition] = ()) -> Bound:
    """The lowest of the bounds that the partitions give: the structural ones, and those in `tried`.

    Infinite for a single rank, which moves nothing.
    """
    routes = cuts.routes
    if routes.size == 1:
        return Bound(float("inf"), ((0,),), "one rank moves nothing")
    best: Bound | None = None
    for partition in dict.fromkeys((*_structural(routes), *cuts.widest_first, *tried)):
        for found in _bounds(collective, cuts, partition):
            if best is None or found.bandwidth < best.bandwidth * (1 - 1e-9):
                best = found
    assert best is not None
    return best


def _structural(routes: Routes) -> Iterator[Partition]:
    """By host, by NUMA node and by the switch next to a rank, where that gives more than one part."""
    nodes = [routes.graph.by_name[name] for name in routes.ranks]
    nearest: dict[str, str] = {}
    for link in routes.links:
        if link.dst not in routes.ranks:
            nearest.setdefault(link.src, link.dst)
    keys: tuple[Sequence[Any], ...] = (
        [node.host for node in nodes],
        [(node.host, node.numa) for node in nodes],
        [nearest.get(node.name, node.name) for node in nodes],
    )
    for key in keys:
        parts = tuple(tuple(r for r, mine in enumerate(key) if mine == value) for value in dict.fromkeys(key))
        if len(parts) > 1:
            yield parts


def _bounds(collective: str, cuts: Cuts, partition: Partition) -> Iterator[Bound]:
    size = cuts.routes.size
    if collective == "all_reduce":
        crossing, parts = sum(map(cuts.leaving, partition)), len(partition)
        proof = f"{crossing:.6g} GB/s leave {_words(cuts, partition)} in all, and {2 * (parts - 1)} S must"
        yield Bound(crossing / (2 * (parts - 1)), partition, proof)
        collective = "one cut"
    for part in partition:
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
        for share, flow, way in ((out, cuts.leaving(part), "leave"), (into, cuts.entering(part), "enter")):
            if share > 0:
                yield Bound(flow / share, (part, rest), f"{flow:.6g} GB/s {way} {two}, and {share:.3g} S must")


def _words(cuts: Cuts, partition: Partition) -> str:
    if len(partition) == cuts.routes.size:
        return "each single rank"
    return " | ".join(" ".join(cuts.routes.ranks[rank] for rank in part) for part in partition)


def _maximum_flow(flows: dict[tuple[str, str], float]) -> float:
    """From "sources" to "targets", over links with these capacities, in GB/s."""
    inner = sorted({name for ends in flows for name in ends} - {"sources", "targets"})
    place = {name: row for row, name in enumerate(inner)}
    kept = np.zeros((len(inner), len(flows)))  # what comes to a node between the two leaves it
    gain = np.zeros(len(flows))
    for column, (src, dst) in enumerate(flows):
        if src in place:
            kept[place[src], column] = -1.0
        if dst in place:
            kept[place[dst], column] = 1.0
        gain[column] = (src == "sources") - (dst == "sources")
    found = linprog(-gain, A_eq=kept, b_eq=np.zeros(len(inner)), bounds=[(0.0, most) for most in flows.values()])
    return -float(found.fun)
