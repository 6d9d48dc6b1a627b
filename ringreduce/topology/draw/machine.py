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
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

GAP = 2.2
"""Points between the lines of rings that share a link."""

DISC = 1.27
"""Radius of what is shaded as one host; its ranks stand on a circle of radius 1."""

MOST_GROUPS = 8
"""NUMA nodes up to which they are shown; a rack has dozens."""

MOST_NAMED = 20
"""PCIe switches up to which they are; more are small squares."""

UNUSED = (0, (3, 2))
"""Dashes of a link that no ring or tree uses."""

Point = tuple[float, float]


class Places(NamedTuple):
    """Of nodes in a picture, and of the circles of hosts, whose radius is `DISC`; y upwards."""

    at: dict[str, Point]
    centre: dict[int, Point]


@dataclass(frozen=True)
class _Strand:
    """What is drawn of one ring or tree: its hops, and how."""

    hops: tuple[tuple[str, str], ...]
    width: float
    points: float
    """The line's width."""
    colour: str
    dash: Any
    one_way: bool
    title: str
    detail: str
    root: str | None = None


@dataclass
class _Scene:
    """Everything that is drawn, and where."""

    graph: LinkGraph
    ranks: Sequence[str]
    """In the order of the circle."""
    strands: Sequence[_Strand]
    outside: bool
    """Whether PCIe, memory and CPUs are part of the picture: not where accelerators' own links do it all."""
    nics: bool = False
    """Whether NICs are."""
    at: dict[str, Point] = field(default_factory=dict)
    centre: dict[int, Point] = field(default_factory=dict)
    """Of each host's circle."""
    extent: float = 1.3
    """The picture is from -extent to extent, both ways."""
    point: float = 0.0
    """A typographic point in the picture's unit."""
    node: float = 0.0
    """Radius of a rank, in points."""
    gap: float = GAP
    """Between lines that lie side by side, in points."""

    def of_host(self, host: int) -> list[str]:
        return [name for name in self.ranks if self.graph.by_name[name].host == host]


def machine(
    graph: LinkGraph,
    rings: Sequence[Ring],
    trees: Sequence[WeightedTree],
    path: str | Path,
    ranks: Sequence[str] | None = None,
    note: str = "",
    inches: tuple[float, float] = A4,
) -> None:
    """Draw the machine and what is planned on it; `note` is a line below the title.

    `ranks` names the node of each rank; without it they are the GPUs, or the cores where there are no GPUs.
    """
    names = list(ranks) if ranks is not None else [node.name for node in graph.ranks]
    strands = _strands(graph, names, rings, trees)
    order = [names[rank] for rank in rings[0].order] if rings else names
    scene = _Scene(graph, order, strands, _needs_more(graph, names, strands))
    _place(scene)
    width, height = inches[1] / inches[0], 0.93
    scene.point = 2 * scene.extent / (min(inches[0] * width, inches[1] * height) * 72)
    scene.node = min(19.0, max(5.0, 0.42 * _closest(scene) / scene.point))
    _thin_out(scene)

    figure = sheet(inches, machine_name(graph), note)
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
) -> list[_Strand]:
    label = {name: rank_label(graph, name) for name in names}
    widest = max([ring.width for ring in rings] + [tree.width for tree in trees], default=1.0)
    most_points = WIDEST / max(1.0, (len(rings) + len(trees)) / 4)

    def strand(hops: Sequence[tuple[str, str]], width: float, title: str, detail: str, **more: Any) -> _Strand:
        at = len(strands)
        points = max(THINNEST, most_points * width / widest)
        return _Strand(tuple(hops), width, points, colour(at), dash(at), title=title, detail=detail, **more)

    strands: list[_Strand] = []
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


def _needs_more(graph: LinkGraph, names: Sequence[str], strands: Sequence[_Strand]) -> bool:
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


# Where it is drawn.


def places(graph: LinkGraph, names: Sequence[str], rings: Sequence[Ring], trees: Sequence[WeightedTree]) -> Places:
    """Where `machine` draws the ranks `names` and all that they are linked through."""
    order = [names[rank] for rank in rings[0].order] if rings else list(names)
    scene = _Scene(graph, order, (), outside=True, nics=True)
    _place(scene)
    waiting = [node.name for node in graph.nodes if node.name not in scene.at]
    while waiting:  # NICs of CPUs and the like, between what is there
        found = {
            name: [scene.at[link.dst] for link in graph.following[name] if link.dst in scene.at] for name in waiting
        }
        scene.at.update({n: (_mean([x for x, _ in at]), _mean([y for _, y in at])) for n, at in found.items() if at})
        if not any(found.values()):
            break
        waiting = [name for name in waiting if name not in scene.at]
    return Places(scene.at, scene.centre)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _place(scene: _Scene) -> None:
    """Every host a circle of its ranks, clockwise; hosts on a circle around the network, clockwise from the left."""
    hosts = list(dict.fromkeys(scene.graph.by_name[name].host for name in scene.ranks))
    far = 1.48 / math.sin(math.pi / len(hosts)) + 0.7 * bool(_leaves(scene)) if len(hosts) > 1 else 0.0
    scene.extent = far + (1.45 if len(hosts) > 1 else 1.3)
    for at, host in enumerate(hosts):
        ranks = scene.of_host(host)
        towards = math.pi - 2 * math.pi * at / len(hosts)
        scene.centre[host] = _on_circle((0.0, 0.0), far, towards)
        # A lone host's first rank is at the top left; among several the first and the last face the network.
        first = math.pi / 2 + math.pi / len(ranks) if len(hosts) == 1 else towards + math.pi - math.pi / len(ranks)
        for place, name in enumerate(ranks):
            scene.at[name] = _on_circle(scene.centre[host], 1.0, first - 2 * math.pi * place / len(ranks))
        _place_inside(scene, host, ranks)
    for node in scene.graph.of_kind(NodeKind.NETWORK):
        scene.at[node.name] = (0.0, 0.0)
    wanted = {}
    for place, (leaf, below) in enumerate(_leaves(scene).items()):
        x, y = (sum(scene.centre[host][axis] for host in below) for axis in (0, 1))
        turn = 2 * math.pi * place / len(_leaves(scene))
        wanted[leaf] = turn if math.hypot(x, y) < 1e-6 else math.atan2(y, x)  # below all hosts: evenly
    radius = (far - DISC) / 2
    for name, angle in (_apart(wanted, 0.5 / radius) if wanted else {}).items():
        scene.at[name] = _on_circle((0.0, 0.0), radius, angle)


def _leaves(scene: _Scene) -> dict[str, set[int]]:
    """The switches between hosts and the network, with the hosts below that are drawn."""
    graph = scene.graph
    drawn = {graph.by_name[name].host for name in scene.ranks}
    switches = [node.name for node in graph.of_kind(NodeKind.NETWORK)]
    below = {name: graph.below(name) & drawn for name in switches} if len(switches) > 1 else {}
    return {name: hosts for name, hosts in below.items() if hosts}


def _place_inside(scene: _Scene, host: int, ranks: Sequence[str]) -> None:
    """NVSwitches at the centre of a host, CPUs near it and PCIe switches further out, towards the ranks below them."""
    graph, centre = scene.graph, scene.centre[host]
    here = [node for node in graph.nodes if node.host == host]
    fabric = [node for node in here if node.kind is NodeKind.NVSWITCH]
    scene.at.update({node.name: centre for node in fabric})
    if not scene.outside:
        return
    levels: dict[float, list[Node]] = defaultdict(list)
    for node in here:
        if node.kind is NodeKind.CPU and _below(graph, node, ranks):
            levels[0.45 if fabric else 0.3].append(node)
        if node.kind is NodeKind.PCIE and _below(graph, node, ranks):
            leaf = any(link.dst in ranks for link in graph.following[node.name])
            levels[0.7 if leaf else 0.53].append(node)
        if node.kind is NodeKind.NIC and scene.nics and _below(graph, node, ranks):
            levels[0.42].append(node)
    for radius, nodes in levels.items():
        if len(nodes) == 1 and nodes[0].kind is NodeKind.CPU and not fabric:
            scene.at[nodes[0].name] = centre
            continue
        wanted = {}
        for node in nodes:
            places = [scene.at[name] for name in _below(graph, node, ranks)]
            mean = sum(x for x, _ in places) / len(places), sum(y for _, y in places) / len(places)
            wanted[node.name] = math.atan2(mean[1] - centre[1], mean[0] - centre[0])
        for name, angle in _apart(wanted, 0.3 / radius).items():
            scene.at[name] = _on_circle(centre, radius, angle)


def _below(graph: LinkGraph, node: Node, ranks: Sequence[str]) -> list[str]:
    """The ranks that a switch or CPU reaches without passing a CPU or a rank."""
    seen, waiting = {node.name}, [node.name]
    while waiting:
        for link in graph.following[waiting.pop()]:
            kind = graph.by_name[link.dst].kind
            if link.dst in seen or link.kind in FABRIC or kind in (NodeKind.CPU, NodeKind.NETWORK, NodeKind.NIC):
                continue
            seen.add(link.dst)
            if link.dst not in ranks:
                waiting.append(link.dst)
    return [name for name in ranks if name in seen]


def _apart(angles: Mapping[str, float], least: float) -> dict[str, float]:
    """The angles, moved until neighbours are `least` radians apart, or as far as there is room."""
    names = sorted(angles, key=lambda name: (angles[name], name))
    placed = dict(angles)
    if len(names) < 2:
        return placed
    least = min(least, 2 * math.pi / len(names))
    for _ in range(100):
        for at, name in enumerate(names):
            after = names[(at + 1) % len(names)]
            turn = 2 * math.pi if at + 1 == len(names) else 0.0
            missing = least - (placed[after] + turn - placed[name])
            if missing > 0:
                placed[name] -= missing / 2
                placed[after] += missing / 2
    return placed


def _closest(scene: _Scene) -> float:
    """Distance of two neighbours on a circle."""
    most = max(len(scene.of_host(host)) for host in scene.centre) if scene.centre else 1
    return 2 * math.sin(math.pi / most) if most > 1 else 2.0


def _on_circle(centre: Point, radius: float, angle: float) -> Point:
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


# How it is drawn.


def _draw_groups(axes: Axes, scene: _Scene) -> None:
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
        axes.text(*_on_circle((0, 0), 1.045 + thickness / 2, middle), f"NUMA {numa}", rotation=turned,
                  ha="center", va="center", fontsize=9, color=GREY)  # fmt: skip


def _numa_runs(scene: _Scene) -> Iterator[tuple[int, list[str]]]:
    """Neighbours on the circle that are of one NUMA node."""
    numa = [scene.graph.by_name[name].numa for name in scene.ranks]
    begin = next(at for at in range(len(numa)) if numa[at] != numa[at - 1])
    turned = [*scene.ranks[begin:], *scene.ranks[:begin]]
    for its_numa, run in groupby(turned, key=lambda name: scene.graph.by_name[name].numa):
        if its_numa is not None:
            yield its_numa, list(run)


def _draw_links(axes: Axes, scene: _Scene) -> bool:
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
        leaves = _leaves(scene)
        for host, (x, y) in scene.centre.items():
            rim = 1 - DISC / math.hypot(x, y)
            for left, bottom in [scene.at[leaf] for leaf, below in leaves.items() if host in below] or [(0.0, 0.0)]:
                axes.plot([left, x * rim], [bottom, y * rim], color=PALE, linewidth=3, zorder=0.2)
        for leaf in leaves:
            axes.plot([0, scene.at[leaf][0]], [0, scene.at[leaf][1]], color=PALE, linewidth=3, zorder=0.2)
    return unused


def _beside(scene: _Scene) -> Mapping[frozenset[str], list[_Strand]]:
    """The strands between every two ranks."""
    beside: dict[frozenset[str], list[_Strand]] = defaultdict(list)
    for strand in scene.strands:
        for hop in strand.hops:
            beside[frozenset(hop)].append(strand)
    return beside


def _thin_out(scene: _Scene) -> None:
    """Lines and gaps so thin that what lies side by side is no wider than the ranks that it joins."""
    widest = max((sum(each.points + GAP for each in strands) for strands in _beside(scene).values()), default=0.0)
    share = min(1.0, 1.7 * scene.node / widest) if widest else 1.0
    scene.gap = GAP * share
    scene.strands = [replace(strand, points=strand.points * share) for strand in scene.strands]


def _draw_strands(axes: Axes, scene: _Scene) -> None:
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


def _draw_nodes(axes: Axes, scene: _Scene) -> None:
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


def _boxes(scene: _Scene) -> Iterator[tuple[Node, str]]:
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


def _draw_legend(figure: Figure, scene: _Scene, unused: bool, left: float) -> None:
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
