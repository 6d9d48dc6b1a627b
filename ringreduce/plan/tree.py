"""Trees: latency logarithmic in the size, each rank combining what its children sent.

A tree is the parent of every rank (None for the root).  A reduction flows up, a broadcast down; with the rounds
overlapped both are pipelined, and a rank exchanges a bounded number of messages per round whatever the size.

broadcast and reduce use one binary tree, the heap order, rather than the binomial tree: the binomial root would read
log2(size) children per round while half of the ranks are idle, and rounds are paced by their busiest rank.

all_reduce uses two binary trees, each for half of the data: a rank that is interior (busy with two children) in one is
a leaf in the other, so that together they use the full bandwidth of every rank, which one tree cannot (Sanders, Speck
and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009).

Slots: any depth, as a parent's message is the answer to the child's.
"""

from ringreduce.plan.compose import compose
from ringreduce.plan.model import Channel, Plan, Program, Read, Step

Tree = tuple[int | None, ...]
"""The parent of every rank, None for the root."""


def all_reduce(size: int) -> Plan:
    """Reduce to the root of each of two complementary trees, and broadcast back from it."""

    def channel(tree: Tree) -> Channel:
        return Channel(1, 1, tuple(compose(_reduce(tree, rank), _broadcast(tree, rank)) for rank in range(size)))

    return Plan("tree", "all_reduce", size, tuple(map(channel, complementary_trees(size))))


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
