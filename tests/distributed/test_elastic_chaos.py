"""One training with 100 kills, and short runs of chaos.py. `make soak` runs chaos.py for longer."""

from __future__ import annotations

import random

import pytest
import torch
from distributed.chaos import Kind, alone, settle, started, trial

STEPS, KILLS = 300, 100


def train_with_kills(kind: Kind, kills: int) -> tuple[list[torch.Tensor], int]:
    """Trains for 300 steps. Kills `kills` members at random moments, and starts a fresh process in the place of each.

    Returns the parameters, which are the same on all members, and the number of changes.
    """
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
    """In float32, so that another order of sums or another split of the batch would change the result."""
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
