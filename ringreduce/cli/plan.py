"""`ringreduce plan`: the rings and trees of a collective on given GPUs, and what each link carries."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.cli import arguments as read
from ringreduce.cli.terminal import bar, console, gigabytes, progress_console, put, say, table
from ringreduce.cli.topo import ring_lines, show_assumed
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.files import write_file
from ringreduce.common.units import bytes_text, time_text
from ringreduce.topology.draw.style import rank_label
from ringreduce.topology.routes import in_runs

if TYPE_CHECKING:
    from rich.console import Console

    from ringreduce.topology.expected import Table
    from ringreduce.topology.planned import Planned

MOST_NAMED = 64
"""GPUs that are listed one by one."""

MOST_LINKS = 48
"""Links that the table shows; of more, as many of the busiest."""


def add(command: Any) -> None:
    parser = command(
        usage="%(prog)s FILE [options]",
        description="Plans a collective over a machine's links: which rings or trees, how fast of what is possible at "
        "most and why, and what each link carries. GPUs are ranks in the order given.",
        epilog="examples:\n"
        "  ringreduce plan dgx1-v100 --gpus 0,1,3 --collective allreduce --size 160MB\n"
        "  ringreduce plan topo.txt --nvlink-gbps 18 --plot rings.png --plot-links links.png\n"
        "  ringreduce plan dgx1-v100 --size 1MB --html plan.html\n"
        "  ringreduce plan machine.json --json | jq .time_s",
    )
    read.add_machine(parser)
    read.add_call(parser, "auto (default: the fastest), rings, trees, ring, ...")
    parser.add_argument("--json", action="store_true", help="all of it as JSON: times, links, the program")
    parser.add_argument("--save", type=Path, metavar="PLAN.json", help="the program alone, for Plan.from_json")
    parser.add_argument("--plot", type=read.picture, metavar="FILE.png", help="draw the machine and its rings or trees")
    parser.add_argument("--plot-links", type=read.picture, metavar="FILE.png", help="draw what each link carries")
    parser.add_argument("--html", type=read.page, metavar="FILE.html", help="a page that plays the plan in a browser")


def run(arguments: argparse.Namespace) -> int:
    from ringreduce.topology import expected
    from ringreduce.topology.planner import plan_for

    graph = read.machine(arguments)
    table = expected.load(arguments.calibration) if arguments.calibration else expected.FABRICS
    size = arguments.size
    with progress_console().status("planning"):
        planned = plan_for(graph, arguments.collective, size, arguments.algorithm)
    planned.verify()
    written = _write(planned, arguments)
    if arguments.json:
        found = expected.expected(planned, size, table)
        more = {"expected_s": found.seconds, "expected": str(found)} if found else {"expected_s": None}
        put(planned.to_json(size, more))
        return 0
    out = console()
    if len(planned.ranks) < 2:
        say(out, f"{graph.name}: {planned.collective} on one GPU: nothing moves")
        return 0
    size_text, gpus = bytes_text(size), len(planned.ranks)
    few = gpus <= MOST_NAMED
    ranks = "GPUs " + ", ".join(in_runs(rank_label(graph, name) for name in planned.ranks)) if few else f"{gpus} GPUs"
    say(out, f"{graph.name}: {planned.collective} of {size_text} on {ranks}", style="bold")
    say(
        out,
        f"{time_text(planned.seconds(size))} by the busiest link, {time_text(planned.simulated(size))} simulated with "
        f"latencies; {_of_bound(planned)}",
    )
    _show_expected(out, planned, size, table)
    say(out, f"why: {planned.reason}")
    say(out, f"limit: {planned.proof}")
    for line in ring_lines(planned) if planned.rings or planned.trees else ():
        say(out, f"  {line}")
    _show_links(out, planned, size)
    show_assumed(out, graph.assumed)
    for path in written:
        say(out, f"written: {path}")
    if arguments.plot and not (planned.rings or planned.trees):
        say(out, f"{planned.plan.name} has no rings or trees to draw; --plot-links draws what its links carry")
    return 0


def _write(planned: Planned, arguments: argparse.Namespace) -> list[Path]:
    from ringreduce.topology import draw

    if arguments.save and planned.in_switches:
        raise InvalidArgument(
            "--save: switches reduce in this plan, which no engine of ringreduce runs; leave out --save"
        )
    if arguments.html:  # first, since a plan may be too large for a page
        draw.page(planned, arguments.size, arguments.html)
    if arguments.save:
        write_file(arguments.save, f"{planned.whole().to_json()}\n".encode())
    if arguments.plot:
        reached = f"planned {planned.bandwidth:.4g} GB/s of at most {planned.bound:.4g}"
        note = f"{planned.collective}, {planned.plan.name}: {reached}"
        draw.machine(planned.graph, planned.rings, planned.trees, arguments.plot, planned.ranks, note)
    if arguments.plot_links:
        draw.loads(planned, arguments.size, arguments.plot_links)
    return [path for path in (arguments.save, arguments.plot, arguments.plot_links, arguments.html) if path]


def _of_bound(planned: Planned) -> str:
    """What is planned, and which bound that is to be held against."""
    from ringreduce.topology.planned import SUSTAINED_BYTES

    large = f" with {bytes_text(SUSTAINED_BYTES)}" if planned.bandwidth < planned.of_links else ""  # as simulated
    share = f"{gigabytes(planned.bandwidth)} GB/s{large} of at most {gigabytes(planned.bound)}"
    ranks = ", without the switches' sums" if planned.bound_in_switches and not planned.in_switches else ""
    return f"planned {share} ({planned.bandwidth / planned.bound:.1%}){ranks}"


def _show_expected(out: Console, planned: Planned, size: int, table: Table) -> None:
    """What NCCL or RCCL needs on such links, and what switches that combine would make possible."""
    from ringreduce.topology.expected import expected
    from ringreduce.topology.planner import algorithms, plan_for

    if found := expected(planned, size, table):
        say(
            out,
            f"expected: {time_text(found.seconds)}, at the efficiency that NCCL or RCCL has on such links ({found})",
        )
    if not planned.bound_in_switches or planned.in_switches:
        return
    names = algorithms(planned.graph, planned.collective)
    name = next((name for name in ("nvls", "sharp") if name in names), None)
    if name is None:
        say(out, f"with the switches' sums (NVLS, SHARP): at most {gigabytes(planned.bound_in_switches)} GB/s")
        return
    switched = plan_for(planned.graph, planned.collective, size, name)
    found = expected(switched, size, table)
    about = f"; expected: {time_text(found.seconds)} ({found})" if found else ""
    say(out, f"with the switches' sums, which NCCL has (--algorithm {name}): {_of_bound(switched)}{about}")


def _show_links(out: Console, planned: Planned, size: int) -> None:
    loads = planned.loads(size)
    shown = loads[:MOST_LINKS]
    links = table("from", "to", "GB/s", "carries", "takes", "", right=("GB/s", "carries", "takes"))
    for load in shown:
        links.add_row(
            *(f"GPU {planned.numbers[end]}" if isinstance(planned.numbers[end], int) else end for end in load[:2]),
            gigabytes(load.capacity),
            bytes_text(load.bytes),
            time_text(load.seconds),
            bar(out, load.busy),
        )
    out.print(links)
    if planned.whole_hosts > 1:
        say(out, f"these are of one host; the other {planned.whole_hosts - 1} are alike")
    if len(loads) > len(shown):
        say(out, f"{len(loads) - len(shown)} more links are no busier than these; --json has them all")
