"""Rows of a table by Zipf-distributed ids: ps.Embedding, torch's own operations on one tensor in one process, Redis.

    python bench/parameter_server_rows.py                            1 worker, which is the server; rows of 16 and 64
    python bench/parameter_server_rows.py --workers 2 --rows 10M --json results.json

Millions of rows per second, all workers together, medians of laps in turn; ids of a batch repeat as Zipf's law has it.

    pull, push        Embedding.pull(ids); Embedding.push(ids, gradients).wait(), which adds
    index_select, index_add_   torch on a tensor with all rows, one thread
    MGET, MSET        Redis through a Unix socket, one command a batch; reading the replies costs the client no parsing.
                      A push to Redis would be an MGET and an MSET. Needs redis-server on PATH; else it is left out

Exit code: 0, or 1 if pushed rows are not torch's sums.
"""

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ringreduce.parameter_server as ps

LAPS = 5
Way = Callable[[torch.Tensor, torch.Tensor], object]


def count_of(text: str) -> int:
    return int(float(text.rstrip("KM")) * {"K": 1_000, "M": 1_000_000}.get(text[-1], 1))


def zipf(rows: int, count: int, exponent: float, seed: int) -> torch.Tensor:
    """Ids of which the k-th most frequent has a share of 1 / k^exponent; which id that is, is random."""
    weights = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    generator = np.random.default_rng(seed)
    ranks = np.searchsorted(weights, generator.random(count) * weights[-1])
    return torch.from_numpy(np.random.default_rng(0).permutation(rows)[ranks].astype(np.int64))


class Redis:
    """A server of its own, and a client that knows how long every reply is."""

    def __init__(self, folder: str, dim: int) -> None:
        path = f"{folder}/redis"
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not Path(path).exists():
            time.sleep(0.01)
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
def redis(dim: int, rows: int, batch: int) -> Iterator[Redis | None]:
    if dist.get_rank() != 0 or shutil.which("redis-server") is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Redis(folder, dim)
        try:
            for begin in range(0, rows, batch):
                ids = torch.arange(begin, min(rows, begin + batch))
                server.mset(ids, torch.zeros(len(ids), dim))
            yield server
        finally:
            server.process.terminate()
            server.process.wait()


def rate(way: Way, batches: list[tuple[torch.Tensor, torch.Tensor]], everybody: bool) -> float:
    """Millions of rows a second, of all workers or of the first alone."""
    workers = dist.get_world_size() if everybody else 1
    dist.barrier()
    begin = time.perf_counter()
    if everybody or dist.get_rank() == 0:
        for ids, rows in batches:
            way(ids, rows)
    dist.barrier()
    return workers * sum(len(ids) for ids, _ in batches) / (time.perf_counter() - begin) / 1e6


def ways_for(
    added: ps.Embedding, tensor: torch.Tensor, batch: int, server: Redis | None
) -> dict[str, tuple[Way, bool]]:
    """By name: what is done with a batch, and whether all workers do it at once."""
    out = torch.empty(batch, tensor.shape[1])
    ways: dict[str, tuple[Way, bool]] = {
        "pull": (lambda ids, _: added.pull(ids, out[: len(ids)]), True),
        "index_select": (lambda ids, _: torch.index_select(tensor, 0, ids, out=out), False),
        "push": (lambda ids, values: added.push(ids, values).wait(), True),
        "index_add_": (lambda ids, values: tensor.index_add_(0, ids, values), False),
    }
    if shutil.which("redis-server") is None:
        return ways
    mget, mset = (server.mget, server.mset) if server is not None else (None, None)
    return ways | {"MGET": (mget, False), "MSET": (mset, False)}  # type: ignore[dict-item]


def measure(rows: int, dims: list[int], batch: int, batches: int, exponent: float) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return [measure_width(rows, dim, batch, batches, exponent) for dim in dims]


def measure_width(rows: int, dim: int, batch: int, batches: int, exponent: float) -> dict[str, float]:
    store = dist.distributed_c10d._get_default_store()
    memory = rows * (dim * 4 + 80) + (64 << 20)
    with ps.join(store, rank=dist.get_rank(), size=dist.get_world_size(), memory=memory) as kv:
        added = ps.Embedding(kv, "added", dim, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0, 0))
        if dist.get_rank() == 0:
            for begin in range(0, rows, 100_000):  # all rows are there, as they are in the tensor
                ids = torch.arange(begin, min(rows, begin + 100_000))
                added.push(ids, torch.zeros(len(ids), dim)).wait()
        kv.barrier()
        tensor = torch.zeros(rows, dim)
        ids = zipf(rows, batch * batches, exponent, dist.get_rank()).split(batch)
        work = [(each, torch.ones(len(each), dim)) for each in ids]
        laps: dict[str, list[float]] = {}
        with redis(dim, rows, batch) as server:
            for lap in range(LAPS + 1):
                for name, (way, everybody) in ways_for(added, tensor, batch, server).items():
                    speed = rate(way, work[:2] if name.startswith("M") else work, everybody)
                    if lap > 0:
                        laps.setdefault(name, []).append(speed)
        distinct = statistics.mean(len(torch.unique(each)) / batch for each in ids)
        check(added, tensor)
        kv.barrier()
    return {"dim": dim, "distinct": distinct} | {name: statistics.median(each) for name, each in laps.items()}


def check(added: ps.Embedding, tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    if dist.get_world_size() == 1:
        some = torch.arange(0, len(tensor), max(1, len(tensor) // 10_000))
        if not torch.equal(added.pull(some), tensor[some]):
            raise ValueError("pushed rows are not torch's sums")


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=count_of, default=1_000_000)
    parser.add_argument("--dims", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--batch", type=int, default=16384, help="ids of a call (default 16384)")
    parser.add_argument("--batches", type=int, default=30, help="of a lap (default 30)")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law (default 1)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = harness.start_ranks(args.workers, measure, args.rows, args.dims, args.batch, args.batches, args.exponent)
    title = f"{args.workers} workers, {args.rows} rows, batches of {args.batch}: millions of rows a second"
    table = Table(title=title)
    names = list(found[0])
    pairs = [("pull", "index_select"), ("push", "index_add_"), ("pull", "MGET"), ("push", "MSET")]
    pairs = [pair for pair in pairs if pair[1] in names]
    for column in (*names, *(f"{ours}/{theirs}" for ours, theirs in pairs)):
        table.add_column(column, justify="right")
    for row in found:
        ratios = [row[ours] / row[theirs] for ours, theirs in pairs]
        table.add_row(*(f"{row[name]:.3g}" for name in names), *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps({"workers": args.workers, "rows": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
