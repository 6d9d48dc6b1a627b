"""Readers: whole rounds, at most one behind, while others train at full speed."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.parameter_server import APART, SMALL, join, placed
from distributed.harness import Rank, Ranks, on_ranks, run
from torch import nn

import ringreduce.parameter_server as ps
from ringreduce.errors import CollectiveTimeout, InvalidArgument, ServerLost

ROUNDS = 150


def model() -> nn.Module:
    """With several blocks on every server."""
    return nn.Sequential(nn.Linear(50, 100), nn.Linear(100, 60), nn.Linear(60, 1))


def reads(me: Rank) -> Any:
    """In round r every element is 2 r, as both workers push ones."""
    if me.rank == 2:
        me.meet("founded")
        with ps.join(me.store, role="reader", timeout=30.0) as kv:
            follower = kv.follow(policy := model(), at_most_behind=1)
            versions = [follower.pull()]
            me.meet("begun")
            while follower.version < ROUNDS:
                if len(versions) % 2:
                    policy(torch.zeros(1, 50))  # which pulls if it is too far behind
                else:
                    follower.pull()
                    assert follower.behind() >= 0
                for parameter in policy.parameters():
                    assert (parameter == 2 * follower.version).all(), "half of a round"
                versions.append(follower.version)
            assert versions == sorted(versions)
            assert not follower.pull() < ROUNDS and follower.behind() == 0
        me.meet("read")
        return len(set(versions))
    with ps.join(me.store, rank=me.rank, size=2, **SMALL) as kv:
        ones = {name: torch.ones_like(p, requires_grad=False) for name, p in model().named_parameters()}
        for name, one in ones.items():
            kv.init(name, torch.zeros_like(one), update=ps.reduce("sum"))
        out = {name: torch.empty_like(one) for name, one in ones.items()}
        kv.barrier()
        me.meet("founded")
        for i in range(ROUNDS):
            kv.push_pull(ones, out=out).wait()
            if i == 0:
                me.meet("begun")
        me.meet("read")
        return 0


def test_a_reader_sees_whole_rounds_while_others_train() -> None:
    assert run(reads, 3)[2] > 1


def founds(me: Rank) -> str:
    if me.rank == 1:
        me.meet("founded")
        kv = ps.join(me.store, role="reader", timeout=30.0)
        follower = kv.follow(policy := nn.Linear(3, 3, bias=False))
        me.report("ready")
        with pytest.raises(ServerLost) as raised:
            while True:
                follower.pull()
        with pytest.raises(ServerLost):
            follower.behind()
        with pytest.raises(ServerLost):
            policy(torch.zeros(3))  # which would be stale
        kv.calls.close()
        return str(raised.value)
    kv = ps.join(me.store, rank=0, size=1, **SMALL)
    kv.init("weight", torch.zeros(3, 3))
    kv.push("weight", torch.ones(3, 3)).wait()  # nobody waits for the reader
    me.meet("founded")
    me.report("ready")
    signal.pause()
    return ""


def test_a_reader_hears_that_its_server_has_ended() -> None:
    with Ranks(founds, 2) as ranks:
        ranks.reports()
        ranks.signal(0, signal.SIGKILL)
        (said,) = ranks.results(but=(0,))
    assert said.startswith("server 0 (")


@on_ranks(2, through=(placed, APART))
def test_servers_of_other_hosts_are_refused(me: Rank) -> None:
    with join(me) as kv:
        kv.init("weight", torch.zeros(40, 40), update=ps.reduce("sum"))
        with pytest.raises(InvalidArgument, match="is on another host"):
            kv.follow(nn.Linear(40, 40, bias=False))
        kv.barrier()


def test_wrong_arguments_are_named() -> None:
    with ps.join(**SMALL) as kv:
        with pytest.raises(InvalidArgument, match="there is no key 'weight'"):
            kv.follow(nn.Linear(3, 3))
        kv.init("weight", torch.zeros(3, 3), mode=ps.asynchronous())
        with pytest.raises(InvalidArgument, match="'weight' is in mode asynchronous"):
            kv.follow(nn.Linear(3, 3, bias=False))
        kv.init("w.weight", torch.zeros(3, 3))
        with pytest.raises(InvalidArgument, match="and not the model's"):
            kv.follow(nn.Linear(3, 4, bias=False), prefix="w.")
        with pytest.raises(InvalidArgument, match="at_most_behind is -1"):
            kv.follow(nn.Linear(3, 3, bias=False), at_most_behind=-1, prefix="w.")
        with pytest.raises(InvalidArgument, match="no parameters that are keys"):
            kv.follow(nn.ReLU())
        follower = kv.follow(policy := nn.Linear(3, 3, bias=False), prefix="w.")
        kv.push("w.weight", torch.ones(3, 3)).wait()
        assert follower.behind() == 1 and not policy.weight.any()
        policy(torch.zeros(3))
        assert follower.version == 0  # one round behind is allowed
        kv.push("w.weight", torch.ones(3, 3)).wait()
        policy(torch.zeros(3))
        assert follower.version == 2 and (policy.weight == 1).all()
        follower.detach()


def test_a_frozen_model_in_channels_last() -> None:
    with ps.join(**SMALL) as kv:
        kv.init("weight", torch.arange(4 * 3 * 2 * 2.0).view(4, 3, 2, 2))
        policy = nn.Conv2d(3, 4, 2).requires_grad_(False).to(memory_format=torch.channels_last)
        kv.follow(policy)
        assert policy.weight.flatten().tolist() == list(range(48))


def test_nobody_waits_for_a_reader_to_leave() -> None:
    store = dist.HashStore()
    with ps.serve(store, rank=0, size=1, memory=1 << 20) as serving:
        with ps.join(store, role="reader") as reader:
            with ps.join(store, role="worker") as kv:
                kv.init("w", torch.ones(3))
            assert serving.wait(10)
        assert reader.has_left


def test_a_key_without_a_value_is_waited_for_until_the_timeout() -> None:
    with ps.join(**SMALL) as kv:
        of_it = {"mode": ps.sync().as_json(), "update": ps.assign().as_json(), "wire": ["float32"] * 2}
        kv.calls.place("weight", {"dtype": "float32", "shape": [3, 3], **of_it}, kv.calls.deadline(None))
        kv.timeout = 0.3
        with pytest.raises(CollectiveTimeout, match="a key has no value yet"):
            kv.follow(nn.Linear(3, 3, bias=False))
