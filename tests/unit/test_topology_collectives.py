"""Every collective at its bound: on all connected subsets of a DGX-1 V100, and on random links, as wide back as forth
or not.  The bounds are computed another way: over all cuts, and all_to_all and all_reduce by flows over links."""

from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import pytest
from bodies.topology_plan import DOUBLE, SINGLE, check, connected
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from ringreduce.plan import verify
from ringreduce.plan.routed import routed
from ringreduce.topology.bound import Cuts, tightest
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind
from ringreduce.topology.planner import algorithms, plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.routes import fabric_routes

Widths = dict[tuple[int, int], float]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "all_to_all")


def machine(size: int, widths: Widths) -> LinkGraph:
    """GPUs with these one-way links."""
    nodes = tuple(Node(f"GPU{rank}", NodeKind.GPU, rank) for rank in range(size))
    links = tuple(Link(f"GPU{a}", f"GPU{b}", LinkKind.NVLINK, gbps) for (a, b), gbps in widths.items())
    return LinkGraph("random", nodes, links)


def over_cuts(collective: str, size: int, widths: Widths) -> float:
    """The least over all sets of ranks: what leaves them, over the share of the tensor that must."""
    least = float("inf")
    for part in range(1, (1 << size) - 1):
        leaving = sum(gbps for (a, b), gbps in widths.items() if part >> a & 1 and not part >> b & 1)
        inside, root = part.bit_count() / size, bool(part & 1)
        must = {
            "all_gather": inside,
            "reduce_scatter": 1 - inside,
            "broadcast": float(root),
            "reduce": float(not root),
            "scatter": (1 - inside) * root,
            "gather": inside * (not root),
        }[collective]
        least = min(least, leaving / must if must else float("inf"))
    return least


def by_flows(size: int, widths: Widths) -> float:
    """all_to_all: what every rank sends to all others flows over links, 1 / size of the tensor to each."""
    links = list(widths)
    count = size * len(links)
    kept, sent = np.zeros((size * size, count + 1)), np.zeros((len(links), count + 1))
    for source in range(size):
        for at, (a, b) in enumerate(links):
            kept[source * size + a, source * len(links) + at] -= 1
            kept[source * size + b, source * len(links) + at] += 1
            sent[at, source * len(links) + at] = 1
        for rank in range(size):
            kept[source * size + rank, -1] = (size - 1) / size if rank == source else -1 / size
    gain = np.zeros(count + 1)
    gain[-1] = -1
    found = linprog(gain, A_ub=sent, b_ub=list(widths.values()), A_eq=kept, b_eq=np.zeros(size * size))
    return -float(found.fun)


def in_and_out(size: int, widths: Widths) -> float:
    """all_reduce: rank v combines x_v of the tensor and copies the sums from there.  By Edmonds' theorem, trees can do
    that if part of every link's width carries, to each rank alone, a flow of all x, and the rest one from each rank."""
    links = list(widths)
    block = len(links)
    count = size + block + 2 * size * block  # x, the part of every link, flows to and from each rank
    kept, sent = lil_matrix((2 * size * size, count)), lil_matrix((2 * size * block, count))
    room = np.zeros(2 * size * block)
    for number, (rank, to_rank) in enumerate(product(range(size), (True, False))):
        for at, (a, b) in enumerate(links):
            flow, row = size + block + number * block + at, number * block + at
            kept[number * size + a, flow] = -1.0 if to_rank else 1.0
            kept[number * size + b, flow] = 1.0 if to_rank else -1.0
            sent[row, flow], sent[row, size + at] = 1.0, -1.0 if to_rank else 1.0
            room[row] = 0.0 if to_rank else widths[a, b]
        for other in range(size):
            kept[number * size + other, other] = 1.0
        kept[number * size + rank, :] = 0.0  # where the flow ends, or begins
    gain = np.zeros(count)
    gain[:size] = -1.0
    limits = [(0, None)] * size + [(0, widths[link]) for link in links] + [(0, None)] * (2 * size * block)
    found = linprog(
        gain, A_ub=sent.tocsr(), b_ub=room, A_eq=kept.tocsr(), b_eq=np.zeros(2 * size * size), bounds=limits
    )
    return -float(found.fun)


def limit(collective: str, size: int, widths: Widths) -> float:
    by = {"all_to_all": by_flows, "all_reduce": in_and_out}.get(collective)
    return by(size, widths) if by else over_cuts(collective, size, widths)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES[1:])  # test_topology_plan.py has all_reduce
def test_all_subsets_of_the_cube_mesh_reach_the_bound(collective: str) -> None:
    every = {**dict.fromkeys(DOUBLE, 50.0), **dict.fromkeys(SINGLE, 25.0)}
    graph, tried = preset("dgx1-v100"), 0
    for size in range(2, 9):
        for gpus in combinations(range(8), size):
            if not connected(gpus, every):
                continue
            rank = {gpu: at for at, gpu in enumerate(gpus)}
            pairs = [(pair, gbps) for pair, gbps in every.items() if set(pair) <= set(gpus)]
            widths = {(rank[a], rank[b]): gbps for (a, b), gbps in pairs}
            widths |= {ends[::-1]: gbps for ends, gbps in widths.items()}
            planned = plan_for(graph.select(gpus), collective)
            verify(planned.plan)
            assert planned.bandwidth >= 0.98 * limit(collective, size, widths), gpus
            assert planned.bandwidth >= 0.98 * planned.bound, gpus
            tried += 1
    assert tried == 197


@st.composite
def one_way_links(draw: st.DrawFn) -> tuple[int, Widths]:
    """Connected both ways; a link back has another width than that forth."""
    size = draw(st.integers(2, 10))
    pairs = list(combinations(range(size), 2))
    joined = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    tree = {(draw(st.integers(0, rank - 1)), rank) for rank in range(1, size)}
    widths: Widths = {}
    for (a, b), is_joined in zip(pairs, joined, strict=True):
        if is_joined or (a, b) in tree:
            widths[a, b] = float(draw(st.integers(1, 8)))
            widths[b, a] = float(draw(st.integers(1, 8)))
    return size, widths


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(deadline=None, max_examples=8)
@given(links=one_way_links())
def test_random_links_reach_the_bound(collective: str, links: tuple[int, Widths]) -> None:
    size, widths = links
    graph = machine(size, widths)
    planned = plan_for(graph, collective, 10**9, algorithms(graph, collective)[0])
    check(planned, 10**9)
    most = limit(collective, size, widths)
    assert most * (1 - 1e-6) <= planned.bound <= most * 1.01
    assert planned.bandwidth >= 0.98 * most
    check(plan_for(graph, collective, 10_000), 10_000)


@settings(deadline=None, max_examples=40)
@given(links=one_way_links(), collective=st.sampled_from(COLLECTIVES[1:-1]))
def test_the_tightest_cut_is_found(links: tuple[int, Widths], collective: str) -> None:
    size, widths = links
    part, rest = tightest(collective, Cuts(fabric_routes(machine(size, widths))))
    if collective in ("reduce_scatter", "reduce", "gather"):
        part, rest = rest, part
    leaving = sum(gbps for (a, b), gbps in widths.items() if a in part and b in rest)
    shares = {"all_gather": len(part) / size, "reduce_scatter": len(rest) / size, "scatter": len(rest) / size,
              "gather": len(part) / size}  # fmt: skip
    assert leaving / shares.get(collective, 1.0) == pytest.approx(over_cuts(collective, size, widths))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "widths",
    [
        {(0, 1): 5.0, (1, 2): 3.0, (2, 0): 2.0},  # a ring
        {(0, 1): 4.0, (1, 0): 1.0, (1, 2): 3.0, (2, 3): 2.0, (3, 1): 6.0},  # a pair and a ring
        {(0, 1): 1.0, (1, 2): 1.0, (2, 0): 1.0, (2, 3): 1.0, (3, 4): 1.0, (4, 2): 1.0},  # two rings: no cycle of all
    ],
)
def test_links_may_have_one_direction(collective: str, widths: Widths) -> None:
    size = 1 + max(map(max, widths))
    planned = plan_for(machine(size, widths), collective, 10**9, algorithms(machine(size, widths), collective)[0])
    verify(planned.plan)
    assert planned.bandwidth == pytest.approx(limit(collective, size, widths), rel=0.02)
    assert planned.bandwidth <= planned.bound * (1 + 1e-9)


def test_blocks_may_go_round_a_star() -> None:
    """The hub passes on the blocks of all: more messages than its outbox has slots, in rounds that fit."""
    size = 9
    hops = {one * size + other: [(one, 0), (0, other)] for one, other in permutations(range(1, size), 2)}
    hops |= {rank * size: [(rank, 0)] for rank in range(1, size)} | {rank: [(0, rank)] for rank in range(1, size)}
    verify(routed("all_to_all", size, [(1, hops)], "star"))
