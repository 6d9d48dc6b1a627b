"""Prints, and draws, the figures with which the idea of ring all-reduce is usually explained, from the simulator.

    python examples/book_figures.py
    python examples/book_figures.py --plot build/book_figures.png

160 MB of gradients are to be summed. Four GPUs behind one PCIe switch, 16 GB/s per link and direction: by way of one
GPU that takes 60 ms, by way of the CPU 80 ms, and 15 ms if each GPU sums a quarter. Eight V100 of a DGX-1, 18 GB/s per
NVLink and direction: two rings, one of doubled links, take about 6 ms, and a longer ring would take no more. Then, what
a plan of ours does better: the rings are run in both directions at once, which takes half the time. Last, a parameter
server grows with its workers, shards divide that, and a ring stays where it is.

Nothing is measured, and nothing is calculated but the column "formula": each figure is the time of a plan, executed
message by message over a network whose links can be full. Latencies are 0, as in the texts.

Exit code: 0, 1 if a simulated time is not that of its formula to 1 %, 2 if it cannot run here.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ringreduce.plan import Channel, Plan, Read, Step, direct, ring, verify
from ringreduce.plan.network import Network, Route, switch
from ringreduce.plan.parameter_server import parameter_server
from ringreduce.plan.simulate import simulate, simulate_symmetric
from ringreduce.topology.planned import Planned
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.rates import Assumed

SIZE = 160e6  # bytes
PCIE = 16e9  # bytes per second and direction
NVLINK = 18e9

# A DGX-1 V100 is these rings and no more: 16 pairs of GPUs, 8 of them joined by two links, so 24 links in all.
DOUBLE = (1, 2, 3, 4, 5, 6, 7, 8)
SINGLE = (1, 4, 6, 3, 5, 8, 2, 7)

LENGTHS = (8, 64, 512, 4096, 16384)
WORKERS = tuple(2**power for power in range(4, 11))
SHARDS = (1, 4, 16)


@dataclass(frozen=True)
class Figure:
    """A figure of the texts, in seconds: what the formula says and what the simulator found."""

    what: str
    text: str
    formula: str
    expected: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.expected


@dataclass(frozen=True)
class Curve:
    """A time over the number of machines: (machines, expected seconds, simulated seconds)."""

    name: str
    formula: str
    points: tuple[tuple[int, float, float], ...]


def over_one_gpu(size: int) -> Plan:
    """All send to rank 0, which sends the sum to all."""
    others = tuple(range(1, size))
    root = (Step(0, Read.INPUT, recv=others, write=True, send=others),)
    other = (Step(0, Read.INPUT, send=(0,)), Step(0, recv=(0,), write=True))
    return Plan("over one GPU", "all_reduce", size, (Channel(1, 1, (root, *(other,) * (size - 1))),))


def dgx1() -> Network:
    """Every NVLink pair of a DGX-1 V100, in both directions; ranks are the numbers of the text less one."""
    capacity: dict[tuple[int, int], float] = {}
    for order, width in ((DOUBLE, 2), (SINGLE, 1)):
        for at, gpu in enumerate(order):
            before = order[at - 1]
            capacity[before - 1, gpu - 1] = capacity[gpu - 1, before - 1] = width * NVLINK
    numbers = {ends: number for number, ends in enumerate(capacity)}
    names = tuple(f"GPU {source + 1} -> GPU {target + 1}" for source, target in capacity)
    return Network(names, tuple(capacity.values()), lambda *ends: Route(((numbers[ends], 1.0),), 0.0))


def rings() -> Plan:
    """all_reduce over the two rings, in one direction, with twice as much on the doubled one."""
    return ring.all_reduce([([gpu - 1 for gpu in order], width) for order, width in ((DOUBLE, 2), (SINGLE, 1))])


def planned() -> Planned:
    """What we plan over the links of a DGX-1 V100, as its own tools number the GPUs."""
    return plan_for(preset("dgx1-v100", Assumed(nvlink=NVLINK / 1e9)))


def without_latency(network: Network) -> Network:
    return Network(network.names, network.capacity, lambda *ends: Route(network.route(*ends).links, 0.0))


def proved(plan: Plan) -> Plan:
    """The plan, if it is right; raises PlanError if not."""
    verify(plan)
    return plan


def figures() -> Iterator[Figure]:
    s, b, link = SIZE, PCIE, NVLINK
    whole = SIZE  # no slices: all is summed before anything is sent back
    four = switch(4, b)
    gpu = simulate(proved(over_one_gpu(4)), four, s, slice_bytes=whole)
    yield Figure("PCIe: one GPU sums", "60", "2 · 3 · S/B", 6 * s / b, gpu.seconds)
    cpu = parameter_server(workers=4, shards=1, size_bytes=s, bandwidth=b)
    yield Figure("PCIe: the CPU sums", "80", "2 · 4 · S/B", 8 * s / b, cpu.seconds)
    parts = simulate(proved(direct.two_shot(4)), four, s)
    yield Figure("PCIe: each a quarter", "15", "2 · 3/4 · S/B", 1.5 * s / b, parts.seconds)
    one_way = simulate(proved(rings()), dgx1(), s)
    yield Figure("DGX-1: two rings", "about 6", "2 · 7/8 · S/3b", 2 * 7 / 8 * s / (3 * link), one_way.seconds)
    long = simulate_symmetric("ring", LENGTHS[-1], s, 3 * link)
    yield Figure(f"{LENGTHS[-1]} GPUs, as wide", "about 6", "2 · S/3b", 2 * s / (3 * link), long.seconds)
    ours = planned()
    both_ways = simulate(proved(ours.plan), without_latency(ours.network), s)
    yield Figure("DGX-1: our plan", "", "2 · 7/8 · S/6b", 2 * 7 / 8 * s / (6 * link), both_ways.seconds)


def lengths() -> Curve:
    """A ring of three NVLinks' bandwidth, longer and longer."""
    bandwidth = 3 * NVLINK
    points = (
        (n, 2 * (n - 1) / n * SIZE / bandwidth, simulate_symmetric("ring", n, SIZE, bandwidth).seconds) for n in LENGTHS
    )
    return Curve("ring of 3 NVLinks", "2 · (n-1)/n · S/3b", tuple(points))


def machines() -> Iterator[Curve]:
    """Parameter servers and a ring, every machine with one link of B to a switch."""
    for shards in SHARDS:
        points = (
            (m, 2 * m / shards * SIZE / PCIE, parameter_server(m, shards, SIZE, PCIE).seconds)
            for m in WORKERS
            if m >= shards
        )
        name = "1 server" if shards == 1 else f"{shards} shards"
        yield Curve(name, "2 · m · S/B" if shards == 1 else f"2 · m/{shards} · S/B", tuple(points))
    points = ((m, 2 * (m - 1) / m * SIZE / PCIE, simulate_symmetric("ring", m, SIZE, PCIE).seconds) for m in WORKERS)
    yield Curve("ring", "2 · (m-1)/m · S/B", tuple(points))


def show(found: list[Figure], ring_of: Curve, curves: list[Curve], console: Console) -> None:
    link, pcie = f"{NVLINK / 1e9:g}", f"{PCIE / 1e9:g}"
    console.print(f"S = {SIZE / 1e6:g} MB, B = {pcie} GB/s (PCIe), b = {link} GB/s (one NVLink), each direction\n")
    title = f"All-reduce of {SIZE / 1e6:g} MB, in ms"
    table = Table("", "the text", "formula", "", "simulated", "ratio", title=title, box=SIMPLE)
    for each in found:
        times = (f"{1e3 * each.expected:5.2f}", f"{1e3 * each.simulated:5.2f}", f"{each.ratio:.3f}")
        table.add_row(each.what, each.text, each.formula, *times)
    console.print(table)

    limit = 2 * SIZE / (3 * NVLINK)
    title = f"The ring's time does not grow with its length: at most 2 · S/3b = {1e3 * limit:.2f} ms"
    table = Table("GPUs", f"{ring_of.formula} (ms)", "simulated (ms)", "ratio", "of the most", title=title, box=SIMPLE)
    for n, expected, simulated in ring_of.points:
        times = (f"{1e3 * expected:.3f}", f"{1e3 * simulated:.3f}", f"{simulated / expected:.3f}")
        table.add_row(f"{n}", *times, f"{simulated / limit:.3f}")
    console.print(table)

    title = "m machines, one link of B each: simulated (ms), and its ratio to the formula"
    table = Table("m", *(f"{curve.name}\n{curve.formula}" for curve in curves), title=title, box=SIMPLE)
    for m in WORKERS:
        cells = ({n: f"{1e3 * t:.1f}  {t / expected:.3f}" for n, expected, t in curve.points} for curve in curves)
        table.add_row(f"{m}", *(row.get(m, "") for row in cells))
    console.print(table)


def draw(found: list[Figure], curves: list[Curve], path: Path) -> None:
    """Bars for the figures, lines for what grows: formulas are lines, simulated times are bars and points."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import FuncFormatter, NullLocator

    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "font.size": 10}
    colours, shapes = ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), ("o", "s", "D", "^")
    with mpl.rc_context(look):
        canvas = Canvas(figsize=(13, 5), layout="constrained")
        left, right = canvas.subplots(1, 2)
        rows = range(len(found))
        left.barh(rows, [1e3 * each.simulated for each in found], 0.6, color="#56B4E9", label="simulated")
        left.plot([1e3 * each.expected for each in found], rows, "|", color="black", ms=28, mew=2, label="formula")
        for row, each in enumerate(found):
            left.annotate(
                f"{1e3 * each.simulated:.2f} ms", (1e3 * each.simulated, row), (8, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        left.set_yticks(rows, [f"{each.what}\n{each.formula}" for each in found])
        left.invert_yaxis()
        left.set_xlim(0, 1.2e3 * max(each.simulated for each in found))
        left.set_xlabel("milliseconds")
        left.set_title(f"all-reduce of {SIZE / 1e6:g} MB", fontweight="bold")
        left.legend(frameon=False, loc="lower right")
        for curve, colour, shape in zip(curves, colours, shapes, strict=True):
            workers, expected, simulated = zip(*curve.points, strict=True)
            right.plot(workers, [1e3 * t for t in expected], color=colour, lw=1.5)
            right.plot(
                workers, [1e3 * t for t in simulated], shape, color=colour, label=f"{curve.name}:  {curve.formula}"
            )
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        right.xaxis.set_minor_locator(NullLocator())
        right.grid(color="#E6E6E6")
        right.set_xlabel("machines (m)")
        right.set_ylabel("milliseconds")
        right.set_title("points simulated, lines by formula", fontweight="bold")
        right.legend(frameon=False)
        canvas.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures and the curves")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    found, ring_of, curves = list(figures()), lengths(), list(machines())
    console = Console()
    show(found, ring_of, curves, console)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found, curves, args.plot)
        console.print(f"picture in {args.plot}")
    ratios = [each.ratio for each in found]
    ratios += [simulated / expected for curve in (ring_of, *curves) for _, expected, simulated in curve.points]
    off = [ratio for ratio in ratios if abs(ratio - 1) > 0.01]
    if off:
        print(f"{len(off)} of {len(ratios)} simulated times are not those of their formulas", file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
