"""Collectives of ringreduce between hosts next to Gloo's, in a network of namespaces (tests/net/network.py).

    python bench/hosts.py --hosts 4 --rate 1gbit --sizes 64M                          a wire's bandwidth
    python bench/hosts.py --hosts 2 --ranks 2 --rate 1gbit --sizes 64M                ranks that share a host
    python bench/hosts.py --hosts 4 --delay 0.005 --sizes 8 1K --collectives all_reduce barrier
    python bench/hosts.py --hosts 2 --rate 100mbit --delay 0.02 --loss 0.005 --sizes 16M

Needs root and iproute2. Prints a header and a table per collective in the columns of nccl-tests. Exit code: 0, 1 if any
element was wrong or a rank failed, 2 if the request makes no sense here.

`--json` writes {"header", "rows"}. A row is a collective and size: collective, hosts, ranks, bytes, least_out (bytes
that some host must send); for each backend `times_us` (per round: the median over the calls of the slowest rank's
time), `bytes_out` (per round: of the host that sent most, per call), `wrong` (elements), and what the table makes of
them: `median_us`, `busbw`, `line`, `out_per_byte`; `vs_gloo`, the rounds' median of Gloo's time over ours.
"""

import argparse
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
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from ringreduce.cli.bench.turns import slowest
from ringreduce.cli.bench.worker import BITS, Bits, Call, obey, private, times_ns, write_inputs

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]  # ringreduce, where it is not installed, and the network

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, RankFailed, Ranks  # noqa: E402

BACKENDS = ("ringreduce", "gloo")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")  # their largest buffer has a part for each rank
LEAST_ITERATIONS = 3  # calls in a batch

METHOD = (
    "bytes is the largest buffer of a rank, as in nccl-tests. Direct calls of ringreduce, dist.* with Gloo, which has",
    "the first interface only; one CPU thread per rank, in place where the collective is.",
    "A batch: barrier, an untimed call, timed calls back to back, a call on fresh inputs that is checked. Its time is",
    "the median over the timed calls of the slowest rank's; backends take turns, a row's time is the rounds' median.",
    "busbw: nccl-tests' factor over all ranks x bytes / time.",
    "line: the bytes that must leave a host, for all_reduce over H hosts 2(H-1)/H x bytes, / time, as a share of the",
    "goodput of one interface: the better of that before and after the rows.",
    "out/byte: what the host that sent most has sent in a batch / its calls / bytes; with headers, acknowledgements,",
    "and the barrier.",
    "x gloo: Gloo's time over ours in the same round, the rounds' median. #wrong: in the checked calls of all rounds.",
)


@dataclass
class Row:
    """One collective and size; the keys are explained in the module's docstring."""

    collective: str
    hosts: int
    ranks: int
    bytes: int
    least_out: float
    times_us: dict[str, list[float]] = field(default_factory=dict)
    bytes_out: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    median_us: dict[str, float] = field(default_factory=dict)
    busbw: dict[str, float] = field(default_factory=dict)
    line: dict[str, float] = field(default_factory=dict)
    out_per_byte: dict[str, float] = field(default_factory=dict)
    vs_gloo: float | None = None

    def finish(self, goodput: float) -> None:
        """What the table shows, of what the rounds found; `goodput` in bytes per second."""
        ranks = self.hosts * self.ranks
        whole = 2.0 if self.collective == "all_reduce" else 1.0
        factor = 1.0 if self.collective == "broadcast" else whole * (ranks - 1) / ranks
        for name, times in self.times_us.items():
            self.median_us[name] = median = statistics.median(times)
            if self.bytes:
                self.busbw[name] = factor * self.bytes / median / 1e3
                self.line[name] = self.least_out / (median / 1e6) / goodput
                self.out_per_byte[name] = statistics.median(self.bytes_out[name]) / self.bytes
        if set(BACKENDS) <= self.times_us.keys():
            pairs = zip(self.times_us["gloo"], self.times_us["ringreduce"], strict=True)
            self.vs_gloo = statistics.median(gloo / ours for gloo, ours in pairs)


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


def measure(settings: argparse.Namespace, network: Network, ranks: Ranks, inputs: Path) -> Iterator[Row]:
    """The rows, without what depends on the goodput."""
    numbers = itertools.count(1)

    def batch(row: Row, name: str, iterations: int) -> float:
        """Returns its time in us, and notes it in the row."""
        order = {"collective": row.collective, "dtype": settings.dtype, "bytes": row.bytes, "iterations": iterations}
        before = [network.bytes_out(host) for host in range(settings.hosts)]
        ranks.tell({**order, "backend": name, "call": next(numbers), "inputs": str(inputs)})
        answers = ranks.reports()
        sent = max(network.bytes_out(host) - start for host, start in enumerate(before))
        time_us = slowest(answers)
        row.times_us.setdefault(name, []).append(time_us)
        row.bytes_out.setdefault(name, []).append(sent / (iterations + 2))
        row.wrong[name] = row.wrong.get(name, 0) + sum(answer["wrong"] for answer in answers)
        return time_us

    for collective in settings.collectives:
        part = BITS[settings.dtype].itemsize * (settings.hosts * settings.ranks if collective in DIVIDED else 1)
        for wanted in settings.sizes if collective != "barrier" else (0,):
            size = -(-wanted // part) * part  # one that can be divided
            shape = collective, settings.hosts, settings.ranks, size
            first, row = (Row(*shape, least_out(*shape)) for _ in range(2))
            iterations = {}
            for name in settings.backends:
                time_us = batch(first, name, settings.iterations or LEAST_ITERATIONS)
                fitting = int(settings.batch_time * 1e6 / time_us)
                iterations[name] = settings.iterations or max(LEAST_ITERATIONS, fitting)
            for turn in range(settings.rounds):
                for name in settings.backends if turn % 2 else settings.backends[::-1]:
                    batch(row, name, iterations[name])
            row.wrong = {name: wrong + first.wrong[name] for name, wrong in row.wrong.items()}
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


def make_header(settings: argparse.Namespace, network: Network) -> dict[str, Any]:
    """What is run, on what machine, and how to read the figures."""
    tool = "iperf3"
    if path := shutil.which(tool):
        tool = " ".join(subprocess.check_output([path, "--version"], text=True).split()[:2])
    else:
        tool = "sockets of this script (iperf3 is not installed)"
    return {
        **harness.origin("hosts: collectives of ringreduce and Gloo between network namespaces"),
        "settings": {key: value for key, value in vars(settings).items() if key != "json"},
        "carrier": network.carrier,
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "goodput_tool": tool,
        "goodput": [],  # bytes per second, before and after the rows
        "method": list(METHOD),
    }


def format_header(header: dict[str, Any]) -> str:
    """The header as lines that start with "#"."""
    found = header["settings"]
    carriers = {"veth": "veth and bridges", "netem": "veth, bridges and netem", "switch": "TAP devices and a switch"}
    network = (
        f"{found['hosts']} hosts x {found['ranks']} ranks; "
        f"interfaces: {found['interfaces']}, {found['rate'] or 'no rate'}; "
        f"{found['delay'] * 1e3:g} ms one way, {found['loss']:.2%} lost; {carriers[header['carrier']]}; "
        f"TCP {header['congestion_control']}"
    )
    return "\n".join(
        (
            *harness.format_origin(header),
            "# versions  " + ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
            f"# network   {network}",
            f"# backend   ringreduce: transport {found['transport']!r}",
            f"# goodput   by {header['goodput_tool']}",
            f"# schedule  {found['rounds']} rounds",
            *(f"# {line}" for line in header["method"]),
        )
    )


def format_table(rows: Sequence[Row]) -> str:
    """Rows of one collective."""
    lines = [
        f"# {rows[0].collective}",
        f"#{'size':>11} {'backend':<11} {'time':>10} {'min':>10} {'max':>10} {'busbw':>7} {'line':>6} {'out/byte':>8} "
        f"{'x gloo':>7} {'#wrong':>6}",
        f"#{'(B)':>11} {'':11} {'(us)':>10} {'(rounds)':>10} {'(rounds)':>10} {'(GB/s)':>7}",
    ]
    for row in rows:
        for name, times in row.times_us.items():
            bandwidths = f"{'-':>7} {'-':>6} {'-':>8}"
            if row.bytes:
                bandwidths = f"{row.busbw[name]:>7.4f} {row.line[name]:>6.1%} {row.out_per_byte[name]:>8.3f}"
            ratio = f"{row.vs_gloo:.2f}x" if row.vs_gloo and name == "ringreduce" else "-"
            lines.append(
                f" {row.bytes:>11} {name:<11} {row.median_us[name]:>10.1f} {min(times):>10.1f} {max(times):>10.1f} "
                f"{bandwidths} {ratio:>7} {row.wrong[name]:>6}"
            )
    return "\n".join(lines) + "\n"


def read_command_line() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--hosts", type=int, default=2, help="(default 2)")
    option("--ranks", type=int, default=1, help="of each host (default 1)")
    option("--rate", help="of every interface, as tc writes it: 1gbit (default none)")
    option("--delay", type=float, default=0.0, help="seconds from host to host (default 0)")
    option("--loss", type=float, default=0.0, help="share of frames lost (default 0)")
    option("--interfaces", type=int, default=1, help="of every host (default 1)")
    option("--collectives", nargs="+", choices=COLLECTIVES, default=["all_reduce"], metavar="NAME")
    option("--sizes", type=harness.parse_bytes, nargs="+", default=[8, 1024, 64 << 20], help="(default 8 1K 64M)")
    option("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, metavar="NAME", help="(default both)")
    option("--transport", default="auto", help="of ringreduce: auto, tcp or gloo (default auto)")
    option("--dtype", choices=BITS, default="float32", help="(default float32)")
    option("--rounds", type=int, default=5, help="turns that each backend takes in a row (default 5)")
    option(
        "--iterations",
        "--iters",
        type=int,
        metavar="N",
        help="timed calls in a turn (default what takes --batch-time, at least 3)",
    )
    option("--batch-time", type=float, default=0.3, help="seconds of calls in a turn (default 0.3)")
    option("--timeout", type=float, default=120, help="seconds that a turn may take (default 120)")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()

    if args.hosts < 2 or args.ranks < 1 or args.interfaces < 1:
        parser.error("need --hosts of at least 2, --ranks and --interfaces of at least 1")
    if args.rounds < 1 or (args.iterations or 1) < 1 or args.batch_time <= 0 or args.timeout <= 0:
        parser.error("--rounds and --iters must be at least 1, --batch-time and --timeout above 0")
    if min(args.sizes) < BITS[args.dtype].itemsize:
        parser.error(f"need sizes of at least {BITS[args.dtype].itemsize}, an element of {args.dtype}")
    if reason := unavailable():
        parser.error(reason)
    args.backends = [name for name in BACKENDS if name in args.backends]
    return args


def main() -> int:
    args = read_command_line()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(args.hosts, args.rate, args.delay, args.loss, args.interfaces) as network,
    ):
        header = make_header(args, network)
        print(format_header(header), flush=True)
        inputs = write_inputs(Path(folder), args.dtype, args.hosts * args.ranks)
        header["goodput"].append(goodput(network))
        told = (args.backends, args.transport, args.timeout)
        with Ranks(network, args.ranks, serve, *told, timeout=args.timeout) as ranks:
            try:
                ranks.reports()
                steps = sum(len(args.sizes) if name != "barrier" else 1 for name in args.collectives)
                with harness.Progress(" and ".join(args.backends), steps, shown=True) as progress:
                    for row in measure(args, network, ranks, inputs):
                        rows.append(row)
                        progress.advance(f"{row.collective}, {harness.format_bytes(row.bytes)}")
            except RankFailed as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        header["goodput"].append(goodput(network))
    line = max(header["goodput"])
    print("# goodput   " + ", then ".join(f"{found * 8 / 1e9:.3f} Gbit/s" for found in header["goodput"]) + "\n")
    for row in rows:
        row.finish(line)
    for _, group in itertools.groupby(rows, key=lambda row: row.collective):
        print(format_table(list(group)))
    wrong = sum(sum(row.wrong.values()) for row in rows)
    print(f"# {wrong} wrong elements")
    if args.json:
        harness.save(args.json, {"header": header, "rows": [asdict(row) for row in rows]})
        print(f"# JSON in {args.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
