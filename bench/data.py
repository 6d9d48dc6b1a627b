"""How many samples a second a Loader delivers, with 2 servers, next to torch's DataLoader with 2 workers.

    python bench/data.py                            15 rounds of all cases
    python bench/data.py --rounds 5 --json data.json

Both read the same rows of a NumPy array in the same order, and the reading process does nothing else. They take turns.
The ratio is the samples of Loader divided by those of DataLoader in the same round, and its median over the rounds.
`work`: CPU time that preparing a sample takes, in microseconds, as measured on this machine before. `readers` processes
read the same samples: the Loaders share their servers, each DataLoader has workers of its own. `memory` is that of
servers or workers, of all readers together (proportional set size). `CPU`: CPU time a sample with DataLoader, divided
by that with Loader, of all processes; it says more than `ratio` where other programs run.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import harness
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from ringreduce.data import Loader, Order, Sampler

KINDS = ("DataLoader", "Loader")
EXAMPLES = 10**9
ROWS_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    bytes: int
    batch: int
    work: int
    readers: int


CASES = (
    Case(1_000, 64, 0, 1),
    Case(100_000, 32, 0, 1),
    Case(1_000_000, 16, 0, 1),
    Case(1_000, 64, 100, 1),
    Case(1_000, 64, 100, 2),
)


class Rows:
    """As many examples as you like, which repeat the rows of one array."""

    def __init__(self, case: Case, spins: int) -> None:
        self.values = np.ones((ROWS_BYTES // case.bytes, case.bytes), np.uint8)
        self.spins = spins

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> np.ndarray:
        spin(self.spins)
        return self.values[number % len(self.values)]


def spin(count: int) -> None:
    for _ in range(count):
        pass


@functools.cache
def spins_for(microseconds: int) -> int:
    """How often to spin for so long: by the fastest of several tries."""
    if not microseconds:
        return 0
    count, fastest = 100_000, float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        spin(count)
        fastest = min(fastest, time.perf_counter() - begin)
    return int(count * microseconds * 1e-6 / fastest)


def batches_of(kind: str, case: Case, name: str) -> Iterator[torch.Tensor]:
    dataset, order = Rows(case, spins_for(case.work)), Order(EXAMPLES, case.batch)
    if kind == "DataLoader":
        return iter(DataLoader(dataset, batch_sampler=Sampler(order), num_workers=2))
    return iter(Loader(dataset, order, servers=2, name=name, seeded=False))


def read(case: Case, name: str, pipe: Connection) -> None:
    """A reading process: is told a kind and a time, counts the samples of that kind, and tells their rate."""
    torch.set_num_threads(1)
    batches = {kind: batches_of(kind, case, name) for kind in KINDS}
    for each in batches.values():
        for _ in range(10):
            next(each)
    workers: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    for child in psutil.Process().children(recursive=True):
        workers["Loader" if child.name().startswith("data ") else "DataLoader"].append(child)

    def cpu_seconds(kind: str) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in workers[kind]) + time.process_time()

    pipe.send(None)
    while (told := pipe.recv()) is not None:
        kind, seconds = told
        begin, cpu, samples = time.perf_counter(), cpu_seconds(kind), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            samples += len(next(batches[kind]))
        pipe.send((samples / elapsed, (cpu_seconds(kind) - cpu) / elapsed))
    pipe.send({kind: sum(each.memory_full_info().pss for each in workers[kind]) for kind in KINDS})
    pipe.recv()  # servers stay until all have looked
    os._exit(0)


def row_of(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    name = f"bench {os.getpid()} {time.monotonic_ns()}"
    spins_for(case.work)  # once: readers are forked, and so spin alike
    pipes = [harness.forked(read, case, name)[1] for _ in range(case.readers)]

    def all_do(message: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in pipes]

    for pipe in pipes:
        pipe.recv()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cores: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[:: 1 if number % 2 else -1]:
            found = all_do((kind, seconds))
            rates[kind].append(sum(rate for rate, _ in found))
            cores[kind].append(sum(busy for _, busy in found))
    cpu = {kind: sum(cores[kind]) / sum(rates[kind]) for kind in KINDS}
    memory = all_do(None)
    for pipe in pipes:
        pipe.send(None)
    ratios = [ours / theirs for ours, theirs in zip(rates["Loader"], rates["DataLoader"], strict=True)]
    return {
        **asdict(case),
        **{f"{kind} samples/s": statistics.median(each) for kind, each in rates.items()},
        **{f"{kind} memory, MB": sum(each[kind] for each in memory) / 1e6 for kind in KINDS},
        **{f"{kind} CPU us a sample": 1e6 * cpu[kind] for kind in KINDS},
        "CPU ratio": cpu["DataLoader"] / cpu["Loader"],
        "ratio": statistics.median(ratios),
        "quartiles": "{0:.2f} {2:.2f}".format(*statistics.quantiles(ratios, n=4)),
        "ratios": ratios,
    }


def data(rounds: int = 15, seconds: float = 1.0) -> Iterator[dict[str, Any]]:
    yield from (row_of(case, rounds, seconds) for case in CASES)


if __name__ == "__main__":
    sys.exit(harness.main(data))
