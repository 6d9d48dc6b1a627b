"""Where a picture of a machine has its ranks, and the switches and CPUs between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.topology.graph import FABRIC, LinkGraph, Node, NodeKind

if TYPE_CHECKING:
    from ringreduce.topology.rings import Ring


GAP = 2.2
"""Points between the lines of rings that share a link."""


DISC = 1.27
"""Radius of what is shaded as one host; its ranks stand on a circle of radius 1."""


Point = tuple[float, float]


class Places(NamedTuple):
    """Of nodes in a picture, and of the circles of hosts, whose radius is `DISC`; y upwards."""

    at: dict[str, Point]
    centre: dict[int, Point]


@dataclass(frozen=True)
class Strand:
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
class Scene:
    """Everything that is drawn, and where."""

    graph: LinkGraph
    ranks: Sequence[str]
    """In the order of the circle."""
    strands: Sequence[Strand]
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


def places(graph: LinkGraph, names: Sequence[str], rings: Sequence[Ring]) -> Places:
    """Where `machine` draws the ranks `names` and all that they are linked through."""
    order = [names[rank] for rank in rings[0].order] if rings else list(names)
    scene = Scene(graph, order, (), outside=True, nics=True)
    lay_out(scene)
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


def lay_out(scene: Scene) -> None:
    """Every host a circle of its ranks, clockwise; hosts on a circle around the network, clockwise from the left."""
    hosts = list(dict.fromkeys(scene.graph.by_name[name].host for name in scene.ranks))
    far = 1.48 / math.sin(math.pi / len(hosts)) + 0.7 * bool(leaf_switches(scene)) if len(hosts) > 1 else 0.0
    scene.extent = far + (1.45 if len(hosts) > 1 else 1.3)
    for at, host in enumerate(hosts):
        ranks = scene.of_host(host)
        towards = math.pi - 2 * math.pi * at / len(hosts)
        scene.centre[host] = on_circle((0.0, 0.0), far, towards)
        # A lone host's first rank is at the top left; among several the first and the last face the network.
        first = math.pi / 2 + math.pi / len(ranks) if len(hosts) == 1 else towards + math.pi - math.pi / len(ranks)
        for place, name in enumerate(ranks):
            scene.at[name] = on_circle(scene.centre[host], 1.0, first - 2 * math.pi * place / len(ranks))
        _place_inside(scene, host, ranks)
    for node in scene.graph.of_kind(NodeKind.NETWORK):
        scene.at[node.name] = (0.0, 0.0)
    wanted = {}
    for place, (leaf, below) in enumerate(leaf_switches(scene).items()):
        x, y = (sum(scene.centre[host][axis] for host in below) for axis in (0, 1))
        turn = 2 * math.pi * place / len(leaf_switches(scene))
        wanted[leaf] = turn if math.hypot(x, y) < 1e-6 else math.atan2(y, x)  # below all hosts: evenly
    radius = (far - DISC) / 2
    for name, angle in (_apart(wanted, 0.5 / radius) if wanted else {}).items():
        scene.at[name] = on_circle((0.0, 0.0), radius, angle)


def leaf_switches(scene: Scene) -> dict[str, set[int]]:
    """The switches between hosts and the network, with the hosts below that are drawn."""
    graph = scene.graph
    drawn = {graph.by_name[name].host for name in scene.ranks}
    switches = [node.name for node in graph.of_kind(NodeKind.NETWORK)]
    below = {name: graph.below(name) & drawn for name in switches} if len(switches) > 1 else {}
    return {name: hosts for name, hosts in below.items() if hosts}


def _place_inside(scene: Scene, host: int, ranks: Sequence[str]) -> None:
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
            scene.at[name] = on_circle(centre, radius, angle)


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


def closest(scene: Scene) -> float:
    """Distance of two neighbours on a circle."""
    most = max(len(scene.of_host(host)) for host in scene.centre) if scene.centre else 1
    return 2 * math.sin(math.pi / most) if most > 1 else 2.0


def on_circle(centre: Point, radius: float, angle: float) -> Point:
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)
