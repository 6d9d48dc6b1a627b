"""Trees: spanning trees with widths that share the links of a machine, for all_reduce where rings leave links idle.

A tree of width `w` GB/s reduces to its root on one direction of its links and broadcasts from it on the other, at the
same time, since slices follow each other: it carries an all_reduce of `w` GB/s with `w` on every link and direction.
The most that trees can carry together is a linear program with one variable a tree (fractional packing; Blink, Wang et
al. 2020, does so by multiplicative weights).  There are too many trees to write it down, but the one that would help
most is always the minimum spanning tree under the links' current prices (the dual solution), so columns are made one at
a time; when no tree is cheaper than 1, the packing is optimal, and the prices prove it.  The simplex method ends in a
corner of the program, which has at most as many trees as there are full links; those that matter little are left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.plan.tree import Tree
from ringreduce.topology.bound import Partition
from ringreduce.topology.routes import Routes

MOST_COLUMNS = 2000
"""Trees that are priced at most; what has been packed by then is taken."""

GIVEN_UP = 0.005
"""The share of the optimum that fewer trees may cost."""

SLACK = 1e-7

Edges = tuple[tuple[int, int], ...]
"""Of a spanning tree: pairs of ranks, the lower one first, ascending."""


@dataclass(frozen=True)
class WeightedTree:
    """The parent of every rank, None for the root, and the width in GB/s."""

    parents: Tree
    width: float


@dataclass(frozen=True)
class Packing:
    """Trees that fit the links together, and the partitions that their prices point at, as candidates for a bound."""

    trees: tuple[WeightedTree, ...]
    tight: tuple[Partition, ...]

    @property
    def bandwidth(self) -> float:
        """Of an all_reduce over all trees, GB/s."""
        return sum(tree.width for tree in self.trees)


def pack_trees(routes: Routes) -> Packing:
    """The packing with the largest sum of widths, but for `GIVEN_UP`; empty if links with two directions do not join
    all ranks."""
    from scipy.optimize import linprog

    pairs = [pair for pair in sorted(routes.between) if pair[0] < pair[1] and pair[::-1] in routes.between]
    # usage[e, l]: what an edge of width 1 puts on link l, both ways.
    usage = np.array([routes.loads({pair: 1.0, pair[::-1]: 1.0}) for pair in pairs])
    capacity = np.array([link.capacity for link in routes.links])
    columns: dict[Edges, Any] = {}
    prices = 1.0 / capacity
    while True:
        edges, cost = _cheapest(routes.size, pairs, usage @ prices) if pairs else ((), 0.0)
        if len(edges) < routes.size - 1:
            return Packing((), ())
        if columns and (edges in columns or cost >= 1 - SLACK or len(columns) == MOST_COLUMNS):
            break
        columns[edges] = sum(usage[pairs.index(edge)] for edge in edges)
        matrix = np.array(list(columns.values())).T
        solution = linprog(-np.ones(len(columns)), A_ub=matrix, b_ub=capacity, method="highs-ds")
        prices = np.maximum(-solution.ineqlin.marginals, 0.0)
    shapes = list(columns)
    trees = tuple(
        WeightedTree(_rooted(routes.size, shapes[at]), width) for at, width in _fewer(matrix, capacity, solution.x)
    )
    return Packing(trees, tuple(_levels(routes.size, pairs, usage @ prices)))


def _cheapest(size: int, pairs: list[tuple[int, int]], costs: Any) -> tuple[Edges, float]:
    """The minimum spanning tree, ties broken by the order of the pairs."""
    order = np.argsort(costs, kind="stable")
    part = list(range(size))
    taken, total = [], 0.0
    for at in order:
        one, other = part[pairs[at][0]], part[pairs[at][1]]
        if one != other:
            part = [one if each == other else each for each in part]
            taken.append(pairs[at])
            total += float(costs[at])
    return tuple(sorted(taken)), total


def _fewer(matrix: Any, capacity: Any, widths: Any) -> list[tuple[int, float]]:
    """The columns of some trees and their widths: the narrowest are left out while the others can nearly make up."""
    from scipy.optimize import linprog

    enough = widths.sum() * (1 - GIVEN_UP)
    kept = [int(at) for at in np.argsort(-widths, kind="stable") if widths[at] > SLACK * capacity.max()]
    best = widths[kept]
    for at in kept[::-1]:
        others = [each for each in kept if each != at]
        if others:
            solution = linprog(-np.ones(len(others)), A_ub=matrix[:, others], b_ub=capacity, method="highs-ds")
            if solution.x.sum() >= enough:
                kept, best = others, solution.x
    return [(at, float(width)) for at, width in zip(kept, best, strict=True) if width > SLACK * capacity.max()]


def _rooted(size: int, edges: Edges) -> Tree:
    """The tree hung up at its centre, so that it is as shallow as can be; the lowest rank of two centres."""
    near: list[list[int]] = [[] for _ in range(size)]
    for one, other in edges:
        near[one].append(other)
        near[other].append(one)

    def hang(root: int) -> tuple[int, Tree]:
        parents: list[int | None] = [None] * size
        level, depth, seen = [root], 0, {root}
        while level:
            below = []
            for rank in level:
                for child in near[rank]:
                    if child not in seen:
                        seen.add(child)
                        parents[child] = rank
                        below.append(child)
            level, depth = below, depth + bool(below)
        return depth, tuple(parents)

    return min((hang(root) for root in range(size)), key=lambda hung: hung[0])[1]


def _levels(size: int, pairs: list[tuple[int, int]], costs: Any) -> list[Partition]:
    """The parts that edges cheaper than some price join, for every price.

    Where links are between ranks and as wide back as forth, one of these partitions has the bandwidth of the optimum: a
    minimum spanning tree costs the integral over prices of (parts - 1), the links cost at least that of what crosses
    between parts, so at some price crossing / (parts - 1) is at most the ratio of the two.
    """
    found = []
    for price in np.unique(np.round(costs, 12)):
        part = list(range(size))
        for (one, other), cost in zip(pairs, costs, strict=True):
            if cost < price - 1e-10:
                a, b = part[one], part[other]
                part = [a if each == b else each for each in part]
        parts = tuple(tuple(r for r in range(size) if part[r] == name) for name in dict.fromkeys(part))
        if len(parts) > 1:
            found.append(parts)
    return found
