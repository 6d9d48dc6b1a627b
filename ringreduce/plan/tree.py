"""Trees: latency logarithmic in the size, each rank combining what its children sent.

A tree is the parent of every rank (None for the root).  A reduction flows up, a broadcast down; with the rounds
overlapped both are pipelined, and a rank exchanges a bounded number of messages per round whatever the size.

broadcast and reduce use one binary tree, the heap order, rather than the binomial tree: the binomial root would read
log2(size) children per round while half of the ranks are idle, and rounds are paced by their busiest rank.

all_reduce uses two binary trees, each for half of the data: a rank that is interior (busy with two children) in one is
a leaf in the other, so that together they use the full bandwidth of every rank, which one tree cannot (Sanders, Speck
and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009).

The trees of a machine's real links (`topology.trees`) are weighted like rings: each carries a stripe in proportion to
its weight.  all_gather and reduce_scatter over a tree send every block outwards from its owner, or inwards to it; a
rank takes the blocks by their owners' distance, so that both ends of a link have the same order.

Slots: any depth, as a parent's message is the answer to the child's; `size` for all_gather and reduce_scatter.
"""

from collections import deque
from collections.abc import Callable, Sequence

from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, PlanError, Program, Read, Step

Tree = tuple[int | None, ...]
"""The parent of every rank, None for the root."""

Trees = Sequence[tuple[Tree, int]]
"""The trees of a plan: (tree, weight) of each."""


def all_reduce(size: int) -> Plan:
    """Reduce to the root of each of two complementary trees, and broadcast back from it."""

    def channel(tree: Tree) -> Channel:
        return Channel(1, 1, tuple(compose(_reduce(tree, rank), _broadcast(tree, rank)) for rank in range(size)))

    return Plan("tree", "all_reduce", size, tuple(map(channel, complementary_trees(size))))


def all_reduce_over(trees: Trees, name: str = "trees") -> Plan:
    """Reduce to the root of each of the given trees, and broadcast back from it."""
    return _over(trees, name, "all_reduce", lambda tree, rank: compose(_reduce(tree, rank), _broadcast(tree, rank)))


def broadcast_over(trees: Trees, name: str = "trees") -> Plan:
    """Broadcast from rank 0 over the given trees, wherever their own roots are."""
    return _over(trees, name, "broadcast", lambda tree, rank: _broadcast(rerooted(tree, 0), rank))


def reduce_over(trees: Trees, name: str = "trees") -> Plan:
    """Reduce to rank 0 over the given trees, wherever their own roots are."""
    return _over(trees, name, "reduce", lambda tree, rank: _reduce(rerooted(tree, 0), rank))


def all_gather_over(trees: Trees, name: str = "trees") -> Plan:
    """Every block goes out from its owner over the given trees."""

    def program(tree: Tree, rank: int) -> Program:
        towards = _ways(tree, rank)
        return tuple(
            Step(
                block,
                Read.INPUT if block == rank else Read.NONE,
                recv=() if near is None else (near,),
                write=True,
                send=tuple(peer for peer in neighbours(tree, rank) if peer != near),
            )
            for block, (_, near) in sorted(towards.items(), key=lambda item: (item[1][0], item[0]))
        )

    return _over(trees, name, "all_gather", program)


def reduce_scatter_over(trees: Trees, name: str = "trees") -> Plan:
    """Every block is combined on its way to its owner over the given trees."""

    def program(tree: Tree, rank: int) -> Program:
        towards = _ways(tree, rank)
        return tuple(
            Step(
                block,
                Read.INPUT,
                recv=tuple(peer for peer in neighbours(tree, rank) if peer != near),
                write=block == rank,
                send=() if near is None else (near,),
            )
            for block, (_, near) in sorted(towards.items(), key=lambda item: (-item[1][0], item[0]))
        )

    return _over(trees, name, "reduce_scatter", program)


def broadcast(size: int) -> Plan:
    """Broadcast down the heap-ordered binary tree.  The root's write is onto itself: nothing moves."""
    programs = tuple(_broadcast(heap_tree(size), rank) for rank in range(size))
    return Plan("tree", "broadcast", size, (Channel(1, 1, programs),))


def reduce(size: int) -> Plan:
    """Reduce up the heap-ordered binary tree."""
    programs = tuple(_reduce(heap_tree(size), rank) for rank in range(size))
    return Plan("tree", "reduce", size, (Channel(1, 1, programs),))


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


def children(tree: Tree, rank: int) -> tuple[int, ...]:
    """The ranks whose parent is `rank`, ascending."""
    return tuple(child for child, parent in enumerate(tree) if parent == rank)


def neighbours(tree: Tree, rank: int) -> tuple[int, ...]:
    """The ranks that a rank has a link to in the tree, ascending."""
    parent = tree[rank]
    return tuple(sorted((*children(tree, rank), *(() if parent is None else (parent,)))))


def rerooted(tree: Tree, root: int) -> Tree:
    """The same links with another rank on top."""
    return tuple(_ways(tree, rank)[root][1] for rank in range(len(tree)))


def _ways(tree: Tree, rank: int) -> dict[int, tuple[int, int | None]]:
    """To every rank: the distance from this one, and the first neighbour on the way, None to itself."""
    ways: dict[int, tuple[int, int | None]] = {rank: (0, None)}
    todo = deque([rank])
    while todo:
        here = todo.popleft()
        distance, first = ways[here]
        for peer in neighbours(tree, here):
            if peer not in ways:
                ways[peer] = distance + 1, peer if first is None else first
                todo.append(peer)
    return ways


def _reduce(tree: Tree, rank: int) -> Program:
    """Combine the own input with the children's, for the parent or, at the root, for the output."""
    parent = tree[rank]
    above = () if parent is None else (parent,)
    return (Step(0, Read.INPUT, recv=children(tree, rank), write=parent is None, send=above),)


def _broadcast(tree: Tree, rank: int) -> Program:
    """Write what the parent sent (the root: its own), and pass it on to the children."""
    parent = tree[rank]
    if parent is None:
        return (Step(0, Read.INPUT, write=True, send=children(tree, rank)),)
    return (Step(0, recv=(parent,), write=True, send=children(tree, rank)),)


def _over(trees: Trees, name: str, collective: str, program: Callable[[Tree, int], Program]) -> Plan:
    size = len(trees[0][0])
    for index, (tree, _) in enumerate(trees):
        in_range = all(parent is None or 0 <= parent < size for parent in tree)
        if len(tree) != size or tree.count(None) != 1 or not in_range or len(_ways(tree, tree.index(None))) < size:
            raise PlanError(f"{name}: tree {index} is {tree}; it must join ranks 0..{size - 1} under one root, None")
    channels = (Channel(weight, 1, tuple(program(tree, rank) for rank in range(size))) for tree, weight in trees)
    return Plan(name, collective, size, tuple(channels))
