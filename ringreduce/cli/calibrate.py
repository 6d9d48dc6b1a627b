"""`ringreduce calibrate`: what to expect of a machine, from a log of nccl-tests or rccl-tests on it."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.cli import arguments as read
from ringreduce.cli.terminal import console, gigabytes, put, say
from ringreduce.common.failures import TopologyError
from ringreduce.common.files import content_of, encoding_of, write_file
from ringreduce.common.units import bytes_text, time_text

if TYPE_CHECKING:
    from ringreduce.topology.graph import LinkGraph
    from ringreduce.topology.planned import Planned

MOST_SIZES = 1000
"""Each is compared with the others; a sweep over all powers of two has about forty."""

HOW_TO = "save all that a program such as all_reduce_perf prints"

_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")


def add(command: Any) -> None:
    parser = command(
        usage="%(prog)s LOG [FILE] [options]",
        description="Fits what to expect of a machine's links to a log of nccl-tests or rccl-tests on it: the share of "
        "the line rate that large tensors get, and the time that small ones take. `plan` and `simulate` use the result "
        "with --calibration.",
        epilog="examples:\n"
        "  ringreduce calibrate all_reduce.log dgx-a100 --save a100.json\n"
        "  ringreduce plan dgx-a100 --calibration a100.json",
    )
    parser.add_argument("log", metavar="LOG", type=Path, help="what nccl-tests or rccl-tests printed")
    read.add_machine(parser, nargs="?")
    known = "all_reduce, allgather, ... (default: the program that the log names)"
    parser.add_argument("--collective", type=read.collective, metavar="NAME", help=known)
    parser.add_argument("--save", type=Path, metavar="OUT.json", help="keep it in this file (default: print it)")


class Log(NamedTuple):
    """What a log says: which collective by how many ranks, and seconds by bytes."""

    collective: str
    ranks: int
    seconds: dict[int, float]


def run(arguments: argparse.Namespace) -> int:
    from ringreduce.topology import expected

    content = content_of(arguments.log)
    log = read_log(content.decode(encoding_of(content), "replace"), str(arguments.log), arguments.collective)
    graph = read.machine(arguments)
    if len(graph.ranks) != log.ranks:
        raise TopologyError(f"{arguments.log}: it is of {log.ranks} ranks, and {graph.name} has {len(graph.ranks)}; "
                            "choose as many with --gpus, or give another FILE")  # fmt: skip
    planned = _as_run(graph, log)
    name = expected.fabric_of(planned)
    if name is None:
        raise TopologyError(f"{graph.name}: its ranks have no links that could be calibrated; give the GPUs' topology")
    line = expected.line_of(planned)
    points = [expected.Measured(size, line, seconds) for size, seconds in log.seconds.items()]
    fabric = expected.calibrated(points, arguments.log.name)
    text = expected.to_json({name: fabric})
    if not arguments.save:
        put(text)
        return 0
    write_file(arguments.save, f"{text}\n".encode())
    least, most = min(log.seconds), max(log.seconds)
    say(console(), f"{name}: {fabric.efficiency:.1%} of {gigabytes(line)} GB/s for large tensors, "
                   f"{time_text(fabric.base)} for small ones; from {fabric.figures} figures, "
                   f"{bytes_text(least, 1024)} to {bytes_text(most, 1024)}; of those left out on trial "
                   f"({fabric.checked} of 1 MiB and more) four in five are within {fabric.within:.0%}; "
                   f"saved: {arguments.save}")  # fmt: skip
    return 0


def read_log(text: str, where: str, collective: str | None) -> Log:
    """The out-of-place times of a log.  Raises TopologyError that says what is missing."""
    ranks = len(re.findall(r"^#\s+Rank\s+\d+\s", text, re.MULTILINE))
    if not ranks:
        raise TopologyError(f"{where}: no line such as `#  Rank  0 ...` says how many ranks there were; {HOW_TO}")
    columns: list[str] = []
    seconds: dict[int, float] = {}
    for line in text.splitlines():
        words = line.replace("#", " # ", 1).split()
        if words[:2] == ["#", "size"]:
            columns = line.lstrip("# ").split()
        elif columns and len(words) == len(columns) and words[0].isdecimal():
            try:
                took = float(words[columns.index("time")]) * 1e-6
            except ValueError:
                continue
            if int(words[0]) > 0 and 0 < took < math.inf:
                seconds[int(words[0])] = took
    if len(seconds) > MOST_SIZES:
        raise TopologyError(f"{where}: it has {len(seconds)} sizes; give a log of at most {MOST_SIZES}")
    if not seconds:
        raise TopologyError(f"{where}: no row of sizes and times is under a line `#  size  count ...`; {HOW_TO}")
    return Log(collective or _named(text, where), ranks, seconds)


def _named(text: str, where: str) -> str:
    for name in _PROGRAM.findall(text):
        try:
            return read.collective(name)
        except argparse.ArgumentTypeError:
            continue
    raise TopologyError(f"{where}: it does not name its program, such as all_reduce_perf; give --collective")


def _as_run(graph: LinkGraph, log: Log) -> Planned:
    """The plan that the log's figures fit better: with the switches' sums, where there are any, or without."""
    from ringreduce.topology.expected import expected
    from ringreduce.topology.planner import algorithms, plan_for

    size = max(log.seconds)
    names = ["auto", *(["nvls"] if "nvls" in algorithms(graph, log.collective) else [])]
    plans = [plan_for(graph, log.collective, size, name) for name in names]

    def off(planned: Planned) -> float:
        found = [(expected(planned, size), seconds) for size, seconds in log.seconds.items()]
        return sum(abs(math.log(each.seconds / seconds)) for each, seconds in found if each)

    beaten = any(size * 1e-9 / seconds > plans[0].bound for size, seconds in log.seconds.items())
    return min(plans[1:] if beaten and plans[1:] else plans, key=off)
