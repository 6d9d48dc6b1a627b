"""`ringreduce topo`: what joins the GPUs of a machine, how fast, and the rings that would be planned."""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.cli import arguments as read
from ringreduce.cli.terminal import console, gigabytes, progress_console, put, say, table
from ringreduce.common.failures import PlanError, RingReduceError
from ringreduce.topology.clusters import hosts_by_kind, of_hosts
from ringreduce.topology.draw.style import rank_label
from ringreduce.topology.graph import FABRIC, Link, LinkGraph, LinkKind, Node, NodeKind

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ringreduce.topology.planned import Planned

MOST_COLUMNS = 16
"""GPUs that a table of all pairs has room for on a terminal of 80 columns."""

MEANING = {
    "NV": "x NVLink between the two",
    "XG": "x XGMI between the two",
    "NVS": "x NVLink of each, to switches",
    "P2P": "PCIe from one to the other",
    "PIX": "PCIe, through one switch",
    "PXB": "PCIe, through several switches",
    "PHB": "PCIe, through a CPU",
    "SYS": "PCIe, through several CPUs",
    "C2C": "NVLink of a GPU to its CPU",
    "NET": "the network between hosts",
    "-": "nothing",
}


class Joined(NamedTuple):
    """What joins two GPUs: a class of `MEANING`, how many links of it, and the GB/s of its narrowest part."""

    kind: str
    lanes: int
    capacity: float

    def label(self) -> str:
        return f"{self.kind}{self.lanes}" if self.lanes else self.kind


def add(command: Any) -> None:
    parser = command(
        usage="%(prog)s [FILE] [options]",
        description="Shows what joins the GPUs of a machine, how fast that is, and the rings that are planned on it. "
        "Without FILE that is this machine, or what RINGREDUCE_TOPO_FILE describes.",
        epilog="examples:\n"
        "  ringreduce topo                                 this machine\n"
        "  ringreduce topo dgx1-v100 --plot dgx1.png       a preset, and its picture\n"
        "  nvidia-smi topo -m | ringreduce topo - --gpu v100\n"
        "  ringreduce topo --json > machine.json           to read again, here or elsewhere",
    )
    read.add_machine(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="the graph as JSON, which FILE may be again")
    parser.add_argument("--plot", type=read.picture, metavar="FILE.png", help="draw the machine and its rings")


def run(arguments: argparse.Namespace) -> int:
    graph = read.machine(arguments)
    planned, reason = (None, "") if arguments.json and not arguments.plot else _planned(graph)
    if arguments.plot:
        from ringreduce.topology import draw

        rings, trees = (planned.rings, planned.trees) if planned else ((), ())
        draw.machine(graph, rings, trees, arguments.plot, note=planned_line(planned) if planned else "")
    if arguments.json:
        put(graph.to_json())
        return 0
    out = console()
    _show(out, graph)
    if planned:
        say(out, planned_line(planned))
        for line in ring_lines(planned):
            say(out, f"  {line}")
    elif reason:
        say(out, f"nothing is planned: {reason}")
    show_assumed(out, graph.assumed)
    if arguments.plot:
        say(out, f"drawn: {arguments.plot}")
    return 0


def planned_line(planned: Planned) -> str:
    """The headline of a plan: what it reaches of what can be reached."""
    return (
        f"{planned.collective} of large tensors: planned {gigabytes(planned.bandwidth)} GB/s "
        f"of at most {gigabytes(planned.bound)}"
    )


def ring_lines(planned: Planned) -> list[str]:
    """Each ring and tree of a plan in a line, its GPUs by index."""
    names = [rank_label(planned.graph, name) for name in planned.ranks]
    lines = []
    for ring in planned.rings:
        order = " ".join(names[rank] for rank in (*ring.order, ring.order[0]))
        lines.append(f"ring, {gigabytes(ring.width)} GB/s {'both ways' if ring.both_ways else 'one way'}: {order}")
    for tree in planned.trees:
        edges = " ".join(
            f"{names[rank]}>{names[parent]}" for rank, parent in enumerate(tree.parents) if parent is not None
        )
        root = names[tree.parents.index(None)]
        lines.append(f"tree, {gigabytes(tree.width)} GB/s, root {root}: {edges}")
    return lines


def show_assumed(out: Console, assumed: tuple[str, ...]) -> None:
    """What the source of a graph left open."""
    if assumed:
        say(out, "assumed:", style="bold")
        for line in assumed:
            say(out, f"  {line}")


def joined(graph: LinkGraph) -> Mapping[tuple[str, str], Joined]:
    """What joins every two GPUs of a graph, by (source, target)."""
    return {(a.name, b.name): found for a in graph.gpus for b, found in _joined_to(graph, a)}


def counted(graph: LinkGraph) -> Mapping[Joined, int]:
    """How many pairs of GPUs, in both orders, are joined in which way.

    Two hosts stand for all hosts that are copies of each other.
    """
    kinds = hosts_by_kind(graph)
    if kinds is None:
        return Counter(joined(graph).values())
    copies = {kind[0]: len(kind) for kind in kinds}
    first = {number: kind[0] for kind in kinds for number in kind}
    few = of_hosts(graph, {number for kind in kinds for number in kind[:2]})
    found: Counter[Joined] = Counter()
    for a in few.gpus:
        for b, how in _joined_to(few, a) if a.host in copies else ():
            hosts = copies[a.host]
            if first[b.host] == a.host:
                found[how] += hosts if b.host == a.host else hosts * (hosts - 1)
            elif b.host in copies:
                found[how] += hosts * copies[b.host]
    return found


def _joined_to(graph: LinkGraph, a: Node) -> Iterator[tuple[Node, Joined]]:
    """The other GPUs, and what joins one GPU to each."""
    before: Mapping[str, Link | None] | None = None
    for b in graph.gpus:
        if b is not a:
            found = _direct(graph, a, b)
            if found is None:
                before = _before(graph, a) if before is None else before
                found = _around(graph, before, b)
            yield b, found


def _direct(graph: LinkGraph, a: Node, b: Node) -> Joined | None:
    """Over the accelerators' own links: from one to the other, or through one switch."""
    link = graph.by_ends.get((a.name, b.name))
    if link is not None and link.kind in FABRIC:
        return Joined("NV" if link.kind is LinkKind.NVLINK else "XG", link.lanes, link.capacity)
    ways = [
        (link, graph.by_ends[link.dst, b.name])
        for link in graph.following[a.name]
        if graph.by_name[link.dst].kind is NodeKind.NVSWITCH and (link.dst, b.name) in graph.by_ends
    ]
    if not ways:
        return None
    return Joined("NVS", sum(up.lanes for up, _ in ways), sum(min(up.capacity, down.capacity) for up, down in ways))


def _before(graph: LinkGraph, a: Node) -> Mapping[str, Link | None]:
    """By node, the last link of the way with the fewest hops from a GPU, over everything but the accelerators' own
    links."""
    before: dict[str, Link | None] = {a.name: None}
    waiting = deque([a.name])
    while waiting:
        for link in graph.following[waiting.popleft()]:
            if link.kind not in FABRIC and link.dst not in before:
                before[link.dst] = link
                if graph.by_name[link.dst].kind is not NodeKind.GPU:
                    waiting.append(link.dst)
    return before


def _around(graph: LinkGraph, before: Mapping[str, Link | None], b: Node) -> Joined:
    """Over everything but the accelerators' own links, by the fewest hops."""
    if b.name not in before:
        return Joined("-", 0, 0.0)
    path = []
    link = before[b.name]
    while link is not None:
        path.append(link)
        link = before[link.src]
    passed = [graph.by_name[link.src].kind for link in path[:-1]]
    over = {link.kind for link in path}
    cpus, switches = passed.count(NodeKind.CPU), passed.count(NodeKind.PCIE)
    if NodeKind.NETWORK in passed:
        kind = "NET"
    elif LinkKind.C2C in over:
        kind = "C2C"
    elif cpus:
        kind = "PHB" if cpus == 1 else "SYS"
    else:
        kind = ("P2P", "PIX", "PXB")[min(switches, 2)]
    return Joined(kind, 0, min(link.capacity for link in path))


def _show(out: Console, graph: LinkGraph) -> None:
    say(out, f"{graph.name}: {_inventory(graph)}", style="bold")
    if not graph.gpus:
        out.print(_cpus(graph))
        return
    if 1 < len(graph.gpus) <= MOST_COLUMNS:
        out.print(_matrix(graph, joined(graph)))
    if len(graph.gpus) > 1:
        out.print(_classes(counted(graph)))
    out.print(_gpus(graph))


def _inventory(graph: LinkGraph) -> str:
    names = {
        NodeKind.GPU: "GPU",
        NodeKind.NVSWITCH: "NVLink switch",
        NodeKind.PCIE: "PCIe switch",
        NodeKind.CPU: "CPU",
        NodeKind.NIC: "NIC",
        NodeKind.CORE: "core",
    }
    counted = [(name, len(graph.of_kind(kind))) for kind, name in names.items()]
    hosts = len({node.host for node in graph.nodes if node.kind is not NodeKind.NETWORK})
    parts = [f"{hosts} hosts"] * (hosts > 1) + [
        f"{count} {name}{'' if count == 1 else 'es' if name.endswith('ch') else 's'}"
        for name, count in counted
        if count
    ]
    return ", ".join(parts) or "nothing"


def _matrix(graph: LinkGraph, pairs: Mapping[tuple[str, str], Joined]) -> Table:
    names = [gpu.name for gpu in graph.gpus]
    shown = table("GPU", *(rank_label(graph, name) for name in names))
    shown.padding = (0, 0)
    for a in names:
        shown.add_row(rank_label(graph, a), *("X" if a == b else pairs[a, b].label() for b in names))
    return shown


def _classes(pairs: Mapping[Joined, int]) -> Table:
    """One row for each class of pairs: how fast, how many, what it is."""
    shown = table("", "GB/s", "pairs", "what joins them", right=("GB/s", "pairs"))
    labels = sorted({pair.label() for pair in pairs}, key=lambda label: (label[:2] not in ("NV", "XG"), label))
    for label in labels:
        alike = [pair for pair in pairs if pair.label() == label]
        rates = sorted({gigabytes(pair.capacity) for pair in alike}, key=float)
        text = rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
        kind, lanes = alike[0].kind, alike[0].lanes
        what = f"{lanes} {MEANING[kind]}" if lanes else MEANING[kind]
        shown.add_row(label, "" if kind == "-" else text, f"{sum(pairs[pair] for pair in alike) / 2:.15g}", what)
    return shown


def _gpus(graph: LinkGraph) -> Table:
    """What every GPU can send at once, and where it is."""
    details = any(gpu.detail for gpu in graph.gpus)
    columns: dict[str, tuple[LinkKind, ...]] = {"NVLink/XGMI GB/s": FABRIC, "PCIe GB/s": (LinkKind.PCIE,)}
    if any(link.kind is LinkKind.C2C for gpu in graph.gpus for link in graph.following[gpu.name]):
        columns["to CPU GB/s"] = (LinkKind.C2C,)
    shown = table("GPU", *columns, "NUMA", *(["what"] * details), right=tuple(columns))
    rows: list[tuple[str, ...]] = []
    for gpu in graph.gpus:
        leaving = graph.following[gpu.name]
        widths = [sum(link.capacity for link in leaving if link.kind in kinds) for kinds in columns.values()]
        rows.append(
            (
                rank_label(graph, gpu.name),
                *(gigabytes(width) if width else "" for width in widths),
                "" if gpu.numa is None else str(gpu.numa),
                *([gpu.detail] * details),
            )
        )
    for row in _runs(rows):
        shown.add_row(*row)
    return shown


def _runs(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that differ in their first cell alone as one: 0 to 3."""
    merged: list[tuple[str, str, tuple[str, ...]]] = []
    for first, *rest in rows:
        if merged and merged[-1][2] == tuple(rest):
            merged[-1] = (merged[-1][0], first, tuple(rest))
        else:
            merged.append((first, first, tuple(rest)))
    return [(one if one == last else f"{one} to {last}", *rest) for one, last, rest in merged]


def _cpus(graph: LinkGraph) -> Table:
    """The NUMA nodes of a machine without GPUs: their cores, and what joins them."""
    shown = table(
        "CPU", "cores", "GB/s of a core", "GB/s to others", right=("cores", "GB/s of a core", "GB/s to others")
    )
    for cpu in graph.of_kind(NodeKind.CPU):
        leaving = graph.following[cpu.name]
        cores = [link for link in leaving if graph.by_name[link.dst].kind is NodeKind.CORE]
        others = ", ".join(f"{gigabytes(link.capacity)} to {link.dst}" for link in leaving if link.kind is LinkKind.SMP)
        speed = max((link.capacity for link in cores), default=0.0)
        shown.add_row(cpu.name, str(len(cores)), gigabytes(speed) if cores else "", others)
    return shown


def _planned(graph: LinkGraph) -> tuple[Planned | None, str]:
    """The plan of an all_reduce, or None and why there is none."""
    if len(graph.ranks) < 2:
        return None, "there is nothing to send from one to another"
    from ringreduce.topology.planner import plan_for

    try:
        with progress_console().status("planning"):
            return plan_for(graph), ""
    except (RingReduceError, PlanError) as error:
        return None, str(error)
