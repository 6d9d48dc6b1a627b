"""Semirings over ranks: shortest paths, reachability, and attention over a sharded sequence.

    torchrun --nproc-per-node=3 examples/semirings.py

A semiring has an addition and a multiplication. The multiplication joins an edge to a path, or a key to its value, and
is local. What the ranks combine is the addition, so that is the operator of an all_reduce: the minimum for (min, +),
"or" for reachability. An `Op` is needed where the addition is not one of torch.distributed: a minimum that remembers
where it came from, and softmax's sum. Each result is compared with that of one process, and the program fails if they
differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import ringreduce

NODES, EDGES = 400, 2400
QUERIES, KEYS, WIDTH = 64, 3000, 32

Pair = tuple[torch.Tensor, torch.Tensor]
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def shorter(a: Pair, b: Pair) -> Pair:
    """Of two paths the shorter one with its last edge; of two as short the one with the lower edge."""
    wins = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return torch.where(wins, b[0], a[0]), torch.where(wins, b[1], a[1])


def merged(a: Partial, b: Partial) -> Partial:
    """Softmax sums over two sets of keys: the highest score, and the weights and weighted values relative to it."""
    highest = torch.maximum(a[0], b[0])
    left, right = (a[0] - highest).exp(), (b[0] - highest).exp()
    return highest, a[1] * left + b[1] * right, a[2] * left[:, None] + b[2] * right[:, None]


SHORTER = ringreduce.Op.torch(shorter, tensors=2, commutative=True)
MERGED = ringreduce.Op.torch(merged, tensors=3, commutative=True, element=((), (), (WIDTH,)))


def own_part(whole: torch.Tensor) -> torch.Tensor:
    """The rows of this rank."""
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()]


def shortest_paths(edges: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, alone: bool = False) -> Pair:
    """From node 0, by Bellman and Ford: distances, and the last edge of each path (-1: none)."""
    distance = torch.full((NODES,), torch.inf, dtype=torch.float64)
    distance[0] = 0
    last = torch.full((NODES,), -1)
    while True:
        before = distance.clone()
        through = before[edges[:, 0]] + lengths  # the semiring's multiplication
        distance.scatter_reduce_(0, edges[:, 1], through, "amin")
        best = (through == distance[edges[:, 1]]) & (through < before[edges[:, 1]])
        lowest = torch.full((NODES,), EDGES).scatter_reduce(0, edges[best, 1], ids[best], "amin")
        last = torch.where(lowest < EDGES, lowest, last)
        if not alone:
            ringreduce.all_reduce((distance, last), op=SHORTER)  # its addition
        if torch.equal(distance, before):
            return distance, last


def reachable(edges: torch.Tensor, alone: bool = False) -> torch.Tensor:
    """Which nodes paths from node 0 lead to. "Or" is a reduction of torch.distributed, so no Op is needed."""
    seen = torch.zeros(NODES, dtype=torch.bool)
    seen[0] = True
    while True:
        before = seen.clone()
        seen[edges[before[edges[:, 0]], 1]] = True
        if not alone:
            ringreduce.all_reduce(seen, op=dist.ReduceOp.BOR)
        if torch.equal(seen, before):
            return seen


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(queries keys^T) values, where each rank has some of the keys and values: one all_reduce."""
    scores = queries @ keys.T
    highest = scores.max(1).values
    weights = (scores - highest[:, None]).exp()
    partial = highest, weights.sum(1), weights @ values
    ringreduce.all_reduce(partial, op=MERGED)
    return partial[2] / partial[1][:, None]


def check(what: str, difference: float, most: float) -> None:
    if not difference <= most:
        raise SystemExit(f"{what}: differs from a single process's by {difference:.1e}")
    if dist.get_rank() == 0:
        print(f"{what}: differs from a single process's by {difference:.1e}")


def main() -> None:
    dist.init_process_group("ringreduce")
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(NODES, (EDGES, 2), generator=generator)
    lengths = torch.randint(1, 100, (EDGES,), generator=generator).double()
    ids = torch.arange(EDGES)

    distance, last = shortest_paths(own_part(edges), own_part(lengths), own_part(ids))
    expected, last_alone = shortest_paths(edges, lengths, ids, alone=True)
    found = distance.isfinite() & (torch.arange(NODES) > 0)
    joined = distance[edges[last[found], 0]] + lengths[last[found]] == distance[found]
    check("shortest paths (min, +)", float((distance != expected).sum() + (~joined).sum()), 0)
    check("their last edges", float((last != last_alone).sum()), 0)
    check("reachability (or, and)", float((reachable(own_part(edges)) != reachable(edges, alone=True)).sum()), 0)

    queries, keys, values = (
        torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) for rows in (QUERIES, KEYS, KEYS)
    )
    ours = attention(queries, own_part(keys), own_part(values))
    check("attention (log-sum-exp)", float((ours - (queries @ keys.T).softmax(1) @ values).abs().max()), 1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
