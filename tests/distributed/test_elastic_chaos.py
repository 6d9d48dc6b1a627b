"""Many kills in one training, and a short run of chaos.py; `make soak` has the long one."""

from __future__ import annotations

import random

import pytest
import torch
from distributed.chaos import Kind, alone, settle, started, trial

STEPS, KILLS = 300, 100


def train_with_kills(kind: Kind, kills: int) -> tuple[list[torch.Tensor], int]:
    """300 steps, between and in which so many members are killed one after the other; a fresh process takes the place
    of each. Returns the parameters, which all have alike, and how many changes there were."""
    draw = random.Random(kills)
    with started(kind) as fleet:
        for kill in range(kills):
            # Those who are left keep the state: two, of which one may be about to be told of the other's end.
            fleet.until(lambda: len(fleet.members()) >= min(3, kind.founders))
            fleet.go(STEPS * (kill + 1) // (kills + 1))
            fleet.drain(draw.uniform(0, 0.02))
            victim = draw.choice(fleet.members())
            fleet.kill(victim)
            fleet.start(victim.place)
        settle(fleet)
        ends = fleet.finish(STEPS - fleet.step)
        assert [life.ended for life in fleet.lives].count("killed") == kills
        assert all(life.steps[-1][1] == STEPS and life.result == ends[0].result for life in ends)
        changes = max(epoch for life in fleet.lives for epoch, _ in life.views)
        return [torch.tensor(each, dtype=kind.dtype) for each in ends[0].result], changes


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])
def test_a_training_that_shrinks_and_grows_with_100_kills(hosts: int) -> None:
    parameters, changes = train_with_kills(Kind(founders=3, hosts=hosts, timeout=30, expel_after=40), KILLS)
    assert changes >= KILLS
    for mine, single in zip(parameters, alone(STEPS), strict=True):
        assert torch.allclose(mine, single, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_training_with_spares_and_100_kills_has_the_same_bits() -> None:
    """In float32, where another order of sums or other shares of a batch would show."""
    kind = Kind(founders=2, spares=2, timeout=30, expel_after=40, dtype=torch.float32)
    plain, none = train_with_kills(kind, 0)
    parameters, changes = train_with_kills(kind, KILLS)
    assert none == 0 and changes >= KILLS
    assert all(torch.equal(mine, same) for mine, same in zip(parameters, plain, strict=True))
    assert not all(torch.equal(mine, single) for mine, single in zip(plain, alone(STEPS, torch.float32), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_chaos_for_a_short_time(number: int) -> None:
    kind, done = trial(number, 12)
    assert done["kill"] + done["kill of one that waits"] > 0 and done["steps"] > 10, (kind, done)
