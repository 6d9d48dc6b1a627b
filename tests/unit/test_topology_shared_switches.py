"""Hosts that share an NVSwitch (NVL72), GPUs with NVLink to their CPU, and clusters that are too large for pairs."""

import math
from collections import Counter
from importlib import import_module
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.cli import topo
from ringreduce.topology.bound import Cuts, bound
from ringreduce.topology.clusters import hosts_of
from ringreduce.topology.graph import FABRIC, LinkGraph, LinkKind, NodeKind
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.read import read
from ringreduce.topology.routes import Routes, all_routes, fabric_routes

SWITCH = '<nvlink target="fffffff:ff:ff.0" count="{}" tclass="0x068000"/>'
C2C = '<c2c bw="44712" count="5"/>'
LARGE = 8 << 30


def trays(hosts: int, gpus: int, links: dict[tuple[int, int], int] | None = None, c2c: str = C2C, nic: str = "") -> str:
    """NCCL's XML of Blackwell hosts on one shared NVSwitch, each GPU with 18 links unless `links` says otherwise."""
    cpus = []
    for host in range(hosts):
        inside = "".join(
            f'<pci busid="000{gpu}:01:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" '
            f'link_width="16"><gpu dev="{gpu}" sm="100">{SWITCH.format((links or {}).get((host, gpu), 18))}{c2c}'
            "</gpu></pci>"
            for gpu in range(gpus)
        )
        cpus.append(f'<cpu host_hash="0x{host + 1}" numaid="0" arch="arm64">{inside}{nic}</cpu>')
    return f'<system version="1">{"".join(cpus)}</system>'


NIC = (
    '<pci busid="000a:0a:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>'
    '<net name="mlx5_0" speed="400000"/></nic></pci>'
)


def narrowest(routes: Routes, pair: tuple[int, int]) -> float:
    """GB/s that one transfer between two ranks can have."""
    return min(routes.links[link].capacity / share for link, share in routes.between[pair])


@settings(max_examples=60, deadline=None)
@given(
    hosts=st.integers(2, 4),
    gpus=st.integers(1, 4),
    lanes=st.integers(1, 18),
    c2c=st.sampled_from([C2C, ""]),
    nic=st.sampled_from([NIC, ""]),
)
def test_every_host_reaches_a_shared_switch(hosts: int, gpus: int, lanes: int, c2c: str, nic: str) -> None:
    """Hosts are equal, so all pairs have the links' 50 GB/s each, whichever host they are on, and no link to a CPU."""
    links = {(host, gpu): lanes for host in range(hosts) for gpu in range(gpus)}
    graph = read(trays(hosts, gpus, links, c2c, nic), "trays")
    for routes in (fabric_routes(graph), all_routes(graph)):
        for pair in permutations(range(hosts * gpus), 2):
            assert narrowest(routes, pair) == 50.0 * lanes
            assert {routes.links[link].kind for link, _ in routes.between[pair]} == {LinkKind.NVLINK}


@pytest.mark.parametrize("c2c", [C2C, ""])
@pytest.mark.parametrize(("hosts", "gpus"), [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_rings_of_trays_take_the_line_rate(hosts: int, gpus: int, c2c: str) -> None:
    """A ring of n ranks with 900 GB/s each moves 2 (n - 1) / n of the tensor over each of its links."""
    ranks = hosts * gpus
    graph = read(trays(hosts, gpus, c2c=c2c), "trays")
    line = 900 * ranks / (2 * (ranks - 1))
    for algorithm in ("auto", "rings", "ring"):
        assert plan_for(graph, size_bytes=LARGE, algorithm=algorithm).bandwidth == pytest.approx(line, rel=0.01)
    assert plan_for(graph, size_bytes=LARGE).bound == pytest.approx(line)


def test_the_switch_stays_with_the_second_host_alone() -> None:
    graph = read(trays(2, 2), "trays").select([2, 3])
    assert narrowest(fabric_routes(graph), (0, 1)) == 900.0
    assert LinkGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize("off", ["count 0", "no element"])
def test_a_gpu_without_nvlink_is_named(off: str) -> None:
    text = trays(1, 4, {(0, 1): 0})
    if off == "no element":
        text = text.replace(SWITCH.format(0), "")
    graph = read(text, "tray")
    assert [sum(link.lanes for link in graph.following[gpu.name] if link.kind in FABRIC) for gpu in graph.gpus] == [
        18, 0, 18, 18
    ]  # fmt: skip
    assert [line for line in graph.assumed if line.startswith("GPU1 has no NVLink")]
    planned = plan_for(graph)
    assert "no NVLink path between GPU0 GPU2 GPU3 | GPU1" in planned.reason
    assert "NVLink to CPU" in planned.reason
    assert planned.bandwidth <= 5 * 44.712 + 1e-9  # all of GPU1's result comes over its five links to the CPU


def test_nvlink_to_a_cpu_in_older_json_is_no_link_between_gpus() -> None:
    graph = read(trays(1, 2), "tray")
    older = graph.to_json().replace(f'"{LinkKind.C2C.value}"', '"NVLink"')
    assert LinkGraph.from_json(older, "tray") == graph


def clusters() -> list[LinkGraph]:
    machine = preset("hgx-h100")
    return [
        hosts_of(machine, 3),
        hosts_of(machine, 3, rails=True),
        hosts_of(machine, 5, hosts_per_leaf=2, taper=2),
        hosts_of(preset("dgx1-v100"), 2, nics=2),
        read(trays(2, 2, {(1, 1): 0}, nic=NIC), "trays"),
    ]


@pytest.mark.parametrize("at", range(5))
def test_pairs_are_counted_by_kinds_of_hosts(at: int) -> None:
    graph = clusters()[at]
    assert topo.counted(graph) == Counter(topo.joined(graph).values())


def test_pairs_of_a_thousand_hosts_take_searches_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = hosts_of(preset("hgx-h100"), 1024)
    searched: list[str] = []
    search = topo._before
    monkeypatch.setattr(topo, "_before", lambda few, gpu: (searched.append(gpu.name), search(few, gpu))[1])
    found = {joined.kind: pairs // 2 for joined, pairs in topo.counted(graph).items()}
    everyone, inside = 8192 * 8191 // 2, 1024 * 8 * 7 // 2
    assert found == {"NVS": inside, "NET": everyone - inside}
    assert searched == [f"host0/GPU{gpu}" for gpu in range(8)]


def test_each_cut_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging n ranks makes fewer than 2 n sets of them; partitions of these have n * n / 2 parts in sum."""
    cuts = Cuts(all_routes(hosts_of(preset("hgx-h100"), 8, hosts_per_leaf=4)))
    asked: Counter[tuple[int, ...]] = Counter()
    others = Cuts.others

    def counted(self: Cuts, part: tuple[int, ...]) -> tuple[int, ...]:
        asked[part] += 1
        return others(self, part)

    monkeypatch.setattr(Cuts, "others", counted)
    bound("all_reduce", cuts)
    assert len(asked) < 2 * 64 + 32
    assert max(asked.values()) <= 3


@pytest.mark.parametrize(("how", "switches"), [({"hosts_per_leaf": 2}, 3), ({"rails": True}, 4), ({}, 0)])
def test_leaf_switches_have_places_of_their_own(how: dict[str, int], switches: int) -> None:
    drawing = import_module("ringreduce.topology.draw.placing")
    graph = hosts_of(preset("dgx1-v100"), 6, nics=4, gbps=12.5, **how)
    scene = drawing.Scene(graph, [node.name for node in graph.ranks], (), False)
    drawing.lay_out(scene)
    leaves = [node.name for node in graph.of_kind(NodeKind.NETWORK) if node.name != "network"]
    assert len(leaves) == switches
    assert len({scene.at[name] for name in ("network", *leaves)}) == switches + 1
    for leaf in leaves if "hosts_per_leaf" in how else ():
        mine = [scene.centre[host] for host in graph.below(leaf)]
        others = [scene.centre[host] for host in range(6) if host not in graph.below(leaf)]
        assert max(math.dist(scene.at[leaf], at) for at in mine) < min(math.dist(scene.at[leaf], at) for at in others)
