"""Collectives of ringreduce between hosts next to Gloo's, in a network of namespaces (tests/net/network.py).

    python bench/hosts.py --hosts 4 --rate 1gbit --sizes 64M                          a wire's bandwidth
    python bench/hosts.py --hosts 2 --ranks 2 --rate 1gbit --sizes 64M                ranks that share a host
    python bench/hosts.py --hosts 4 --delay 0.005 --sizes 8 1K --collectives all_reduce barrier
    python bench/hosts.py --hosts 2 --rate 100mbit --delay 0.02 --loss 0.005 --sizes 16M

Needs root and iproute2. Each of --hosts has --ranks and --interfaces, of a --rate as tc writes it. --delay is in
seconds from host to host, --loss the share of frames that are lost. In each of --rounds every backend has a turn of
--iterations calls, by default as many as take --batch-time seconds, and of at most --timeout seconds. Direct calls of
ringreduce by --transport, dist.* with Gloo, which has the first interface only; one CPU thread per rank, in place where
the collective is. A turn: barrier, an untimed call, timed calls back to back, a call on fresh inputs that is checked.

    bytes     of the largest buffer of a rank, as in nccl-tests
    us        of a turn: the median over the timed calls of the slowest rank's; the rounds' median, least and most
    busbw     nccl-tests' factor over all ranks x bytes / us
    line      the bytes that must leave a host, for all_reduce over H hosts 2(H-1)/H x bytes, / us, as a share of the
              goodput of one interface: the better of that before and after the rows
    out/byte  what the host that sent most has sent in a turn / its calls / bytes; with headers, acknowledgements, and
              the barrier
    x gloo    Gloo's time over ours in the same round, the rounds' median

Exit code: 0, 1 if any element was wrong or a rank failed, 2 if the request makes no sense here.
"""

import gc
import itertools
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import harness
import torch
import torch.distributed as dist

from ringreduce.cli.bench.turns import slowest
from ringreduce.cli.bench.worker import BITS, Bits, Call, obey, private, times_ns, write_inputs

sys.path[1:1] = [str(harness.ROOT), str(harness.ROOT / "tests")]  # ringreduce, if not installed, and the network

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, RankFailed, Ranks  # noqa: E402

Backend = Literal["ringreduce", "gloo"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"]
DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")  # their largest buffer has a part for each rank
LEAST_ITERATIONS = 3  # calls in a turn
CALLS = itertools.count(1)


def least_out(collective: str, hosts: int, ranks: int, size: int) -> float:
    """Bytes that some host must send: `ranks` of it, whose largest buffers have `size` bytes each."""
    share = size * (hosts - 1) / hosts
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "broadcast": float(size),
        "all_to_all": ranks * share,
        "barrier": 0.0,
    }[collective]


# ---- in a rank -----------------------------------------------------------------------------------------------------


class Group:
    """A group of all ranks on one backend, as ringreduce.cli.bench.worker.obey wants it."""

    version = ""

    def __init__(self, name: str, transport: str, timeout: float) -> None:
        import ringreduce

        options = None if name == "gloo" else ringreduce.Options(transport=transport)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend=name, pg_options=options, timeout=timedelta(seconds=timeout))
        self.library: Any = dist if name == "gloo" else ringreduce

    def barrier(self) -> None:
        self.library.barrier(group=self.group)

    def empty(self, count: int, dtype: str) -> Bits:
        return private(count, dtype)

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        a, b = (torch.from_numpy(bits.view("u1")).view(harness.DTYPES[dtype]) for bits in (source, output))
        library, group = self.library, self.group
        calls: dict[str, Call] = {
            "all_reduce": lambda: library.all_reduce(a, group=group),
            "reduce_scatter": lambda: library.reduce_scatter_tensor(b, a, group=group),
            "all_gather": lambda: library.all_gather_into_tensor(b, a, group=group),
            "broadcast": lambda: library.broadcast(a, 0, group=group),
            "all_to_all": lambda: library.all_to_all_single(b, a, group=group),
        }
        return calls[collective]


def serve(me: Rank, backends: Sequence[str], transport: str, timeout: float) -> None:
    """Obeys orders until there is none."""
    with me.join(backend="gloo", timeout=timeout):
        groups = {name: Group(name, transport, timeout) for name in backends}
        me.report(None)
        gc.disable()
        while order := me.hear():
            answer = time_barrier if order["collective"] == "barrier" else obey
            me.report(answer(groups[order["backend"]], order))


def time_barrier(group: Group, order: dict[str, Any]) -> dict[str, Any]:
    """As ringreduce.cli.bench.worker.obey does, of calls without data."""
    return {"times_ns": times_ns(group, group.barrier, order["iterations"]), "wrong": 0}


# ---- outside -------------------------------------------------------------------------------------------------------


def rows_of(
    network: Network,
    ranks: Ranks,
    shape: tuple[str, int, int, int],
    backends: Sequence[str],
    rounds: int,
    iterations: int,
    batch_time: float,
    order: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """A row of each backend, without what depends on the goodput."""
    collective, hosts, per_host, size = shape
    factor = (hosts * per_host - 1) / (hosts * per_host) * (2 if collective == "all_reduce" else 1)
    rows: dict[str, dict[str, Any]] = {
        name: {"collective": collective, "bytes": size, "backend": name, "wrong": 0, "times_us": [], "bytes_out": []}
        for name in backends
    }

    def turn(name: str, calls: int) -> float:
        """Its time in us, which is noted in the row."""
        before = [network.bytes_out(host) for host in range(hosts)]
        ranks.tell({**order, "backend": name, "iterations": calls, "call": next(CALLS)})
        answers = ranks.reports()
        sent = max(network.bytes_out(host) - start for host, start in enumerate(before))
        rows[name]["times_us"].append(slowest(answers))
        rows[name]["bytes_out"].append(sent / (calls + 2))
        rows[name]["wrong"] += sum(answer["wrong"] for answer in answers)
        return float(rows[name]["times_us"][-1])

    calls = {}
    for name in backends:
        fitting = int(batch_time * 1e6 / turn(name, iterations or LEAST_ITERATIONS))
        calls[name] = iterations or max(LEAST_ITERATIONS, fitting)
        rows[name] |= {"times_us": [], "bytes_out": []}  # the first turn is not counted
    for number in range(rounds):
        for name in backends if number % 2 else backends[::-1]:
            turn(name, calls[name])
    for name, row in rows.items():
        times = row["times_us"]
        row |= {"us": statistics.median(times), "least": min(times), "most": max(times)}
        if size:
            row["busbw, GB/s"] = (1.0 if collective == "broadcast" else factor) * size / row["us"] / 1e3
            row["line"] = least_out(*shape) / row["us"] * 1e6  # of bytes a second
            row["out/byte"] = statistics.median(row["bytes_out"]) / size
        if name != "gloo" and "gloo" in rows:
            pairs = zip(rows["gloo"]["times_us"], times, strict=True)
            row["x gloo"] = statistics.median(gloo / ours for gloo, ours in pairs)
        yield row


def goodput(network: Network, seconds: float = 2.0) -> float:
    """Bytes per second from host 0 to host 1 by one TCP connection, its first second left out."""
    if not shutil.which("iperf3"):
        return network.call(0, _stream, network, seconds)
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    server = network.popen(1, ["iperf3", "--server", "--one-off", "--forceflush"], **pipe)
    assert server.stdout
    while "listening" not in (line := server.stdout.readline()):
        if not line:
            raise OSError("iperf3 --server has ended")
    client = ["iperf3", "--client", network.address(1), "--omit", "1", "--time", f"{seconds:.0f}", "--json"]
    report = json.loads(network.popen(0, client, **pipe).communicate()[0])
    server.communicate()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def _stream(network: Network, seconds: float) -> float:
    """The same by sockets of Python; called on host 0."""
    listener = network.call(1, socket.create_server, (network.address(1), 0))
    stop = threading.Event()
    with socket.create_connection(listener.getsockname()) as out, listener, listener.accept()[0] as into:

        def send() -> None:
            while not stop.is_set():
                out.sendall(bytes(1 << 17))
            out.shutdown(socket.SHUT_WR)

        def receive_until(end: float) -> int:
            count = 0
            while time.monotonic() < end:
                count += len(into.recv(1 << 20))
            return count

        sender = threading.Thread(target=send)
        sender.start()
        receive_until(start := time.monotonic() + 1)
        received = receive_until(start + seconds)
        stop.set()
        while into.recv(1 << 20):
            pass
        sender.join()
    return received / seconds


def hosts(
    hosts: int = 2,
    ranks: int = 1,
    rate: str = "",
    delay: float = 0.0,
    loss: float = 0.0,
    interfaces: int = 1,
    collectives: tuple[Collective, ...] = ("all_reduce",),
    sizes: tuple[harness.Bytes, ...] = (8, 1 << 10, 64 << 20),
    backends: tuple[Backend, ...] = ("ringreduce", "gloo"),
    transport: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 5,
    iterations: int = 0,
    batch_time: float = 0.3,
    timeout: float = 120.0,
) -> Iterator[dict[str, Any]]:
    if hosts < 2 or min(ranks, interfaces, rounds) < 1 or batch_time <= 0 or timeout <= 0:
        raise harness.CannotRun("need 2 --hosts or more, 1 of --ranks, --interfaces and --rounds, and times above 0")
    if min(sizes) < BITS[dtype].itemsize:
        raise harness.CannotRun(f"need --sizes of at least {BITS[dtype].itemsize}, an element of {dtype}")
    if reason := unavailable():
        raise harness.CannotRun(reason)
    found = []
    with tempfile.TemporaryDirectory() as folder, Network(hosts, rate or None, delay, loss, interfaces) as network:
        inputs = write_inputs(Path(folder), dtype, hosts * ranks)
        goodputs = [goodput(network)]
        with Ranks(network, ranks, serve, backends, transport, timeout, timeout=timeout) as all_ranks:
            try:
                all_ranks.reports()
                for collective in collectives:
                    part = BITS[dtype].itemsize * (hosts * ranks if collective in DIVIDED else 1)
                    for wanted in sizes if collective != "barrier" else (0,):
                        size = -(-wanted // part) * part  # one that can be divided
                        order = {"collective": collective, "dtype": dtype, "bytes": size, "inputs": str(inputs)}
                        shape = collective, hosts, ranks, size
                        found += rows_of(network, all_ranks, shape, backends, rounds, iterations, batch_time, order)
                        print(f"{collective}, {harness.format_bytes(size)}: done", file=sys.stderr, flush=True)
            except RankFailed as error:
                yield {"note": str(error)}
        goodputs.append(goodput(network))
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    by = "iperf3" if shutil.which("iperf3") else "sockets of Python"
    yield {"header": {"network": network.carrier, "TCP": congestion, "goodput": goodputs, "by": by}}
    for row in found:
        if "line" in row:
            row["line"] /= max(goodputs)
        yield row


if __name__ == "__main__":
    sys.exit(harness.main(hosts))
