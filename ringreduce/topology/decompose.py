"""Decide: the links of a machine as rings or trees for all_reduce, with the reason and the bound.

1. The ranks use the links that accelerators have for each other, if these join all of them, else every link: what PCIe
   would add to NVLink is little, and shared with all other traffic of the host.
2. Rings, if they come up to the bound: they need the fewest steps that a channel can have.
3. Else spanning trees, which always come up to the bound where links are between ranks, if they beat the rings.

Other collectives run on the same rings and trees; how much that leaves, their own bounds say.

Pure: with one version of SciPy, the same graph gives the same answer everywhere.
"""

from dataclasses import dataclass
from functools import lru_cache

from ringreduce.common.failures import TopologyError
from ringreduce.topology.bound import Bound, Cuts, Partition, bound
from ringreduce.topology.graph import FABRIC, LinkGraph
from ringreduce.topology.rings import Ring, pack_rings, transfers
from ringreduce.topology.routes import Routes, all_routes, fabric_routes
from ringreduce.topology.trees import WeightedTree, pack_trees

AS_GOOD = 0.999
"""The share of the bound, or of the other's bandwidth, from which rings are preferred."""

MOST_TREE_RANKS = 32
"""Beyond these, trees are packed only where there is no ring: the linear program grows with the square of the ranks."""


@dataclass(frozen=True)
class Decomposition:
    """Rings, or trees, over some links, made for all_reduce.  Where `trees` are there, they beat the rings."""

    cuts: Cuts
    """Of the links that are used, and their routes."""
    rings: tuple[Ring, ...]
    trees: tuple[WeightedTree, ...]
    bound: Bound
    partitions: tuple[Partition, ...]
    """Those that the trees' prices point at, for bounds of other collectives."""
    why_links: str
    """Why these links are used."""
    why_shape: str
    """Why rings, or trees."""

    @property
    def routes(self) -> Routes:
        return self.cuts.routes


@lru_cache(maxsize=64)
def decompose(graph: LinkGraph) -> Decomposition:
    """The decomposition for the GPUs of the graph, or its cores if it has none.

    Raises TopologyError if there is no path between two of them.
    """
    routes, why = _links_to_use(graph)
    cuts = Cuts(routes)
    limit = bound("all_reduce", cuts)
    if routes.size == 1:
        return Decomposition(cuts, (), (), limit, (), why, "nobody to talk to")
    rings = pack_rings(routes, limit.bandwidth)
    by_rings = sum(ring.bandwidth for ring in rings)
    if by_rings >= AS_GOOD * limit.bandwidth or (rings and routes.size > MOST_TREE_RANKS):
        return Decomposition(cuts, rings, (), limit, (), why, _about_rings(routes, rings))
    packing = pack_trees(routes)
    limit = bound("all_reduce", cuts, packing.tight)
    if rings and by_rings >= AS_GOOD * packing.bandwidth:
        return Decomposition(cuts, rings, (), limit, packing.tight, why, _about_rings(routes, rings))
    instead = f"the best rings found reach {by_rings:.4g} GB/s" if rings else "no ring was found"
    several = f"{len(packing.trees)} spanning trees" if len(packing.trees) > 1 else "one spanning tree"
    about = f"{several}, since {instead}" if packing.trees else f"{instead}, and no tree has links with two directions"
    return Decomposition(cuts, rings, packing.trees, limit, packing.tight, why, about)


def _links_to_use(graph: LinkGraph) -> tuple[Routes, str]:
    own = fabric_routes(graph)
    kinds = " and ".join(kind.value for kind in FABRIC if any(link.kind is kind for link in own.links))
    if own.size == 1 or len(own.components) == 1:
        return own, f"{kinds} joins all {own.size} GPUs" if kinds else "one rank"
    whole = all_routes(graph)
    if len(whole.components) > 1:
        parts = whole.words(whole.components)
        raise TopologyError(f"{graph.name}: there is no path between {parts}; add the links that join them")
    used = (whole.links[at] for at in sorted({at for shares in whole.between.values() for at, _ in shares}))
    others = ", ".join(dict.fromkeys(link.kind.value for link in used if link.kind not in FABRIC))
    if not graph.gpus:
        return whole, f"over {others}"
    parts = own.words(own.components)
    where = f"between {parts}" if kinds or own.size <= 3 else "between any of the GPUs"
    return whole, f"no {kinds or 'NVLink or XGMI'} path {where}: over {others}{' as well' if kinds else ''}"


def _about_rings(routes: Routes, rings: tuple[Ring, ...]) -> str:
    loads = routes.loads(transfers(rings))
    used = [(load, link) for load, link in zip(loads, routes.links, strict=True) if load > 0]
    full = sum(1 for load, link in used if load >= AS_GOOD * link.capacity)
    lanes = sum(link.lanes for load, link in used if load >= AS_GOOD * link.capacity)
    ways = "in both directions" if any(ring.both_ways for ring in rings) else "in one direction"
    several = f"{len(rings)} rings" if len(rings) > 1 else "one ring"
    return f"{several} {ways}, filling {full} of {len(routes.links)} directed links ({lanes} lanes)"
