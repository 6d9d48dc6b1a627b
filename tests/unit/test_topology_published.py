"""Published measurements against the bounds that claim to hold for them; what is to be expected is in
test_topology_expected.py.

tests/fixtures/published_busbw.csv has one row a figure, with its source.  Add a row of a machine that `MACHINES` knows,
and it is tested; of another, and the test asks for the machine.
"""

from __future__ import annotations

import pytest
from bodies.published_topologies import ROWS, in_switches, machine, matrix

from ringreduce.topology.clusters import hosts_of
from ringreduce.topology.graph import LinkGraph
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.rates import Assumed
from ringreduce.topology.read import read


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_no_published_figure_is_above_its_bound(at: int) -> None:
    row = ROWS[at]
    planned = plan_for(machine(at), row["collective"])
    bound = planned.bound
    if in_switches(row) and planned.bound_in_switches is not None:
        bound = planned.bound_in_switches
    size = int(row["gpus"])
    moved = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "reduce": 1.0}.get(
        row["collective"], (size - 1) / size
    )
    assert float(row["busbw_GBps"]) <= bound * moved * 1.005  # as read off plots
    assert bound < 1000


@pytest.mark.slow
def test_bounds_of_switches_that_reduce() -> None:
    h100, a100 = plan_for(preset("hgx-h100")), plan_for(preset("dgx-a100"))
    assert (h100.bound, h100.bound_in_switches) == (pytest.approx(450 * 8 / 14), pytest.approx(450))
    assert a100.bound_in_switches is None
    assert plan_for(preset("hgx-h100"), "all_gather").bound_in_switches is None
    nvls = plan_for(preset("hgx-h100"), algorithm="nvls")
    assert nvls.bandwidth == pytest.approx(450 * 8 / 9)
    assert nvls.bound == h100.bound_in_switches and "450 GB/s leave GPU0" in nvls.proof
    assert h100.plan.name == "rings"  # the engine has no sums in switches
    four = hosts_of(preset("hgx-h100"), 4)
    assert not plan_for(four).in_switches
    assert plan_for(four).bound < plan_for(four).bound_in_switches <= 400 * 4 / 6


@pytest.mark.slow
def test_four_hosts_promise_what_they_sustain() -> None:
    planned = plan_for(hosts_of(preset("hgx-h100"), 4), algorithm="hierarchical_ring")
    assert planned.of_links == pytest.approx(257.1, rel=1e-3)
    assert planned.bandwidth == pytest.approx((1 << 33) * 1e-9 / planned.simulated(1 << 33))
    assert 170 < planned.bandwidth < 220  # published: 366 GB/s of bus bandwidth, 189 of the tensor


@pytest.mark.parametrize("gpus", [4, 8])
def test_parts_of_a_socket_share_its_way_out(gpus: int) -> None:
    """NPS4: four NUMA nodes a socket, every pair of GPUs at SYS.  The sockets' cut is that of two NUMA nodes."""
    assume = Assumed(gpu="l40s", smp=10)
    apart = matrix(gpus, "SYS", lambda gpu: gpu * 8 // gpus, assume)
    halves = matrix(gpus, "SYS", lambda gpu: gpu * 2 // gpus, assume)
    assert plan_for(apart).bound == pytest.approx(plan_for(halves).bound) == pytest.approx(10)
    assert any("parts of two sockets are assumed" in text for text in apart.assumed)
    assert not any("two sockets" in text for text in halves.assumed)


def test_geforce_meets_in_the_memory_of_a_cpu() -> None:
    """Two GPUs of a switch: without access to each other, all that passes between them goes up and down."""
    names = "GPU0\tX\tPIX\t0-7\t0\nGPU1\tPIX\tX\t0-7\t0\n"
    text = f"\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n{names}"
    for model, access, up in (("rtx4090", None, True), ("rtx4090", True, False), ("l40s", None, False)):
        graph = read(text, "two", Assumed(gpu=model, peer_access=access))
        crossed = {str(load.dst) for load in plan_for(graph).loads(1000)}
        assert ("CPU0" in crossed) == up
        assert any("GeForce" in text for text in graph.assumed) == up
        assert LinkGraph.from_json(graph.to_json()) == graph


def test_what_joins_cpus_is_as_wide_as_data_sheets_have_it() -> None:
    graph = matrix(2, "SYS", int, Assumed(gpu="l40s"))
    assert graph.by_ends["CPU0", "CPU1"].capacity >= 192  # three xGMI links of 32 GT/s; unknown CPUs may have them
