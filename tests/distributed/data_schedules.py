"""Readers of Loaders who do what comes to their minds: each sample is of the dataset that its reader gave, and in time.

    cd tests && python -m distributed.data_schedules --steps 10000

Three processes draw their steps from the seed. They open Loaders of a few names, with one of several datasets, read on
or jump to another epoch, hold batches, close Loaders or forget them, also while another thread reads, are interrupted
by a signal whose handler raises an error, kill servers and supervisors, and have children that are killed while they
read. What happens at the same time differs from run to run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bodies.data import open_files, servers_of
from distributed.harness import Rank, Ranks
from processes import until
from torch.utils.data import Subset

from ringreduce.data import Loader, Order, supervisor
from ringreduce.data.server import _seed
from ringreduce.errors import InvalidArgument, SampleFailed, SystemFailure

READERS = 3
N, BATCH, BROKEN = 60, 7, 23
TIMEOUT, SLACK = 10.0, 5.0
"""Seconds: of each Loader, and what a loaded machine may add to a call."""
SERVERS = {"one": 1, "two": 2, "/three": 3, None: 2}
"""By name."""
FILES_LOST = 10
"""Descriptors that interrupts may leave open: between the system call that receives one and its close()."""


class Tagged:
    """Example k is [tag, k, two random numbers]; one of them is broken, some take long."""

    def __init__(self, tag: int) -> None:
        self.tag, self.scale = tag, lambda value: value * (tag + 1)

    def __len__(self) -> int:
        return N

    def __getitem__(self, number: int) -> np.ndarray:
        if number == BROKEN:
            raise ValueError(f"tag {self.tag} is broken")
        if number % 16 == 0:
            time.sleep(0.002)
        return np.array([self.tag, number, random.random(), self.scale(np.random.random())])


DATASETS: list[Any] = [Tagged(0), Tagged(1), Subset(Tagged(2), range(N)), Subset(Tagged(2), range(N - 1, -1, -1))]


class Interrupted(Exception):
    pass


class Reader:
    def __init__(self, draw: random.Random, run: str) -> None:
        self.draw, self.run, self.did = draw, run, Counter[str]()
        self.loader: Loader | None = None
        self.dataset: Any = None
        self.at = 0
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None
        self.expected: dict[tuple[int, int, int], np.ndarray] = {}
        self.armed = False
        signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_alarm(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise Interrupted

    def step(self) -> None:
        action = self.draw.choices(
            [self.read, self.interrupt, self.open, self.close, self.forget, self.kill, self.close_beside, self.child],
            [60, 12, 6, 3, 3, 4, 2, 2],
        )[0]
        self.did[action.__name__] += 1
        self.timed(action)

    def timed(self, action: Callable[[], None]) -> None:
        """Each action has at most two calls that wait."""
        began = time.monotonic()
        action()
        assert time.monotonic() - began < 2 * TIMEOUT + SLACK, f"{action.__name__} took longer than the timeouts"

    def open(self) -> None:
        """Another phase: the Loader before it may be closed, or is only forgotten when this one is there."""
        if self.draw.random() < 0.5:
            self.close()
        name = self.draw.choice([*SERVERS])
        dataset, order = self.draw.choice(DATASETS), Order(N, BATCH, seed=3)
        of_run = name and (f"/{self.run} {name}" if name.startswith("/") else f"{self.run} {name}")
        self.loader = Loader(dataset, order, SERVERS[name], name=of_run, timeout=TIMEOUT)
        self.dataset, self.at = dataset, self.draw.randrange(20)

    def close(self) -> None:
        if self.loader:
            self.loader.close()
            self.loader = None

    def forget(self) -> None:
        self.loader = None

    def read(self) -> None:
        """The next step, or another one; and what was held is still what it was."""
        if self.loader is None:
            self.open()
        assert self.loader
        self.at = self.at + 1 if self.draw.random() < 0.9 else self.draw.randrange(50)
        rank, size = self.draw.choice([(0, 1), (0, 2), (1, 2)])
        self.check(rank, size)

    def check(self, rank: int, size: int) -> None:
        assert self.loader
        ids = self.loader.order.ids(self.at, rank, size).tolist()
        try:
            batch = self.loader.get(self.at, rank, size)
        except SampleFailed as error:
            assert error.id in ids and "is broken" in str(error), f"{error}"
            self.did["broken samples"] += 1
            return
        except SystemFailure as error:  # if several readers killed servers at the same time
            assert "has died 4 times" in str(error)
            self.did["too many deaths"] += 1
            return
        expected = self.expected_of(self.at * BATCH + self.loader.order.span(0, rank, size)[0], ids)
        assert torch.equal(batch, expected), f"dataset {DATASETS.index(self.dataset)}: {batch} is not {expected}"
        if self.held:
            assert torch.equal(*self.held), f"a batch that is held became {self.held[0]}; it was {self.held[1]}"
        self.held = (batch, expected) if self.draw.random() < 0.3 else None

    def expected_of(self, begin: int, ids: list[int]) -> torch.Tensor:
        rows = []
        for position, number in enumerate(ids, begin):
            key = DATASETS.index(self.dataset), position // N, number
            if key not in self.expected:
                _seed(3, position // N, number)
                self.expected[key] = self.dataset[number]
            rows.append(self.expected[key])
        return torch.from_numpy(np.stack(rows))

    def interrupt(self) -> None:
        """In the midst of another action; afterwards the same step is read."""
        action = self.draw.choices([self.read, self.open, self.close], [4, 1, 1])[0]
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** self.draw.uniform(-5, -2))
            self.armed = True
            action()
        except Interrupted:
            self.did["interrupts"] += 1
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.loader and not self.loader._closed:
            self.check(0, 1)
        else:
            self.loader = None

    def kill(self) -> None:
        """A server, or a supervisor, that this process has started."""
        with contextlib.suppress(OSError, IndexError):
            victim = self.draw.choice(supervisor.started)
            pids = [victim] if self.draw.random() < 0.3 else servers_of(victim)
            os.kill(self.draw.choice(pids), signal.SIGKILL)

    def close_beside(self) -> None:
        """Another thread closes the Loader while this one reads."""
        if self.loader is None:
            self.open()
        assert self.loader
        pause = self.draw.random() * 0.003
        thread = threading.Thread(target=lambda closing: (time.sleep(pause), closing.close()), args=(self.loader,))
        thread.start()
        try:
            for _ in range(100):
                self.read()
        except InvalidArgument as error:
            assert "is closed" in str(error)
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "close() did not return"
        self.loader = None

    def child(self) -> None:
        """A child reads with a name until it is killed. Then this process takes the name for another dataset."""
        if (pid := os.fork()) == 0:
            try:
                self.loader = self.held = None
                self.open()
                while True:
                    self.read()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        time.sleep(self.draw.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child found an error"
        self.open()
        self.read()


def reads(me: Rank, seed: int, steps: int, run: str) -> Counter[str]:
    """Returns how often this process has done what."""
    reader = Reader(random.Random(f"{seed} {me.rank}"), run)
    files = open_files()
    for number in range(steps):
        try:
            reader.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, reader {me.rank}, step {number}: {error}; {reader.did}") from error
    reader.held = None
    reader.close()
    gc.collect()
    until(lambda: not (supervisor.reap() or supervisor.started))
    assert open_files() <= files + FILES_LOST, f"seed {seed}: {open_files()} files are open, and {files} were"
    return reader.did


def run_schedule(seed: int, steps: int) -> Counter[str]:
    """Raises AssertionError, or fails as tests do. `steps`: of all readers together."""
    run = f"schedule {seed} {os.getpid()} {time.monotonic_ns()}"
    with Ranks(reads, READERS, seed, -(-steps // READERS), run) as ranks:
        return sum(ranks.results(), Counter[str]())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=600, help="steps of one seed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default: %(default)s)")
    arguments = parser.parse_args()
    began, did = time.monotonic(), Counter[str]()
    for seed in range(arguments.seed, arguments.seed - (-arguments.steps // arguments.each)):
        did += run_schedule(seed, arguments.each)
        print(f"seed {seed}, {time.monotonic() - began:.0f} s: {dict(did)}", flush=True)
    print("each sample was of its reader's dataset, and in time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
