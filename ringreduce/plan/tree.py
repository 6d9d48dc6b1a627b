"""Trees: latency logarithmic in the size, each rank combining what its children sent.

A tree is the parent of every rank (None for the root).  A reduction flows up, a broadcast down; with the rounds
overlapped both are pipelined, and a rank exchanges a bounded number of messages per round whatever the size.

broadcast and reduce use one binary tree, the heap order, rather than the binomial tree: the binomial root would read
log2(size) children per round while half of the ranks are idle, and rounds are paced by their busiest rank.

all_reduce uses two binary trees, each for half of the data: a rank that is interior (busy with two children) in one is
a leaf in the other, so that together they use the full bandwidth of every rank, which one tree cannot (Sanders, Speck
and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009).

The trees of a machine's real links (`topology.trees`) are weighted like rings: each carries a stripe in proportion to
its weight.  all_gather and reduce_scatter over a tree send every block outwards from its owner, or inwards to it (see
`routed`).

Slots: any depth, as a parent's message is the answer to the child's; `size` for all_gather and reduce_scatter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ringreduce.common.failures import PlanError
from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, Program, Read, Step
from ringreduce.plan.routed import programs

Tree = tuple[int | None, ...]
"""The parent of every rank, None for the root."""

Trees = Sequence[tuple[Tree, int]]
"""The trees of a plan: (tree, weight) of each."""


def all_reduce(size: int) -> Plan:
    """Reduce to the root of each of two complementary trees, and broadcast back from it."""
    return all_reduce_over([(tree, 1) for tree in complementary_trees(size)], "tree")


def broadcast(size: int) -> Plan:
    """Broadcast down the heap-ordered binary tree.  The root's write is onto itself: nothing moves."""
    return _over([(heap_tree(size), 1)], "tree", "broadcast", _broadcast)


def reduce(size: int) -> Plan:
    """Reduce up the heap-ordered binary tree."""
    return _over([(heap_tree(size), 1)], "tree", "reduce", _reduce)


def all_reduce_over(trees: Trees, name: str = "trees") -> Plan:
    """Reduce to the root of each of the given trees, and broadcast back from it."""
    return _over(trees, name, "all_reduce", lambda tree: map(compose, _reduce(tree), _broadcast(tree)))


def broadcast_over(trees: Trees, name: str = "trees") -> Plan:
    """Broadcast from rank 0 over the given trees, wherever their own roots are."""
    return _over(trees, name, "broadcast", lambda tree: _broadcast(rerooted(tree, 0)))


def reduce_over(trees: Trees, name: str = "trees") -> Plan:
    """Reduce to rank 0 over the given trees, wherever their own roots are."""
    return _over(trees, name, "reduce", lambda tree: _reduce(rerooted(tree, 0)))


def all_gather_over(trees: Trees, name: str = "trees") -> Plan:
    """Every block goes out from its owner over the given trees."""
    return _over(trees, name, "all_gather", _all_gather)


def reduce_scatter_over(trees: Trees, name: str = "trees") -> Plan:
    """Every block is combined on its way to its owner over the given trees."""
    return _over(trees, name, "reduce_scatter", _reduce_scatter)


def heap_tree(size: int) -> Tree:
    """The binary tree with root 0 in which the children of `r` are ``2 r + 1`` and ``2 r + 2``."""
    return tuple((rank - 1) // 2 if rank > 0 else None for rank in range(size))


def inorder_tree(size: int) -> Tree:
    """The balanced binary tree, numbered in order, whose interior ranks are exactly the odd ones.

    A range of ranks that starts even gets an odd rank near its middle as root; what is left of it and what is right
    of it start even again, and a single even rank is a leaf.
    """
    parents: list[int | None] = [None] * size

    def grow(low: int, high: int, parent: int | None) -> None:
        if low == high:
            return
        top = low + (((high - low) // 2) | 1 if high - low > 1 else 0)
        parents[top] = parent
        grow(low, top, top)
        grow(top + 1, high, top)

    grow(0, size, None)
    return tuple(parents)


def complementary_trees(size: int) -> tuple[Tree, Tree]:
    """Two trees such that no rank is interior in both: the in-order tree, and the same with ranks moved on by one.

    The interior ranks of the first are 1, 3, 5, ... and those of the second 2, 4, ..., with ``size`` counted as 0.
    """
    first = inorder_tree(size)
    parents = (first[rank - 1] for rank in range(size))
    return first, tuple(None if parent is None else (parent + 1) % size for parent in parents)


def children(tree: Tree) -> list[tuple[int, ...]]:
    """Of every rank, the ranks whose parent it is, ascending."""
    below: list[list[int]] = [[] for _ in tree]
    for child, parent in enumerate(tree):
        if parent is not None:
            below[parent].append(child)
    return list(map(tuple, below))


def rerooted(tree: Tree, root: int) -> Tree:
    """The same links with another rank on top."""
    parents = list(tree)
    below: int | None = None
    rank: int | None = root
    while rank is not None:  # up to the old root, turning the links
        parents[rank], below, rank = below, rank, parents[rank]
    return tuple(parents)


def _reduce(tree: Tree) -> Iterator[Program]:
    """Combine the own input with the children's, for the parent or, at the root, for the output."""
    for parent, below in zip(tree, children(tree), strict=True):
        above = () if parent is None else (parent,)
        yield (Step(0, Read.INPUT, recv=below, write=parent is None, send=above),)


def _broadcast(tree: Tree) -> Iterator[Program]:
    """Write what the parent sent (the root: its own), and pass it on to the children."""
    for parent, below in zip(tree, children(tree), strict=True):
        if parent is None:
            yield (Step(0, Read.INPUT, write=True, send=below),)
        else:
            yield (Step(0, recv=(parent,), write=True, send=below),)


def _all_gather(tree: Tree) -> Iterator[Program]:
    """Every block goes out from its owner."""
    return programs("all_gather", len(tree), {root: _hops(rerooted(tree, root), 1) for root in range(len(tree))})


def _reduce_scatter(tree: Tree) -> Iterator[Program]:
    """Every block is combined on its way to its owner."""
    return programs("reduce_scatter", len(tree), {root: _hops(rerooted(tree, root), -1) for root in range(len(tree))})


def _hops(tree: Tree, way: int) -> list[tuple[int, int]]:
    """The links of a tree, outwards with 1 and inwards with -1."""
    down = [(parent, rank) for rank, parent in enumerate(tree) if parent is not None]
    return down if way > 0 else [(rank, parent) for parent, rank in down]


def _over(trees: Trees, name: str, collective: str, made: Callable[[Tree], Iterable[Program]]) -> Plan:
    size = len(trees[0][0])
    for index, (tree, _) in enumerate(trees):
        in_range = all(parent is None or 0 <= parent < size for parent in tree)
        one_root = len(tree) == size and tree.count(None) == 1
        below = children(tree) if in_range and one_root else []
        reached = [tree.index(None)] if below else []
        for rank in reached:
            reached += below[rank]
        if len(reached) < size:
            raise PlanError(f"{name}: tree {index} is {tree}; it must join ranks 0..{size - 1} under one root, None")
    return Plan(name, collective, size, tuple(Channel(weight, 1, tuple(made(tree))) for tree, weight in trees))
