"""A machine with its rings or trees, each in a colour of its own and as wide as what it carries.

Ranks stand on a circle in the order of the widest ring, which so is the outline, and other rings are chords.  Rings
that share a link run side by side.  Inside the circle, in grey, are the switches and CPUs that they go through.
Several hosts are several circles, around the network.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.topology.draw.placing import DISC, GAP, Scene, Strand, closest, lay_out, leaf_switches, on_circle
from ringreduce.topology.draw.style import (
    A4,
    GREY,
    INK,
    PALE,
    TINTS,
    colour,
    dash,
    literal,
    machine_name,
    rank_label,
    save,
    sheet,
    spoken,
)
from ringreduce.topology.graph import FABRIC, LinkGraph, Node, NodeKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringreduce.topology.rings import Ring
    from ringreduce.topology.trees import WeightedTree

WIDEST, THINNEST = 7.0, 1.6
"""Points: the line of the widest ring, and the thinnest line that is still seen."""


MOST_GROUPS = 8
"""NUMA nodes up to which they are shown; a rack has dozens."""

MOST_NAMED = 20
"""PCIe switches up to which they are; more are small squares."""

UNUSED = (0, (3, 2))
"""Dashes of a link that no ring or tree uses."""


def machine(
    graph: LinkGraph,
    rings: Sequence[Ring],
    trees: Sequence[WeightedTree],
    path: str | Path,
    ranks: Sequence[str] | None = None,
    note: str = "",
) -> None:
    """Draw the machine and what is planned on it; `note` is a line below the title.

    `ranks` names the node of each rank; without it they are the GPUs, or the cores where there are no GPUs.
    """
    names = list(ranks) if ranks is not None else [node.name for node in graph.ranks]
    strands = _strands(graph, names, rings, trees)
    order = [names[rank] for rank in rings[0].order] if rings else names
    scene = Scene(graph, order, strands, _needs_more(graph, names, strands))
    lay_out(scene)
    width, height = A4[1] / A4[0], 0.93
    scene.point = 2 * scene.extent / (min(A4[0] * width, A4[1] * height) * 72)
    scene.node = min(19.0, max(5.0, 0.42 * closest(scene) / scene.point))
    _thin_out(scene)

    figure = sheet(machine_name(graph), note)
    axes = figure.add_axes((0.01, 0.0, width, height))
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-scene.extent, scene.extent)
    axes.set_ylim(-scene.extent, scene.extent)
    _draw_groups(axes, scene)
    unused = _draw_links(axes, scene)
    _draw_strands(axes, scene)
    _draw_nodes(axes, scene)
    _draw_legend(figure, scene, unused, width + 0.015)
    save(figure, path)


# What is drawn.


def _strands(
    graph: LinkGraph, names: Sequence[str], rings: Sequence[Ring], trees: Sequence[WeightedTree]
) -> list[Strand]:
    label = {name: rank_label(graph, name) for name in names}
    widest = max([ring.width for ring in rings] + [tree.width for tree in trees], default=1.0)
    most_points = WIDEST / max(1.0, (len(rings) + len(trees)) / 4)

    def strand(hops: Sequence[tuple[str, str]], width: float, title: str, detail: str, **more: Any) -> Strand:
        at = len(strands)
        points = max(THINNEST, most_points * width / widest)
        return Strand(tuple(hops), width, points, colour(at), dash(at), title=title, detail=detail, **more)

    strands: list[Strand] = []
    for ring in rings:
        order = [names[rank] for rank in ring.order]
        hops = list(zip(order, order[1:] + order[:1], strict=True))
        if len(order) == 2 and ring.both_ways:
            hops.pop()
        title = f"{ring.width:.4g} GB/s {'both ways' if ring.both_ways else 'one way'}"
        detail = _listed([label[name] for name in (*order, order[0])])
        strands.append(strand(hops, ring.width, title, detail, one_way=not ring.both_ways))
    for tree in trees:
        hops = [(names[rank], names[parent]) for rank, parent in enumerate(tree.parents) if parent is not None]
        root = names[tree.parents.index(None)]
        detail = " ".join(f"{label[child]}-{label[parent]}" for child, parent in hops)
        title = f"{tree.width:.4g} GB/s, root {label[root]}"
        strands.append(strand(hops, tree.width, title, detail, one_way=False, root=root))
    return strands


def _listed(labels: Sequence[str]) -> str:
    """Labels in a line; of many numbers that follow one another, the first two and the last."""
    runs: list[list[str]] = []
    for label in labels:
        if runs and label.isdecimal() and runs[-1][-1].isdecimal() and int(label) == int(runs[-1][-1]) + 1:
            runs[-1].append(label)
        else:
            runs.append([label])
    return " ".join(" ".join(run) if len(run) < 20 else f"{run[0]} {run[1]} … {run[-1]}" for run in runs)


def _needs_more(graph: LinkGraph, names: Sequence[str], strands: Sequence[Strand]) -> bool:
    """Whether some hop inside a host, or without a plan some rank, has no accelerators' own links to go by."""

    def own(a: str, b: str) -> bool:
        if (a, b) in graph.by_ends and graph.by_ends[a, b].kind in FABRIC:
            return True
        switches = [link.dst for link in graph.following[a] if graph.by_name[link.dst].kind is NodeKind.NVSWITCH]
        return any((switch, b) in graph.by_ends for switch in switches)

    if strands:
        hops = {hop for strand in strands for hop in strand.hops}
        return not all(own(a, b) for a, b in hops if graph.by_name[a].host == graph.by_name[b].host)
    return not all(any(link.kind in FABRIC for link in graph.following[name]) for name in names)


# How it is drawn.


def _draw_groups(axes: Axes, scene: Scene) -> None:
    """A disc behind each of several hosts; behind neighbours of the same NUMA node of a lone one, an arc."""
    from matplotlib.patches import Circle, Wedge

    if len(scene.centre) > 1:
        for host, (x, y) in scene.centre.items():
            axes.add_patch(Circle((x, y), DISC, facecolor="#F6F6F6", edgecolor=PALE, zorder=0))
            axes.text(x, y + DISC + 0.03, f"host {host}", ha="center", va="bottom", fontsize=11, color=INK)
        return
    numas = sorted({numa for name in scene.ranks if (numa := scene.graph.by_name[name].numa) is not None})
    if not 2 <= len(numas) <= MOST_GROUPS:
        return
    thickness = max(2.6 * scene.node * scene.point, 0.1)
    reach = min(0.9 * math.pi / len(scene.ranks), 0.5)
    for numa, names in _numa_runs(scene):
        first, last = (math.atan2(*reversed(scene.at[name])) for name in (names[0], names[-1]))
        low, span = last - reach, (first - last) % (2 * math.pi) + 2 * reach
        tint = TINTS[numas.index(numa) % len(TINTS)]
        arc = Wedge((0, 0), 1 + thickness / 2, math.degrees(low), math.degrees(low + span), width=thickness)
        arc.set(facecolor=tint, edgecolor="none", zorder=0.5)
        axes.add_patch(arc)
        middle = low + span / 2
        turned = (math.degrees(middle) % 180) - 90
        axes.text(*on_circle((0, 0), 1.045 + thickness / 2, middle), f"NUMA {numa}", rotation=turned,
                  ha="center", va="center", fontsize=9, color=GREY)  # fmt: skip


def _numa_runs(scene: Scene) -> Iterator[tuple[int, list[str]]]:
    """Neighbours on the circle that are of one NUMA node."""
    numa = [scene.graph.by_name[name].numa for name in scene.ranks]
    begin = next(at for at in range(len(numa)) if numa[at] != numa[at - 1])
    turned = [*scene.ranks[begin:], *scene.ranks[:begin]]
    for its_numa, run in groupby(turned, key=lambda name: scene.graph.by_name[name].numa):
        if its_numa is not None:
            yield its_numa, list(run)


def _draw_links(axes: Axes, scene: Scene) -> bool:
    """In grey, what strands go through, and, dashed, what none uses.  Returns whether there is such a link."""
    hops = {frozenset(hop) for strand in scene.strands for hop in strand.hops}
    drawn: set[frozenset[str]] = set()
    unused = False
    widest = max((link.capacity for link in scene.graph.links), default=1.0)
    for link in scene.graph.links:
        ends = frozenset((link.src, link.dst))
        wanted = link.kind in FABRIC or scene.outside
        if not wanted or ends in drawn or not ends <= scene.at.keys():
            continue
        drawn.add(ends)
        between_ranks = ends <= set(scene.ranks)
        if between_ranks and ends in hops:
            continue
        dashed = between_ranks and bool(scene.strands)
        unused |= dashed
        xs, ys = zip(scene.at[link.src], scene.at[link.dst], strict=True)
        thick = 1.2 if dashed else 2.0 if len(scene.ranks) <= 32 else 0.7
        if not scene.strands and between_ranks:
            thick = max(THINNEST, WIDEST * link.capacity / widest)
        axes.plot(xs, ys, color=PALE, linewidth=thick, linestyle=UNUSED if dashed else "solid", zorder=1)
    if len(scene.centre) > 1:
        leaves = leaf_switches(scene)
        for host, (x, y) in scene.centre.items():
            rim = 1 - DISC / math.hypot(x, y)
            for left, bottom in [scene.at[leaf] for leaf, below in leaves.items() if host in below] or [(0.0, 0.0)]:
                axes.plot([left, x * rim], [bottom, y * rim], color=PALE, linewidth=3, zorder=0.2)
        for leaf in leaves:
            axes.plot([0, scene.at[leaf][0]], [0, scene.at[leaf][1]], color=PALE, linewidth=3, zorder=0.2)
    return unused


def _beside(scene: Scene) -> Mapping[frozenset[str], list[Strand]]:
    """The strands between every two ranks."""
    beside: dict[frozenset[str], list[Strand]] = defaultdict(list)
    for strand in scene.strands:
        for hop in strand.hops:
            beside[frozenset(hop)].append(strand)
    return beside


def _thin_out(scene: Scene) -> None:
    """Lines and gaps so thin that what lies side by side is no wider than the ranks that it joins."""
    widest = max((sum(each.points + GAP for each in strands) for strands in _beside(scene).values()), default=0.0)
    share = min(1.0, 1.7 * scene.node / widest) if widest else 1.0
    scene.gap = GAP * share
    scene.strands = [replace(strand, points=strand.points * share) for strand in scene.strands]


def _draw_strands(axes: Axes, scene: Scene) -> None:
    """Lines of the same two ranks side by side, all together centred between them; one-way rings with arrows."""
    from matplotlib.patches import Polygon

    beside = _beside(scene)
    passed: dict[frozenset[str], float] = defaultdict(float)
    for strand in scene.strands:
        for a, b in strand.hops:
            pair = frozenset((a, b))
            total = sum(other.points + scene.gap for other in beside[pair]) - scene.gap
            aside = (passed[pair] + strand.points / 2 - total / 2) * scene.point
            passed[pair] += strand.points + scene.gap
            (x1, y1), (x2, y2) = scene.at[a], scene.at[b]
            length = math.dist((x1, y1), (x2, y2))
            ex, ey = (x2 - x1) / length, (y2 - y1) / length
            sign = 1 if a < b else -1  # the same side for both directions
            dx, dy = -ey * aside * sign, ex * aside * sign
            axes.plot([x1 + dx, x2 + dx], [y1 + dy, y2 + dy], color=strand.colour, linewidth=strand.points,
                      linestyle=strand.dash, solid_capstyle="butt", zorder=3)  # fmt: skip
            if strand.one_way:
                tip = x1 + 0.56 * (x2 - x1) + dx, y1 + 0.56 * (y2 - y1) + dy
                long, half = (2 * strand.points + 7) * scene.point, (0.75 * strand.points + 3) * scene.point
                foot = tip[0] - long * ex, tip[1] - long * ey
                head = [tip, (foot[0] - half * ey, foot[1] + half * ex), (foot[0] + half * ey, foot[1] - half * ex)]
                axes.add_patch(Polygon(head, facecolor=strand.colour, edgecolor="white", linewidth=0.8, zorder=4))


def _draw_nodes(axes: Axes, scene: Scene) -> None:
    from matplotlib.patches import Circle

    graph = scene.graph
    roomy = scene.node > 15  # room for a word above the number
    for name in scene.ranks:
        x, y = scene.at[name]
        node = graph.by_name[name]
        roots = [strand for strand in scene.strands if strand.root == name][:4]
        for at, strand in reversed(list(enumerate(roots, 1))):
            radius = (scene.node + 2.6 * at) * scene.point
            axes.add_patch(Circle((x, y), radius, facecolor=strand.colour, edgecolor="white", linewidth=0.6, zorder=5))
        radius = scene.node * scene.point
        axes.add_patch(Circle((x, y), radius, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=6))
        axes.text(x, y - 0.12 * radius * roomy, str(node.index), ha="center", va="center", color=INK, zorder=7,
                  fontsize=min(15.0, scene.node * 0.95), fontweight="bold")  # fmt: skip
        if roomy:
            word = "core" if node.kind is NodeKind.CORE else "GPU"
            axes.text(x, y + 0.55 * radius, word, ha="center", va="center", fontsize=6.5, color=GREY, zorder=7)
    box = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": GREY, "linewidth": 1.2}
    for node, text in _boxes(scene):
        if not text:
            axes.plot(*scene.at[node.name], "s", color="white", markeredgecolor=GREY, markersize=5, zorder=6)
            continue
        size = 10 if node.kind is NodeKind.NVSWITCH else 8.5
        axes.text(*scene.at[node.name], text, ha="center", va="center", fontsize=size, color=INK, bbox=box, zorder=6)


def _boxes(scene: Scene) -> Iterator[tuple[Node, str]]:
    """What is drawn as a box, and its text; NVSwitches of a host as one."""
    for host in scene.centre:
        fabric = [node for node in scene.graph.of_kind(NodeKind.NVSWITCH) if node.host == host]
        if fabric:
            yield fabric[0], "NVSwitch" if len(fabric) == 1 else f"{len(fabric)} NVSwitches"
    switches = sum(node.name in scene.at for node in scene.graph.of_kind(NodeKind.PCIE))
    for node in scene.graph.nodes:
        if node.name in scene.at and node.kind in (NodeKind.PCIE, NodeKind.CPU, NodeKind.NETWORK):
            named = node.kind is not NodeKind.PCIE or switches <= MOST_NAMED
            yield node, literal(spoken(node)) if named else ""


def _draw_legend(figure: Figure, scene: Scene, unused: bool, left: float) -> None:
    """Beside the machine: what each colour is, and what was assumed."""
    from matplotlib.lines import Line2D

    def sample(y: float, **style: Any) -> None:
        figure.add_artist(Line2D([left, left + 0.035], [y - 0.011, y - 0.011], solid_capstyle="butt", **style))

    y, bottom = 0.86, 0.06
    assumed = [line for text in scene.graph.assumed for line in textwrap.wrap(text, 50)][:12]
    if assumed:
        bottom += 0.024 * len(assumed) + 0.05
    for at, strand in enumerate(scene.strands):
        lines = textwrap.wrap(strand.detail, 34, break_long_words=False)
        lines = lines[:5] + ["…"] * (len(lines) > 5)
        below = y - 0.054 - 0.022 * len(lines)
        if below < bottom + 0.03:
            figure.text(left, y, f"and {len(scene.strands) - at} more", fontsize=10, color=GREY, va="top")
            y -= 0.04
            break
        sample(y, color=strand.colour, linewidth=strand.points, linestyle=strand.dash)
        figure.text(left + 0.045, y, strand.title, fontsize=11, fontweight="bold", color=INK, va="top")
        figure.text(left + 0.045, y - 0.032, literal("\n".join(lines)), fontsize=9, color=INK, va="top",
                    family="DejaVu Sans Mono", linespacing=1.35)  # fmt: skip
        y = below
    if unused:
        sample(y, color=GREY, linewidth=1.2, linestyle=UNUSED)
        figure.text(left + 0.045, y, "carries nothing", fontsize=10, color=GREY, va="top")
    if assumed:
        figure.text(left, bottom - 0.012, "Assumed", fontsize=9, fontweight="bold", color=GREY, va="top")
        text = literal("\n".join(assumed))
        figure.text(left, bottom - 0.035, text, fontsize=8, color=GREY, va="top", linespacing=1.3)
