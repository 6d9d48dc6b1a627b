"""The parameter server on several hosts: m workers, n servers, against what the lines allow. Needs root.

    python bench/parameter_server_hosts.py                        1 to 4 workers, 1 to 4 servers, 100 Mbit/s lines
    python bench/parameter_server_hosts.py --rate 1gbit --size 64M --workers 1 --servers 1

Every worker and every server is alone on a host (a network namespace) with a line of that rate in each direction.
Milliseconds of a push_pull of the whole tensor in `sync`, on the slowest worker; the median of some. `bound` is the
time that the busiest line needs, pushes and pulls being under way at once: the greater of B (a worker's) and m B / n (a
server's), B with the headers of TCP and below; `of bound` is its share of the time. Blocks are 1/64 of the tensor:
what a worker gets back at the end waits for the last of them. `sent` and `received` are the bytes of a step, as that
worker's line has counted them. With --wires (bfloat16 or int8) `bound` stays that of float32. `--way push` pulls
nothing; `--way sockets` moves the same bytes over plain sockets, both ways at once, and waits for nothing in between;
`--way rounds` does the same, but a block goes back only when it has come from all workers.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from net.network import UNITS, Network, unavailable  # noqa: E402
from net.ranks import Rank, run  # noqa: E402

import ringreduce.parameter_server as ps  # noqa: E402
from ringreduce.common.units import parse_bytes  # noqa: E402

HEADERS = 1538 / 1448
"""Bytes on an Ethernet for those of a TCP stream, in full packets with timestamps."""


def work(me: Rank, servers: int, workers: int, size: int, steps: int, how: list[str]) -> list[float]:
    """Of a worker: seconds, bytes sent, bytes received. `how`: the way and the wires."""
    block = max(1 << 16, size // 64)
    if how[0] in ("sockets", "rounds"):
        return exchange(me, servers, workers, size, steps, block if how[0] == "rounds" else 0)
    sizes: dict[str, Any] = {"window": 2 * size + (8 << 20), "timeout": 120.0, "block_bytes": block}
    if me.rank < servers:
        with ps.serve(me.store, rank=me.rank, size=servers, memory=8 * size + (8 << 20), **sizes) as serving:
            serving.wait()
        return [0.0, 0.0, 0.0]
    with ps.join(me.store, role="worker", workers=workers, **sizes) as kv:
        w, gradient = torch.zeros(size // 4), torch.ones(size // 4)
        kv.init("w", w, update=ps.optimizer(torch.optim.SGD, lr=0.1), push_wire=how[1], pull_wire=how[2])
        times, moved = [], []
        for _ in range(steps + 1):
            kv.barrier()
            begin, before = time.perf_counter(), line_bytes()
            (kv.push("w", gradient) if how[0] == "push" else kv.push_pull("w", gradient, out=w)).wait()
            times.append(time.perf_counter() - begin)
            moved.append([after - some for after, some in zip(line_bytes(), before, strict=True)])
        return [statistics.median(times[1:]), *map(statistics.median, zip(*moved[1:], strict=True))]


def exchange(me: Rank, servers: int, workers: int, size: int, steps: int, block: int) -> list[float]:
    """The same bytes over plain sockets, both ways at once. Without `block` nobody waits for anything; with it a server
    sends so many bytes back when they have come from all workers."""
    part, serves = size // servers, me.rank < servers
    if serves:
        listener = socket.create_server((own_address(), 0))
        me.store.set(f"server {me.rank}", "{} {}".format(*listener.getsockname()[:2]))
        ends = [listener.accept()[0] for _ in range(workers)]
    else:
        places = [me.store.get(f"server {server}").decode().split() for server in range(servers)]
        ends = [socket.create_connection((host, int(port))) for host, port in places]
    times = []
    for step in range(steps + 1):
        me.store.add(f"ready {step}", 1)
        while me.store.add(f"ready {step}", 0) < servers + workers:
            time.sleep(0.002)
        came = Came(len(ends)) if block and serves else None
        begin = time.perf_counter()
        threads = [
            threading.Thread(target=move, args=(end, i, part, block or part, came))
            for i, end in enumerate(ends)
            for move in (send_all, receive_all)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append(time.perf_counter() - begin)
    return [statistics.median(times[1:]), 0.0, 0.0]


class Came:
    """How many bytes have come from each worker."""

    def __init__(self, workers: int) -> None:
        self._bytes, self._changed = [0] * workers, threading.Condition()

    def add(self, worker: int, some: int) -> None:
        with self._changed:
            self._bytes[worker] += some
            self._changed.notify_all()

    def wait(self, least: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: min(self._bytes) >= least)


def send_all(end: socket.socket, _: int, size: int, block: int, came: Came | None) -> None:
    for sent in range(0, size, block):
        some = min(block, size - sent)
        if came:
            came.wait(sent + some)
        end.sendall(bytes(some))


def receive_all(end: socket.socket, worker: int, size: int, block: int, came: Came | None) -> None:
    place = bytearray(1 << 18)
    while size > 0:
        some = end.recv_into(place, min(size, block, len(place)))
        size -= some
        if came:
            came.add(worker, some)


def own_address() -> str:
    (address,) = json.loads(subprocess.check_output(["ip", "-json", "-4", "address", "show", "eth0"]))[0]["addr_info"]
    return str(address["local"])


def line_bytes() -> tuple[int, int]:
    """That this host has sent and received."""
    text = Path("/proc/net/dev").read_text()
    (words,) = (line.split() for line in text.splitlines() if line.lstrip().startswith("eth0:"))
    return int(words[9]), int(words[1])


def rate_of(text: str) -> float:
    """Bytes a second."""
    unit = next(unit for unit in UNITS if text.endswith(unit))
    return float(text.removesuffix(unit)) * UNITS[unit] / 8


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--size", type=parse_bytes, default=8 << 20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--way", choices=("push_pull", "push", "sockets", "rounds"), default="push_pull")
    parser.add_argument("--wires", nargs=2, metavar=("PUSH", "PULL"), default=["float32", "float32"])
    args = parser.parse_args()
    if why := unavailable():
        parser.error(why)
    how = [args.way, *args.wires]
    table = Table(title=f"{args.way} of {args.size} bytes, lines of {args.rate}: ms")
    for column in ("workers", "servers", "time", "bound", "of bound", "sent", "received"):
        table.add_column(column, justify="right")
    for workers in args.workers:
        for servers in args.servers:
            hosts = servers + workers
            with Network(hosts, rate=args.rate) as network:
                found, sent, received = max(
                    run(network, 1, work, servers, workers, args.size, args.steps, how, timeout=170)
                )
            bound = max(1, workers / servers) * args.size * HEADERS / rate_of(args.rate)
            table.add_row(
                str(workers),
                str(servers),
                f"{1e3 * found:.0f}",
                f"{1e3 * bound:.0f}",
                f"{bound / found:.0%}",
                f"{sent / 1e6:.2f} MB",
                f"{received / 1e6:.2f} MB",
            )
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
