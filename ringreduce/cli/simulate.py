"""`ringreduce simulate`: how long the algorithms of a collective take, over the size or over the number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ringreduce.cli import arguments as read
from ringreduce.cli.terminal import Help, console, progress_console, say, size_text, table, time_text
from ringreduce.cli.topo import show_assumed
from ringreduce.errors import RingReduceError, TopologyError
from ringreduce.plan import BUILDERS, PlanError, build
from ringreduce.plan.network import switch
from ringreduce.plan.simulate import SYMMETRIC, parameter_server, simulate, simulate_symmetric
from ringreduce.topology.graph import LinkGraph, NodeKind

SIZES = 10
"""Sizes compared: that of `--size`, and each a quarter of the one before."""

MOST_WALKED = 128
"""Ranks on a switch up to which every step of every rank is simulated; beyond, one rank's, where that shows all."""

MOST_RANKS = 16384


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        usage="%(prog)s (FILE | --ranks N --link-gbps X) [options]",
        help="how long each algorithm takes, over size or ranks",
        description="Simulates a collective step by step, with latencies, slices and links that are shared: how long "
        "each algorithm takes on a machine, or on equal links to one switch.",
        epilog="examples:\n"
        "  ringreduce simulate dgx1-v100 --size 160MB --plot time.png\n"
        "  ringreduce simulate --ranks 64 --link-gbps 12.5 --latency-us 5 --over ranks\n"
        "  ringreduce simulate --ranks 64 --link-gbps 12.5 --parameter-server 64,8",
        formatter_class=Help,
    )
    read.add_machine(parser, nargs="?")
    ideal = parser.add_argument_group("instead of FILE, ranks that are joined by one switch")
    ideal.add_argument("--ranks", type=read.count, metavar="N", help=f"how many, up to {MOST_RANKS}")
    ideal.add_argument("--link-gbps", type=read.rate, metavar="X", help="GB/s of a rank's link, in each direction")
    ideal.add_argument("--latency-us", type=read.microseconds, metavar="Y", help="from rank to rank (default: 0)")
    ideal.add_argument("--parameter-server", type=read.servers, metavar="M,N", help="also M workers with N shards")
    read.add_call(parser, "only these, as in rings,trees (default: all)")
    parser.add_argument("--over", choices=("size", "ranks"), default="size", help="what to vary (default: size)")
    parser.add_argument("--plot", type=read.picture, metavar="FILE.png", help="draw the times as curves")
    parser.set_defaults(run=run)


class _Curve(NamedTuple):
    """One algorithm: seconds by (ranks, bytes).  A PlanError says why it cannot be had there."""

    name: str
    seconds: Callable[[int, int], float]


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    graph = read.machine(arguments) if arguments.file is not None else None
    most = _ranks(graph, arguments.over) if graph else arguments.ranks
    curves = list(_on_machine(graph, arguments) if graph else _on_switch(arguments))
    over_size = arguments.over == "size"
    points = (
        [(most, size) for size in _sizes(arguments.size)]
        if over_size
        else [(ranks, arguments.size) for ranks in _counts(most)]
    )
    times, missing = _simulate(curves, points)
    known = [curve.name for curve in curves if any((curve.name, point) in times for point in points)]

    out = console()
    where = graph.name if graph else f"ranks on a switch, {arguments.link_gbps:g} GB/s each way"
    what = (
        f"{arguments.collective} of {most} ranks"
        if over_size
        else f"{arguments.collective} of {size_text(arguments.size)}"
    )
    title = f"{where}: {what}"
    say(out, title, style="bold")
    shown = table("size" if over_size else "ranks", *known, "fastest", right=("size", "ranks", *known))
    for point in points:
        row = {name: times[name, point] for name in known if (name, point) in times}
        fastest = min(row, key=row.__getitem__) if row else ""
        first = size_text(point[1]) if over_size else str(point[0])
        shown.add_row(first, *(time_text(row[name]) if name in row else "" for name in known), fastest)
    out.print(shown)
    for line in missing:
        say(out, line)
    if graph:
        show_assumed(out, graph.assumed)
    if arguments.plot:
        from ringreduce.topology import draw

        at = 1 if over_size else 0
        drawn = {n: [(float(p[at]), times[n, p]) for p in points if times.get((n, p), 0) > 0] for n in known}
        draw_curves = draw.time_over_size if over_size else draw.time_over_ranks
        draw_curves({name: curve for name, curve in drawn.items() if curve}, arguments.plot, title)
        say(out, f"drawn: {arguments.plot}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.file is not None:
        for name in ("ranks", "link_gbps", "latency_us", "parameter_server"):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                raise TopologyError(f"argument {option}: it is for ranks on a switch; leave it out, or FILE")
    elif arguments.ranks is None or arguments.link_gbps is None:
        raise TopologyError(
            "arguments FILE, --ranks and --link-gbps: no machine is given; name a FILE, or describe one as in "
            "ringreduce simulate --ranks 8 --link-gbps 18"
        )
    elif not 2 <= arguments.ranks <= MOST_RANKS:
        raise TopologyError(f"argument --ranks: {arguments.ranks} ranks; give from 2 to {MOST_RANKS}")
    elif arguments.gpus is not None:
        raise TopologyError("argument --gpus: there are no GPUs to choose from without FILE; leave it out")


def _ranks(graph: LinkGraph, over: str) -> int:
    count = len(graph.gpus or graph.of_kind(NodeKind.CORE))
    if count < 2:
        raise TopologyError(f"{graph.name}: it has {count} GPU{'s' * (count != 1)}; a collective needs at least 2")
    if over == "ranks" and not graph.gpus:
        raise TopologyError(f"argument --over: {graph.name} has cores for ranks, which are all taken; give 'size'")
    return count


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while len(sizes) < SIZES and sizes[-1] >= 4:
        sizes.append(sizes[-1] // 4)
    return sizes[::-1]


def _counts(most: int) -> list[int]:
    """Up to 16 all, then powers of two, and the whole."""
    doubled = [1 << power for power in range(1, most.bit_length())]
    return sorted({*(range(2, most + 1) if most <= 16 else doubled), most} - {1})


def _on_machine(graph: LinkGraph, arguments: argparse.Namespace) -> Iterator[_Curve]:
    """The algorithms that the planner has for the machine's GPUs; fewer ranks are its first GPUs."""
    from ringreduce.topology.planner import algorithms, plan_for

    names = algorithms(graph, arguments.collective)
    planned: dict[tuple[str, int], Any] = {}
    for name in _chosen(arguments.algorithm, names):

        def seconds(ranks: int, size: int, name: str = name) -> float:
            if (name, ranks) not in planned:
                part = graph if arguments.over == "size" else graph.select(range(ranks))
                planned[name, ranks] = plan_for(part, arguments.collective, size, name)
            found: float = planned[name, ranks].simulated(size)
            return found

        yield _Curve(name, seconds)


def _on_switch(arguments: argparse.Namespace) -> Iterator[_Curve]:
    bandwidth, latency = arguments.link_gbps * 1e9, (arguments.latency_us or 0.0) * 1e-6
    collective = arguments.collective
    for name in _chosen(arguments.algorithm, tuple(BUILDERS[collective])):

        def seconds(ranks: int, size: int, name: str = name) -> float:
            if ranks <= MOST_WALKED:
                return simulate(build(collective, name, ranks), switch(ranks, bandwidth, latency), size).seconds
            if collective != "all_reduce" or name not in SYMMETRIC:
                raise PlanError(f"beyond {MOST_WALKED} ranks only {', '.join(SYMMETRIC)} of all_reduce are simulated")
            return simulate_symmetric(name, ranks, size, bandwidth, latency).seconds

        yield _Curve(name, seconds)
    if arguments.parameter_server:
        workers, shards = arguments.parameter_server
        for its_shards in sorted({1, shards}):

            def serve(ranks: int, size: int, shards: int = its_shards) -> float:
                count = ranks if arguments.over == "ranks" else workers
                return parameter_server(count, shards, size, bandwidth, latency)

            yield _Curve(f"server, {its_shards} shard{'s' * (its_shards > 1)}", serve)


def _chosen(wanted: str, names: tuple[str, ...]) -> tuple[str, ...]:
    if wanted == "auto":
        return names
    chosen = tuple(dict.fromkeys(wanted.split(",")))
    for name in chosen:
        if name not in names:
            raise TopologyError(f"argument --algorithm: {name!r} is not possible here; possible are {', '.join(names)}")
    return chosen


def _simulate(
    curves: list[_Curve], points: list[tuple[int, int]]
) -> tuple[dict[tuple[str, tuple[int, int]], float], list[str]]:
    """Seconds by (name, (ranks, bytes)), and what is missing, with the reason."""
    times: dict[tuple[str, tuple[int, int]], float] = {}
    missing: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(curves) * len(points))
        for curve in curves:
            progress.update(bar, description=curve.name)
            for point in points:
                try:
                    times[curve.name, point] = curve.seconds(*point)
                except (PlanError, RingReduceError) as error:
                    missing.setdefault(curve.name, f"{curve.name} is left out where {error}")
                progress.advance(bar)
    return times, list(missing.values())
