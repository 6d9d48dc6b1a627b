"""Programs that ask for "gloo" and get this backend, by `as_gloo` or RINGREDUCE_AS_GLOO."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.errors import InvalidArgument
from ringreduce.groups import as_gloo as module
from ringreduce.groups.lookup import found_in


@pytest.fixture
def _gloo_again() -> Any:
    yield
    ringreduce.as_gloo(False)


def check_group(group: dist.ProcessGroup, ours: bool = True) -> None:
    """What a program can ask a group of Gloo, and what it can do with it."""
    assert dist.get_backend(group) == "gloo"
    assert dist.get_backend_config(group) == "cpu:gloo,cuda:gloo"
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    assert (found_in(group) is not None) == ours
    dist.all_reduce(total := torch.ones(1000), group=group)
    assert total.eq(group.size()).all()
    dist.all_gather_object(said := [None] * group.size(), dist.get_rank(group), group=group)
    assert said == list(range(group.size()))
    dist.monitored_barrier(group, timedelta(seconds=60))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
@on_ranks(3)
def test_groups_of_gloo_run_on_ringreduce(me: Rank, backend: str | None) -> None:
    ringreduce.as_gloo()
    ringreduce.as_gloo()  # no more than once
    with me.join(backend=backend):
        assert isinstance(me.size, int) and dist.group.WORLD is not None
        config = {"gloo": "cpu:gloo,cuda:gloo", "cpu:gloo": "cpu:gloo", None: "cpu:gloo"}[backend]
        assert dist.get_backend_config(dist.group.WORLD) == config
        if backend == "gloo":
            check_group(dist.group.WORLD)
        group = dist.new_group([0, 2], backend="gloo")
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (me.rank == 1)
        if me.rank != 1:
            check_group(group)
        like_the_world = dist.new_group([1, 2])
        if me.rank != 0:
            assert found_in(like_the_world) and dist.get_backend(like_the_world) == dist.get_backend()
        linear = torch.nn.Linear(3, 1)
        model = DistributedDataParallel(linear)
        model(torch.full((1, 3), float(me.rank))).sum().backward()
        assert linear.weight.grad is not None
        torch.testing.assert_close(linear.weight.grad, torch.ones(1, 3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(3))
        assert "gloo:all_reduce" in {event.name for event in profile.events()}


@on_ranks(2)
def test_what_is_not_for_the_cpu_and_what_is_made_by_hand_stays(me: Rank) -> None:
    ringreduce.as_gloo()
    with me.join(backend="cpu:fake,cuda:gloo"):
        assert dist.get_backend_config() == "cpu:fake,cuda:gloo" and found_in(dist.group.WORLD) is None
        me.meet("Gloo has connected all")  # before one leaves
    store = dist.PrefixStore("by hand", me.store)
    made = dist.ProcessGroupGloo(store, me.rank, me.size, timeout=timedelta(seconds=60))
    made.allreduce([total := torch.ones(3)]).wait()
    me.meet("Gloo is done")
    assert total.eq(me.size).all() and made.name() == "gloo" and not isinstance(made, ringreduce._C.ProcessGroupRing)


@on_ranks(2)
def test_as_gloo_can_be_taken_back(me: Rank) -> None:
    ringreduce.as_gloo()
    with me.join(backend="gloo"):
        ringreduce.as_gloo(False)
        ringreduce.as_gloo(False)
        assert dist.group.WORLD is not None
        check_group(dist.group.WORLD)  # it stays as it was made
        group = dist.new_group(backend="gloo")
        check_group(group, ours=False)
        me.meet("Gloo is done")


@on_ranks(2)
def test_with_the_checks_of_torch_distributed_debug(me: Rank) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    ringreduce.as_gloo()
    with me.join(backend="gloo"):
        assert dist.group.WORLD is not None
        check_group(dist.group.WORLD)


def on_one_rank_only(me: Rank) -> str:
    me.meet("all are here")  # the timeout is short, and processes start as they can
    ringreduce.as_gloo(me.rank == 0)
    with pytest.raises(Exception) as raised, me.join(backend="gloo", timeout=2.0):
        pass
    return str(raised.value)


def test_a_rank_that_has_not_called_it_is_hinted_at() -> None:
    assert "if it has not called as_gloo" in run(on_one_rank_only, 2)[0]


@on_ranks(2)
def test_a_tagged_group_that_there_is_stays_with_gloo(me: Rank) -> None:
    with me.join(backend="gloo"):
        ranks = list(range(me.size))
        first = dist.distributed_c10d._new_group_with_tag(ranks, backend="gloo", pg_tag="mine")
        ringreduce.as_gloo()
        again = dist.distributed_c10d._new_group_with_tag(ranks, backend="gloo", pg_tag="mine")
        assert again is first
        check_group(first, ours=False)
        me.meet("Gloo is done")


@pytest.mark.parametrize("enabled", [None, "", 1, []])
def test_what_is_no_bool_is_refused(enabled: Any) -> None:
    with pytest.raises(InvalidArgument, match="it must be True or False"):
        ringreduce.as_gloo(enabled)


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(3))
kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
print(f"{dist.get_backend()} {kind} {total.tolist()}\\n", end="", flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"rank {dist.get_rank()} is done", "")
store.wait(["rank 0 is done", "rank 1 is done"])  # Gloo's last message may not have been read yet
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1", "ProcessGroupRing"),
        ("0", "ProcessGroupGloo"),
        ("", "ProcessGroupGloo"),
        ("false", "ProcessGroupGloo"),
    ],
)
def test_the_variable(value: str, kind: str, tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"RINGREDUCE_AS_GLOO": value, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"gloo {kind} [2.0, 2.0, 2.0]"] * 2
    assert ("RINGREDUCE_AS_GLOO has no effect" in done.stderr) == (value == "false")


class Plugin(tuple):  # type: ignore[type-arg]
    """A plugin as torch has it from 2.14 on."""

    creator_fn = property(lambda self: self[0])

    def _replace(self, **fields: Any) -> Plugin:
        return Plugin((fields["creator_fn"], self[1]))


def test_where_gloo_is_a_plugin(_gloo_again: None) -> None:
    """From torch 2.14 on. This torch may be an older one, so its `Backend` is replaced."""
    gloo = mock.Mock(return_value="Gloo's")
    backend = mock.Mock(_plugins={"GLOO": Plugin((gloo, True))}, backend_type_map={"gloo": "GLOO"})
    ours = mock.Mock()
    with mock.patch.object(module, "Backend", backend), mock.patch("ringreduce.groups.make.create", lambda *_: ours):
        ringreduce.as_gloo()
        backend._ensure_backend_registered.assert_called_once_with("gloo")
        replaced = backend._plugins["GLOO"].creator_fn
        assert backend.backend_type_map["gloo"] == dist.ProcessGroup.BackendType.CUSTOM
        assert replaced(mock.Mock(enable_reconfigure=False), None) is ours
        assert replaced(mock.Mock(spec=[]), None) is ours
        assert ours.show_as_gloo.call_count == 2
        assert replaced(mock.Mock(enable_reconfigure=True), None) == "Gloo's"
        ringreduce.as_gloo(False)
        assert backend._plugins["GLOO"].creator_fn is gloo and backend.backend_type_map == {"gloo": "GLOO"}
