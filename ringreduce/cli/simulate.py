"""`ringreduce simulate`: how long the algorithms of a collective take, over the size or over the number of ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ringreduce.cli import arguments as read
from ringreduce.cli.terminal import console, progress, progress_console, put, say, table
from ringreduce.cli.topo import show_assumed
from ringreduce.common.failures import PlanError, TopologyError
from ringreduce.common.units import bytes_text, time_text
from ringreduce.plan import BUILDERS, build
from ringreduce.plan.network import switch
from ringreduce.plan.parameter_server import parameter_server
from ringreduce.plan.simulate import simulate, simulate_symmetric
from ringreduce.plan.symmetric import SYMMETRIC
from ringreduce.topology.graph import LinkGraph, LinkKind
from ringreduce.topology.routes import LATENCY

if TYPE_CHECKING:
    from rich.table import Table

    from ringreduce.topology.planned import Planned

SIZES_COMPARED = 10
"""Sizes compared: that of `--size`, and each a quarter of the one before."""

MOST_WALKED = 1024
"""Ranks on a switch up to which every step of every rank can be simulated."""

ALL_WALKED = 128
"""Ranks up to which it is, even where one rank's steps show all."""

MOST_RANKS = 16384

LATENCY_US = LATENCY[LinkKind.NETWORK] * 1e6
"""Of ranks on a switch, as on a network: without any, algorithms of many steps would seem as good as others."""


def add(command: Any) -> None:
    parser = command(
        usage="%(prog)s (FILE | --ranks N --link-gbps X) [options]",
        description="Simulates a collective step by step, with latencies, slices and shared links: how long each "
        "algorithm takes on a machine, or on one switch.",
        epilog="examples:\n"
        "  ringreduce simulate dgx1-v100 --size 160MB --plot time.png\n"
        "  ringreduce simulate --ranks 64 --link-gbps 12.5 --latency-us 5 --over ranks\n"
        "  ringreduce simulate --ranks 64 --link-gbps 12.5 --parameter-server 64,8",
    )
    read.add_machine(parser, nargs="?")
    ideal = parser.add_argument_group("instead of FILE, ranks that are joined by one switch")
    ideal.add_argument("--ranks", type=read.count, metavar="N", help=f"how many, up to {MOST_RANKS}")
    ideal.add_argument("--link-gbps", type=read.rate, metavar="X", help="GB/s of a rank's link, in each direction")
    ideal.add_argument(
        "--latency-us", type=read.microseconds, metavar="Y", help=f"from rank to rank (default: {LATENCY_US:g})"
    )
    ideal.add_argument("--parameter-server", type=read.servers, metavar="M,N", help="also M workers with N shards")
    read.add_call(parser, "only these, as in rings,trees (default: all)")
    parser.add_argument("--over", choices=("size", "ranks"), default="size", help="what to vary (default: size)")
    parser.add_argument("--json", action="store_true", help="the times as JSON")
    parser.add_argument("--plot", type=read.picture, metavar="FILE.png", help="draw the times as curves")
    parser.set_defaults(parser=parser)


class _Point(NamedTuple):
    """What is simulated: so many ranks, so many bytes."""

    ranks: int
    size: int


class _Curve(NamedTuple):
    """An algorithm, and how its seconds are found: None where it is not possible; an error where that must be said."""

    name: str
    seconds: Callable[[_Point], float | None]


Times = dict[tuple[str, _Point], float]
"""Seconds by the curve's name and the point, where there are any."""

Known = dict[str, dict["_Point", float | None]]
"""Seconds that are not simulated, by the column's name and the point."""


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    graph = read.machine(arguments) if arguments.file is not None else None
    most = len(graph.ranks) if graph else arguments.ranks
    on_switch = f"ranks on a switch, {arguments.link_gbps or 0:g} GB/s each way, {_latency_us(arguments):g} us"
    where = graph.name if graph else on_switch
    if most < 2:
        raise TopologyError(f"{where}: it has {most} to run on, and a collective needs 2; take another FILE or --gpus")
    over_size = arguments.over == "size"
    if over_size:
        points = [_Point(most, size) for size in _sizes(arguments.size)]
        title = f"{where}: {arguments.collective} of {most} ranks"
    else:
        points = [_Point(ranks, arguments.size) for ranks in _counts(most)]
        title = f"{where}: {arguments.collective} of {bytes_text(arguments.size)}"
    curves = _on_machine(graph, points, arguments) if graph else _on_switch(arguments)
    times, missing = _simulate(list(curves), points)

    if not times:
        raise PlanError("; ".join(missing))
    if arguments.plot:
        _draw(times, over_size, arguments.plot, title)
    if arguments.json:
        known = _known(graph, points, arguments) if graph else {}
        put(json.dumps(_document(times, points, known, title, missing), indent=1))
        return 0
    out = console()
    say(out, title, style="bold")
    known = _known(graph, points, arguments) if graph else {}
    out.print(_table(times, points, over_size, known))
    say(out, "* the fastest")
    if known:
        say(out, "bound: no plan of ranks alone is faster; expected: with the efficiency of NCCL or RCCL on such links")
    for line in missing:
        say(out, line)
    if graph:
        show_assumed(out, graph.assumed)
    elif arguments.latency_us is None:
        show_assumed(out, (f"A message takes {LATENCY_US:g} us from rank to rank; set --latency-us.",))
    if arguments.plot:
        say(out, f"drawn: {arguments.plot}")
    return 0


def _latency_us(arguments: argparse.Namespace) -> float:
    return LATENCY_US if arguments.latency_us is None else float(arguments.latency_us)


def _check(arguments: argparse.Namespace) -> None:
    """What argparse cannot see: which options exclude one another."""
    wrong: Callable[[str], NoReturn] = arguments.parser.error
    if arguments.file is not None:
        for name in ("ranks", "link_gbps", "latency_us", "parameter_server"):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                wrong(f"argument {option}: it describes ranks on a switch; leave it out, or FILE ({arguments.file!r})")
    elif arguments.ranks is None or arguments.link_gbps is None:
        wrong("FILE, or --ranks and --link-gbps, are needed: they say what is simulated")
    elif not 2 <= arguments.ranks <= MOST_RANKS:
        wrong(f"argument --ranks: {arguments.ranks} ranks; give from 2 to {MOST_RANKS}")
    elif arguments.gpus is not None:
        wrong("argument --gpus: ranks on a switch are no GPUs; leave it out, or give FILE")


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while len(sizes) < SIZES_COMPARED and sizes[-1] >= 4:
        sizes.append(sizes[-1] // 4)
    return sizes[::-1]


def _counts(most: int) -> list[int]:
    """Up to 16 all, then powers of two, and the whole."""
    doubled = [1 << power for power in range(1, most.bit_length())]
    return sorted({*(range(2, most + 1) if most <= 16 else doubled), most} - {1})


def _on_machine(graph: LinkGraph, points: list[_Point], arguments: argparse.Namespace) -> Iterator[_Curve]:
    """The algorithms that the planner has for the machine; fewer ranks are the first of its GPUs."""
    from ringreduce.topology.planner import algorithms, plan_for

    collective = arguments.collective
    parts = {ranks: graph.select(range(ranks)) for ranks in {point.ranks for point in points}}
    possible = {ranks: algorithms(part, collective) for ranks, part in sorted(parts.items(), reverse=True)}
    names = tuple(dict.fromkeys(name for each in possible.values() for name in each))
    for name in _chosen(arguments.algorithm, names):
        planned: dict[int, Planned] = {}

        def seconds(point: _Point, name: str = name, planned: dict[int, Planned] = planned) -> float | None:
            if name not in possible[point.ranks]:
                return None
            if point.ranks not in planned:
                planned[point.ranks] = plan_for(parts[point.ranks], collective, point.size, name)
            return planned[point.ranks].simulated(point.size)

        yield _Curve(name, seconds)


def _on_switch(arguments: argparse.Namespace) -> Iterator[_Curve]:
    """The algorithms that know of no links, and a parameter server with one shard and with as many as asked for."""
    bandwidth, latency = arguments.link_gbps * 1e9, _latency_us(arguments) * 1e-6
    collective = arguments.collective
    for name in _chosen(arguments.algorithm, tuple(BUILDERS[collective])):

        def seconds(point: _Point, name: str = name) -> float:
            ranks, size = point
            alike = collective == "all_reduce" and name in SYMMETRIC[collective]
            if alike and ranks > ALL_WALKED:
                return simulate_symmetric(name, ranks, size, bandwidth, latency).seconds
            if ranks <= MOST_WALKED:
                return simulate(build(collective, name, ranks), switch(ranks, bandwidth, latency), size).seconds
            raise PlanError(
                f"its ranks do not all do the same, and more than {MOST_WALKED} are not simulated one by one"
            )

        yield _Curve(name, seconds)
    if arguments.parameter_server:
        workers, most_shards = arguments.parameter_server
        for shards in sorted({1, most_shards}):

            def serve(point: _Point, shards: int = shards) -> float:
                served = point.ranks if arguments.over == "ranks" else workers
                return parameter_server(served, shards, point.size, bandwidth, latency).seconds

            yield _Curve(f"server, {shards} shard{'s' * (shards > 1)}", serve)


def _chosen(wanted: str, names: tuple[str, ...]) -> tuple[str, ...]:
    if wanted == "auto":
        return names
    chosen = tuple(dict.fromkeys(wanted.split(",")))
    for name in chosen:
        if name not in names:
            raise TopologyError(f"argument --algorithm: {name!r} is not possible here; possible are {', '.join(names)}")
    return chosen


def _simulate(curves: list[_Curve], points: list[_Point]) -> tuple[Times, list[str]]:
    """The times, and what is missing, with the reason."""
    times: Times = {}
    missing: dict[str, str] = {}
    with progress(progress_console()) as bars:
        bar = bars.add_task("simulating", total=len(curves) * len(points))
        for curve in curves:
            bars.update(bar, description=curve.name)
            for point in points:
                try:
                    seconds = curve.seconds(point)
                    if seconds is not None:
                        times[curve.name, point] = seconds
                except (PlanError, TopologyError) as error:
                    missing.setdefault(curve.name, f"{curve.name} of {point.ranks} ranks is left out: {error}")
                bars.advance(bar)
    return times, list(missing.values())


def _names(times: Times) -> list[str]:
    return list(dict.fromkeys(name for name, _ in times))


def _known(graph: LinkGraph, points: list[_Point], arguments: argparse.Namespace) -> Known:
    """Columns of seconds that are not simulated: the bound's, and what is to be expected of the plan for each point."""
    from ringreduce.topology import expected
    from ringreduce.topology.planner import algorithms, plan_for

    figures = expected.load(arguments.calibration) if arguments.calibration else expected.FABRICS
    columns: dict[str, dict[_Point, float | None]] = {"bound": {}, "expected": {}, "expected, NVLS": {}}
    for point in points:
        part = graph.select(range(point.ranks))
        names = algorithms(part, arguments.collective)
        columns["bound"][point] = point.size * 1e-9 / plan_for(part, arguments.collective, algorithm=names[0]).bound
        for column, name in (("expected", names[0]), ("expected, NVLS", "nvls")):
            if name in names:
                planned = plan_for(part, arguments.collective, point.size, name)
                found = expected.expected(planned, point.size, figures)
                columns[column][point] = found.seconds if found else None
    return {name: column for name, column in columns.items() if any(column.values())}


def _table(times: Times, points: list[_Point], over_size: bool, known: Known) -> Table:
    names = _names(times)
    first = "size" if over_size else "ranks"
    shown = table(first, *names, *known, right=(first, *names, *known))
    for point in points:
        row = {name: times[name, point] for name in names if (name, point) in times}
        fastest = time_text(min(row.values(), default=0.0))
        shown.add_row(
            bytes_text(point.size) if over_size else str(point.ranks),
            *("* " * (time == fastest) + time for time in (time_text(row[n]) if n in row else "" for n in names)),
            *("" if (seconds := column.get(point)) is None else time_text(seconds) for column in known.values()),
        )
    return shown


def _document(times: Times, points: list[_Point], known: Known, title: str, missing: list[str]) -> dict[str, Any]:
    """For --json."""
    rows = [
        {
            "ranks": point.ranks,
            "bytes": point.size,
            "seconds": {name: times[name, point] for name in _names(times) if (name, point) in times},
            "known_seconds": {name: column.get(point) for name, column in known.items()},
        }
        for point in points
    ]
    return {"title": title, "points": rows, "left_out": missing}


def _draw(times: Times, over_size: bool, path: Path, title: str) -> None:
    from ringreduce.topology import draw

    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in _names(times)}
    for (name, point), seconds in times.items():
        curves[name].append((point.size if over_size else point.ranks, seconds))
    (draw.time_over_size if over_size else draw.time_over_ranks)(curves, path, title)
