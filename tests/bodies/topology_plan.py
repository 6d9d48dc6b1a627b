"""Machines made of links, and what must hold for a plan over them."""

import json
from collections import defaultdict
from typing import Any

import pytest

from ringreduce.plan import Plan, verify
from ringreduce.topology.graph import LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.planned import Planned

DOUBLE = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
SINGLE = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
GBPS = 18.0  # of one NVLink, as in the texts
Widths = dict[tuple[int, int], float]


def direct(size: int, widths: Widths, name: str = "direct") -> LinkGraph:
    """GPUs with links of these GB/s between them."""
    nodes = tuple(Node(f"GPU{i}", NodeKind.GPU, i) for i in range(size))
    links = [
        link for (a, b), gbps in widths.items() for link in both_directions(f"GPU{a}", f"GPU{b}", LinkKind.NVLINK, gbps)
    ]
    return LinkGraph(name, nodes, tuple(links))


def cube_mesh(pcie: bool = False) -> LinkGraph:
    """DGX-1 V100; with PCIe, two GPUs a switch, two switches a CPU."""
    graph = direct(8, {**dict.fromkeys(DOUBLE, 2 * GBPS), **dict.fromkeys(SINGLE, GBPS)}, "DGX-1 V100")
    if not pcie:
        return graph
    switches = tuple(Node(f"PCIe{i}", NodeKind.PCIE, i) for i in range(4))
    cpus = tuple(Node(f"CPU{i}", NodeKind.CPU, i, numa=i) for i in range(2))
    links = [
        *(link for i in range(8) for link in both_directions(f"GPU{i}", f"PCIe{i // 2}", LinkKind.PCIE, 16.0)),
        *(link for i in range(4) for link in both_directions(f"PCIe{i}", f"CPU{i // 2}", LinkKind.PCIE, 16.0)),
        *both_directions("CPU0", "CPU1", LinkKind.SMP, 20.0),
    ]
    return LinkGraph(graph.name, (*graph.nodes, *switches, *cpus), (*graph.links, *links))


def connected(gpus: tuple[int, ...], widths: Widths) -> bool:
    reached, todo = set(), [gpus[0]]
    while todo:
        gpu = todo.pop()
        if gpu not in reached:
            reached.add(gpu)
            todo += [b if gpu == a else a for a, b in widths if gpu in (a, b) and {a, b} <= set(gpus)]
    return reached == set(gpus)


def recounted(document: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes from GPU to GPU, from the JSON alone: every send of every step, at its chunk's size."""
    plan = document["plan"]
    ranks = len(document["ranks"])
    one_block = plan["collective"] in ("all_reduce", "broadcast", "reduce")
    size_bytes = document["size_bytes"] if one_block else document["size_bytes"] / ranks
    total = sum(channel["share"] for channel in plan["channels"])
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for channel in plan["channels"]:
        chunk = size_bytes * channel["share"] / total / channel["chunks"]
        for rank, program in enumerate(channel["programs"]):
            for step in program:
                for peer in step["send"]:
                    sent[document["ranks"][rank], document["ranks"][peer]] += chunk
    return sent


def check(planned: Planned, size_bytes: int = 160_000_000) -> dict[str, Any]:
    """The plan is right, and no link has more to carry than it can in the time that the plan claims.  Its JSON."""
    verify(planned.plan)
    document = json.loads(planned.to_json(size_bytes))
    assert Plan.from_json(json.dumps(document["plan"])) == planned.plan
    assert document["bandwidth_GBps"] == pytest.approx(size_bytes / document["time_s"] / 1e9)
    assert document["bandwidth_GBps"] <= document["bound_GBps"] * (1 + 1e-9)
    crossing: dict[str, float] = defaultdict(float)  # by link, counted again from every send of every step
    capacity = {f"{link.src} {link.dst}": link.capacity for link in planned.graph.links}
    for pair, amount in recounted(document).items():
        source, target = (document["ranks"].index(end) for end in pair)
        for link, share in planned.routes.between[source, target]:
            crossing[f"{planned.routes.links[link].src} {planned.routes.links[link].dst}"] += share * amount
    needed = max(amount / (capacity[name] * 1e9) for name, amount in crossing.items())
    if len({node.host for node in planned.graph.ranks}) == 1:
        assert document["time_s"] == pytest.approx(needed)
    assert document["time_s"] >= needed * (1 - 1e-9)
    assert sorted(link["bytes"] for link in document["links"]) == pytest.approx(sorted(crossing.values()))
    return document
