"""What a program does with its world: mistakes that are named, and what torch's modules need after a change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.elastic import loss_of, start
from distributed.harness import Rank, Ranks, on_ranks, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ringreduce import elastic
from ringreduce.elastic.state import State
from ringreduce.errors import CollectiveMismatch, InvalidArgument

STEPS = 6


def static_graph(me: Rank) -> float:
    """The greatest difference of a gradient from that of the whole batch. Rank 2 dies in a step."""
    world = start(me, 3)
    torch.manual_seed(0)
    net = nn.Linear(8, 1).double()
    model = DistributedDataParallel(net, init_sync=False, static_graph=True)
    state = world.state(model=model, step=0)
    worst = 0.0

    def backward() -> None:
        net.zero_grad()
        if me.rank == 2 and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, state.step, world.rank, world.size).backward()

    while state.step < STEPS:
        world.attempt(backward)
        whole = nn.Linear(8, 1).double()
        whole.load_state_dict(net.state_dict())
        loss_of(whole, state.step, 0, 1).backward()
        for mine, right in zip(net.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None and right.grad is not None
            worst = max(worst, float((mine.grad - right.grad).abs().max()))
        state.step += 1
    world.leave()
    return worst


def test_a_static_graph_is_reduced_after_a_change() -> None:
    with Ranks(static_graph, 3) as ranks:
        assert max(ranks.results(but=(2,))) < 1e-12


@on_ranks(
    2,
    returns=[
        "start: least is 1 here and 2 on rank 1; give all processes the same",
        "start: least is 2 here and 1 on rank 0; give all processes the same",
    ],
)
def test_founders_with_other_arguments_are_told(me: Rank) -> str:
    with pytest.raises(InvalidArgument) as caught:
        start(me, 2, least=1 + me.rank)
    return str(caught.value)


def joins_with_another_least(me: Rank) -> tuple[int, str]:
    if me.rank == 1:
        me.store.wait(["begun"])
        with pytest.raises(InvalidArgument) as caught:
            elastic.start(least=2, store=me.store, rank=0, world_size=2, timeout=30)
        me.store.set("refused", "")
        return 0, str(caught.value)
    world = start(me, 1)
    me.store.set("begun", "")
    while not me.store.check(["refused"]):
        world.attempt(lambda: time.sleep(0.01))
    while world.size > 1:
        world.attempt(lambda: None)
    world.leave()
    return world.size, ""


def test_a_joiner_with_other_arguments_is_told_and_the_others_go_on() -> None:
    (size, _), (_, text) = run(joins_with_another_least, 2)
    assert (size, text) == (1, "start: least is 2 here and 1 on the members; give all processes the same")


@on_ranks(2)
def test_a_mismatch_goes_through_on_all(me: Rank) -> None:
    world = start(me, 2)

    def function() -> None:
        if me.rank == 1:
            dist.all_reduce(torch.ones(3))

    with pytest.raises(CollectiveMismatch) as caught:
        world.attempt(function)
    text = str(caught.value)
    assert "made different calls" in text


@on_ranks(2, returns=["bad batch on rank 0", "bad batch on rank 1"])
def test_an_error_is_not_swallowed_because_another_member_raised_before(me: Rank) -> str:
    world = start(me, 2)

    def function() -> None:
        time.sleep(0.3 * me.rank)
        raise ValueError(f"bad batch on rank {me.rank}")

    with pytest.raises(ValueError, match="bad batch") as caught:
        world.attempt(function)
    return str(caught.value)


def leaves(me: Rank) -> list[str]:
    world = start(me, 1)
    for call in (world.attempt, world.on_change, world.on_straggler):
        with pytest.raises(InvalidArgument, match="give a function"):
            call(None)  # type: ignore[arg-type]
    world.leave()
    world.leave()
    told = []
    for again in (lambda: world.attempt(lambda: None), world.commit):
        with pytest.raises(InvalidArgument) as caught:
            again()
        told.append(str(caught.value))
    return told


def test_what_is_called_after_leave_says_so() -> None:
    assert all("this process has left the world, by leave()" in text for text in run(leaves, 1)[0])


@dataclass(frozen=True)
class Place:
    name: str
    rank: int


class OnlySaves:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: [nn.Linear(1, 1)], "p contains a Linear, whose state would be copied"),
        (lambda: {"log": lambda: None}, "p contains a function, which is no plain value"),
        (lambda: torch.eye(2).to_sparse(), "p has a tensor that is torch.sparse_coo"),
        (lambda: DistributedSampler([1, 2], 2, 0), "p contains a DistributedSampler, and each rank has its own"),
        (lambda: {"loader": DataLoader([1])}, "p contains a DataLoader, and each rank has its own"),
        (lambda: Place("me", 1), "p contains a Place, which is no plain value"),
        (lambda: {Place("me", 1)}, "p contains a set, which is no plain value"),
        (lambda: np.array([Place("me", 1)]), "p contains a ndarray, which is no plain value"),
        (lambda: np.random.default_rng(0), "p contains a Generator, which is no plain value"),
        (OnlySaves, "p is a OnlySaves, which has state_dict and no load_state_dict"),
    ],
)
def test_parts_that_a_joiner_could_not_receive_are_refused(part: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        State({"p": part()})
    state = State({"p": 0})
    with pytest.raises(InvalidArgument, match=message):
        state.p = part()


def test_a_part_has_a_name_of_its_own() -> None:
    with pytest.raises(InvalidArgument, match="cannot be called 'share'"):
        State({"share": 1})


VALUES = [
    torch.tensor(True),
    torch.tensor([1, 2], dtype=torch.uint16),
    torch.randn(3, 2).t(),
    torch.empty(0, 3),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(2).to(torch.float8_e5m2),
]


@on_ranks(2, returns=[[True] * 7] * 2)
def test_tensors_of_all_dtypes_are_received(me: Rank) -> list[bool]:
    world = start(me, 2)
    mine = nn.Parameter(torch.full((3,), float(me.rank)))
    state = world.state(values=VALUES if me.rank == 0 else [], parameter=mine)
    found = [
        got.dtype == sent.dtype and bool((got == sent).all()) for got, sent in zip(state.values, VALUES, strict=True)
    ]
    found.append(state.parameter is mine and mine.tolist() == [0.0] * 3)
    world.leave()
    return found


FOUNDER = """
import os, signal, sys, torch.distributed as dist
from ringreduce import elastic

rank, port, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
first = not os.path.exists(mark)
store = dist.TCPStore("127.0.0.1", port, is_master=False)
if rank == 1 and first:
    open(mark, "w").close()
    store.add("ringreduce/elastic/0/rank/1", 1)
    os.kill(os.getpid(), signal.SIGKILL)
world = elastic.start(store=store, rank=rank, world_size=2, timeout=5, patience=2)
print(world.size, world.attempt(lambda: "done"), flush=True)
world.leave()
"""


@pytest.mark.slow
def test_founders_that_are_started_again_found_again(tmp_path: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    keep = [sys.executable, "-m", "ringreduce", "keep", "--errors", "--again", "5", sys.executable, "-c", FOUNDER]
    started = [
        subprocess.Popen([*keep, str(rank), str(store.port), str(tmp_path / "mark")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [each.communicate(timeout=100)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0]
    assert said == ["2 done\n"] * 2


def test_a_world_of_one_ends_cleanly_while_its_store_is_slow() -> None:
    """Python must not end while a thread is in a store's code."""
    code = (
        "import time, torch.distributed as dist\n"
        "from ringreduce.coordination.store import Bounded\n"
        "class Slow(dist.HashStore):\n"
        "    def set(self, key, value):\n"
        "        time.sleep(0.5)\n"
        "        print('set', flush=True)\n"
        "import threading\n"
        "bounded = Bounded(Slow())\n"
        "threading.Thread(target=bounded.set, args=('key', 'value'), daemon=True).start()\n"
        "time.sleep(0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "set\n"), done.stderr
