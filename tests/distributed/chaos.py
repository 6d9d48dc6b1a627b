"""Kills, stops, continues and starts members of worlds at random, and checks that their logs agree.

    cd tests && python -m distributed.chaos --seconds 3600        make soak runs it for SOAK_SECONDS

A world lives for a minute or two, then the next one is drawn: on one host or two, with or without spares. Every member
tells the test's process each view that it enters and each step that it commits, so the logs of dead members are checked
too. An epoch must have one view. All members that commit a step must commit it in the same epoch, and must have the
same parameters after it. In every second world, one member is left alone; it must not gain descriptors, threads or
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import harness
from distributed.harness import Rank
from processes import Processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce import elastic
from ringreduce.errors import CollectiveTimeout, Expelled, TooFewRanks

BATCH = 12
HANGS_AFTER = 60.0
"""A test fails if no member commits a step for so many seconds. Longer than `timeout` and `expel_after` together."""
ENDS = ("killed", "expelled", "trained", "over", "waited", "alone")
"""How a process may end. `waited`: no member looked for joiners within the timeout. `alone`: all members have died."""
LATE = "the first group was not made within a call's timeout"
"""How a founder ends on a busy machine. Then the world is started again, with the next of SLOWER:"""
SLOWER = (1, 2, 6)
"""Factors for all timeouts."""
QUIET = 2.5
"""Seconds after which nothing is left of the latest change. Threads that watch a view end within one second."""


@dataclass(frozen=True)
class Kind:
    """What kind of world it is."""

    founders: int = 3
    spares: int = 0
    hosts: int = 1
    timeout: float = 2.0
    expel_after: float = 4.0
    """Seconds. Longer than `timeout`, so that members that wait for one which waits are not given up."""
    dtype: torch.dtype = torch.float64

    @property
    def processes(self) -> int:
        return self.founders + self.spares

    @property
    def least(self) -> int:
        return self.founders if self.spares else 1


# in a member


def net_of(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The loss of a rank's share of the step's batch. Its mean over the ranks is the loss of the batch."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step), dtype=dtype)[rank::size]
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True), reduction="sum") * size / BATCH


def alone(steps: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The parameters that a single process has after `steps` steps."""
    model = net_of(0, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1, dtype).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def digest_of(parameters: list[torch.Tensor]) -> int:
    return zlib.crc32(b"".join(each.detach().numpy().tobytes() for each in parameters))


def member(me: Rank, kind: Kind) -> list[list[Any]]:
    """A member. Trains and returns the parameters.

    The store says under "go" up to which step it may train, and at which step the training ends (-1: not yet).
    """
    faulthandler.register(signal.SIGUSR1)
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank % kind.hosts}"
    me.store.add("came", 1)
    while me.store.add("came", 0) < kind.processes:  # how long processes take to begin is no part of a timeout
        time.sleep(0.01)
    world = elastic.start(
        least=kind.least,
        spares=kind.spares,
        store=me.store,
        rank=me.rank,
        world_size=kind.processes,
        timeout=timedelta(seconds=kind.timeout),
        expel_after=kind.expel_after,
    )
    net = net_of(me.rank and os.getpid(), kind.dtype)  # the state is the first member's
    model = DistributedDataParallel(net, init_sync=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    world.on_change(lambda world: me.report(("view", world.epoch, world.view.names)))
    state = world.state(model=model, optimizer=optimizer, step=0)
    me.report(("in", world.epoch, world.view.names, world.view.names[world.rank]))

    def backward() -> tuple[bool, bool, int]:
        told = torch.tensor([int(each) for each in me.store.get("go").split()])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        goes = state.step < int(told[0])
        if goes:
            time.sleep(0.002)  # as a training computes
            optimizer.zero_grad()
            loss_of(model, state.step, world.rank, world.size, kind.dtype).backward()
        return goes, state.step + goes == int(told[1]), world.epoch

    over = False
    while not over:
        # `epoch` is that of the attempt: a member that sees a loss while it votes returns in the next one.
        goes, over, epoch = world.attempt(backward)
        if goes:
            optimizer.step()
            state.step += 1
            me.report(("step", epoch, state.step, digest_of(list(net.parameters()))))
        else:
            time.sleep(0.001)
    world.leave()
    return [each.tolist() for each in net.parameters()]  # a tensor would lie in memory that ends with the process


def _main(rank: int, kind: Kind, port: int, prefix: str, pipe: connection.Connection, log: str) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        me = Rank(rank, kind.processes, port, prefix, pipe)
        pipe.send(("ended", "trained", member(me, kind)))
    except Expelled:
        pipe.send(("ended", "expelled", None))
    except elastic.Over:
        pipe.send(("ended", "over", None))
    except CollectiveTimeout as error:  # no member had time for it
        late = f"{LATE}: {traceback.format_exc()}"
        pipe.send(("ended", "waited" if "no member has looked" in str(error) else late, None))
    except TooFewRanks as error:
        pipe.send(("ended", "alone" if "all members have died" in str(error) else traceback.format_exc(), None))
    except BaseException:
        pipe.send(("ended", traceback.format_exc(), None))


# outside


@dataclass
class Life:
    """What the test knows of one process."""

    place: int
    pid: int
    name: str = ""
    """Its name as a member, once it has the state."""
    stopped: bool = False
    sure: bool = True
    """False after a long stop, for which the others may have gone on without it, until its next commit."""
    ended: str = ""
    """One of ENDS, or a traceback."""
    result: Any = None
    views: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, step, digest)."""

    @property
    def runs(self) -> bool:
        return not self.ended and not self.stopped


class Fleet(Processes):
    """The members and waiting processes of one world, seen from the test's process. A context manager."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.prefix = kind, f"chaos{next(harness._fresh)}"
        self.lives: list[Life] = []
        self._port = harness._store().port
        self._store = dist.PrefixStore(self.prefix, harness._store())
        self._moved = time.monotonic()
        self._logs = tempfile.TemporaryDirectory(prefix="chaos")

    def __exit__(self, *reasons: object) -> None:
        super().__exit__(*reasons)
        self._logs.cleanup()

    def start(self, place: int) -> Life:
        """Starts a fresh process with the rank `place`."""
        log = f"{self._logs.name}/{len(self.lives)}"
        self._start(_main, place, self.kind, self._port, self.prefix, tail=(log,))
        self.lives.append(Life(place, self.pid(len(self.lives))))
        return self.lives[-1]

    def start_all(self, wait: float = 60.0) -> bool:
        """Starts the founders and spares. Returns True after the first step, False if a founder was LATE."""
        self.go(1)
        for place in range(self.kind.processes):
            self.start(place)
        self.until(lambda: self.step >= 1 or self._are_late(), wait)
        return self.step >= 1

    def _are_late(self) -> bool:
        return self.step == 0 and any(life.ended.startswith(LATE) for life in self.lives)

    def go(self, steps: int, end: int = -1) -> None:
        self._store.set("go", f"{steps} {end}")

    @property
    def step(self) -> int:
        """The latest step that any member has committed."""
        return max((life.steps[-1][1] for life in self.lives if life.steps), default=0)

    def free(self) -> set[int]:
        """The places whose process has ended."""
        return set(range(self.kind.processes)) - {life.place for life in self.lives if not life.ended}

    def members(self) -> list[Life]:
        """The processes that run, have the state, and are in the latest view that is known."""
        latest = max((view for life in self.lives for view in life.views[-1:]), default=(0, ()))
        return [life for life in self.lives if life.runs and life.name in latest[1]]

    def until(self, done: Any, wait: float = HANGS_AFTER) -> None:
        """Waits until `done()` is true. Fails after `wait` seconds."""
        end = time.monotonic() + wait
        while not done():
            self.drain(0.02)
            if time.monotonic() > end:
                self.fail(f"waited {wait:.0f} s")

    def drain(self, seconds: float) -> None:
        """Reads the members' reports for so many seconds. Fails if no member commits a step for HANGS_AFTER seconds."""
        end = time.monotonic() + seconds
        while True:
            open_pipes = {pipe: life for pipe, life in zip(self._pipes, self.lives, strict=True) if not pipe.closed}
            before = time.monotonic()
            ready = connection.wait(list(open_pipes), max(0.0, end - before))
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                self._hear(open_pipes[pipe], pipe)
                if open_pipes[pipe].ended not in ("", *ENDS) and not self._are_late():
                    self.fail("a member has failed")
            now = time.monotonic()
            if now > before + max(1.0, 2 * seconds):  # this process has been stopped, and so, maybe, all
                self._moved = now
            if now > self._moved + HANGS_AFTER and any(life.runs for life in self.lives):
                self.fail(f"nobody has committed a step for {HANGS_AFTER:.0f} s")
            if now >= end:
                return

    def _hear(self, life: Life, pipe: connection.Connection) -> None:
        try:
            kind, *told = pipe.recv()
            if kind == "report":
                kind, *told = told[0]
        except (EOFError, ConnectionResetError):
            pipe.close()
            process = self._processes[self.lives.index(life)]
            process.join(60)
            life.ended = life.ended or f"it died by itself, with exit code {process.exitcode}"
            return
        if kind == "step":
            life.steps.append((told[0], told[1], told[2]))
            life.sure, self._moved = True, time.monotonic()
        elif kind == "ended":
            life.ended, life.result = life.ended or told[0], told[1]
        else:
            life.views.append((told[0], told[1]))
            life.name = told[2] if kind == "in" else life.name

    def kill(self, life: Life) -> None:
        self._send(life, signal.SIGKILL)
        life.ended = "killed"

    def stop(self, life: Life, stopped: bool = True) -> None:
        self._send(life, signal.SIGSTOP if stopped else signal.SIGCONT)
        life.stopped = stopped

    def _send(self, life: Life, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid, number)

    def finish(self, more: int = 5) -> list[Life]:
        """Lets all members train `more` steps and leave. Returns those that did, once all processes have ended."""
        for life in self.lives:
            if life.stopped and not life.ended:
                self.stop(life, False)
        end = self.step + more
        self.go(end, end)
        self.until(lambda: all(life.ended for life in self.lives))
        for process in self._processes:
            process.join(60)
        self.check()
        return [life for life in self.lives if life.ended == "trained"]

    def check(self) -> None:
        """Checks that the logs of all members agree, dead or alive.

        The last step of a member that was killed or expelled may be one that the others did again.
        """
        views: dict[int, tuple[str, ...]] = {}
        steps: dict[int, tuple[int, int]] = {}
        for life in sorted(self.lives, key=lambda life: life.ended in ("killed", "expelled")):
            for epoch, names in life.views:
                if views.setdefault(epoch, names) != names:
                    self.fail(f"epoch {epoch} has two views: {views[epoch]} and {names}")
            numbers = [step for _, step, _ in life.steps]
            if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                self.fail(f"a member has committed steps {numbers}")
            for place, (epoch, step, digest) in enumerate(life.steps):
                may_differ = life.ended in ("killed", "expelled") and place + 1 == len(life.steps)
                if steps.setdefault(step, (epoch, digest)) != (epoch, digest) and not may_differ:
                    self.fail(f"step {step}: {steps[step]} and {(epoch, digest)} (epoch, digest)")

    def fail(self, why: str) -> None:
        """Fails with what the latest processes have written, and with the stacks of the living ones."""
        for life in self.lives:
            if not life.ended:
                self.stop(life, False)
                self._send(life, signal.SIGUSR1)
        time.sleep(0.5)
        told = [why, str(self.kind)]
        for number, life in enumerate(self.lives):
            had_the_state = bool(life.steps) and life.steps[-1][1] > self.step - 3
            if life.ended and number <= len(self.lives) - 12 and not had_the_state:
                continue
            log = Path(f"{self._logs.name}/{number}")
            told.append(f"place {life.place}, pid {life.pid}, {life.name!r}, ended {life.ended!r}, {life.views[-1:]}")
            told.append(f"latest step {life.steps[-1:]}\n{log.read_text()[-3000:] if log.exists() else ''}")
        raise AssertionError("\n".join(told))


@contextlib.contextmanager
def started(kind: Kind) -> Iterator[Fleet]:
    """Starts a world and yields it after its first step."""
    for slower in SLOWER:
        with Fleet(replace(kind, timeout=slower * kind.timeout, expel_after=slower * kind.expel_after)) as fleet:
            if fleet.start_all():
                yield fleet
                return
    raise AssertionError(f"{len(SLOWER)} times in a row, {LATE}: {kind}")


@dataclass(frozen=True)
class Held:
    """The resources that a process holds."""

    descriptors: list[str]
    """The targets of its open descriptors."""
    threads: list[str]
    bytes: int
    """Its private memory, in bytes."""

    @staticmethod
    def by(pid: int) -> Held:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found = sorted(os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir())
        threads = sorted(each.read_text().strip() for each in Path(f"/proc/{pid}/task").glob("*/comm"))
        return Held(found, threads, 1024 * int(status["RssAnon"].split()[0]))


def rough(fleet: Fleet, draw: random.Random, seconds: float, kept: Life | None) -> Counter[str]:
    """Kills, stops and starts members for so many seconds. Returns how often it did what. `kept` is left alone."""
    done: Counter[str] = Counter()
    begins: list[tuple[float, int]] = []
    goes_on: list[tuple[float, Life]] = []
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for place in fleet.free() - {place for _, place in begins}:
            begins.append((now + draw.choice((0, 0, 0.05, 0.5)), place))
        for due, place in [each for each in begins if each[0] <= now]:
            begins.remove((due, place))
            fleet.start(place)
        for due, life in [each for each in goes_on if each[0] <= now]:
            goes_on.remove((due, life))
            if not life.ended:
                fleet.stop(life, False)
        what = draw.choices(("kill", "stop", "long stop", "nothing"), (60, 25, 3, 12))[0]
        running = [life for life in fleet.lives if life.runs and life is not kept]
        if running and what != "nothing":
            victim = draw.choice(running)
            # Somebody must be left with the state, and the others of a long stop must not be stopped themselves.
            left = [life for life in fleet.members() if life.sure and life is not victim]
            if left or what == "stop":
                done[f"{what}{'' if victim.name else ' of one that waits'}"] += 1
                if what == "kill":
                    fleet.kill(victim)
                else:
                    fleet.stop(victim)
                    long = what == "long stop"
                    victim.sure = victim.sure and not long
                    pause = fleet.kind.timeout + fleet.kind.expel_after + 3 if long else draw.uniform(0, 0.5)
                    goes_on.append((now + pause, victim))
        fleet.drain(0 if draw.random() < 0.15 else draw.expovariate(1 / 0.3))
    for life in fleet.lives:
        if life.stopped and not life.ended:
            fleet.stop(life, False)
    return done


def shared_files() -> set[str]:
    """The names in /dev/shm, without semaphores of Python's multiprocessing, which other programs may make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def trial(number: int, seconds: float) -> tuple[Kind, Counter[str]]:
    """Runs one world for so many seconds. The number determines what is done to it, but not the exact moments."""
    draw = random.Random(number)
    kind = Kind(draw.randint(2, 4), draw.choice((0, 0, 1, 2)), draw.choice((1, 1, 2)))
    before = shared_files()
    with started(kind) as fleet:
        fleet.go(1 << 60)
        kept = fleet.lives[kind.founders - 1] if number % 2 else None  # the last one, so that others lead at first
        done = rough(fleet, draw, min(5.0, seconds / 2), kept)
        settle(fleet)
        held, epoch = kept and not kept.ended and Held.by(kept.pid), newest(fleet)
        done += rough(fleet, draw, seconds - min(5.0, seconds / 2), kept)
        settle(fleet)
        if kept and held and not kept.ended:  # others may have gone on without it
            changes = newest(fleet) - epoch
            after = does_not_grow(fleet, kept, held, changes)
            done["changes seen by one"], done["KB gained by one"] = changes, (after.bytes - held.bytes) >> 10
            done["descriptors gained by one"] = len(after.descriptors) - len(held.descriptors)
        fleet.finish()
        done["views"], done["steps"], done["processes"] = newest(fleet), fleet.step, len(fleet.lives)
        done["expelled"] = sum(life.ended == "expelled" for life in fleet.lives)
    left = shared_files() - before
    if left:
        raise AssertionError(f"left in /dev/shm: {left}")
    return fleet.kind, done


def newest(fleet: Fleet) -> int:
    return max(epoch for life in fleet.lives for epoch, _ in life.views)


def settle(fleet: Fleet) -> None:
    """Waits until the world has all its members, and nothing is left of the latest change."""

    def all_are_in() -> bool:
        for place in fleet.free():
            fleet.start(place)
        return len(fleet.members()) == fleet.kind.founders

    fleet.until(all_are_in)
    fleet.drain(QUIET)


def does_not_grow(fleet: Fleet, kept: Life, before: Held, changes: int) -> Held:
    """Checks that the process `kept` has not grown, and returns what it holds now.

    A change may leave some 10 KB, because every member has read the ledger. C's heap may grow at first. Threads of
    earlier views may need some time to end if there are few cores.
    """
    others = 4 * (fleet.kind.hosts - 1)  # connections and their threads: by how many members are on the other host now
    most = {"descriptors": 4 + others, "threads": 2 + others, "bytes": (48 << 20) + (64 << 10) * changes}
    end = time.monotonic() + 10 * QUIET
    while True:
        after = Held.by(kept.pid)
        if (
            len(after.descriptors) <= len(before.descriptors) + most["descriptors"]
            and len(after.threads) <= len(before.threads) + most["threads"]
            and after.bytes <= before.bytes + most["bytes"]
        ):
            return after
        if time.monotonic() > end:
            fleet.fail(f"in {changes} changes, a member grew by more than {most}: from {before} to {after}")
        fleet.drain(QUIET)


def main() -> None:
    import importlib

    importlib.import_module("conftest")
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="how long to go on drawing worlds")
    parser.add_argument("--each", type=float, default=60, help="seconds that each world lives")
    parser.add_argument("--first", type=int, default=0, help="number of the first world; it determines what happens")
    args = parser.parse_args()
    end, number, sums = time.monotonic() + args.seconds, args.first, Counter[str]()
    while time.monotonic() < end or number == args.first:
        kind, done = trial(number, min(args.each, args.seconds))
        sums += done
        print(f"world {number}: {kind}: {dict(done)}", flush=True)
        number += 1
    print(f"{number - args.first} worlds, nothing wrong: {dict(sums)}")


if __name__ == "__main__":
    sys.exit(main())
