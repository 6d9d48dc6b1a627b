"""The link graph: the devices of a machine, and what moves between them how fast.

A node is a GPU, a switch (NVLink or PCIe), a CPU with its memory (one NUMA node), a NIC, or the network between hosts.
A link has one direction; what a data sheet calls a link is two of them, and both can be full at once.  Capacities are
what one direction carries, in GB/s (1e9 bytes a second), for all lanes together.  Every link says where its figure
comes from, and the graph what had to be assumed.

Readers (`matrix`, `nccl_xml`, `live`, `presets`) make these graphs; `routes` says which links a transfer takes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property

from ringreduce.common.failures import TopologyError
from ringreduce.common.from_json import load, parsed


class NodeKind(Enum):
    """What a node is."""

    GPU = "gpu"
    NVSWITCH = "nvswitch"
    """Switches of the accelerators' own links: NVSwitch, or any number of them that traffic is spread over."""
    PCIE = "pcie"
    """A PCIe switch or host bridge."""
    CPU = "cpu"
    """The cores and the memory of one NUMA node."""
    NIC = "nic"
    NETWORK = "network"
    """What joins hosts: every NIC that is on it reaches every other."""
    CORE = "core"
    """One core, where ranks run on CPUs."""


class LinkKind(Enum):
    """What a link is made of."""

    NVLINK = "NVLink"
    XGMI = "XGMI"
    C2C = "NVLink to CPU"
    """Between a GPU and its CPU: NVLink-C2C of Grace, NVLink of POWER.  Other GPUs reach it through that CPU."""
    PCIE = "PCIe"
    SMP = "SMP"
    """Between CPUs: QPI, UPI, Infinity Fabric, X-Bus."""
    NETWORK = "network"
    MEMORY = "memory"
    """Between a core and the memory of its NUMA node."""


UNNUMBERED = -1

LARGEST = 1e12
"""GB/s that a link may have, and the least its inverse: figures beyond are mistakes, and drown in sums."""

FABRIC = (LinkKind.NVLINK, LinkKind.XGMI)
"""Links that accelerators have for each other alone."""


@dataclass(frozen=True)
class Node:
    """A device.  `index` is the number that its source gives it among its kind (GPU 3), `host` the host it is in.

    Several hosts may share an NVSwitch (NVL72): it counts as one host's, and belongs to all that have links to it.
    """

    name: str
    kind: NodeKind
    index: int = 0
    host: int = 0
    numa: int | None = None
    detail: str = ""
    """What else is known: a model, a bus id."""
    peer_access: bool = True
    """Of a GPU: whether others reach its memory over PCIe.  If not, what goes between them passes a CPU's memory."""
    reduces: bool = False
    """Of a switch: whether it combines and copies what passes it, as NVSwitches do with NVLink 4 and later (NVLS)."""


@dataclass(frozen=True)
class Link:
    """One direction between two nodes: `lanes` bonded links, `capacity` GB/s together, where that figure is from."""

    src: str
    dst: str
    kind: LinkKind
    capacity: float
    lanes: int = 1
    source: str = ""


@dataclass(frozen=True)
class LinkGraph:
    """Nodes by name, links by (src, dst); at most one link from a node to another: bonded ones are lanes of one.

    Raises TopologyError where that, or the ends or the capacity of a link, are wrong.
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    assumed: tuple[str, ...] = ()
    """What the source did not say and was supposed instead, in words, with what would set it."""

    def __post_init__(self) -> None:
        if twice := _repeated(node.name for node in self.nodes):
            raise TopologyError(f"{self.name}: two nodes are called {twice!r}; give each a name of its own")
        for link in self.links:
            where = f"{self.name}: link {link.src} -> {link.dst}"
            for end in (link.src, link.dst):
                if end not in self.by_name:
                    raise TopologyError(f"{where}: there is no node {end!r}; known are {', '.join(self.by_name)}")
            if link.src == link.dst:
                raise TopologyError(f"{where} joins a node to itself; leave it out")
            if not 1 / LARGEST <= link.capacity <= LARGEST:
                limits = f"from {1 / LARGEST:g} to {LARGEST:g}"
                raise TopologyError(f"{where}: capacity is {link.capacity!r:.40} GB/s; it must be above 0, {limits}")
            if link.lanes < 1:
                raise TopologyError(f"{where}: lanes is {link.lanes!r}; it must be at least 1")
        if twice := _repeated(f"GPU {node.index} of host {node.host}" for node in self.gpus):
            raise TopologyError(f"{self.name}: {twice} is there twice; give each GPU of a host an index of its own")
        if twice := _repeated(f"{link.src} -> {link.dst}" for link in self.links):
            raise TopologyError(f"{self.name}: link {twice} is there twice; bonded links are lanes of one link")

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def by_ends(self) -> Mapping[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def following(self) -> Mapping[str, tuple[Link, ...]]:
        """The links that leave each node, in the order of `links`."""
        leaving: dict[str, list[Link]] = {node.name: [] for node in self.nodes}
        for link in self.links:
            leaving[link.src].append(link)
        return {name: tuple(links) for name, links in leaving.items()}

    @cached_property
    def gpus(self) -> tuple[Node, ...]:
        """The GPUs, in the order of `nodes`: readers list them as their source numbers them, host by host."""
        return self.of_kind(NodeKind.GPU)

    @cached_property
    def ranks(self) -> tuple[Node, ...]:
        """The nodes that ranks run on, rank by rank: the GPUs, or the cores of a machine without any."""
        return self.gpus or self.of_kind(NodeKind.CORE)

    @cached_property
    def several_hosts(self) -> bool:
        """Whether the ranks are on more than one host."""
        return len({node.host for node in self.ranks}) > 1

    def of_kind(self, kind: NodeKind) -> tuple[Node, ...]:
        """The nodes of a kind, in the order of `nodes`."""
        return tuple(node for node in self.nodes if node.kind is kind)

    def below(self, switch: str) -> set[int]:
        """The hosts whose NICs are on a switch of the network."""
        return {self.by_name[link.dst].host for link in self.following[switch]
                if self.by_name[link.dst].kind is NodeKind.NIC}  # fmt: skip

    def places(self, indices: Sequence[int]) -> list[int]:
        """Where the GPUs (or cores) of these indices are in `ranks`; of several hosts, whose indices repeat, GPUs are
        counted through.  Raises TopologyError for one that is not there."""
        numbers = [node.index for node in self.ranks]
        if len(set(numbers)) < len(numbers):
            numbers = list(range(len(numbers)))
        known = set(numbers)
        for index in indices:
            if index not in known:
                what = "GPU" if self.gpus else "core"
                raise TopologyError(f"{self.name}: there is no {what} {index}; it has {_listed(what, numbers)}")
        at = {number: place for place, number in enumerate(numbers)}
        return [at[index] for index in indices]

    def select(self, places: Sequence[int]) -> "LinkGraph":
        """This graph with only those of its `ranks` that a job was given, in the job's order.

        On one host the places of GPUs are the indices that the machine's own listing shows.  Switches, CPUs and NICs of
        their hosts stay: they belong to nobody; so do NVSwitches that several hosts share.  Raises TopologyError for a
        place that there is not or that is named twice.
        """
        what = "GPU" if self.gpus else "core"
        known = _listed(what, range(len(self.ranks)))
        if not places:
            raise TopologyError(f"{self.name}: no {what}s are named; it has {known}")
        for place in places:
            if not 0 <= place < len(self.ranks):
                raise TopologyError(f"{self.name}: there is no {what} {place}; it has {known}")
        if twice := _repeated(map(str, places)):
            raise TopologyError(f"{self.name}: {what} {twice} is named twice; name each once")
        kept = [self.ranks[place] for place in places]
        hosts, ranks = {node.host for node in kept}, {node.name for node in self.ranks}
        reached = {link.dst for node in kept for link in self.following[node.name]}
        near = (
            node
            for node in self.nodes
            if node.host in hosts
            or node.kind is NodeKind.NETWORK
            or (node.kind is NodeKind.NVSWITCH and node.name in reached)
        )
        return self.part((*kept, *(node for node in near if node.name not in ranks)))

    def part(self, nodes: tuple[Node, ...]) -> "LinkGraph":
        """This graph with only these of its nodes, and the links between them."""
        there = {node.name for node in nodes}
        links = tuple(link for link in self.links if link.src in there and link.dst in there)
        return replace(self, nodes=nodes, links=links)

    def to_json(self) -> str:
        """The graph as a JSON document that `from_json` loads back to an equal graph."""
        return json.dumps(asdict(self), default=lambda kind: kind.value, indent=1)

    @staticmethod
    def from_json(text: str, where: str = "topology") -> "LinkGraph":
        """Load what `to_json` wrote, or what a person wrote like it: only `nodes[].name`, `nodes[].kind`,
        `links[].src`, `links[].dst`, `links[].kind` and `links[].capacity` have no default.  Nodes without an `index`
        are numbered by kind and host.

        Raises TopologyError that names the line and column, or the path to the value, at fault.
        """
        given: _Document = load(_Document, parsed(text, where, TopologyError), f"{where}: graph", TopologyError)
        nodes = _numbered(given.nodes)
        cpus = {node.name for node in nodes if node.kind is NodeKind.CPU}
        links = tuple(
            replace(link, kind=LinkKind.C2C) if link.kind is LinkKind.NVLINK and {link.src, link.dst} & cpus else link
            for link in given.links
        )
        return LinkGraph(given.name or where, nodes, links, given.assumed)


def off_the_fabric(graph: LinkGraph) -> tuple[str, ...]:
    """What to say of GPUs without a link of their own where others of their host are on an NVSwitch."""
    switched = {gpu.host for gpu in graph.gpus for link in graph.following[gpu.name]
                if graph.by_name[link.dst].kind is NodeKind.NVSWITCH}  # fmt: skip
    return tuple(
        f"{gpu.name} has no NVLink in it, but other GPUs of its host are on an NVSwitch: `nvidia-smi nvlink --status` "
        "says whether its links are down."
        for gpu in graph.gpus
        if gpu.host in switched and not any(link.kind in FABRIC for link in graph.following[gpu.name])
    )


def both_directions(
    one: str, other: str, kind: LinkKind, capacity: float, lanes: int = 1, source: str = ""
) -> tuple[Link, Link]:
    """A full-duplex link: each direction has the whole capacity."""
    return Link(one, other, kind, capacity, lanes, source), Link(other, one, kind, capacity, lanes, source)


def merged(links: Iterable[Link]) -> tuple[Link, ...]:
    """Links between the same ends as one, with the sum of their lanes and capacities."""
    together: dict[tuple[str, str], Link] = {}
    for link in links:
        ends = link.src, link.dst
        known = together.get(ends)
        together[ends] = (
            replace(known, lanes=known.lanes + link.lanes, capacity=known.capacity + link.capacity) if known else link
        )
    return tuple(together.values())


def _listed(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return f"no {what}"
    if list(numbers) == list(range(len(numbers))) and len(numbers) > 1:
        return f"{what}s 0 to {len(numbers) - 1}"
    return f"{what} {', '.join(map(str, numbers))}"


def _repeated(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _numbered(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """With indices for those that have none, in order."""
    numbered: list[Node] = []
    for node in nodes:
        taken = {other.index for other in numbered if (other.kind, other.host) == (node.kind, node.host)}
        free = next(at for at in range(len(taken) + 1) if at not in taken)
        fields = vars(node) | ({"index": free} if node.index == UNNUMBERED else {})
        numbered.append(Node(**fields))
    return tuple(numbered)


@dataclass(frozen=True)
class _GivenNode(Node):
    index: int = UNNUMBERED


@dataclass(frozen=True)
class _Document:
    """A graph as JSON has it."""

    nodes: tuple[_GivenNode, ...]
    links: tuple[Link, ...]
    name: str = ""
    assumed: tuple[str, ...] = ()
