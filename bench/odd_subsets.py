"""Where it pays to plan over a machine's links: all_reduce on every subset of its GPUs, next to NCCL's rule.

    python bench/odd_subsets.py dgx1-v100 --plot docs/odd_subsets.png
    python bench/odd_subsets.py topology.xml --table subsets.csv

NCCL's rule for one host, as its sources have it: rings over NVLink (XGMI) alone, each hop as wide as whole links, as
many as the links allow; where there is no such ring, a ring over PCIe.  The rule is granted the best packing of rings
that there is, where NCCL searches greedily for a limited time, and the same line rates as our plans.  Left out
are NCCL's hops over a third GPU's NVLinks, which some versions have.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ringreduce.topology.graph import FABRIC, LinkGraph
from ringreduce.topology.planner import plan_for
from ringreduce.topology.read import described


class Subset(NamedTuple):
    """Some GPUs, and GB/s of all_reduce (the tensor's size over the time): by our plan, by NCCL's rule, at most."""

    gpus: tuple[int, ...]
    ours: float
    rule: float
    bound: float
    rings: int
    """Of the rule, over the accelerators' own links; 0 where it takes PCIe."""

    @property
    def gain(self) -> float:
        return self.ours / self.rule


def subset(graph: LinkGraph, gpus: tuple[int, ...]) -> Subset:
    part = graph.select(gpus)
    planned = plan_for(part)
    rings, lane = whole_rings(part)
    size = len(gpus)
    if rings:
        rule = rings * lane * size / (2 * (size - 1))
    else:
        without = replace(part, links=tuple(link for link in part.links if link.kind not in FABRIC))
        rule = plan_for(without, algorithm="rings").bandwidth
    return Subset(gpus, planned.bandwidth, rule, planned.bound, rings)


def whole_rings(graph: LinkGraph) -> tuple[int, float]:
    """The most rings in one direction that use whole links, and GB/s of a link; switches count as links to all."""
    names = [gpu.name for gpu in graph.gpus]
    lanes: dict[tuple[int, int], int] = {}
    own = [link for link in graph.links if link.kind in FABRIC]
    if not own:
        return 0, 0.0
    lane = min(link.capacity / link.lanes for link in own)
    if any(link.dst not in names for link in own):
        return min(link.lanes for link in own), lane
    for link in own:
        if {link.src, link.dst} <= set(names):
            lanes[names.index(link.src), names.index(link.dst)] = link.lanes
    size = len(names)
    orders = [(0, *rest) for rest in permutations(range(1, size))]
    hops = [[(order[at - 1], order[at]) for at in range(size)] for order in orders]
    cycles = [cycle for cycle in hops if all(hop in lanes for hop in cycle)]
    if not cycles:
        return 0, lane
    pairs = list(lanes)
    uses = np.array([[float(pair in cycle) for cycle in map(set, cycles)] for pair in pairs])
    found = milp(
        -np.ones(len(cycles)),
        integrality=np.ones(len(cycles)),
        bounds=Bounds(0, max(lanes.values())),
        constraints=LinearConstraint(uses, -np.inf, list(lanes.values())),
    )
    return round(-found.fun), lane


def show(found: list[Subset]) -> None:
    by_size = defaultdict(list)
    for each in found:
        by_size[len(each.gpus)].append(each)
    print("| GPUs | subsets | over PCIe by the rule | ours / rule: median | largest | of our bound, least |")
    print("|---|---|---|---|---|---|")
    rows = [*by_size.items(), ("all", found)]
    for size, subsets in rows:
        gains = [each.gain for each in subsets]
        least = min(each.ours / each.bound for each in subsets)
        pcie = sum(not each.rings for each in subsets)
        print(f"| {size} | {len(subsets)} | {pcie} | {median(gains):.2f} | {max(gains):.2f} | {least:.3f} |")
    best = max(found, key=lambda each: each.gain)
    print(f"\nlargest: GPUs {', '.join(map(str, best.gpus))}: {best.ours:.4g} GB/s, by the rule {best.rule:.4g}")


def draw(found: list[Subset], path: Path, title: str) -> None:
    from ringreduce.topology.draw.style import GREY, PALETTE, sheet

    figure = sheet((9, 5.4), title, "all_reduce on every subset: our plan's bandwidth over that of NCCL's rule")
    axes = figure.add_axes((0.08, 0.12, 0.88, 0.7))
    for rings, colour, name in ((True, PALETTE[0], "rule: rings over NVLink"), (False, PALETTE[1], "rule: over PCIe")):
        chosen = [each for each in found if bool(each.rings) == rings]
        shift = np.linspace(-0.3, 0.3, len(chosen) or 1)
        at = [
            len(each.gpus) + float(to)
            for each, to in zip(chosen, np.random.default_rng(0).permutation(shift), strict=True)
        ]
        axes.plot(at, [each.gain for each in chosen], "o", ms=4, alpha=0.7, color=colour, label=name)
    axes.axhline(1, color=GREY, lw=1)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", help="a preset, or a file as `ringreduce topo` reads it")
    parser.add_argument("--table", type=Path, help="every subset, as CSV")
    parser.add_argument("--plot", type=Path, help="the gains, as a picture")
    arguments = parser.parse_args()
    graph = described(arguments.machine)
    count = len(graph.gpus)
    every = [gpus for size in range(2, count + 1) for gpus in combinations(range(count), size)]
    found = [subset(graph, gpus) for gpus in every]
    print(f"{graph.name}: {len(found)} subsets\n")
    show(found)
    if arguments.table:
        with arguments.table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("gpus", "ours_GBps", "rule_GBps", "bound_GBps", "rings_of_rule", "gain"))
            for each in found:
                figures = (f"{figure:.4g}" for figure in (each.ours, each.rule, each.bound, each.rings, each.gain))
                writer.writerow((" ".join(map(str, each.gpus)), *figures))
    if arguments.plot:
        draw(found, arguments.plot, graph.name)


if __name__ == "__main__":
    main()
