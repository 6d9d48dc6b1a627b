"""Options as torch hands them around: of several backends of a group, and of the dimensions of a DeviceMesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from processes import Logged
from torch.distributed.device_mesh import init_device_mesh

import ringreduce
from ringreduce.groups.lookup import found_in


@pytest.mark.parametrize("backend", ["ringreduce", "cpu:ringreduce", "cpu:ringreduce,cuda:ringreduce"])
@on_ranks(2)
def test_options_of_another_backend_do_no_harm(me: Rank, backend: str) -> None:
    logged = Logged("ringreduce.config")
    logged_at = ringreduce.config.log
    logged_at.setLevel("INFO")
    with me.join(backend=backend, options=dist.ProcessGroupGloo._Options()):
        dist.all_reduce(total := torch.ones(3))
        assert total.eq(me.size).all()
    assert [text for text in logged.messages if "is for another backend" in text]


@on_ranks(2, returns=[True, True])
def test_dimensions_of_a_mesh_have_options_of_their_own(me: Rank) -> bool:
    with me.join():
        copies = ringreduce.Options(fetch=0, engine="channel_bytes=1M")
        for given in ({"a": copies}, {"a": ("ringreduce", copies)}):
            override: Any = given
            of = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), backend_override=override)
            dist.all_reduce(total := torch.ones(100_000), group=of["a"].get_group())
            assert total.eq(2).all()
            statistics = ringreduce.stats()[of["a"].get_group().group_name]
            assert statistics["all_reduce"].lent == 0
        return found_in(of["a"].get_group()) is not None
