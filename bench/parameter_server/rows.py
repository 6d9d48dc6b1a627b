"""Rows of the parameter server's tables, next to torch and Redis."""

from __future__ import annotations

import contextlib
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce.parameter_server as ps
from bench import harness
from bench.parameter_server import peers

LAPS = 5
BATCH, BATCHES = 16384, 30  # ids of a batch, and batches of a lap
PRIME = 2_654_435_761  # whose products with 0, 1, 2, ... are all rows, once, in a scattered order
Way = Callable[[torch.Tensor, torch.Tensor], object]


def zipf(rows: int, count: int, seed: int) -> torch.Tensor:
    """Ids of which the k-th most frequent has a share of 1 / k; which id that is, looks random."""
    weights = np.arange(1.0, rows + 1)
    np.cumsum(np.divide(1, weights, out=weights), out=weights)  # in place, as there may be many
    generator = np.random.default_rng(seed)
    ranks = np.searchsorted(weights, generator.random(count) * weights[-1]).astype(np.int64)
    return torch.from_numpy(ranks * PRIME % rows)


class Redis:
    """A client that knows how long every reply is."""

    def __init__(self, path: str, dim: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.bytes = 4 * dim
        self.head = f"${self.bytes}\r\n".encode()

    def send(self, name: bytes, words: int, text: list[bytes]) -> None:
        self.socket.sendall(b"*%d\r\n$4\r\n%s\r\n" % (words + 1, name) + b"".join(text))

    def receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            view = view[self.socket.recv_into(view) :]
        return data

    def mget(self, ids: torch.Tensor, _: torch.Tensor) -> np.ndarray:
        self.send(b"MGET", len(ids), [b"$8\r\n%s\r\n" % key.tobytes() for key in ids.numpy()])
        head = len(b"*%d\r\n" % len(ids))
        stride = len(self.head) + self.bytes + 2
        reply = np.frombuffer(self.receive(head + len(ids) * stride), np.uint8)[head:].reshape(-1, stride)
        return reply[:, len(self.head) : -2].copy().view(np.float32)

    def mset(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        pairs = zip(ids.numpy(), rows.numpy(), strict=True)
        text = [b"$8\r\n%s\r\n%s%s\r\n" % (i.tobytes(), self.head, row.tobytes()) for i, row in pairs]
        self.send(b"MSET", 2 * len(ids), text)
        self.receive(len(b"+OK\r\n"))


@contextlib.contextmanager
def redis(dim: int, rows: int) -> Iterator[Redis | None]:
    """With all rows, in the first worker, if there is one."""
    if dist.get_rank() != 0 or shutil.which("redis-server") is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, peers.redis_server(folder) as path:
        client = Redis(path, dim)
        for begin in range(0, rows, BATCH):
            ids = torch.arange(begin, min(rows, begin + BATCH))
            client.mset(ids, torch.zeros(len(ids), dim))
        yield client


def rate(way: Way | None, batches: list[tuple[torch.Tensor, torch.Tensor]], everybody: bool) -> float:
    """Millions of rows a second, of all workers or of the first alone."""
    workers = dist.get_world_size() if everybody else 1
    dist.barrier()
    begin = time.perf_counter()
    if everybody or dist.get_rank() == 0:
        assert way is not None
        for ids, rows in batches:
            way(ids, rows)
    dist.barrier()
    return workers * sum(len(ids) for ids, _ in batches) / (time.perf_counter() - begin) / 1e6


def torch_ways(rows: int, dim: int) -> dict[str, tuple[Way | None, bool]]:
    """By name: what is done with a batch, and whether all workers do it at once. The first worker has the tensor."""
    if dist.get_rank() != 0:
        return {"index_select": (None, False), "index_add_": (None, False)}
    tensor, out = torch.empty(rows, dim).zero_(), torch.empty(BATCH, dim)  # zero_ has its memory touched
    return {
        "index_select": (lambda ids, _: torch.index_select(tensor, 0, ids, out=out), False),
        "index_add_": (lambda ids, values: tensor.index_add_(0, ids, values), False),
    }


def our_ways(added: ps.Embedding) -> dict[str, tuple[Way | None, bool]]:
    out = torch.empty(BATCH, added.dim)
    return {
        "pull": (lambda ids, _: added.pull(ids, out[: len(ids)]), True),
        "push": (lambda ids, values: added.push(ids, values).wait(), True),
    }


def redis_ways(server: Redis | None) -> dict[str, tuple[Way | None, bool]]:
    if shutil.which("redis-server") is None:
        return {}
    mget, mset = (server.mget, server.mset) if server is not None else (None, None)
    return {"MGET": (mget, False), "MSET": (mset, False)}


class Laps:
    """Batches of ids and rows, and by way the rates at which laps have done them."""

    def __init__(self, ids: torch.Tensor, dim: int) -> None:
        self.work = [(each, torch.ones(len(each), dim)) for each in ids.split(BATCH)]
        self.rates: dict[str, list[float]] = {}

    def run(self, ways: dict[str, tuple[Way | None, bool]]) -> None:
        for lap in range(LAPS + 1):
            for name, (way, everybody) in ways.items():
                speed = rate(way, self.work[:2] if name.startswith("M") else self.work, everybody)
                if lap > 0:
                    self.rates.setdefault(name, []).append(speed)


def measure(rows: int, dims: list[int], apart: bool) -> list[dict[str, float]]:
    ids = zipf(rows, BATCH * BATCHES, dist.get_rank())
    return [measure_width(rows, dim, ids, apart) for dim in dims]


def measure_width(rows: int, dim: int, ids: torch.Tensor, apart: bool) -> dict[str, float]:
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    laps = Laps(ids, dim)
    if apart:
        laps.run(torch_ways(rows, dim))
    memory = rows * (dim * 4 + 60) // size + (128 << 20)
    with ps.join(store, rank=rank, size=size, memory=memory) as kv:
        added = ps.Embedding(kv, "added", dim, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0, 0))
        for begin in range(100_000 * rank, rows, 100_000 * size):  # all rows are there, as they are in the tensor
            some = torch.arange(begin, min(rows, begin + 100_000))
            added.push(some, torch.zeros(len(some), dim)).wait()
        kv.barrier()
        if apart:
            laps.run(our_ways(added))
        else:
            with redis(dim, rows) as server:
                laps.run(our_ways(added) | torch_ways(rows, dim) | redis_ways(server))
        kv.barrier()
        check(added, ids, rows)
        gigabytes = [each["memory"] / 1e9 for each in kv.stats()["servers"].values()]
        kv.barrier()
    if apart:
        laps.run(torch_ways(rows, dim))
    distinct = statistics.mean(len(torch.unique(each)) / BATCH for each in ids.split(BATCH))
    found = {"dim": dim, "distinct": distinct, "GB of a server": max(gigabytes)}
    return found | {name: statistics.median(each) for name, each in laps.rates.items()}


def check(added: ps.Embedding, ids: torch.Tensor, rows: int) -> None:
    """The most frequent rows and some others are how often their ids came, on all workers and in all laps."""
    some = torch.cat([torch.arange(1000) * PRIME % rows, torch.arange(0, rows, max(1, rows // 10_000))])
    ids = ids.sort().values
    counts = (LAPS + 1.0) * (torch.searchsorted(ids, some, right=True) - torch.searchsorted(ids, some))
    dist.all_reduce(counts)
    if not torch.equal(added.pull(some), counts[:, None].expand(-1, added.dim)):
        raise ValueError("pushed rows are not the sums")


def rows(
    workers: int = 1,
    rows: str = "1M",
    dims: tuple[int, ...] = (16, 64),
    apart: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows of a table by Zipf-distributed ids: ps.Embedding, torch on one tensor in one process, Redis.

    Millions of rows per second, all workers together, medians of laps in turn. A lap has 30 batches of 16384
    ids, which repeat as Zipf's law has it. The table has 1M (a million) rows of 16 and of 64 numbers.

        pull, push                  Embedding.pull(ids); Embedding.push(ids, gradients).wait(), which adds
        index_select, index_add_    torch on a tensor with all rows, one thread
        MGET, MSET                  Redis through a Unix socket, one command a batch; reading the replies costs the
                                    client no parsing. A push to Redis would be an MGET and an MSET. Needs redis-server
                                    on PATH; else it is left out

    --apart: torch's tensor and our table are not there at once. torch is measured before our laps and after them, and
    Redis, which needs more memory for each row, not at all. It fails if pushed rows are not the sums.
    """
    count = int(float(rows.rstrip("KM")) * {"K": 1_000, "M": 1_000_000}.get(rows[-1], 1))
    for row in harness.start_ranks(workers, measure, count, list(dims), apart):
        pairs = [("pull", "index_select"), ("push", "index_add_"), ("pull", "MGET"), ("push", "MSET")]
        ratios = {f"{ours}/{theirs}": row[ours] / row[theirs] for ours, theirs in pairs if theirs in row}
        yield {"workers": workers, "rows": count, **row, **ratios}
