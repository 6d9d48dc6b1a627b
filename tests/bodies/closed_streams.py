"""What ranks do whose standard streams are closed, while a C library prints. Also a program for launchers:

python -m bodies.closed_streams env|file FOLDER    # writes FOLDER/RANK: "right", or what was wrong
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.data import Loader, Order

RANKS = 8
"""One for each subset of the three streams."""
TEXT = b"libfoo: tuning kernel 37/100, 29.31 it/s\n" * 6100
"""250 KB."""
_LIBC = ctypes.CDLL(None)


def closed_for(rank: int) -> list[int]:
    """The streams that are closed for this rank: all for rank 0, which leads its host, and none for the last one."""
    return [fd for fd in range(3) if (RANKS - 1 - rank) >> fd & 1]


class Streams:
    """Which of the streams are open. The others may not be opened, and what is printed to them must not matter."""

    def __init__(self, closed: Iterable[int] = ()) -> None:
        for fd in closed:
            os.close(fd)
        self._open = self._seen()

    @staticmethod
    def _seen() -> dict[int, str]:
        return {fd: os.readlink(link) for fd in range(3) if os.path.lexists(link := f"/proc/self/fd/{fd}")}

    def print(self) -> None:
        """Prints to those that are closed: the others are the launcher's, or belong to torch's store."""
        for fd in (1, 2):
            if fd not in self._open:
                _LIBC.write(fd, TEXT, len(TEXT))
        seen = self._seen()
        assert seen.keys() == self._open.keys(), f"the streams are {seen}, and were {self._open}"


class Printing:
    """A dataset that prints: row k is k."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def __getitem__(self, number: int) -> torch.Tensor:
        self._streams.print()
        return torch.full((5000,), number)


def call(rank: int, streams: Streams) -> None:
    """Collectives, messages, shared memory and a training; each value is checked."""
    size, zeros = dist.get_world_size(), ringreduce.zeros(4096)
    net = nn.Linear(300, 300, bias=False)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    for step in range(3):
        streams.print()
        for count in (8, 5000, 300_000):
            x = torch.full((count,), float(step + rank))
            dist.all_reduce(x)
            assert (x == size * step + size * (size - 1) / 2).all()
        sent, got = torch.full((3000,), float(rank)), torch.empty(3000)
        streams.print()
        works = [dist.isend(sent, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        assert (got == (rank - 1) % size).all()
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 300)).sum().backward()
        streams.print()
        assert net.weight.grad is not None and (net.weight.grad == 1).all() and not zeros.any()


def read(streams: Streams) -> None:
    """A Loader, of which each server finds the streams as its reader has them."""
    order = Order(40, 8, 1)
    with Loader(Printing(streams), order, servers=2, name=secrets.token_hex(8), timeout=60.0) as loader:
        for step in range(5):
            streams.print()
            batch = loader.get(step, 0, 1)
            assert torch.equal(batch, torch.tensor(order.ids(step))[:, None].expand(8, 5000))


def main(store: str, folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for fd in {0, 1, 2}.difference(closed_for(rank)):  # torchrun gives all ranks the same
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != fd:
            os.dup2(nothing, fd)
            os.close(nothing)
    made: Any = {"init_method": f"file://{folder}/store"}
    if store == "env":
        made = {"store": next(dist.rendezvous("env://"))[0]}
    streams = Streams()
    dist.init_process_group("ringreduce", rank=rank, world_size=size, timeout=timedelta(seconds=100), **made)
    call(rank, streams)
    read(streams)
    dist.destroy_process_group()
    streams.print()


if __name__ == "__main__":
    said = Path(sys.argv[2]) / os.environ["RANK"]
    try:
        main(sys.argv[1], Path(sys.argv[2]))
        said.write_text("right")
    except BaseException:
        said.write_text(traceback.format_exc())
