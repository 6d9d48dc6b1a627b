"""Rings: Hamiltonian cycles with widths that share the links of a machine.

A ring of width `w` GB/s sends so much from each rank to the next, and as much the other way round: most links are
full-duplex, and a ring and its reverse use them both ways.  Rings that use every link whole are the best there is for
all_reduce: it runs at ``w n / (n - 1)`` for each of them, and needs no start-up but its hops.  Where links have another
capacity back than forth, as between hosts over the internet, rings have one direction.

The fewest rings that do as well as any are looked for: with `k` left to choose, the widest of them has at least one
k-th of the rest, so only few cycles come into question.  On the hybrid cube mesh of eight V100 this finds the ring of
doubled links and that of single ones.  Where all links are equal, as many one-way rings as a rank has links may use
each direction once: eight fully connected GPUs have seven of them.  Else a linear program gives every cycle its width.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from ringreduce.common.failures import TopologyError
from ringreduce.topology.bound import Cuts
from ringreduce.topology.host_order import ring_order
from ringreduce.topology.routes import Routes

MOST_ENUMERATED = 8
"""Ranks up to which all cycles are looked at: 2,520 of them with 8, or twice that where each has one direction."""

MOST_RINGS = 4
"""The search for few rings ends there."""

MOST_TRIES = 400
"""Cycles that are tried in either search before it is given up."""

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
        forward = [(self.order[at - 1], self.order[at]) for at in range(len(self.order))]
        return forward + [hop[::-1] for hop in forward] if self.both_ways else forward


def transfers(rings: Sequence[Ring]) -> dict[tuple[int, int], float]:
    """What all rings together send from rank to rank, GB/s."""
    sent: dict[tuple[int, int], float] = {}
    for ring in rings:
        for hop in ring.hops():
            sent[hop] = sent.get(hop, 0.0) + ring.width
    return sent


def pack_rings(routes: Routes, bound: float) -> tuple[Ring, ...]:
    """Rings that fit the links together and carry as much as could be found; none if no cycle has routes.

    `bound` is what an all_reduce could reach at most, GB/s: the search ends there.
    """
    if routes.size < 2:
        return ()
    both_ways = _symmetric(routes) and routes.size > 2
    cycles = [Ring(order, 1.0, both_ways) for order in _orders(routes, both_ways)]
    cycles = [cycle for cycle in cycles if all(hop in routes.between for hop in cycle.hops())]
    if not cycles:
        return ()
    usage = np.array([routes.loads(dict.fromkeys(cycle.hops(), 1.0)) for cycle in cycles])
    capacity = np.array([link.capacity for link in routes.links])
    chosen = _fewest(usage, capacity, bound / cycles[0].bandwidth)
    if chosen is None and (disjoint := _disjoint(routes)):
        return disjoint
    chosen = chosen or _best(usage, capacity)
    return _one_way(routes, capacity, tuple(replace(cycles[at], width=width) for at, width in chosen))


def _symmetric(routes: Routes) -> bool:
    back = {(link.dst, link.src): link.capacity for link in routes.links}
    return all(math.isclose(link.capacity, back.get((link.src, link.dst), 0.0)) for link in routes.links)


def _orders(routes: Routes, both_ways: bool) -> list[tuple[int, ...]]:
    """Orders that start with rank 0: all of them, but for their reverses where both ways are the same, or, for more
    ranks, those that promise something."""
    size = routes.size
    if size <= MOST_ENUMERATED:
        orders = [(0, *rest) for rest in permutations(range(1, size))]
        return [order for order in orders if not both_ways or order[1] < order[-1]]
    orders = [tuple(range(size)), _nearest_first(routes)]
    if all(link.dst in routes.ranks for link in routes.links):  # what goes between two ranks concerns no others
        width = np.zeros((size, size))
        for pair, ((link, _),) in routes.between.items():
            width[pair] = routes.links[link].capacity
        with contextlib.suppress(TopologyError):  # there is no ring
            orders.insert(0, ring_order(width).order)
    return list(dict.fromkeys(orders))


def _nearest_first(routes: Routes) -> tuple[int, ...]:
    """An order in which ranks with short and wide routes between them follow each other: depth first through parts
    that are merged narrowest last."""
    merged: dict[tuple[int, ...], tuple[int, ...]] = {(rank,): (rank,) for rank in range(routes.size)}
    partitions = Cuts(routes).widest_first
    for before, after in pairwise(partitions):
        (new,) = set(after) - set(before)
        one, other = (part for part in before if part not in after)
        merged[new] = merged[one] + merged[other]
    return tuple(rank for part in partitions[-1] for rank in merged[part])


Chosen = list[tuple[int, float]]


def _fewest(usage: Any, capacity: Any, most: float) -> Chosen | None:
    """Few cycles whose widths sum up to `most`, by iterative deepening; None if `MOST_TRIES` did not find any."""
    tries = iter(range(MOST_TRIES))
    unused = np.where(usage > 0, 0.0, np.inf)
    divisor = np.where(usage > 0, usage, 1.0)

    def choose(left: Any, missing: float, count: int) -> Chosen | None:
        width = (left / divisor + unused).min(axis=1)
        wide = np.flatnonzero(width * count >= missing * (1 - SLACK))
        for at in wide[np.argsort(-width[wide], kind="stable")]:
            if width[at] >= missing * (1 - SLACK):
                return [(int(at), min(float(width[at]), missing))]
            if count == 1 or next(tries, None) is None:
                return None
            rest = choose(np.maximum(left - width[at] * usage[at], 0.0), missing - width[at], count - 1)
            if rest is not None:
                return [(int(at), float(width[at])), *rest]
        return None

    found = (choose(capacity, most, count) for count in range(1, MOST_RINGS + 1))
    return next((chosen for chosen in found if chosen is not None), None)


def _disjoint(routes: Routes) -> tuple[Ring, ...]:
    """One-way rings that use every direction of every link once; nothing if links differ, or if none were found.

    Each ring leaves rank 0 over another link.  Rings are sets of links, as bits; candidates that share a link with a
    chosen one drop out, and a choice that leaves some link of rank 0 without a candidate is taken back.
    """
    first = routes.links[0].capacity
    equal = all(math.isclose(link.capacity, first) for link in routes.links)
    if routes.size > MOST_ENUMERATED or not equal or len(routes.links) != len(routes.between):
        return ()
    starting: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for order in _orders(routes, both_ways=False):
        hops = Ring(order, first, both_ways=False).hops()
        if all(hop in routes.between for hop in hops):
            mask = sum(1 << routes.between[hop][0][0] for hop in hops)
            starting.setdefault(order[1], []).append((mask, order))
    tries = iter(range(MOST_TRIES))

    def choose(left: list[list[tuple[int, tuple[int, ...]]]]) -> list[tuple[int, ...]] | None:
        if not left:
            return []
        for mask, order in left[0]:
            if next(tries, None) is None:
                return None
            fitting = [[each for each in others if not each[0] & mask] for others in left[1:]]
            if all(fitting) and (rest := choose(fitting)) is not None:
                return [order, *rest]
        return None

    found = choose([starting[peer] for peer in sorted(starting)]) or []
    return tuple(
        Ring(order, first, both_ways=False) for order in found if len(found) * routes.size == len(routes.links)
    )


def _best(usage: Any, capacity: Any) -> Chosen:
    """The widths with the largest sum."""
    from scipy.optimize import linprog  # as long to import as all else together, and most machines need none

    solution = linprog(-np.ones(len(usage)), A_ub=usage.T, b_ub=capacity, method="highs-ds")
    return [(at, float(width)) for at, width in enumerate(solution.x) if width > SLACK * capacity.max()]


def _one_way(routes: Routes, capacity: Any, rings: tuple[Ring, ...]) -> tuple[Ring, ...]:
    """The same in one direction at twice the width, if the links carry that: through switches they mostly do."""
    doubled = tuple(Ring(each.order, each.width * (1 + each.both_ways), both_ways=False) for each in rings)
    return rings if any(np.array(routes.loads(transfers(doubled))) > capacity * (1 + SLACK)) else doubled
