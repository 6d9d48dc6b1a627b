"""Groups that plan over links: those that a file describes, and the NUMA nodes that ranks are bound to."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.topology_plan import cube_mesh
from distributed.harness import Rank, on_ranks, run

import ringreduce
import ringreduce.topology.group_plans
from ringreduce import plan
from ringreduce.errors import TopologyError
from ringreduce.groups import choices, decision


@pytest.fixture
def cube_mesh_file(tmp_path: Path) -> str:
    path = tmp_path / "dgx1.json"
    path.write_text(cube_mesh(pcie=True).to_json())
    return str(path)


MB = 1024**2  # 4 ranks' and 8 ranks' largest calls have 1 and 2 MB


def collectives(size: int, rank: int) -> None:
    """Each once for sizes with few and with many hops; wrong elements are failures."""
    for count in (1, 1000, 70_001):
        mine = torch.arange(count * size, dtype=torch.float32) % 1000 + rank
        total = (torch.arange(count * size) % 1000 * size + sum(range(size))).float()
        summed = mine.clone()
        dist.all_reduce(summed)
        assert summed.equal(total)
        part = torch.empty(count)
        dist.reduce_scatter_tensor(part, mine)
        assert part.equal(total.view(size, count)[rank])
        gathered = torch.empty(size, count)
        dist.all_gather_into_tensor(gathered, mine[:count].contiguous())
        assert gathered.equal(torch.stack([mine[:count] - rank + r for r in range(size)]))
        sent = mine.clone()
        dist.broadcast(sent, size - 1)
        assert sent.equal(mine - rank + size - 1)
        there = mine.clone()
        dist.reduce(there, 1)
        assert rank != 1 or there.equal(total)


def run_over_file(me: Rank, path: str) -> tuple[Any, set[str]]:
    lowered = set()
    original = choices._lowered

    def record(built: plan.Plan) -> tuple[list[int], int]:
        lowered.add(f"{built.collective}: {built.name}")
        return original(built)

    choices._lowered = record
    with me.join(options=ringreduce.Options(topo_file=path)):
        collectives(me.size, me.rank)
        return ringreduce.topology(), lowered


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_group_runs_what_is_planned_over_the_file(ranks: int, cube_mesh_file: str) -> None:
    results = run(run_over_file, ranks, cube_mesh_file)
    for found, lowered in results:
        assert found == results[0][0]
        assert found.ranks == tuple(f"GPU{rank}" for rank in range(ranks))
        large = [served for served in found.served if served.end is None]
        assert {served.plan.collective for served in large} == {*ringreduce.topology.group_plans.COLLECTIVES}
        ran = [served for served in found.served if served.begin <= MB and (served.end is None or served.end > MB)]
        assert {f"{served.plan.collective}: {served.plan.name}" for served in ran} <= lowered
        (served,) = (served for served in large if served.plan.collective == "all_reduce")
        assert served.plan.name in ("rings", "trees") and served.bandwidth >= 0.98 * served.bound
        assert served.reason in str(found)


def one_subset(me: Rank, path: str) -> tuple[str, ...]:
    with me.join(options=ringreduce.Options(topo_file=path)):
        group = dist.new_group([1, 3], pg_options=ringreduce.Options(topo_file=path))
        if me.rank not in (1, 3):
            return ()
        mine = torch.full((1000,), float(me.rank))
        dist.all_reduce(mine, group=group)
        assert mine.eq(4).all()
        return ringreduce.topology(group).ranks


def test_a_subgroup_is_planned_for_its_own_gpus(cube_mesh_file: str) -> None:
    assert run(one_subset, 4, cube_mesh_file) == [(), ("GPU1", "GPU3"), (), ("GPU1", "GPU3")]


def refused(me: Rank, path: str) -> str:
    with pytest.raises(TopologyError) as error, me.join(options=ringreduce.Options(topo_file=path)):
        pass
    return str(error.value)


def test_all_ranks_hear_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    assert all(missing in said for said in run(refused, 2, missing))
    small = tmp_path / "small.json"
    small.write_text(cube_mesh().select([0, 1]).to_json())
    assert all("rank 2 of the world is on none of its 2 GPUs" in said for said in run(refused, 3, str(small)))


@on_ranks(3)
def test_a_refused_group_keeps_no_descriptors(me: Rank, tmp_path: Path) -> None:
    counts = []
    for attempt in range(4):
        with (
            pytest.raises(TopologyError) as raised,
            me.join(f"attempt {attempt}", options=ringreduce.Options(topo_file=str(tmp_path / "missing.json"))),
        ):
            pass
        raised.value.__traceback__ = None
        del raised
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == [counts[1]] * 3, "descriptors pile up"


def run_on_nodes(me: Rank, tuning: str) -> Any:
    """As if there were two NUMA nodes of four cores, and each rank bound to a core."""
    ringreduce.topology.group_plans.numa_nodes = lambda: {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    original = decision.group_topology
    decision.group_topology = lambda world, options, cores: original(
        world, options, [frozenset({rank}) for rank in world]
    )
    with me.join(options=ringreduce.Options(tuning=tuning)):
        collectives(me.size, me.rank)
        return ringreduce.topology()


def test_ranks_bound_to_numa_nodes_are_planned_over_them(tmp_path: Path) -> None:
    found = run(run_on_nodes, 8, str(tmp_path / "tuning.json"))[5]
    assert found.machine == "2 NUMA nodes"
    assert any("GB/s between NUMA nodes" in said for said in found.assumed)
    (served,) = found.served
    assert served.plan.name.startswith("hierarchical") and served.end is None and served.begin > 0


def join(me: Rank) -> Any:
    with me.join():
        return ringreduce.topology()


def test_ranks_of_one_memory_have_nothing_to_plan() -> None:
    found = run(join, 2)[0]
    assert found.served == () and "tuned rules decide" in str(found)
