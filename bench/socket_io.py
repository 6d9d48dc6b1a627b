"""Ways to drive the TCP sockets of links: epoll, io_uring, sends without a copy, between two network namespaces.

    python bench/socket_io.py                          as fast as the machine is
    python bench/socket_io.py --rate 1gbit             a wire's bandwidth, as tc writes it
    python bench/socket_io.py --connections 8          seven of them silent, as those to other peers are

Compiles socket_io.cpp, which says what is run, and starts one process a host, each bound to a core. Needs root,
iproute2 and a C++20 compiler. Exit code: 0, 1 if a process failed or a byte was wrong, 2 if it cannot run here.

`--json` writes {"header", "rows"}. A row is a pattern, a frame's bytes and a way, with what each round measured:
`time_us` (pingpong: half of the median round trip; else: of all frames, on the slower side), `cpu_s` (of both
processes), `busy_s` (of all cores, the kernel's threads too), `calls` (of the system, both sides), `zero` and `copied`
(sends without a copy that the kernel reported on, and those that it copied after all); and its medians: `time_ratio`
and `cpu_ratio`, of the same round's with epoll.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT / "tests")]

from net.network import Network, unavailable  # noqa: E402

SOURCE = Path(__file__).with_suffix(".cpp")
WAYS = {
    "epoll": "epoll_wait, readv until nothing is left, sendmsg: as links do",
    "epoll_short": "the same, and a read that finds less than asked for is taken for the last",
    "plain": "readv and sendmsg on each connection in turn, without epoll",
    "epoll_zero_copy": "epoll, with MSG_ZEROCOPY",
    "uring": "io_uring, SINGLE_ISSUER and DEFER_TASKRUN: one thread only; a send and a receive in one call",
    "uring_multishot": "the same, with one receive for ever into buffers that the kernel picks, and a copy from there",
    "uring_shared": "io_uring that any thread may use",
    "uring_zero_copy": "io_uring as the first, with SEND_ZC",
}
STREAMS = ("epoll", "epoll_short", "epoll_zero_copy", "uring", "uring_shared")
PATTERNS = {
    "pingpong": ("epoll", "epoll_short", "plain", "uring", "uring_multishot", "uring_shared"),
    # Not uring_zero_copy: there it came to a standstill in 2 of some 30 runs, on a crowded machine (Linux 6.18). Both
    # sides' sends and receives waited in the kernel, though there were bytes to read. The cause has not been found.
    "busy": STREAMS,
    "asleep": (*STREAMS, "uring_zero_copy"),
}
METHOD = (
    "pingpong: a frame there, one back; both sides poll. busy, asleep: frames both ways at once over one connection;",
    "a side with nothing to do polls, or sleeps in the kernel, so that its CPU time is that of the work.",
    "Ways take turns on the same connections. Figures are medians of the rounds, ratios to epoll in the same round.",
    "time: one way. GB/s: each way. CPU: of both processes, busy: of all cores with the kernel's threads, both per GB",
    "that arrived on either side. calls: of the system per frame, both sides. copied: of the sends without a copy.",
)


@dataclass
class Row:
    """A way in a pattern; the keys are explained in the module's docstring."""

    pattern: str
    bytes: int
    frames: int  # each way, in a round
    way: str
    time_us: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    zero: int = 0
    copied: int = 0
    time_ratio: float = 0
    cpu_ratio: float = 0

    def add(self, sides: Sequence[dict[str, Any]]) -> None:
        """A round, in the words of both sides."""
        seconds = max(side["seconds"] for side in sides)
        one_way = sides[0]["trip"] / 2 if self.pattern == "pingpong" else seconds
        self.time_us.append(one_way * 1e6)
        self.cpu_s.append(sum(side["cpu"] for side in sides))
        self.busy_s.append(max(0.0, seconds * (os.cpu_count() or 1) - sides[0]["idle"]))
        self.calls.append(sum(side["calls"] for side in sides))
        self.zero += sum(side["zero"] for side in sides)
        self.copied += sum(side["copied"] for side in sides)

    def compare(self, base: "Row") -> None:
        self.time_ratio = median_ratio(self.time_us, base.time_us)
        self.cpu_ratio = median_ratio(self.cpu_s, base.cpu_s)

    @property
    def gigabytes(self) -> float:
        """That arrive in a round, on both sides."""
        return 2 * self.frames * self.bytes / 1e9


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def compile_source(folder: Path) -> Path:
    program = folder / SOURCE.stem
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread", str(SOURCE), "-o", str(program)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: cannot compile {SOURCE.name}: {error}; CXX names the compiler")
    return program


def measure(network: Network, program: Path, args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each pattern and size of frame."""
    for pattern in args.patterns:
        for size in args.small if pattern == "pingpong" else args.large:
            frames = args.trips if pattern == "pingpong" else -(-args.bytes // size)
            rows = {way: Row(pattern, size, frames, way) for way in PATTERNS[pattern]}
            request = (args.connections, pattern, size, frames, args.rounds, *rows)
            for sides in zip(*run_both(network, program, request, args.timeout), strict=True):
                rows[sides[0]["way"]].add(sides)
            for row in rows.values():
                row.compare(rows["epoll"])
            yield list(rows.values())


def run_both(network: Network, program: Path, request: Sequence[object], timeout: float) -> list[list[dict[str, Any]]]:
    """What the two sides print."""
    with network.call(1, socket.create_server, (network.address(1), 0)) as listener:
        port = listener.getsockname()[1]  # is free
    meeting = (network.address(1), port)
    commands = [[str(word) for word in (program, side, *meeting, *request)] for side in (0, 1)]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    processes = [network.popen(side, command, **pipe) for side, command in enumerate(commands)]
    printed: list[list[dict[str, Any]]] = []
    for process in processes:
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {' '.join(commands[len(printed)][1:])}: not done within {timeout:g} s")
        if process.returncode:
            sys.exit(1)  # it has said why
        printed.append([json.loads(line) for line in text.splitlines()])
    return printed


def format_table(rows: Sequence[Row]) -> str:
    """Rows of one pattern and size."""
    first = rows[0]
    small = first.pattern == "pingpong"
    title = f"# {first.pattern}, frames of {harness.format_bytes(first.bytes)}"
    head = f"{'time us' if small else 'GB/s':>8} {'x epoll':>8}"
    if first.pattern == "asleep":
        head += f" {'CPU s/GB':>9} {'busy s/GB':>9} {'x epoll':>8}"
    lines = [title, f"#{'way':<16} {head} {'calls':>7} {'copied':>7}"]
    for row in rows:
        time_us = statistics.median(row.time_us)
        line = f" {row.way:<16} {time_us if small else row.frames * row.bytes / time_us / 1e3:>8.2f} "
        line += f"{row.time_ratio:>8.3f}"
        if row.pattern == "asleep":
            cpu, busy = (statistics.median(found) / row.gigabytes for found in (row.cpu_s, row.busy_s))
            line += f" {cpu:>9.3f} {busy:>9.3f} {row.cpu_ratio:>8.3f}"
        copied = f"{row.copied / row.zero:.0%}" if row.zero else "-"
        lines.append(f"{line} {statistics.median(row.calls) / (2 * row.frames):>7.1f} {copied:>7}")
    return "\n".join(lines) + "\n"


def make_header(args: argparse.Namespace, network: Network) -> dict[str, Any]:
    """What is run, on what machine, and how to read the figures."""
    return {
        **harness.origin("socket_io: ways to drive TCP sockets, between network namespaces"),
        "rate": args.rate,
        "carrier": network.carrier,
        "connections": args.connections,
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "rounds": args.rounds,
        "ways": WAYS,
        "method": list(METHOD),
    }


def format_header(header: dict[str, Any]) -> str:
    """The header as lines that start with "#"."""
    network = f"2 hosts, {header['rate'] or 'no rate'}, {header['carrier']}; TCP {header['congestion_control']}"
    return "\n".join(
        (
            *harness.format_origin(header),
            f"# network   {network}; {header['connections']} connections, of which one is used",
            f"# schedule  {header['rounds']} rounds",
            *(f"# {line}" for line in header["method"]),
            *(f"#   {way:<16} {meaning}" for way, meaning in header["ways"].items()),
        )
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--rate", help="of both interfaces, as tc writes it: 1gbit (default none)")
    option("--connections", type=int, default=1, help="of which all but one are silent (default 1)")
    option("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="NAME", help="(default all)")
    option("--small", type=harness.parse_bytes, nargs="+", default=[64, 4096], help="frames of pingpong (64 4K)")
    option("--large", type=harness.parse_bytes, nargs="+", default=[128 << 10, 512 << 10], help="others (128K 512K)")
    option("--trips", type=int, default=2000, help="round trips in a batch (default 2000)")
    option("--bytes", type=harness.parse_bytes, default=64 << 20, help="each way in a batch (default 64M)")
    option("--rounds", type=int, default=7, help="(default 7)")
    option("--timeout", type=float, default=120, help="seconds for a pattern and size (default 120)")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()
    if not 1 <= args.connections <= 32:
        parser.error(f"--connections {args.connections}: give 1 to 32")
    if min(args.rounds, args.trips, args.bytes) < 1 or args.timeout <= 0:
        parser.error("--rounds, --trips, --bytes and --timeout must be above 0")
    if wrong := [size for size in args.small + args.large if size % 8 or not 16 <= size <= 64 << 20]:
        parser.error(f"frames of {wrong[0]} bytes: give multiples of 8 from 16 to 64M")
    if reason := unavailable():
        parser.error(reason)
    return args


def main() -> int:
    args = read_command_line()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Network(2, args.rate) as network:
        program = compile_source(Path(folder))
        header = make_header(args, network)
        print(format_header(header) + "\n", flush=True)
        for group in measure(network, program, args):
            rows += group
            print(format_table(group), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"header": header, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
        print(f"# JSON in {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
