"""Rings and trees as plans' orders and weights, and plans in stages: inside groups of ranks, and between these."""

import math
from collections.abc import Iterator, Sequence

from ringreduce.common.failures import TopologyError
from ringreduce.plan import Plan, build, hierarchical, ring, tree
from ringreduce.topology.bound import Partition
from ringreduce.topology.decompose import decompose
from ringreduce.topology.rings import Ring
from ringreduce.topology.routes import Routes, fabric_routes
from ringreduce.topology.trees import WeightedTree

DENOMINATORS = (*range(1, 101), 1000, 10000)


def weights(widths: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the widths, as small as four digits of precision allow."""
    widest = max(widths)
    for top in DENOMINATORS:
        rounded = [max(1, round(width / widest * top)) for width in widths]
        if all(
            math.isclose(each / top, width / widest, rel_tol=1e-4) for each, width in zip(rounded, widths, strict=True)
        ):
            break
    divisor = math.gcd(*rounded)
    return [each // divisor for each in rounded]


def directed(rings: Sequence[Ring]) -> list[tuple[tuple[int, ...], int]]:
    """Every ring in each of its directions, with its weight."""
    return [
        (order, weight)
        for each, weight in zip(rings, weights([each.width for each in rings]), strict=True)
        for order in ((each.order, each.order[::-1]) if each.both_ways else (each.order,))
    ]


def weighted(trees: Sequence[WeightedTree]) -> list[tuple[tree.Tree, int]]:
    return [(each.parents, w) for each, w in zip(trees, weights([each.width for each in trees]), strict=True)]


def _groups(routes: Routes) -> Partition:
    """Ranks that are close to each other: of a host, else joined by links of their own, else of a NUMA node; nothing if
    that gives one group, groups of one, or groups of several sizes."""
    nodes = [routes.graph.by_name[name] for name in routes.ranks]
    own = {rank: part[0] for part in fabric_routes(routes.graph).components for rank in part}
    numa = [(node.host, node.numa) for node in nodes]
    for keys in ([node.host for node in nodes], [own[rank] for rank in range(routes.size)], numa):
        groups = tuple(tuple(r for r, mine in enumerate(keys) if mine == key) for key in dict.fromkeys(keys))
        if len(groups) > 1 and len(groups[0]) > 1 and len({len(group) for group in groups}) == 1:
            return groups
    return ()


def hierarchies(routes: Routes) -> Iterator[tuple[Plan, str]]:
    groups = _groups(routes)
    if not groups:
        return
    try:
        inside = list(inside_groups(routes, groups))
    except TopologyError:  # a group is not connected by itself
        return
    why = f"in groups: {routes.words(groups)}"
    for name in ("ring", "halving_doubling") if len(groups) > 2 else ("ring",):  # of two groups they are the same
        across = build("all_reduce", name, len(groups))
        stages = [hierarchical.Stages(scatter, across, gather, weight) for scatter, gather, weight in inside]
        yield hierarchical.all_reduce(groups, stages, f"hierarchical_{name}"), why


def inside_groups(routes: Routes, groups: Partition) -> Iterator[tuple[Plan, Plan, int]]:
    """The first group's rings or trees, by places, which the others are taken to have too."""
    if not routes.graph.gpus:
        one = ((tuple(range(len(groups[0]))), 1),)
        yield ring.reduce_scatter(one), ring.all_gather(one), 1
        return
    first = decompose(routes.graph.select(groups[0]))
    for order, weight in () if first.trees else directed(first.rings):
        yield ring.reduce_scatter(((order, 1),)), ring.all_gather(((order, 1),)), weight
    for shape, weight in weighted(first.trees) if first.trees else ():
        yield tree.reduce_scatter_over(((shape, 1),)), tree.all_gather_over(((shape, 1),)), weight
