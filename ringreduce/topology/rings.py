"""Rings: Hamiltonian cycles with widths that share the links of a machine.

A ring of width `w` GB/s sends so much from each rank to the next, and as much the other way round: most links are
full-duplex, and a ring and its reverse use them both ways.  Rings that use every link whole are the best there is for
all_reduce: it runs at ``w n / (n - 1)`` for each of them, and needs no start-up but its hops.

The fewest rings that do as well as any are looked for: with `k` left to choose, the widest of them has at least one
k-th of the rest, so only few cycles come into question.  On the hybrid cube mesh of eight V100 this finds the ring of
doubled links and that of single ones.  Where no few rings are perfect, a linear program gives every cycle its width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from scipy.optimize import linprog

from ringreduce.topology.routes import Routes

MOST_ENUMERATED = 8
"""Ranks up to which all cycles are looked at: 2,520 of them with 8."""

MOST_RINGS = 4
"""The search for few rings ends there."""

SLACK = 1e-6


@dataclass(frozen=True)
class Ring:
    """A cycle of all ranks, and its width in GB/s: what each rank sends to the next, and, with `both_ways`, as much to
    the one before."""

    order: tuple[int, ...]
    width: float
    both_ways: bool

    @property
    def bandwidth(self) -> float:
        """Of an all_reduce over this ring alone, GB/s."""
        size = len(self.order)
        return self.width * (2 if self.both_ways else 1) * size / (2 * (size - 1))

    def hops(self) -> list[tuple[int, int]]:
        """The pairs of ranks that the ring sends between, each with its whole width."""
        forward = _hops(self.order)
        return forward + [hop[::-1] for hop in forward] if self.both_ways else forward


def pack_rings(routes: Routes, bound: float) -> tuple[Ring, ...]:
    """Rings that fit the links together and carry as much as could be found; none if no cycle has routes.

    `bound` is what an all_reduce could reach at most, GB/s: the search ends there.
    """
    if routes.size < 2:
        return ()
    cycles = _cycles(routes)
    if not cycles:
        return ()
    usage = np.array([_usage(routes, cycle) for cycle in cycles])
    capacity = np.array([link.capacity for link in routes.links])
    most = bound * (routes.size - 1) / routes.size * (1 if routes.size > 2 else 2)  # of the widths' sum
    chosen = _fewest(usage, capacity, most) or _best(usage, capacity)
    both = tuple(Ring(cycles[at], width, both_ways=routes.size > 2) for at, width in chosen)
    return _one_way(routes, capacity, both)


def _cycles(routes: Routes) -> list[tuple[int, ...]]:
    """Cycles that start with rank 0, each in one of its directions."""
    size = routes.size
    if size <= MOST_ENUMERATED:
        orders = [(0, *rest) for rest in permutations(range(1, size)) if not rest or rest[0] <= rest[-1]]
    else:
        orders = [tuple(range(size)), _nearest_first(routes)]
    return [
        order
        for order in dict.fromkeys(orders)
        if all(pair in routes.between for hop in _hops(order) for pair in (hop, hop[::-1]))
    ]


def _hops(order: Sequence[int]) -> list[tuple[int, int]]:
    return [(order[at - 1], order[at]) for at in range(len(order))]


def _usage(routes: Routes, order: Sequence[int]) -> list[float]:
    """What a ring of width 1 puts on each link, both ways; a ring of two is its own reverse."""
    transfers: dict[tuple[int, int], float] = {}
    for hop in _hops(order):
        transfers[hop] = 1.0
        transfers[hop[::-1]] = 1.0
    return routes.loads(transfers)


def _nearest_first(routes: Routes) -> tuple[int, ...]:
    """An order in which ranks with short and wide routes between them follow each other: depth first through parts
    that are merged narrowest last."""
    from ringreduce.topology.bound import Cuts

    merged: dict[tuple[int, ...], tuple[int, ...]] = {(rank,): (rank,) for rank in range(routes.size)}
    partitions = Cuts(routes).widest_first
    for before, after in pairwise(partitions):
        (new,) = set(after) - set(before)
        one, other = (part for part in before if part not in after)
        merged[new] = merged[one] + merged[other]
    return tuple(rank for part in partitions[-1] for rank in merged[part])


Chosen = list[tuple[int, float]]


def _fewest(usage: Any, capacity: Any, most: float) -> Chosen | None:
    """The fewest cycles whose widths sum up to `most`, by iterative deepening."""
    for count in range(1, MOST_RINGS + 1):
        if (found := _choose(usage, capacity, most, count)) is not None:
            return found
    return None


def _choose(usage: Any, left: Any, most: float, count: int) -> Chosen | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        width = np.where(usage > 0, left / usage, np.inf).min(axis=1)
    wide = np.flatnonzero(width * count >= most * (1 - SLACK))
    for at in wide[np.argsort(-width[wide], kind="stable")][:50]:
        if width[at] >= most * (1 - SLACK):
            return [(int(at), min(float(width[at]), most))]
        if count > 1:
            rest = np.maximum(left - width[at] * usage[at], 0.0)
            if (found := _choose(usage, rest, most - width[at], count - 1)) is not None:
                return [(int(at), float(width[at])), *found]
    return None


def _best(usage: Any, capacity: Any) -> Chosen:
    """The widths with the largest sum."""
    solution = linprog(-np.ones(len(usage)), A_ub=usage.T, b_ub=capacity, method="highs-ds")
    return [(at, float(width)) for at, width in enumerate(solution.x) if width > SLACK * capacity.max()]


def _one_way(routes: Routes, capacity: Any, rings: tuple[Ring, ...]) -> tuple[Ring, ...]:
    """The same in one direction at twice the width, if the links carry that: through switches they mostly do."""
    transfers: dict[tuple[int, int], float] = {}
    for ring in rings:
        for hop in _hops(ring.order):
            transfers[hop] = transfers.get(hop, 0.0) + ring.width * (2 if ring.both_ways else 1)
    if any(np.array(routes.loads(transfers)) > capacity * (1 + SLACK)):
        return rings
    return tuple(Ring(ring.order, ring.width * (2 if ring.both_ways else 1), both_ways=False) for ring in rings)
