"""What `world.state` sends, where a joiner receives it, and how much memory this takes."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.elastic import come, start, wait_for
from distributed.harness import Rank, Ranks, on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ringreduce.elastic.state import PIECE, State
from ringreduce.errors import InvalidArgument, TooFewRanks


@on_ranks(2, returns=[[True] * 7] * 2)
def test_what_lies_in_lists_and_dictionaries_is_received_in_place(me: Rank) -> list[bool]:
    """Whether what the program holds under names of its own is what `state` has, and what rank 0 had."""
    with torch.device("meta"):  # where the program's new tensors go, and not those of a world
        world = start(me, 2)
    value = float(me.rank + 1)
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    columns, array = torch.full((2, 3), value).t(), np.full(3, value)
    generator = torch.Generator().manual_seed(me.rank)
    parts = {
        "named": {"weight": net.weight.detach()},
        "nested": [(net.bias.detach(), 7 - me.rank), {"columns": columns}],
        "arrays": [array],
        "generator": generator,
        "grown": [torch.full((1,), value)] * (2 - me.rank),
        "filled": {"new": torch.ones(2)} if me.rank == 0 else {},
    }
    with torch.device("meta"):
        state = world.state(**parts)
        world.attempt(lambda: None)
    found = [
        bool((net.weight == 1).all()) and state.named["weight"].data_ptr() == net.weight.data_ptr(),
        state.nested[0][0].data_ptr() == net.bias.data_ptr() and state.nested[0][1] == 7,
        bool((columns == 1).all()) and state.nested[1]["columns"] is columns,
        array.tolist() == [1.0] * 3 and state.arrays[0] is array,
        generator.initial_seed() == 0 and state.generator is generator,
        [each.tolist() for each in state.grown] == [[1.0]] * 2,
        state.filled["new"].tolist() == [1.0] * 2,
    ]
    world.leave()
    return found


class Clears:
    """An object that clears its tensor before it loads one."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((2,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, found: dict[str, torch.Tensor]) -> None:
        self.value.zero_()
        self.value += found["value"]


@on_ranks(2, returns=[(5.0, 9.0, [7.0, 7.0], [3.0, 3.0], True)] * 2)
def test_two_parts_may_share_memory_on_a_joiner_only(me: Rank) -> tuple[Any, ...]:
    """`best` begins as the net's own tensors and is something else on rank 0; `tied` is one tensor on both."""
    world = start(me, 2)
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 5.0 + me.rank)
    tied = torch.full((2,), 7.0 + me.rank)
    best = net.state_dict() if me.rank else {"weight": torch.full((1, 1), 9.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rank 1 once told of what torch deprecates
        state = world.state(net=net, best=best, first=tied, second=[tied], clears=Clears(3.0 + me.rank))
    world.leave()
    values = net.weight.item(), state.best["weight"].item(), tied.tolist(), state.clears.value.tolist()
    return *values, state.second[0] is tied


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: torch.ones(1).expand(5), r"p has elements that share memory, .* give its contiguous\(\) or clone\(\)"),
        (lambda: [torch.ones(4).as_strided((3, 2), (1, 1))], "p has elements that share memory"),
        (lambda: nn.Linear(2, 2, device="meta"), r"p.weight is on the meta device; .* first, by to_empty\(\)"),
    ],
)
def test_parts_in_which_nothing_can_be_received_are_refused(part: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        State({"p": part()})


@on_ranks(2, returns=[[[1.0] * 3, [3.0] * 3, [0.0] * 3] * 2] * 2)
def test_tensors_that_consist_of_others_are_parts_of_a_state(me: Rank) -> list[Any]:
    """Rank 0's optimizer has states that consist of several tensors, or are not dense. Rank 1's has none, or others."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    mine = TwoTensor(torch.full((3,), me.rank + 1.0), TwoTensor(torch.full((3,), me.rank + 3.0), torch.zeros(3)))
    optimizer.state[weight] = (
        {"step": 7, "sparse": torch.eye(2).to_sparse(), "m": mine} if me.rank == 0 else {"m": mine}
    )
    world = start(me, 2)
    state = world.state(optimizer=optimizer, wrapped=[mine])
    world.leave()
    found = optimizer.state[weight]
    assert found["sparse"].to_dense().equal(torch.eye(2)) and found["step"] == 7
    assert all(isinstance(each, TwoTensor) and isinstance(each.b, TwoTensor) for each in (found["m"], *state.wrapped))
    return [each.tolist() for m in (found["m"], mine) for each in (m.a, m.b.a, m.b.b)]


def is_refused(me: Rank) -> None:
    """The state of the members gets what cannot be sent, so rank 1 cannot join. Then rank 2 can."""
    if me.rank > 0:
        wait_for(me, f"come {me.rank}")
    world = start(me, 1)
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if me.rank == 1:
        with pytest.raises(InvalidArgument, match=r"optimizer.state.0.\w+ is a .*\(on the member whose state this"):
            world.state(optimizer=optimizer, step=0)
        return world.leave()
    state = world.state(optimizer=optimizer, step=0)
    optimizer.state[weight]["lock"] = threading.Lock()
    me.report("begins")
    while world.epoch < 3:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        state.step += 1
        if world.epoch == 2:
            optimizer.state[weight].clear()
            me.report("has lost rank 1")
    world.leave()


def test_what_cannot_be_sent_is_refused_to_the_joiner_alone() -> None:
    with Ranks(is_refused, 3) as ranks:
        assert ranks.reports(but=(1, 2)) == ["begins"]
        come(ranks, 1)
        assert ranks.reports(but=(1, 2)) == ["has lost rank 1"]
        come(ranks, 2)
        ranks.results()


def test_views_that_do_not_overlap_are_parts() -> None:
    grid = torch.ones(3, 1, 4, 5)
    State({"views": [grid.permute(2, 0, 3, 1)[1:], grid[:, 0, ::2, 1::3], grid[:0], torch.tensor(1)]})


BIG = 2**28  # bytes


def peak() -> int:
    """The most bytes that this process has ever had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def needs_memory(me: Rank) -> tuple[int, int]:
    """The bytes that a process needs beside its own state: for its first call of `state`, and until all have joined."""
    if me.rank == 2:
        wait_for(me, "come 2")
    world = start(me, 2)
    net = nn.Linear(BIG // 8, 1, bias=False)
    before = peak()
    state = world.state(net=net, more={"values": torch.full((BIG // 8,), float(me.rank))}, step=0)
    first = peak() - before - BIG // 2  # `more` was made after `before`
    me.report("begins")
    while world.epoch == 0:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    both = peak() - before - BIG // 2
    assert state.more["values"][-1] == 0
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))  # the members' attempt with the joiner
    world.leave()
    return first, both


def test_no_rank_holds_the_state_twice() -> None:
    with Ranks(needs_memory, 3) as ranks:
        ranks.reports(but=(2,))
        come(ranks, 2)
        for first, both in ranks.results():
            assert first < PIECE // 2 and both < PIECE * 3 // 2, (first >> 20, both >> 20)


def dies_while_it_sends() -> None:
    """Ends this process when it has sent two tensors."""
    real, sent = dist.broadcast, []

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        sent.append(real(tensor, source))
        if len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    dist.broadcast = broadcast


def parts(value: float) -> dict[str, Any]:
    net = nn.Linear(300, 300)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return {"net": net, "more": {"a": torch.full((9,), value), "b": torch.full((9,), value)}, "step": value}


def is_left(me: Rank) -> None:
    world = start(me, 3)
    if me.rank == 0:
        dies_while_it_sends()
    with pytest.raises(TooFewRanks, match="every member that had the state is lost"):
        world.state(**parts(float(me.rank)))
    world.leave()


def test_a_founder_that_has_received_half_a_state_gives_it_to_nobody() -> None:
    with Ranks(is_left, 3) as ranks:
        ranks.results(but=(0,))


def takes_twice(me: Rank) -> list[float]:
    """Rank 2 joins. Rank 0 dies while it sends its state, which is not rank 1's, and rank 1 sends its own."""
    if me.rank == 2:
        wait_for(me, "come 2")
    world = start(me, 2)
    given = parts(float(me.rank))
    own = [*given["net"].state_dict().values(), *given["more"].values()]
    state = world.state(**given)
    if me.rank < 2:
        for each in own:
            nn.init.constant_(each, 5.0 + me.rank)
        state.step = 5.0 + me.rank
        if me.rank == 0:
            dies_while_it_sends()
        me.report("begins")
    while world.epoch < 2:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    return sorted({state.step, *(value for each in own for value in each.unique().tolist())})


def test_a_joiner_takes_again_when_its_source_dies() -> None:
    with Ranks(takes_twice, 3) as ranks:
        ranks.reports(but=(2,))
        come(ranks, 2)
        assert ranks.results(but=(0,)) == [[6.0], [6.0]]


def dies_before_the_state(me: Rank) -> tuple[int, int]:
    world = start(me, 3)
    me.report("is a member")
    if me.rank == 2:
        signal.pause()
    state = world.state(step=7 if me.rank == 0 else 0)
    return world.size, state.step


def test_a_death_before_anybody_has_the_state() -> None:
    with Ranks(dies_before_the_state, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [(2, 7)] * 2


def durable(me: Rank) -> int:
    world = start(me, 3)
    me.report("begins")
    for number in range(3):
        dist.barrier()
        assert world.commit(durable=number == 1)
    me.meet("committed")
    if me.rank == 2:
        time.sleep(60)
    while world.commit():  # until rank 2 is dead
        time.sleep(0.01)
    return world.view.step


def test_durable_commits() -> None:
    with Ranks(durable, 3) as ranks:
        ranks.reports()
        time.sleep(0.5)
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [3, 3]
