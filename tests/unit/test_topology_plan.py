"""Rings and trees against bounds that are computed another way, loads recounted step by step; switches, PCIe, hosts."""

import json
import math
from itertools import combinations, permutations

import odd_subsets
import pytest
from bodies.topology_plan import DOUBLE, GBPS, SINGLE, Widths, check, connected, cube_mesh, direct, recounted
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.errors import TopologyError
from ringreduce.plan import build, verify
from ringreduce.topology.graph import LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.planned import transfers
from ringreduce.topology.planner import algorithms, plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.routes import in_runs
from ringreduce.topology.stages import weights


def switched(size: int, gbps: float, switches: int = 1) -> LinkGraph:
    nodes = [Node(f"GPU{i}", NodeKind.GPU, i) for i in range(size)]
    nodes += [Node(f"NVSwitch{i}", NodeKind.NVSWITCH, i) for i in range(switches)]
    links = [
        link
        for gpu in range(size)
        for at in range(switches)
        for link in both_directions(f"GPU{gpu}", f"NVSwitch{at}", LinkKind.NVLINK, gbps / switches)
    ]
    return LinkGraph(f"{size} GPUs on NVSwitch", tuple(nodes), tuple(links))


def hosts(count: int, gbps: float) -> LinkGraph:
    """So many cube meshes, each GPU with a NIC of its own."""
    one = cube_mesh()
    nodes, links = [Node("network", NodeKind.NETWORK, host=-1)], []
    for host in range(count):
        nodes += [Node(f"host{host}/{n.name}", n.kind, n.index, host) for n in one.nodes]
        nodes += [Node(f"host{host}/NIC{i}", NodeKind.NIC, i, host) for i in range(8)]
        for link in one.links:
            links.append(type(link)(f"host{host}/{link.src}", f"host{host}/{link.dst}", link.kind, link.capacity))
        for i in range(8):
            links += both_directions(f"host{host}/GPU{i}", f"host{host}/NIC{i}", LinkKind.PCIE, 32.0)
            links += both_directions(f"host{host}/NIC{i}", "network", LinkKind.NETWORK, gbps)
    return LinkGraph(f"{count} hosts", tuple(nodes), tuple(links))


def strength(size: int, widths: Widths) -> float:
    """min over partitions of crossing capacity / (parts - 1), without linear programs or cuts.

    Dinkelbach: for a ratio `r` the partition with the largest ``capacity inside parts + r * parts``, by dynamic
    programming over sets of ranks; its own ratio is the next `r`, until none is lower.
    """
    inside = [sum(w for (a, b), w in widths.items() if s >> a & 1 and s >> b & 1) for s in range(1 << size)]
    ratio = inside[-1] / (size - 1)
    while True:
        best = [(0.0, 0.0, 0)]  # of each set of ranks: the value, the capacity inside, the parts
        for s in range(1, 1 << size):
            lowest = s & -s
            rest = sub = s ^ lowest
            found = (-1.0, 0.0, 0)
            while True:  # every part that has the lowest rank of s
                kept = inside[sub | lowest]
                value, others, parts = best[rest ^ sub]
                if value + kept + ratio > found[0]:
                    found = value + kept + ratio, others + kept, parts + 1
                if sub == 0:
                    break
                sub = (sub - 1) & rest
            best.append(found)
        value, kept, parts = best[-1]
        if parts < 2 or (inside[-1] - kept) / (parts - 1) > ratio * (1 - 1e-9):
            return ratio
        ratio = (inside[-1] - kept) / (parts - 1)


def test_cube_mesh_is_two_rings_that_use_all_links() -> None:
    planned = plan_for(cube_mesh())
    check(planned)
    wide, narrow = planned.rings
    assert (wide.width, narrow.width, wide.both_ways, narrow.both_ways) == (2 * GBPS, GBPS, True, True)
    for ring, pairs in ((wide, DOUBLE), (narrow, SINGLE)):
        assert {tuple(sorted(hop)) for hop in ring.hops()} == set(pairs)
    loads = planned.loads(160_000_000)
    assert len(loads) == 32  # 16 pairs, both directions
    assert {round(load.seconds, 9) for load in loads} == {round(160e6 * 14 / 8 / 6 / GBPS / 1e9, 9)}  # all full


def test_cube_mesh_has_the_rings_of_the_book() -> None:
    book = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 4, 6, 3, 5, 8, 2, 7))
    planned = plan_for(cube_mesh())
    ours = [{frozenset(hop) for hop in ring.hops()} for ring in planned.rings]
    fitting = [
        numbers
        for numbers in permutations(range(8))
        if all(
            {frozenset((numbers[a - 1], numbers[b - 1])) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}
            == mine
            for ring, mine in zip(book, ours, strict=True)
        )
    ]
    assert len(fitting) == 4  # the ways in which the book may have numbered them


def test_cube_mesh_takes_less_than_half_of_the_books_time() -> None:
    one_direction = 2 * 160e6 / (3 * GBPS * 1e9)
    assert one_direction == pytest.approx(5.93e-3, rel=1e-3)
    planned = plan_for(cube_mesh())
    assert planned.seconds(160_000_000) <= 2.60e-3
    assert 160e6 / (planned.bound * 1e9) == pytest.approx(2.59e-3, rel=2e-3)


@pytest.mark.slow
def test_all_subsets_of_the_cube_mesh() -> None:
    every = {**dict.fromkeys(DOUBLE, 2 * GBPS), **dict.fromkeys(SINGLE, GBPS)}
    graph = cube_mesh(pcie=True)
    apart = 0
    for size in range(2, 9):
        for gpus in combinations(range(8), size):
            planned = plan_for(graph.select(gpus))
            document = check(planned)
            if not connected(gpus, every):
                apart += 1
                assert "no NVLink" in planned.reason
                assert any(load.src not in planned.ranks for load in planned.loads(1000))
                continue
            names = {gpu: rank for rank, gpu in enumerate(gpus)}
            own = {(names[a], names[b]): w for (a, b), w in every.items() if a in names and b in names}
            limit = strength(size, own)
            assert planned.bound == pytest.approx(limit)
            assert planned.bandwidth >= 0.98 * limit
            sent = recounted(document)
            loads = {tuple(planned.numbers[end] for end in load[:2]): load.bytes for load in planned.loads(160_000_000)}
            assert loads == pytest.approx(sent)
            for (a, b), amount in sent.items():
                assert amount / (every[min(a, b), max(a, b)] * 1e9) <= planned.seconds(160_000_000) * (1 + 1e-9)
    assert apart == 50


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[int, Widths]:
    size = draw(st.integers(2, 10))
    pairs = list(combinations(range(size), 2))
    lanes = draw(st.lists(st.integers(0, 4), min_size=len(pairs), max_size=len(pairs)))
    widths = {pair: float(count) for pair, count in zip(pairs, lanes, strict=True) if count}
    for rank in range(1, size):  # a path to every rank
        if not any(rank == b for _, b in widths):
            widths[draw(st.integers(0, rank - 1)), rank] = float(draw(st.integers(1, 4)))
    return size, widths


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(multigraphs())
def test_random_multigraphs_come_up_to_their_bound(graph: tuple[int, Widths]) -> None:
    size, widths = graph
    planned = plan_for(direct(size, widths))
    document = check(planned, 1_000_000_000)
    limit = strength(size, widths)
    assert planned.bound == pytest.approx(limit)
    assert planned.bandwidth >= 0.95 * limit
    for (a, b), amount in recounted(document).items():
        assert amount / 1e9 / widths[min(a, b), max(a, b)] <= planned.seconds(1_000_000_000) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "broadcast", "reduce"])
@settings(deadline=None, max_examples=15)
@given(graph=multigraphs())
def test_other_collectives_are_right_and_within_bounds(collective: str, graph: tuple[int, Widths]) -> None:
    size, widths = graph
    planned = plan_for(direct(size, widths), collective, 100_000)
    check(planned, 100_000)
    limits = []
    for part in range(1, (1 << size) - 1):
        crossing = sum(w for (a, b), w in widths.items() if (part >> a ^ part >> b) & 1)
        share = part.bit_count() / size
        limits.append(crossing / {"all_gather": share, "reduce_scatter": 1 - share}.get(collective, 1.0))
    assert planned.bound == pytest.approx(min(limits))


@pytest.mark.parametrize("collective", ["all_to_all", "gather", "scatter"])
def test_exchanges_use_pcie_where_nvlink_does_not_reach(collective: str) -> None:
    check(plan_for(cube_mesh(pcie=True), collective))
    relayed = plan_for(cube_mesh(), collective)
    check(relayed)
    assert relayed.plan.name == "routed"


@pytest.mark.parametrize(("size", "gbps", "switches"), [(8, 300.0, 1), (8, 450.0, 4), (16, 150.0, 6), (72, 900.0, 1)])
def test_through_switches_one_ring_is_all_there_is(size: int, gbps: float, switches: int) -> None:
    planned = plan_for(switched(size, gbps, switches), algorithm="rings")
    check(planned)
    assert planned.bandwidth == pytest.approx(gbps * size / (2 * (size - 1)))
    assert planned.bound == pytest.approx(planned.bandwidth)
    assert len(planned.rings) == 1 and not planned.rings[0].both_ways


def test_shared_links_count_once_for_all_who_cross_them() -> None:
    """Four GPUs, two a switch, of which only a narrow link leads to the other switch."""
    nodes = [Node(f"GPU{i}", NodeKind.GPU, i) for i in range(4)] + [
        Node(f"PCIe{i}", NodeKind.PCIE, i) for i in range(2)
    ]
    links = [link for i in range(4) for link in both_directions(f"GPU{i}", f"PCIe{i // 2}", LinkKind.PCIE, 16.0)]
    links += both_directions("PCIe0", "PCIe1", LinkKind.PCIE, 4.0)
    planned = plan_for(LinkGraph("narrow", tuple(nodes), tuple(links)))
    check(planned)
    assert planned.bound == pytest.approx(4.0)  # all of a tensor crosses the narrow link, both ways
    assert planned.bandwidth >= 0.98 * planned.bound
    crossing = [load for load in planned.loads(4_000) if {load.src, load.dst} == {"PCIe0", "PCIe1"}]
    assert [load.bytes for load in crossing] == pytest.approx([4_000, 4_000], rel=0.02)


def test_hosts_are_planned_in_a_hierarchy() -> None:
    graph = hosts(2, 12.5)
    assert "hierarchical_ring" in algorithms(graph, "all_reduce")
    planned = plan_for(graph, algorithm="hierarchical_ring")
    check(planned)
    ring = plan_for(graph, algorithm="ring")
    across = [load.bytes for load in planned.loads(8_000) if load.dst == "network"]
    assert across == pytest.approx([1_000] * 16)  # each rail its part, to the other host and back as the result
    assert planned.simulated(160_000_000) < ring.simulated(160_000_000)


def test_small_tensors_take_few_hops() -> None:
    graph = switched(8, 300.0)
    small, large = plan_for(graph, size_bytes=1_000), plan_for(graph, size_bytes=1_000_000_000)
    assert small.plan.name == "one_shot" and large.plan.name == "rings"
    assert small.simulated(1_000) < large.simulated(1_000)


def test_plans_are_the_same_everywhere_and_follow_relabelling() -> None:
    graph = cube_mesh()
    again = LinkGraph.from_json(graph.to_json())
    assert plan_for(again).plan == plan_for(graph).plan
    moved = plan_for(graph.select([5, 2, 7, 0, 1, 4, 3, 6]))
    assert moved.bandwidth == pytest.approx(plan_for(graph).bandwidth)
    assert moved.ranks[0] == "GPU5"


def test_more_gpus_than_rings_are_looked_for_among() -> None:
    planned = plan_for(direct(33, {(gpu, gpu + 1): 10.0 for gpu in range(32)}))
    verify(planned.plan)
    assert planned.bandwidth == pytest.approx(planned.bound) == 10.0


def test_numa_nodes_whose_gpus_are_not_joined_alone() -> None:
    nodes = tuple(Node(f"GPU{i}", NodeKind.GPU, i, numa=i % 2) for i in range(4))
    square = direct(4, {(0, 1): 25.0, (1, 2): 25.0, (2, 3): 25.0, (0, 3): 25.0})
    planned = plan_for(LinkGraph("square", nodes, square.links))
    check(planned)
    assert planned.bandwidth == pytest.approx(planned.bound) == pytest.approx(100 / 3)


def test_large_tensors_go_by_bandwidth() -> None:
    nodes = (*(Node(f"GPU{i}", NodeKind.GPU, i) for i in range(4)), Node("NVSwitch0", NodeKind.NVSWITCH))
    lanes = (75.0, 75.0, 25.0, 75.0)
    links = [x for i in range(4) for x in both_directions(f"GPU{i}", "NVSwitch0", LinkKind.NVLINK, lanes[i])]
    planned = plan_for(LinkGraph("uneven lanes", nodes, tuple(links)))
    check(planned)
    assert planned.bandwidth >= 0.98 * planned.bound == pytest.approx(0.98 * 25.0)


def test_gpus_are_named_by_their_index() -> None:
    graph = cube_mesh().select([2, 5, 6])
    assert graph.places([6, 2]) == [2, 0]
    with pytest.raises(TopologyError, match="there is no GPU 0; it has GPU 2, 5, 6"):
        graph.places([0])


def test_groups_do_not_mix_hosts() -> None:
    nodes = [Node(f"host{h}/GPU{i}", NodeKind.GPU, i, host=h, numa=0) for h, i in ((0, 0), (0, 1), (0, 2), (1, 0))]
    nodes += [Node(f"host{h}/NIC0", NodeKind.NIC, 0, host=h) for h in (0, 1)] + [Node("network", NodeKind.NETWORK)]
    links = [x for n in nodes[:4] for x in both_directions(n.name, f"host{n.host}/NIC0", LinkKind.PCIE, 16.0)]
    links += [x for h in (0, 1) for x in both_directions(f"host{h}/NIC0", "network", LinkKind.NETWORK, 4.0)]
    links += [x for i in (1, 2) for x in both_directions("host0/GPU0", f"host0/GPU{i}", LinkKind.NVLINK, 50.0)]
    graph = LinkGraph("uneven", tuple(nodes), tuple(links))
    assert not any(name.startswith("hierarchical") for name in algorithms(graph, "all_reduce"))
    check(plan_for(graph))


def test_json_without_indices_is_numbered() -> None:
    names = ("A", "B", "C")
    nodes = [{"name": name, "kind": "gpu"} for name in names]
    links = [{"src": a, "dst": b, "kind": "NVLink", "capacity": 10} for a in names for b in names if a != b]
    graph = LinkGraph.from_json(json.dumps({"nodes": nodes, "links": links}))
    assert [node.index for node in graph.gpus] == [0, 1, 2]
    assert check(plan_for(graph))["ranks"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("digits", "what"), [("1" + "0" * 400, "capacity is 10{39} GB/s"), ("9" * 5000, "too many digits")]
)
def test_numbers_without_end_are_refused(digits: str, what: str) -> None:
    text = direct(2, {(0, 1): 1.0}).to_json().replace('"capacity": 1.0', f'"capacity": {digits}')
    with pytest.raises(TopologyError, match=what):
        LinkGraph.from_json(text)


def test_two_gpus_with_one_index_are_refused() -> None:
    nodes = (Node("A", NodeKind.GPU, 3), Node("B", NodeKind.GPU, 3))
    with pytest.raises(TopologyError, match="GPU 3 of host 0 is there twice"):
        LinkGraph("twins", nodes, ())


def test_one_gpu_moves_nothing() -> None:
    planned = plan_for(cube_mesh().select([3]))
    verify(planned.plan)
    document = json.loads(planned.to_json(1_000))
    assert (document["time_s"], document["links"], document["bandwidth_GBps"]) == (0.0, [], None)


def test_unreachable_gpus_are_named() -> None:
    with pytest.raises(TopologyError, match=r"no path between GPU0 GPU1 \| GPU2; add the links that join them"):
        plan_for(direct(3, {(0, 1): 1.0}))


@pytest.mark.parametrize(
    ("gpus", "said"),
    [([], "no GPUs are named"), ([8], "there is no GPU 8; it has GPUs 0 to 7"), ([1, 1], "GPU 1 is named twice")],
)
def test_gpus_that_do_not_exist(gpus: list[int], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        cube_mesh().select(gpus)


def test_unknown_names() -> None:
    with pytest.raises(TopologyError, match="collective 'allreduces' is unknown; known are all_reduce"):
        plan_for(cube_mesh(), "allreduces")
    with pytest.raises(
        TopologyError, match="algorithm 'magic' is not possible for all_reduce here; possible are rings"
    ):
        plan_for(cube_mesh(), algorithm="magic")
    with pytest.raises(TopologyError, match="size_bytes is 0"):
        plan_for(cube_mesh(), size_bytes=0)


def test_transfers_count_every_receiver() -> None:
    assert transfers(build("all_reduce", "one_shot", 3), 9) == {(a, b): 9 for a, b in permutations(range(3), 2)}
    assert transfers(build("all_gather", "direct", 3), 9) == {(a, b): 3 for a, b in permutations(range(3), 2)}
    assert transfers(build("all_to_all", "direct", 3), 9) == {(a, b): 3 for a, b in permutations(range(3), 2)}


@pytest.mark.parametrize(
    ("machine", "gpus", "rings", "chains"),
    [
        # 6 rings of single links; 6 chains, each with half of a link each way
        pytest.param("dgx1-v100", range(8), 600 / 7, 75.0, marks=pytest.mark.slow),
        ("dgx1-v100", (0, 1, 2, 5), 100 / 3, 25.0),  # GPU 5 has links to 1 alone: 2 rings with a detour, 50 GB/s for us
        ("dgx1-v100", range(7), 700 / 12, 50.0),  # GPU 4 has 4 links left
        ("dgx2", range(5), 150 * 5 / 8, 75.0),
    ],
)
def test_the_rule_that_plans_are_compared_with(
    machine: str, gpus: tuple[int, ...], rings: float, chains: float
) -> None:
    found = odd_subsets.subset(preset(machine), tuple(gpus), "all_reduce")
    assert (found.rings, found.chains) == pytest.approx((rings, chains))
    assert found.gain >= 0.999


def test_weights_are_small_where_they_can_be() -> None:
    assert weights([36.0, 18.0]) == [2, 1]
    assert weights([7.5]) == [1]
    assert weights([1 / 3, 1 / 2]) == [2, 3]
    first, second = weights([math.pi, 1.0])
    assert first / second == pytest.approx(math.pi, rel=1e-3)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("GPU0 GPU1 GPU2 GPU4 GPU5", "GPU0-2 GPU4 GPU5"),
        ("GPU2 GPU1 GPU0", "GPU2 GPU1 GPU0"),
        ("0/9 0/10 0/11 1/12", "0/9-11 1/12"),
        ("one one one", "one one one"),
        ("5 6 7", "5-7"),
    ],
)
def test_names_in_a_row_are_told_as_one(names: str, said: str) -> None:
    assert " ".join(in_runs(names.split())) == said
