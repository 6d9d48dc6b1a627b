"""Link classes: from PIX, PXB, PHB, NODE and SYS between devices to the PCIe tree that they hang on.

A tool such as `nvidia-smi topo -m` does not show switches and CPUs, only how far up two devices meet.  Those classes
are an ultrametric (of three devices, the two farthest pairs are equally far), and that is a tree: devices that meet at
PIX share a switch, at PXB a switch of switches, at PHB a host bridge, at NODE a CPU; SYS crosses between CPUs.

Pairs with NVLink hide their class.  It follows from a third device that is at different distances from the two, or from
their NUMA nodes; what neither settles is taken to be NODE, or as much closer as the rest demands.  Listings of virtual
machines contradict themselves; the closer class wins.  `PcieTree.assumed` says all of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations

from ringreduce.topology.graph import Link, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.rates import Rate


class LinkClass(IntEnum):
    """Where the paths of two devices meet, the nearest first."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5


PLACES = {
    LinkClass.PIX: "below one PCIe switch",
    LinkClass.PXB: "below one PCIe switch",
    LinkClass.PHB: "below one host bridge",
    LinkClass.NODE: "on one CPU",
    LinkClass.SYS: "not on one CPU",
}
"""What two devices are that meet so far up."""


@dataclass(frozen=True)
class Device:
    """A GPU or NIC, what its slot carries, and what is known of its place: its NUMA node, or several that it might be
    in, and the cores that are near."""

    node: Node
    slot: Rate
    numa: frozenset[int] = frozenset()
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PcieTree:
    """Switches, host bridges and CPUs above some devices, all links between them, and what had to be assumed."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    assumed: tuple[str, ...]


Pair = tuple[int, int]

INSIDE_SOCKET = 1000.0
"""GB/s between NUMA nodes of one socket: more than the PCIe lanes below all of them carry."""


TWO_SOCKETS = (
    "There are more than two NUMA nodes: parts of two sockets are assumed, the lower half of the numbers on the first; "
    "the JSON of the graph can say otherwise."
)


def pcie_tree(devices: Sequence[Device], classes: dict[Pair, LinkClass], smp: Rate) -> PcieTree:
    """The tree above `devices`; `classes` has the pairs (i, j), i < j, whose class is known."""
    groups = _Groups(devices, classes)
    groups.settle()
    tree = _Builder(devices)
    cpus = groups.at(LinkClass.NODE, range(len(devices)))
    known = _numa_nodes(devices, cpus)
    free = iter(sorted(set(range(2 * len(cpus))) - set(known)))
    for cpu, numa in zip(cpus, known, strict=True):
        tree.cpu(groups, cpu, next(free) if numa is None else numa, numa)
    tree.join_cpus({node.name: node.numa for node in tree.nodes if node.kind is NodeKind.CPU}, smp)
    nodes = sorted(tree.nodes, key=lambda node: (node.kind is NodeKind.CPU, node.index))
    return PcieTree(tuple(nodes), tuple(tree.links), (*groups.assumed, *tree.assumed))


class _Groups:
    """Which devices meet at most so far up: a partition of them per class, each coarser than the one before."""

    def __init__(self, devices: Sequence[Device], classes: dict[Pair, LinkClass]) -> None:
        self.devices = devices
        self.classes = dict(classes)
        self.of = {level: list(range(len(devices))) for level in LinkClass if level < LinkClass.SYS}
        self.assumed: list[str] = []

    def at(self, level: LinkClass, members: Iterable[int]) -> list[list[int]]:
        """`members` by group, in their order."""
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(self.of[level][member], []).append(member)
        return list(found.values())

    def settle(self) -> None:
        pairs = list(combinations(range(len(self.devices)), 2))
        hidden = [pair for pair in pairs if pair not in self.classes]
        self._believe_numa_nodes(pairs)
        for level in self.of:
            for pair in pairs:
                if self.classes.get(pair, LinkClass.SYS) <= level:
                    self._join(pair, level)
        guessed = [pair for pair in hidden if pair not in self.classes and not self._follows(pair)]
        for pair in guessed:
            if self._may_meet(pair):
                self._join(pair, LinkClass.NODE)
        self._say_what_was_overruled()
        if guessed:
            places: dict[str, list[str]] = {}
            for pair in sorted(guessed, key=self.found):
                places.setdefault(PLACES[self.found(pair)], []).append(self.name(pair))
            taken = "; ".join(f"{some(names)} taken as {place}" for place, names in places.items())
            self.assumed.append(f"How these pairs are joined over PCIe is not in it: {taken}.")

    def _believe_numa_nodes(self, pairs: Iterable[Pair]) -> None:
        """Devices of one NUMA node are on one CPU, whatever their class; those of two are not if that is hidden."""
        closer, farther = [], []
        for pair in pairs:
            one, other = (self.devices[at].numa for at in pair)
            if len(one) != 1 or len(other) != 1:
                continue
            known = self.classes.get(pair)
            if one == other and known is LinkClass.SYS:
                closer.append(self.name(pair))
            if one != other and known is not None and known is not LinkClass.SYS:
                farther.append(self.name(pair))
            if one != other and known is None:
                self.classes[pair] = LinkClass.SYS
            if one == other and known in (None, LinkClass.SYS):
                self.classes.pop(pair, None)
                self._join(pair, LinkClass.NODE)
        if closer:
            self.assumed.append(f"{some(closer)}: SYS, but in one NUMA node; taken as on one CPU.")
        if farther:
            self.assumed.append(f"{some(farther)}: closer than SYS, but in two NUMA nodes; the class is taken.")

    def _follows(self, pair: Pair) -> bool:
        """Whether a hidden class is settled by the others: a third device is nearer to one of the two."""
        one, other = pair
        third = (at for at in range(len(self.devices)) if at not in pair)
        known = [(self.classes.get(_pair(one, at)), self.classes.get(_pair(other, at))) for at in third]
        return any(a is not None and b is not None and (a != b or a is b is LinkClass.PIX) for a, b in known)

    def _may_meet(self, pair: Pair) -> bool:
        """Whether nothing speaks against the groups of two devices being on one CPU."""
        if self.found(pair) is not LinkClass.SYS:
            return False
        level = self.of[LinkClass.NODE]
        one, other = ([at for at, group in enumerate(level) if group == level[end]] for end in pair)
        return not any(
            self.classes.get(_pair(a, b)) is LinkClass.SYS or self._seem_apart(a, b) for a in one for b in other
        )

    def _seem_apart(self, one: int, other: int) -> bool:
        a, b = self.devices[one], self.devices[other]
        if a.numa and b.numa:
            return not a.numa & b.numa
        return bool(a.cores and b.cores and not a.cores & b.cores)

    def _say_what_was_overruled(self) -> None:
        overruled = [
            self.name(pair)
            for pair, known in self.classes.items()
            if (found := self.found(pair)) is not known and found < known
        ]
        if overruled:
            self.assumed.append(f"{some(overruled)}: farther apart in it than the rest allows; taken as closer.")

    def _join(self, pair: Pair, level: LinkClass) -> None:
        for coarser, group in self.of.items():
            if coarser >= level:
                kept, gone = sorted((group[pair[0]], group[pair[1]]))
                if kept != gone:
                    self.of[coarser] = [kept if at == gone else at for at in group]

    def found(self, pair: Pair) -> LinkClass:
        return next((level for level, group in self.of.items() if group[pair[0]] == group[pair[1]]), LinkClass.SYS)

    def name(self, pair: Pair) -> str:
        return "-".join(self.devices[at].node.name for at in pair)


class Draft:
    """Nodes and links in the making, and what had to be assumed, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        self.assumed: dict[str, None] = {}

    def note(self, text: str) -> None:
        """`text`: what was assumed; "" for nothing."""
        if text:
            self.assumed[text] = None

    def join(self, one: str, other: str, kind: LinkKind, rate: Rate) -> None:
        self.links += both_directions(one, other, kind, rate.gbps, source=rate.source)
        self.note(rate.assumed)

    def join_cpus(self, cpus: Mapping[str, int | None], smp: Rate) -> None:
        """Joins CPUs, given their NUMA nodes, by what is between two sockets.

        One or two are a socket each, and so are several whose nodes are not known: every two are joined.  More NUMA
        nodes are parts of two sockets (NPS2, NPS4, sub-NUMA clustering), each with half of the numbers; the parts of a
        socket are joined to the first of them by what no traffic of PCIe fills, and the sockets by one link.
        """
        numbers = [numa for numa in cpus.values() if numa is not None]
        if len(cpus) <= 2 or len(numbers) < len(cpus):
            for one, other in combinations(cpus, 2):
                self.join(one, other, LinkKind.SMP, smp)
            return
        half = (1 << max(numbers).bit_length()) // 2
        sockets = [
            [name for name, numa in cpus.items() if (numa is not None and numa >= half) == upper] for upper in (0, 1)
        ]
        for first, *parts in filter(None, sockets):
            for part in parts:
                rate = Rate(INSIDE_SOCKET, "within a socket: not filled by PCIe", TWO_SOCKETS)
                self.join(first, part, LinkKind.SMP, rate)
        if all(sockets):
            self.join(sockets[0][0], sockets[1][0], LinkKind.SMP, smp)


class _Builder(Draft):
    """Makes the nodes and links, from CPUs down to devices."""

    def __init__(self, devices: Sequence[Device]) -> None:
        super().__init__()
        self.devices = devices
        self.switches = 0

    def cpu(self, groups: _Groups, members: Sequence[int], number: int, numa: int | None) -> None:
        name = f"CPU{number}"
        self.nodes.append(Node(name, NodeKind.CPU, number, numa=numa))
        bridges = groups.at(LinkClass.PHB, members)
        for bridge in bridges:
            below = groups.at(LinkClass.PXB, bridge)
            above = name
            if len(bridges) > 1 and len(below) > 1:
                inside = Rate(sum(self._slot(part).gbps for part in below), "inside the CPU: all slots below at once")
                above = self._switch("host bridge", numa, name, inside)
            for part in below:
                self._branch(groups, part, numa, above)

    def _branch(self, groups: _Groups, members: Sequence[int], numa: int | None, above: str) -> None:
        """The devices that meet below a host bridge: one, some on a switch, or some on switches on a switch."""
        leaves = groups.at(LinkClass.PIX, members)
        if len(leaves) > 1:
            above = self._switch("PCIe switch", numa, above, self._slot(members))
        for leaf in leaves:
            of_leaf = above
            if len(members) > 1:
                of_leaf = self._switch("PCIe switch", numa, above, self._slot(leaf))
            for at in leaf:
                device = self.devices[at]
                self.join(device.node.name, of_leaf, LinkKind.PCIE, device.slot)

    def _slot(self, members: Sequence[int]) -> Rate:
        """A switch has one slot, as fast as the fastest of those below it."""
        return max((self.devices[at].slot for at in members), key=lambda slot: slot.gbps)

    def _switch(self, detail: str, numa: int | None, above: str, rate: Rate) -> str:
        name = f"PCIe{self.switches}"
        self.nodes.append(Node(name, NodeKind.PCIE, self.switches, numa=numa, detail=detail))
        self.switches += 1
        self.join(name, above, LinkKind.PCIE, rate)
        return name


def _numa_nodes(devices: Sequence[Device], cpus: Sequence[Sequence[int]]) -> list[int | None]:
    """Of each CPU: the NUMA node that its devices are in, if that is known and no CPU before has it."""
    numbers: list[int | None] = []
    for members in cpus:
        known = {min(devices[at].numa) for at in members if len(devices[at].numa) == 1}
        numbers.append(min(known - set(numbers), default=None))
    return numbers


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def some(names: Sequence[str]) -> str:
    """A list for a person to read: not longer than it helps."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
