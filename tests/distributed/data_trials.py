"""An epoch in which ranks and servers of a Loader are killed and a process joins: each id is committed once.

    cd tests && python -m distributed.data_trials --trials 100

Each trial draws anew which two of three founders die, where in their step, when a server or the supervisor is killed,
and when a fourth process joins.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from bodies.data import Noise, servers_of
from bodies.elastic import start
from distributed.harness import Rank, Ranks

from ringreduce.data import Loader, Order, supervisor
from ringreduce.data.server import _seed

ORDER = Order(480, 12, seed=9)
STEPS = ORDER.steps(1)
FOUNDERS, JOINER = 3, 3
PLACES = ("before it reads", "after it has read", "after the sum", "after the commit")


@dataclass(frozen=True)
class Trial:
    name: str
    deaths: dict[int, tuple[int, str]]
    """By rank: the step and the place in it."""
    server_dies: int
    """In which step."""
    supervisor_dies: int
    join: int
    """In which step the fourth process begins to come."""


def drawn(seed: int) -> Trial:
    draw = random.Random(seed)
    deaths = {rank: (draw.randrange(STEPS - 6), draw.choice(PLACES)) for rank in draw.sample(range(FOUNDERS), 2)}
    supervisor_dies = draw.randrange(STEPS) if seed % 4 == 0 else -1
    name = f"trial {seed} {os.getpid()} {time.monotonic_ns()}"
    return Trial(name, deaths, draw.randrange(STEPS), supervisor_dies, draw.randrange(STEPS - 6))


def member(me: Rank, trial: Trial) -> tuple[list[float], list[float]]:
    """Returns how often each id was committed, and its augmentation."""
    with Loader(Noise(ORDER.n), ORDER, servers=2, name=trial.name) as reader:
        if supervisor.started:
            me.store.set("supervisor", str(supervisor.started[-1]))
        if me.rank == JOINER:
            me.store.get("come")
        world = start(me, FOUNDERS)
        seen, noise = torch.zeros(ORDER.n), torch.zeros(ORDER.n, dtype=torch.float64)
        state = world.state(step=0, seen=seen, noise=noise, joined=0)

        def dies(place: str) -> None:
            if trial.deaths.get(me.rank) == (state.step, place):
                os.kill(os.getpid(), signal.SIGKILL)

        def read_and_sum() -> tuple[torch.Tensor, bool]:
            # The last steps wait for the joiner, so that it reads, too.
            goes = state.step < STEPS - 5 or state.joined
            sums = torch.zeros(2 * ORDER.n + 1, dtype=torch.float64)
            dies("before it reads")
            if goes:
                batch = reader.get(state.step)
                ids = batch[:, 0].long()
                sums[ids] += 1
                sums[ORDER.n + ids] = batch[:, 1:].sum(1)
            dies("after it has read")
            sums[-1] = me.rank == JOINER
            dist.all_reduce(sums)
            dies("after the sum")
            return sums, goes

        while state.step < STEPS:
            if world.rank == 0:
                kill_servers(me, trial, state.step)
                if state.step >= trial.join:
                    me.store.set("come", "")
            sums, goes = world.attempt(read_and_sum)
            dies("after the commit")
            state.seen += sums[: ORDER.n]
            state.noise += sums[ORDER.n : -1]
            state.joined = max(state.joined, int(sums[-1]))
            state.step += goes
            if not goes:
                time.sleep(0.005)
        world.leave()
    return state.seen.tolist(), state.noise.tolist()


def kill_servers(me: Rank, trial: Trial, step: int) -> None:
    """Once each, also if ranks change."""
    for what, when in (("server", trial.server_dies), ("supervisor", trial.supervisor_dies)):
        if step >= when >= 0:
            supervisor = int(me.store.get("supervisor"))
            with contextlib.suppress(OSError):  # the supervisor has been killed before
                pids = [supervisor] if what == "supervisor" else servers_of(supervisor)
                if pids and me.store.add(f"{what} killed", 1) == 1:
                    os.kill(pids[step % len(pids)], signal.SIGKILL)


def expected_noise() -> list[float]:
    noise, found = Noise(ORDER.n), []
    for number in range(ORDER.n):
        _seed(ORDER.seed, 0, number)
        found.append(float(torch.from_numpy(noise[number])[None, 1:].sum(1)))
    return found


def run_trial(seed: int) -> None:
    """Raises AssertionError, or fails as tests do."""
    trial = drawn(seed)
    with Ranks(member, FOUNDERS + 1, trial) as ranks:
        results = ranks.results(but=tuple(trial.deaths))
    for seen, noise in results:
        assert np.array_equal(seen, np.ones(ORDER.n)), f"{trial}: ids were not committed once each"
        assert noise == expected_noise(), f"{trial}: an augmentation differs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: %(default)s)")
    arguments = parser.parse_args()
    began = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        run_trial(seed)
        print(f"\r{seed - arguments.seed + 1} trials, {time.monotonic() - began:.0f} s", end="", flush=True)
    print(": each id was committed once in each, with the same augmentation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
