"""Packings: trees and paths with widths that share the links of a machine, for what rings and trees leave idle.

Every block of a collective travels in a shape of its own: from its root to all ranks over a tree (broadcast,
all_gather), from all ranks to its root over one (reduce, reduce_scatter), over a tree inwards and another one outwards
(all_reduce, with any rank as root), or from one rank to another over a path (scatter, gather, all_to_all), other ranks
passing it on. Blocks are alike, so each gets shapes of the same total width,
and the most that fits the links is a linear program with one variable a shape. As in `trees`, columns are made one at a
time: under the links' current prices the best shape for a block is a cheapest arborescence (Chu and Liu 1965, Edmonds
1967) or a shortest path. On links between ranks arborescences reach the lowest cut, however links differ back and forth
(Edmonds 1973; for a block from every rank at once, Zhao et al. 2024); paths, and trees inwards and outwards, reach what
the prices prove (`Packed.bound`).

For all_reduce the prices prove this. When the first rank holds the contributions of all, messages have gone over a tree
inwards to it; every other rank must receive once more after that. Turned round in time: once the last rank sends its
contribution away, a tree outwards follows, and every other rank has sent before. So an element costs at least the
cheapest such tree and every other rank's cheapest link, and the links' prices pay for so many elements and no more.
Ranks between which links are free count as one.

A plan's channels take the same share of every block, so the blocks' shapes are aligned: channel `k` moves part `k` of
each block, over that block's shape for it.  A few equal parts are taken where they cost little.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from math import gcd, prod
from typing import Any

import numpy as np

from ringreduce.topology.routes import Routes

MOST_RANKS = 16
"""Beyond these nothing is packed: the linear program grows with the square of the ranks, or faster."""

MOST_ROUNDS = 60
"""Of pricing; what has been packed by then is taken."""

NEAR = 0.997
"""The share of the bound at which packing ends."""

GIVEN_UP = 0.012
"""The share of the optimum that whole numbers may cost."""

PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of equal channels that are tried."""

GRID = 5040
"""Parts of a block where no few equal ones will do: its shapes get whole numbers of these."""

DEPTH_COUNTS = 1e-3
"""The share of a width that a shape may give up for being shallower; of all_reduce, whose shapes are two trees, more
(simulated on RCCL's topology files: the times of 160 MB)."""

MOST_SEEDS = 4
"""Trees of shortest paths from each root with which packing starts; of all_reduce so many inwards, and outwards."""

MOST_NODES = 30
"""Of the search for whole numbers, for each number of channels: a limit that is the same on every machine."""

Shape = tuple[tuple[int, int], ...]
"""The hops of a block, as pairs of ranks in the direction in which it moves: a tree's or a path's.  Of all_reduce, the
tree inwards and then, from the same root, the tree outwards."""


@dataclass(frozen=True)
class Packed:
    """Per channel its share and the shape of every block, by number; and what the links' prices prove: over these
    routes no algorithm carries more GB/s."""

    channels: tuple[tuple[int, Mapping[int, Shape]], ...]
    bound: float


def pack(collective: str, routes: Routes, limit: float) -> Packed | None:
    """A packing for a collective, whose bandwidth is at most `limit`; None if a block cannot get where it must."""
    pairs = sorted(routes.between)
    blocks = _blocks(collective, routes.size)
    if routes.size > MOST_RANKS or not all(_reaches(routes, block) for block in blocks):
        return None
    master = _Master(routes, pairs, blocks)
    most = limit / master.blocks_of_a_tensor
    alone = [pair for pair in pairs if len(routes.between[pair]) == 1]  # over links that no other pair has a share of
    best, best_costs = float("inf"), master.pair_costs(1.0 / master.capacity)
    for block in blocks:
        for shape in list(block.shallow(alone)) or [block.cheapest(pairs, best_costs)[0]]:
            master.add(block.number, shape)
    for _ in range(MOST_ROUNDS):
        master.solve()
        # Where links are free, shapes wander: at even prices they are short, and the mean of the two finds the end
        # sooner.
        for even in (0.3, 0.03, 0.0):
            prices = (1 - even) * master.prices + even * master.worth / len(pairs) / master.capacity
            costs = master.pair_costs(prices)
            shapes = [block.cheapest(pairs, costs) for block in blocks]
            least: dict[int, float] = {}
            for block, (_, cost) in zip(blocks, shapes, strict=True):
                least[block.number] = min(cost, least.get(block.number, cost))
            worth, cost = float(prices @ master.capacity), sum(least.values())
            if cost > 0 and worth / cost < best:
                best, best_costs = worth / cost, costs / worth
            if any(
                (block.number, shape) not in master.shapes for block, (shape, _) in zip(blocks, shapes, strict=True)
            ):
                break
        if master.width >= NEAR * min(best, most):
            break
        if not any([master.add(block.number, shape) for block, (shape, _) in zip(blocks, shapes, strict=True)]):
            break
    if collective == "all_reduce":
        best = 1 / max(_least_cost(routes.size, pairs, best_costs), 1e-12)
    channels = tuple((share, dict(zip(master.numbers, shapes, strict=True))) for share, shapes in master.channels())
    return Packed(channels, best * master.blocks_of_a_tensor)


@dataclass(frozen=True)
class _Block:
    """What has to be moved, by its number in the plan's layout: from `source` to `target`, to all ranks, with
    `inwards` from all ranks to `source`, or with both one after the other.  Blocks that share a number
    are alternatives."""

    size: int
    number: int
    source: int
    target: int | None = None
    inwards: bool = False
    outwards: bool = True

    def shallow(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Shape]:
        """Some of the trees in which every rank is as near to the root as can be: with them the packing starts, and
        often ends."""
        if self.target is not None:
            return
        into = list(_shortest(self.size, self.source, [pair[::-1] for pair in pairs])) if self.inwards else [()]
        out_of = list(_shortest(self.size, self.source, pairs)) if self.outwards else [()]
        for one, other in product(into, out_of):
            yield (*sorted(hop[::-1] for hop in one), *other)

    def cheapest(self, pairs: Sequence[tuple[int, int]], costs: Any) -> tuple[Shape, float]:
        price = dict(zip(pairs, map(float, costs), strict=True))
        hops: list[tuple[int, int]] = []
        if self.inwards:
            back = {pair[::-1]: cost for pair, cost in price.items()}
            hops += sorted(hop[::-1] for hop in _arborescence(self.size, self.source, back))
        if self.target is not None:
            hops += _path(self.size, self.source, self.target, price)
        elif self.outwards:
            hops += _arborescence(self.size, self.source, price)
        return tuple(hops), sum(price[hop] for hop in hops)


def _blocks(collective: str, size: int) -> list[_Block]:
    match collective:
        case "broadcast" | "reduce":
            inwards = collective == "reduce"
            return [_Block(size, 0, 0, inwards=inwards, outwards=not inwards)]
        case "all_gather" | "reduce_scatter":
            inwards = collective == "reduce_scatter"
            return [_Block(size, rank, rank, inwards=inwards, outwards=not inwards) for rank in range(size)]
        case "all_reduce":
            return [_Block(size, 0, rank, inwards=True) for rank in range(size)]
        case "scatter":
            return [_Block(size, rank, 0, rank) for rank in range(1, size)]
        case "gather":
            return [_Block(size, rank, rank, 0) for rank in range(1, size)]
        case _:
            pairs = permutations(range(size), 2)
            return [_Block(size, one * size + other, one, other) for one, other in pairs]


def _reaches(routes: Routes, block: _Block) -> bool:
    ways = [pair[::-1] if block.inwards else pair for pair in routes.between]  # with both, another block checks it
    reached = {block.source}
    for rank in (todo := [block.source]):
        for one, other in ways:
            if one == rank and other not in reached:
                reached.add(other)
                todo.append(other)
    return len(reached) == block.size if block.target is None else block.target in reached


class _Master:
    """The linear program over the shapes made so far: equal widths of all blocks, as wide as the links allow."""

    def __init__(self, routes: Routes, pairs: Sequence[tuple[int, int]], blocks: Sequence[_Block]) -> None:
        self.capacity = np.array([link.capacity for link in routes.links])
        self.usage = np.array([routes.loads({pair: 1.0}) for pair in pairs])
        self.at = {pair: at for at, pair in enumerate(pairs)}
        self.numbers, self.size = sorted({block.number for block in blocks}), routes.size
        self.shapes: dict[tuple[int, Shape], Any] = {}
        self.depths: list[int] = []
        self.depth_counts = DEPTH_COUNTS * (5 if blocks[0].inwards and blocks[0].outwards else 1)
        whole_tensor = blocks[0].target is None and len(self.numbers) == 1
        self.blocks_of_a_tensor = 1 if whole_tensor else routes.size
        self.width, self.prices, self.worth = 0.0, self.capacity, 0.0
        self.widths: Any = None

    def pair_costs(self, prices: Any) -> Any:
        return self.usage @ prices

    def add(self, number: int, shape: Shape) -> bool:
        """Whether the shape is new."""
        if (number, shape) in self.shapes:
            return False
        inwards = len(shape) // 2 if len(shape) >= self.size else 0  # of two trees
        self.depths.append(_depth(shape[:inwards]) + _depth(shape[inwards:]))
        self.shapes[number, shape] = self.usage[[self.at[hop] for hop in shape]].sum(axis=0)
        return True

    @cached_property
    def loads(self) -> Any:
        return np.array(list(self.shapes.values())).T

    @cached_property
    def owners(self) -> Any:
        owner = np.array([number for number, _ in self.shapes])
        return (np.array(self.numbers)[:, None] == owner[None, :]).astype(float)

    def solve(self) -> None:
        """The last variable is the width that every block has."""
        from scipy.optimize import linprog

        vars(self).pop("loads", None)
        vars(self).pop("owners", None)
        limits = np.hstack([self.loads, np.zeros((len(self.capacity), 1))])
        equal = np.hstack([self.owners, -np.ones((len(self.numbers), 1))])
        # Among packings of nearly equal width, one with short routes.
        gain = np.append([self.depth_counts * depth / self.size for depth in self.depths], -1.0)
        found = linprog(
            gain, A_ub=limits, b_ub=self.capacity, A_eq=equal, b_eq=np.zeros(len(self.numbers)), method="highs-ds"
        )
        self.width, self.widths = float(found.x[-1]), found.x[:-1]
        self.prices = np.maximum(-found.ineqlin.marginals, 0.0)
        self.worth = float(self.prices @ self.capacity)

    def channels(self) -> tuple[tuple[int, tuple[Shape, ...]], ...]:
        """Shares, and the shape of every block in each: a few equal ones where they cost little."""
        used = np.flatnonzero(self.widths > 1e-7 * self.width)
        for parts in PARTS:
            counts = self._whole(used, parts)
            if counts is not None:
                return self._aligned(used, counts, parts)
        return self._aligned(used, self.widths[used] / self.width * GRID, GRID)

    def _whole(self, used: Any, parts: int) -> Any:
        """How many of `parts` equal parts each shape gets, or None."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(used)
        seconds = np.append(np.zeros(count), 1.0)
        fits = np.hstack([self.loads[:, used], -self.capacity[:, None]])
        each = np.hstack([self.owners[:, used], np.zeros((len(self.numbers), 1))])
        most = parts / self.width / (1 - GIVEN_UP)
        found = milp(
            seconds,
            integrality=np.append(np.ones(count), 0),
            bounds=Bounds(0, np.append(np.full(count, parts), most)),
            constraints=[LinearConstraint(fits, -np.inf, 0), LinearConstraint(each, parts, parts)],
            options={"node_limit": MOST_NODES, "mip_rel_gap": GIVEN_UP},
        )
        return None if found.x is None else np.round(found.x[:-1])

    def _aligned(self, used: Any, amounts: Any, total: int) -> tuple[tuple[int, tuple[Shape, ...]], ...]:
        """Every block's shapes laid end to end, the widest first, and cut wherever one of any block ends."""
        shapes = list(self.shapes)
        ends: list[list[tuple[int, Shape]]] = []
        for number in self.numbers:
            mine = [(float(amount), shapes[at][1]) for at, amount in zip(used, amounts, strict=True)
                    if shapes[at][0] == number and amount > 0]  # fmt: skip
            mine.sort(key=lambda each: -each[0])
            whole = sum(amount for amount, _ in mine)
            reached = np.round(np.cumsum([amount for amount, _ in mine]) / whole * total).astype(int)
            ends.append([(int(end), shape) for end, (_, shape) in zip(reached, mine, strict=True)])
        cuts = sorted({end for each in ends for end, _ in each} - {0})
        channels = dict[tuple[Shape, ...], int]()
        for before, end in zip([0, *cuts], cuts, strict=False):
            key = tuple(next(shape for reached, shape in each if reached >= end) for each in ends)
            channels[key] = channels.get(key, 0) + end - before
        divisor = gcd(*channels.values())
        return tuple((share // divisor, key) for key, share in channels.items())


def _least_cost(size: int, pairs: Sequence[tuple[int, int]], costs: Any) -> float:
    """What messages must cost at the least for an element of all_reduce, whatever the algorithm (see above)."""
    price = dict(zip(pairs, map(float, costs), strict=True))
    free = 1e-9 * max(price.values())
    near = [[one == other or price.get((one, other), 1.0) <= free for other in range(size)] for one in range(size)]
    for by in range(size):
        near = [[near[a][b] or (near[a][by] and near[by][b]) for b in range(size)] for a in range(size)]
    first = [min(other for other in range(size) if near[rank][other] and near[other][rank]) for rank in range(size)]
    part = [sorted(set(first)).index(name) for name in first]
    parts = range(len(set(part)))
    forth: dict[tuple[int, int], float] = {}
    for (one, other), cost in price.items():
        ends = part[one], part[other]
        if ends[0] != ends[1]:
            forth[ends] = min(cost, forth.get(ends, cost))
    back = {ends[::-1]: cost for ends, cost in forth.items()}
    found = []
    for into, out_of in ((forth, back), (back, forth)):
        once = [min((cost for (_, to), cost in into.items() if to == one), default=0.0) for one in parts]
        trees = [sum(out_of[hop] for hop in _arborescence(len(parts), root, out_of)) for root in parts]
        found.append(min(tree + sum(once) - mine for tree, mine in zip(trees, once, strict=True)))
    return max(found)


def _depth(shape: Shape) -> int:
    """Hops on the longest way."""
    before = {other: one for one, other in shape}
    if len(before) < len(shape):  # inwards
        before = dict(shape)
    depth = 0
    for start in before:
        node, hops = start, 0
        while node in before:
            node, hops = before[node], hops + 1
        depth = max(depth, hops)
    return depth


def _shortest(size: int, root: int, pairs: Sequence[tuple[int, int]]) -> Iterator[Shape]:
    """Up to `MOST_SEEDS` trees from the root over shortest paths, spread over all there are; none if these do not reach
    all ranks."""
    depth = {root: 0}
    for rank in (todo := [root]):
        fresh = [other for one, other in pairs if one == rank and other not in depth]
        depth |= dict.fromkeys(fresh, depth[rank] + 1)
        todo += fresh
    before = [[(one, rank) for one, other in pairs if other == rank and depth[one] < depth[rank]] for rank in todo[1:]]
    count = prod(map(len, before)) if len(todo) == size else 0
    for number in range(0, count, -(-count // MOST_SEEDS) or 1):
        left, hops = number, []
        for choices in before:
            left, at = divmod(left, len(choices))
            hops.append(choices[at])
        yield tuple(sorted(hops))


def _path(size: int, source: int, target: int, price: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The cheapest, and of these one with few hops."""
    least = 1e-9 * max(price.values())
    cost, before = {source: 0.0}, dict[int, int]()
    for _ in range(size - 1):
        for (one, other), add in price.items():
            if one in cost and cost[one] + add + least < cost.get(other, float("inf")):
                cost[other], before[other] = cost[one] + add + least, one
    hops = []
    while target != source:
        hops.append((before[target], target))
        target = before[target]
    return hops[::-1]


def _arborescence(size: int, root: int, price: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The cheapest tree from the root to all ranks.

    Each rank takes its cheapest way in; a cycle of them becomes one node, whose ways in cost what they add to the
    cycle, and so on."""
    ways: list[tuple[int, int, float, tuple[int, int]]] = [
        (one, other, cost, (one, other)) for (one, other), cost in price.items() if other != root
    ]
    return sorted(_contract(set(range(size)), root, ways, size))


def _contract(
    nodes: set[int], root: int, ways: Iterable[tuple[int, int, float, tuple[int, int]]], fresh: int
) -> list[tuple[int, int]]:
    ways = list(ways)
    into: dict[int, tuple[int, int, float, tuple[int, int]]] = {}
    for way in ways:
        if way[1] not in into or way[2] < into[way[1]][2]:
            into[way[1]] = way
    cycle = _cycle(nodes, root, lambda node: into[node][0])
    if not cycle:
        return [into[node][3] for node in nodes if node != root]
    inside = set(cycle)
    contracted, entry = [], dict[tuple[int, int], tuple[int, tuple[int, int]]]()
    for one, other, cost, pair in ways:
        if one in inside and other in inside:
            continue
        if other in inside:
            contracted.append((one, fresh, cost - into[other][2], pair))
            entry[pair] = (other, pair)
        else:
            contracted.append((fresh if one in inside else one, other, cost, pair))
    chosen = _contract((nodes - inside) | {fresh}, root, contracted, fresh + 1)
    entered = next(entry[pair][0] for pair in chosen if pair in entry and entry[pair][0] in inside)
    return chosen + [into[node][3] for node in inside if node != entered]


def _cycle(nodes: set[int], root: int, before: Callable[[int], int]) -> list[int]:
    seen = {root}
    for start in sorted(nodes):
        walk, node = [], start
        while node not in seen:
            seen.add(node)
            walk.append(node)
            node = before(node)
        if node in walk:
            return walk[walk.index(node) :]
    return []
