"""The well-known machines: their links against listings of real ones, and hosts joined by their NICs."""

import json
from collections import Counter

import networkx
import pytest

from ringreduce.errors import TopologyError
from ringreduce.plan.simulate import simulate
from ringreduce.topology import many_hosts
from ringreduce.topology.clusters import hosts_of
from ringreduce.topology.graph import FABRIC, Link, LinkGraph, LinkKind, Node, NodeKind
from ringreduce.topology.planned import MOST_RANKS
from ringreduce.topology.planner import algorithms, plan_for
from ringreduce.topology.presets import PRESETS, preset
from ringreduce.topology.rates import Assumed
from ringreduce.topology.read import load

# NVLinks between GPUs as `nvidia-smi topo -m` lists them on a DGX-1 with P100s, one with V100s, and a p3.8xlarge.
P100 = """
. 1 1 1 1 . . .
1 . 1 1 . 1 . .
1 1 . 1 . . 1 .
1 1 1 . . . . 1
1 . . . . 1 1 1
. 1 . . 1 . 1 1
. . 1 . 1 1 . 1
. . . 1 1 1 1 .
"""
V100 = """
. 1 1 2 2 . . .
1 . 2 1 . 2 . .
1 2 . 2 . . 1 .
2 1 2 . . . . 1
2 . . . . 1 1 2
. 2 . . 1 . 2 1
. . 1 . 1 2 . 2
. . . 1 2 1 2 .
"""
QUAD = """
. 1 1 2
1 . 2 1
1 2 . 2
2 1 2 .
"""
GPUS = {
    "dgx1-p100": 8,
    "dgx1-v100": 8,
    "p3.16xlarge": 8,
    "p3.8xlarge": 4,
    "dgx2": 16,
    "dgx-a100": 8,
    "hgx-h100": 8,
    "hgx-h200": 8,
    "hgx-b200": 8,
    "gb200-nvl72": 72,
    "pcie-4": 4,
    "pcie-8": 8,
}


def lanes(table):
    rows = [row.split() for row in table.split("\n") if row]
    return {
        (f"GPU{one}", f"GPU{other}"): int(cell)
        for one, row in enumerate(rows)
        for other, cell in enumerate(row)
        if cell != "."
    }


def fabric(graph):
    return {ends: link.lanes for ends, link in graph.by_ends.items() if link.kind in FABRIC}


def path(graph, one, other):
    """The nodes between two devices, without the accelerators' own links."""
    links = [(link.src, link.dst) for link in graph.links if link.kind not in FABRIC]
    return networkx.shortest_path(networkx.Graph(links), one, other)[1:-1]


@pytest.mark.parametrize("name", PRESETS)
def test_every_machine_has_its_gpus_and_links_both_ways(name):
    graph = preset(name)
    assert graph.name == name
    assert [gpu.name for gpu in graph.gpus] == [f"GPU{index}" for index in range(GPUS[name])]
    assert {(b, a): link.capacity for (a, b), link in graph.by_ends.items()} == {
        ends: link.capacity for ends, link in graph.by_ends.items()
    }
    assert all(link.source for link in graph.links)
    assert PRESETS[name]() == graph
    assert LinkGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    "name, table, rate",
    [
        ("dgx1-p100", P100, 20),
        ("dgx1-v100", V100, 25),
        ("p3.16xlarge", V100, 25),
        ("p3.8xlarge", QUAD, 25),
    ],
)
def test_cube_meshes_are_wired_as_listed(name, table, rate):
    graph = preset(name)
    assert fabric(graph) == lanes(table)
    assert all(link.capacity == rate * link.lanes for link in graph.links if link.kind is LinkKind.NVLINK)


@pytest.mark.parametrize(
    "name, links, rate", [("dgx2", 6, 25), ("dgx-a100", 12, 25), ("hgx-h100", 18, 25), ("hgx-h200", 18, 25),
                          ("hgx-b200", 18, 50), ("gb200-nvl72", 18, 50)]
)  # fmt: skip
def test_switched_machines_give_each_gpu_all_its_links(name, links, rate):
    graph = preset(name)
    assert {ends[0] for ends in fabric(graph)} == {gpu.name for gpu in graph.gpus} | {"NVSwitch0"}
    for gpu in graph.gpus:
        link = graph.by_ends[gpu.name, "NVSwitch0"]
        assert (link.lanes, link.capacity) == (links, links * rate)


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx1-p100", "dgx-a100", "pcie-4", "pcie-8"])
def test_pairs_share_a_pcie_switch(name):
    graph = preset(name)
    assert path(graph, "GPU0", "GPU1") == ["PCIe0"]
    assert path(graph, "GPU2", "GPU3") == ["PCIe1"]
    last = len(graph.gpus) - 1
    assert path(graph, "GPU0", f"GPU{last}") == ["PCIe0", "CPU0", "CPU1", f"PCIe{last // 2}"]


def test_dgx2_has_two_levels_of_switches():
    graph = preset("dgx2")
    assert path(graph, "GPU0", "mlx5_0") == ["PCIe0"]
    assert path(graph, "GPU0", "GPU2") == ["PCIe0", "PCIe8", "PCIe1"]
    assert path(graph, "GPU0", "GPU4") == ["PCIe0", "PCIe8", "CPU0", "PCIe9", "PCIe2"]


def test_nics_are_near_their_gpus():
    for name, near in (
        ("dgx1-v100", ("GPU2", "mlx5_1")),
        ("dgx-a100", ("GPU2", "mlx5_3")),
        ("hgx-h200", ("GPU5", "mlx5_5")),
    ):
        assert len(path(preset(name), *near)) == 1


def test_what_is_assumed_overrides_rates():
    graph = preset("dgx1-v100", Assumed(nvlink=18, pcie=12, smp=9.5))
    assert graph.by_ends["GPU0", "GPU3"].capacity == 36
    assert graph.by_ends["GPU0", "GPU1"].capacity == 18
    assert graph.by_ends["GPU0", "PCIe0"].capacity == graph.by_ends["PCIe0", "CPU0"].capacity == 12
    assert graph.by_ends["CPU1", "CPU0"].capacity == 9.5
    assert Counter(link.source for link in graph.links if link.source.startswith("--")) == {
        "--nvlink-gbps": 32, "--pcie-gbps": 24, "--smp-gbps": 2
    }  # fmt: skip


def test_what_nobody_said_is_assumed_aloud():
    assert any("--pcie-gbps" in text for text in preset("pcie-4").assumed)
    assert any("--smp-gbps" in text for text in preset("pcie-4").assumed)
    assert preset("pcie-4", Assumed(pcie=20, smp=20)).assumed == ()
    faster = preset("pcie-4", Assumed(gpu="l40s"))
    assert faster.by_ends["GPU0", "PCIe0"].capacity == pytest.approx(31.508, abs=1e-3)
    assert not any("--pcie-gbps" in text for text in faster.assumed)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(TopologyError, match=r"'dgx3'.*dgx1-v100.*gb200-nvl72"):
        preset("dgx3")


def test_hosts_are_copies_joined_by_their_nics():
    graph = hosts_of(preset("dgx1-v100"), 3)
    assert [gpu.name for gpu in graph.gpus[7:9]] == ["host0/GPU7", "host1/GPU0"]
    assert {gpu.host for gpu in graph.gpus} == {0, 1, 2}
    inside = Link("host2/GPU0", "host2/GPU3", LinkKind.NVLINK, 50, 2, "NVLink 2")
    assert graph.by_ends["host2/GPU0", "host2/GPU3"] == inside
    joined = [link for link in graph.links if link.kind is LinkKind.NETWORK]
    assert len(joined) == 2 * 3 * 4 and {link.capacity for link in joined} == {12.5}
    assert {link.src for link in joined if link.dst == "network"} == {
        f"host{host}/mlx5_{nic}" for host in range(3) for nic in range(4)
    }
    between = [link for link in graph.links if "network" not in (link.src, link.dst)]
    assert all(link.src.split("/")[0] == link.dst.split("/")[0] for link in between)


def test_nics_can_be_fewer_more_and_faster():
    fast = hosts_of(preset("dgx1-v100"), 2, nics=1, gbps=50)
    network = {link.src: link.capacity for link in fast.links if link.dst == "network"}
    assert network == {"host0/mlx5_0": 50, "host1/mlx5_0": 50}
    assert fast.by_ends["host0/PCIe0", "host0/mlx5_0"].capacity == 50
    graph = hosts_of(preset("pcie-4"), 2, nics=3, gbps=25)
    assert [graph.by_ends[f"host1/NIC{at}", f"host1/CPU{at % 2}"].capacity for at in range(3)] == [25, 25, 25]
    assert graph.by_ends["host1/NIC2", "network"].capacity == 25


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("dgx1-v100", {"count": 1}, "1 hosts need no network"),
        ("dgx1-v100", {"count": 2, "nics": 0}, "nics is 0; give from 1 to 64"),
        ("dgx1-v100", {"count": 2, "nics": 10**9, "gbps": 1.0}, "nics is 1000000000; give from 1 to 64"),
        ("dgx1-v100", {"count": 2, "gbps": 0.0}, "a NIC of 0.0 GB/s"),
        ("pcie-4", {"count": 2}, "pcie-4 has 0 NICs; give `gbps`, and it gets 1"),
        ("dgx1-v100", {"count": 2, "nics": 6}, "has 4 NICs; give `gbps`, and it gets 2"),
        ("gb200-nvl72", {"count": 2, "gbps": 50.0}, "no CPU that more could be at"),
    ],
)
def test_hosts_that_cannot_be_joined(name, arguments, message):
    with pytest.raises(TopologyError, match=message):
        hosts_of(preset(name), **arguments)


def test_hosts_are_joined_once():
    with pytest.raises(TopologyError, match="several hosts already"):
        hosts_of(hosts_of(preset("dgx1-v100"), 2), 2)


def test_a_nic_that_hangs_in_the_air_joins_nothing():
    graph = LinkGraph("box", (Node("GPU0", NodeKind.GPU), Node("NIC0", NodeKind.NIC)), ())
    with pytest.raises(TopologyError, match="box: NIC0 has no link"):
        hosts_of(graph, 2, gbps=50)


@pytest.mark.slow
def test_a_tapered_tree_narrows_what_leaves_a_switch():
    graph = hosts_of(preset("dgx-a100"), 4, hosts_per_leaf=2, taper=4)
    assert graph.by_ends["leaf0", "network"].capacity == 2 * 8 * 25 / 4
    assert graph.by_ends["host3/mlx5_7", "leaf1"].capacity == 25
    planned = plan_for(graph)
    assert planned.bound == pytest.approx(100)  # all of the tensor leaves each half over 100 GB/s
    assert "leave host0/GPU0" in planned.proof
    wide = plan_for(hosts_of(preset("dgx-a100"), 4, hosts_per_leaf=2))
    assert wide.bound == pytest.approx(plan_for(hosts_of(preset("dgx-a100"), 4)).bound)


def test_rails_join_the_nics_of_one_place():
    graph = hosts_of(preset("dgx-a100"), 2, rails=True)
    assert {link.dst for link in graph.following["host1/mlx5_3"]} == {"host1/PCIe1", "rail3"}
    assert graph.by_ends["host0/mlx5_3", "rail3"].capacity == graph.by_ends["host1/mlx5_3", "rail3"].capacity == 25
    planned = plan_for(graph)
    assert planned.bound == pytest.approx(plan_for(hosts_of(preset("dgx-a100"), 2)).bound)
    rail_by_rail = plan_for(graph, algorithm="hierarchical_ring")
    assert all("network" not in (load.src, load.dst) for load in rail_by_rail.loads(1000))


@pytest.mark.slow
def test_a_network_that_reduces_is_bounded_by_its_lines_alone():
    plain = plan_for(hosts_of(preset("dgx-a100"), 4))
    summed = plan_for(hosts_of(preset("dgx-a100"), 4, in_network=True))
    assert plain.bound_in_switches is None
    assert summed.bound == plain.bound < summed.bound_in_switches == pytest.approx(200)  # of eight NICs
    assert summed.plan.name not in ("nvls", "sharp")


def test_sharp_is_planned_on_networks_that_reduce():
    """Each of eight places sends an eighth up, whatever the number of hosts; 7/4 of the tensor crosses NVLink."""
    for arguments, busiest in (
        ({}, 300 * 8 / 14),
        ({"rails": True}, 300 * 8 / 14),
        ({"hosts_per_leaf": 2, "taper": 16.0}, 2 * 200 / 16),  # a leaf sends the tensor up once
    ):
        planned = plan_for(hosts_of(preset("dgx-a100"), 4, in_network=True, **arguments), algorithm="sharp")
        assert planned.of_links == pytest.approx(busiest) and planned.in_switches
        assert planned.of_links <= planned.bound == planned.bound_in_switches
        up = [load.bytes for load in planned.loads(8_000) if load.dst in ("network", "leaf0") or load.dst == "rail0"]
        assert up and set(up) <= {1_000.0, 8_000.0}
    assert "sharp" not in algorithms(hosts_of(preset("dgx-a100"), 4), "all_reduce")


def test_one_host_shows_what_all_do():
    for count, algorithm in ((3, "hierarchical_ring"), (4, "hierarchical_ring"), (4, "hierarchical_halving_doubling")):
        planned = plan_for(hosts_of(preset("p3.8xlarge"), count), algorithm=algorithm)
        like = planned.routes.like_hosts
        assert like is not None and like.places == 4
        for size in (10_000, 100_000_000):
            whole = simulate(planned.plan, planned.network, size)
            one = simulate(planned.plan, planned.network, size, groups=like)
            assert one.seconds == pytest.approx(whole.seconds, rel=0.02)  # messages of one time are taken by rank
        whole, one = (
            simulate(planned.plan, planned.network, 1000, slice_bytes=1000, groups=groups) for groups in (None, like)
        )
        assert (one.messages, one.steps, one.rounds) == (whole.messages, whole.steps, 1)
    leaves = plan_for(hosts_of(preset("p3.8xlarge"), 4, hosts_per_leaf=2), algorithm="hierarchical_ring")
    assert leaves.routes.like_hosts is None and not many_hosts.candidates(
        leaves.graph
    )  # hosts on one switch are nearer to each other
    with_more = hosts_of(preset("dgx-a100"), 24)
    planned = plan_for(with_more, algorithm="hierarchical_ring")
    assert planned.plan.size > MOST_RANKS and planned.bandwidth < planned.of_links


@pytest.mark.parametrize(
    "machine, arguments, count",
    [
        pytest.param(machine, arguments, count, marks=pytest.mark.slow if count > most else ())
        for machine, arguments, most in [
            ("p3.8xlarge", {}, 8),
            ("hgx-h100", {"gbps": 50.0, "nics": 8}, 3),
            ("dgx-a100", {"rails": True, "taper": 2.0}, 3),
            ("dgx-a100", {"in_network": True}, 8),
            ("dgx1-v100", {"nics": 2, "gbps": 12.5}, 2),
        ]
        for count in (2, 3, 4, 8)
    ],
)
def test_one_hosts_programs_give_what_all_ranks_programs_give(machine, count, arguments):
    graph = hosts_of(preset(machine), count, **arguments)
    made = many_hosts.candidates(graph)
    assert "hierarchical_ring" in made and ("hierarchical_halving_doubling" in made) == (count in (2, 4, 8))
    for name in set(made) & set(algorithms(graph, "all_reduce")):
        few, whole = made[name], plan_for(graph, algorithm=name)
        few.verify()
        assert few.plan.channels[0].programs == whole.plan.channels[0].programs[: len(preset(machine).gpus)]
        assert few.whole().channels == whole.plan.channels
        assert (few.bound, few.bound_in_switches) == pytest.approx((whole.bound, whole.bound_in_switches))
        assert few.ranks == whole.ranks and few.of_links == pytest.approx(whole.of_links)
        own = [load for load in whole.loads(8000) if "host0/" in f"{load.src} {load.dst}"]
        assert {load[:2]: load.bytes for load in few.loads(8000)} == pytest.approx(
            {load[:2]: load.bytes for load in own}
        )
        for size in (10_000, 100_000_000) if len(whole.ranks) <= 16 and not few.in_switches else ():
            every_rank = simulate(whole.plan, whole.network, size)
            assert few.simulated(size) == pytest.approx(every_rank.seconds, rel=0.02)
        assert few.bandwidth == pytest.approx(whole.bandwidth, rel=0.02)


def test_a_thousand_hosts_are_planned_by_one():
    graph = hosts_of(preset("p3.8xlarge"), 1000)
    planned = plan_for(graph, algorithm="hierarchical_ring")
    assert len(planned.ranks) == 4000 and len(planned.plan.channels[0].programs) == 4
    assert planned.bound == pytest.approx(1.25 * 1000 / (2 * 999)) and "all 1000 hosts" in planned.proof
    assert planned.of_links <= planned.bound
    assert {str(load.src).split("/")[0] for load in planned.loads(1000)} == {"host0", "network"}
    with pytest.raises(TopologyError, match="one host's programs stand for those of 1000"):
        planned.whole()
    with pytest.raises(TopologyError, match="more than 64 hosts are planned for all_reduce only"):
        plan_for(graph, "all_gather")
    with pytest.raises(TopologyError, match="more than 64 hosts are planned for all_reduce only"):
        plan_for(hosts_of(preset("p3.8xlarge"), 128, hosts_per_leaf=16))


def test_hosts_that_differ_are_not_taken_for_alike():
    graph = hosts_of(preset("p3.8xlarge"), 10)
    assert many_hosts.first_two(graph).ranks == graph.ranks[:8]
    first, *links = graph.links
    wider = LinkGraph("a wider link", graph.nodes, (Link(first.src, first.dst, first.kind, 99.0), *links))
    assert many_hosts.first_two(wider) is None
    assert many_hosts.first_two(graph.select(range(3, 23))) is None  # hosts with some of their GPUs
    assert many_hosts.first_two(graph.select(range(20))).ranks == graph.ranks[:8]


def test_clusters_are_described_in_json(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text('{"machine": "dgx1-v100", "hosts": 3, "gbps": 25, "nics": 2}')
    assert load(path) == hosts_of(preset("dgx1-v100"), 3, nics=2, gbps=25)
    for text, message in (
        ('{"machine": "dgx1-v100"}', "cluster.hosts is missing; expected"),
        ('{"machine": "dgx1-v100", "hosts": 2.5}', "cluster.hosts is 2.5; expected an integer"),
        (
            '{"machine": "dgx1-v100", "hosts": 2, "nic": 1}',
            "cluster.nic is unknown .*: expected an object with the keys hosts, machine, nics",
        ),
        ('{"machine": "dgx1-v100", "hosts": 4, "taper": 0.5}', "taper is 0.5; it must be at least 1"),
        ('{"machine": "dgx-a100", "hosts": 4, "taper": 8}', "taper is 8, but all NICs are on one network"),
        ('{"machine": "dgx1-v100", "hosts": 4, "hosts_per_leaf": 4}', "4 hosts a switch, of 4"),
        ('{"machine": "dgx1-v100", "hosts": 4, "hosts_per_leaf": 2, "rails": true}', "give one"),
        ('{"machine": "nothing", "hosts": 2}', "neither a file nor a preset"),
    ):
        path.write_text(text)
        with pytest.raises(TopologyError, match=message):
            load(path)


def test_the_machine_of_a_cluster_is_beside_it(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there/box.json").write_text(preset("p3.8xlarge").to_json())
    path = tmp_path / "there/cluster.json"
    path.write_text('{"machine": "box.json", "hosts": 2}')
    assert load(path).nodes == load("there/cluster.json").nodes == hosts_of(preset("p3.8xlarge"), 2).nodes
    for machine in ("cluster.json", "other.json"):  # itself, and in a circle
        (tmp_path / "there/other.json").write_text('{"machine": "cluster.json", "hosts": 2}')
        path.write_text(json.dumps({"machine": machine, "hosts": 2}))
        with pytest.raises(TopologyError, match=f"machine is '{machine}', a cluster itself; name one host's file"):
            load(path)
