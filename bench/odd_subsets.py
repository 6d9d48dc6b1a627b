"""Where it pays to plan over a machine's links: all_reduce on every subset of its GPUs, next to NCCL's rule.

    python bench/odd_subsets.py --machines dgx1-v100 dgx2:0-7 topology.xml --plot docs/odd_subsets.png

The rule is that of NCCL's search inside a host, as the sources of NCCL 2.30 have it (graph/search.cc, paths.cc and
tuning.cc).  Every two GPUs have one path: over NVLink (XGMI), else over the NVLinks of a third GPU of the job, else
over PCIe.  Channels are rings through all GPUs, all of one width.  Widths are tried from a list, the widest first, and
at each of them first rings over NVLink, then rings with detours, then with PCIe.  What is found first says which hops
may be used; narrower channels are tried down to half of that width, and taken if together they carry more.  all_reduce
may instead go over chains, which NCCL calls trees: as many as rings, each reducing one way and copying the other way.

The rule is granted the best set of channels where NCCL searches for a limited time, and the line rates of our plans.
--machines are presets, or files as `ringreduce topo` reads them; :0-7: of these GPUs. A row has, of the subsets with as
many GPUs, for how many the rule's rings need detours or PCIe, our bandwidth over the rule's, and where it is highest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import harness
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ringreduce.cli.arguments import gpu_list
from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import FABRIC, LinkGraph
from ringreduce.topology.planner import plan_for
from ringreduce.topology.read import described
from ringreduce.topology.routes import Routes, all_routes, fabric_routes

SPEEDS = np.array((40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3)) / 20
"""The widths of channels that NCCL tries (speedArrayIntra), as shares of the 20 GB/s that it takes an NVLink for."""


LEAST_SHARE = 0.49
"""Of the width of the best channels: narrower ones are not tried."""

DOUBLED = 1.25
"""Channels so wide are cut into two each."""

PCIE_AS_LANES = 25.0
"""GB/s that the widths are shares of where GPUs have no links of their own."""

Collective = Literal["all_reduce", "all_gather"]
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda size: 2 * (size - 1),
    "all_gather": lambda size: size - 1,
}
"""By collective: how many parts, of as many as there are GPUs, a ring sends over each of its hops."""

HOPS = ("over NVLink", "with detours", "over PCIe")

MOST_GPUS = 8
"""Of which all subsets are looked at, and all orders of each."""


class Channels(NamedTuple):
    """So many channels, the width that was tried, the worst hop, and the width that links have for each, in NVLinks."""

    number: int
    width: float
    worst: int
    carried: float


class Subset(NamedTuple):
    """Some GPUs, and GB/s of a collective (the tensor's size over the time): by our plan, by NCCL's rings, its chains.
    `worst` is of the rings' hops."""

    gpus: tuple[int, ...]
    ours: float
    rings: float
    chains: float
    worst: int

    @property
    def gain(self) -> float:
        return self.ours / max(self.rings, self.chains)


def subset(graph: LinkGraph, gpus: tuple[int, ...], collective: str) -> Subset:
    part, size = graph.select(gpus), len(gpus)
    planned, routes = plan_for(part, collective), all_routes(part)
    crossing, kinds = paths(part, routes)
    lane = min((link.capacity / link.lanes for link in routes.links if link.kind in FABRIC), default=PCIE_AS_LANES)
    capacity = np.array([link.capacity / lane for link in routes.links])
    orders = np.array([(0, *rest) for rest in permutations(range(1, size))])
    after = np.roll(orders, -1, axis=1)
    rings = search(crossing[orders, after].sum(axis=1), kinds[orders, after].max(axis=1), capacity)
    by_rings = rings.number * rings.carried * lane * size / STEPS[collective](size)
    by_chains = 0.0
    if collective == "all_reduce":
        orders = np.array([order for order in permutations(range(size)) if order[0] < order[-1]])
        ends = orders[:, 1:], orders[:, :-1]
        # A chain's channel carries half of its width each way.
        halves = (crossing + crossing.transpose(1, 0, 2))[ends].sum(axis=1) / 2
        chains = search(halves, kinds[ends].max(axis=1), capacity, rings.number)
        by_chains = chains.number * chains.carried * lane / 2
    return Subset(gpus, planned.bandwidth, by_rings, by_chains, rings.worst)


def search(shapes: Any, kinds: Any, capacity: Any, exactly: int = 0) -> Channels:
    """The channels of the rule: `shapes` has what each possible one of width 1 puts on each link, `kinds` its worst
    hop."""
    best = Channels(0, 0.0, len(HOPS) - 1, 0.0)
    for width in SPEEDS:
        if width <= LEAST_SHARE * best.width:
            break
        for worst in range(best.worst + 1):
            found = packed(shapes[kinds <= worst], capacity, width, exactly)
            if found[0] * width > best.number * best.width * (1 + 1e-9):
                best = Channels(found[0], width, worst, found[1])
                break
    if not exactly and best.width >= DOUBLED:
        best = Channels(2 * best.number, best.width / 2, best.worst, best.carried / 2)
        for width in SPEEDS[::-1]:
            found = packed(shapes[kinds <= best.worst], capacity, width, best.number)
            if width > best.width and found[0]:
                best = Channels(best.number, width, best.worst, found[1])
    return best


def paths(part: LinkGraph, routes: Routes) -> tuple[Any, Any]:
    """By sender, receiver and link the share of what is sent that crosses the link, on the one path of NCCL's rule; and
    by sender and receiver its kind, a number of `HOPS`."""
    own, size = fabric_routes(part).between, routes.size
    wide = {pair: min(routes.links[at].capacity / share for at, share in routes.between[pair]) for pair in own}
    crossing, kinds = np.zeros((size, size, len(routes.links))), np.zeros((size, size), int)
    for one, other in permutations(range(size), 2):
        thirds = [third for third in range(size) if (one, third) in own and (third, other) in own]
        ways = [(one, other)]
        if (one, other) not in own and thirds:
            third = max(thirds, key=lambda third: min(wide[one, third], wide[third, other]))
            ways = [(one, third), (third, other)]
        kinds[one, other] = 0 if (one, other) in own else 1 if thirds else 2
        for way in ways:
            for link, share in routes.between[way]:
                crossing[one, other, link] += share
    return crossing, kinds


def packed(shapes: Any, capacity: Any, width: float, exactly: int = 0) -> tuple[int, float]:
    """How many channels of a width fit the links at once, several perhaps of one shape, or 0 if not `exactly` so many;
    and how wide the links let them be."""
    shapes = np.unique(shapes, axis=0)
    shapes = shapes[(shapes * width <= capacity * (1 + 1e-9)).all(axis=1)]
    if not len(shapes):
        return 0, 0.0
    single = float((capacity / np.maximum(shapes, 1e-12)).min(axis=1).max())
    found = milp(
        -np.ones(len(shapes)),
        integrality=np.ones(len(shapes)),
        bounds=Bounds(0, np.inf),
        constraints=[
            LinearConstraint(shapes.T, -np.inf, capacity / width * (1 + 1e-9)),
            LinearConstraint(np.ones((1, len(shapes))), 0, exactly or np.inf),
        ],
    )
    count = round(-found.fun)
    if count < exactly:
        return 0, 0.0
    return count, single if count == 1 else float((capacity / np.maximum(np.round(found.x) @ shapes, 1e-12)).min())


def draw(found: dict[str, list[Subset]], path: Path, collective: str) -> None:
    from ringreduce.topology.draw.style import GREY, PALETTE, sheet

    what = f"{collective} on every subset: our plan's bandwidth over that of NCCL's rule, at line rate"
    figure = sheet("Where it pays", what, (9, 5.4))
    axes = figure.add_axes((0.08, 0.12, 0.88, 0.7))
    for at, (name, subsets) in enumerate(found.items()):
        for size in sorted({len(each.gpus) for each in subsets}):
            gains = sorted(each.gain for each in subsets if len(each.gpus) == size)
            wide = 0.24 * np.linspace(-0.5, 0.5, len(gains)) if len(gains) > 1 else [0.0]
            places = [size + 0.28 * (at - (len(found) - 1) / 2) + shift for shift in wide]
            label = name if size == 2 else None
            axes.plot(places, gains, "o", ms=3.5, alpha=0.7, color=PALETTE[at % len(PALETTE)], label=label)
    axes.axhline(1, color=GREY, lw=1)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def odd_subsets(
    machines: tuple[str, ...] = ("dgx1-v100", "dgx2:0-7"), collective: Collective = "all_reduce", plot: str = ""
) -> Iterator[dict[str, Any]]:
    found: dict[str, list[Subset]] = {}
    for machine in machines:
        name, _, some = machine.partition(":")
        try:
            graph = described(name)
            gpus = graph.places(gpu_list(some)) if some else range(len(graph.gpus))
        except (TopologyError, argparse.ArgumentTypeError) as error:
            raise harness.CannotRun(f"--machines {machine}: {error}") from None
        if not 2 <= len(gpus) <= MOST_GPUS:
            raise harness.CannotRun(
                f"--machines {machine}: {len(gpus)} GPUs; name 2 to {MOST_GPUS} of them, as in :0-7"
            )
        every = [chosen for size in range(2, len(gpus) + 1) for chosen in combinations(gpus, size)]
        found[Path(name).stem] = all_of = [subset(graph, chosen, collective) for chosen in every]
        for size in (*range(2, len(gpus) + 1), "all"):
            some_of = [each for each in all_of if size in (len(each.gpus), "all")]
            gains = [each.gain for each in some_of]
            row = {"machine": graph.name, "GPUs": size, "subsets": len(gains)}
            row |= {f"rings {HOPS[kind]}": sum(each.worst == kind for each in some_of) for kind in (1, 2)}
            row |= {"median": median(gains), "largest": max(gains), "least": min(gains)}
            best = some_of[gains.index(max(gains))]
            yield {**row, "5% faster": sum(gain >= 1.05 for gain in gains), "largest on": " ".join(map(str, best.gpus))}
    if plot:
        draw(found, Path(plot), collective)


if __name__ == "__main__":
    sys.exit(harness.main(odd_subsets))
