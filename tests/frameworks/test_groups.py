"""Groups of groups and of objects: what frameworks build their own communication from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from frameworks.common import same
from torch.distributed.device_mesh import init_device_mesh


def thing(rank: int) -> dict[str, object]:
    """An object whose pickle has another length on every rank."""
    return {"rank": rank, "list": list(range(100 * rank)), "tensor": torch.arange(rank)}


def equal(actual: object, rank: int) -> None:
    expected = thing(rank)
    assert isinstance(actual, dict) and actual.keys() == expected.keys()
    assert actual["rank"] == rank and actual["list"] == expected["list"]
    same(actual["tensor"], expected["tensor"])


@on_ranks(3)
def test_objects(me: Rank) -> None:
    with me.join():
        mine, last = thing(me.rank), me.size - 1

        everything: list[object] = [None] * me.size
        dist.all_gather_object(everything, mine)
        for rank, item in enumerate(everything):
            equal(item, rank)

        gathered: list[object] | None = [None] * me.size if me.rank == last else None
        dist.gather_object(mine, gathered, dst=last)
        for rank, item in enumerate(gathered or ()):
            equal(item, rank)

        pair: list[object] = [mine, "from " + str(me.rank)]
        dist.broadcast_object_list(pair, src=last)
        equal(pair[0], last)
        assert pair[1] == f"from {last}"

        taken: list[object] = [None]
        dist.scatter_object_list(taken, [thing(rank) for rank in range(me.size)] if me.rank == 1 else None, src=1)
        equal(taken[0], me.rank)

        if me.rank == 0:
            dist.send_object_list([mine, thing(2)], dst=last)
        elif me.rank == last:
            received: list[object] = [None, None]
            assert dist.recv_object_list(received, src=0) == 0
            equal(received[0], 0)
            equal(received[1], 2)


def sum_in(group: dist.ProcessGroup | None, rank: int) -> float:
    tensor = torch.tensor(10.0**rank)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_ranks(4)
def test_subgroups(me: Rank) -> None:
    with me.join():
        pair, _ = dist.new_subgroups(2)
        assert dist.get_backend(pair) == "ringreduce"
        assert sum_in(pair, me.rank) == (11.0 if me.rank < 2 else 1100.0)

        uneven, _ = dist.new_subgroups_by_enumeration([[3, 0, 1], [2]])
        assert sum_in(uneven, me.rank) == (100.0 if me.rank == 2 else 1011.0)

        same_time = dist.new_group([1, 3], use_local_synchronization=True) if me.rank % 2 else None
        if same_time:
            assert sum_in(same_time, me.rank) == 1010.0

        dist.destroy_process_group(uneven)
        assert sum_in(pair, me.rank) == (11.0 if me.rank < 2 else 1100.0)
        assert sum_in(None, me.rank) == 1111.0


@on_ranks(4)
def test_device_meshes(me: Rank) -> None:
    with me.join():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        assert sum_in(mesh.get_group("columns"), me.rank) == (11.0 if me.rank < 2 else 1100.0)
        assert sum_in(mesh["rows"].get_group(), me.rank) == (101.0 if me.rank % 2 == 0 else 1010.0)
        assert sum_in(mesh._flatten("all").get_group(), me.rank) == 1111.0
        assert dist.get_backend(mesh.get_group("rows")) == "ringreduce"
