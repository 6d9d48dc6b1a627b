"""Reads the XML in which NCCL and RCCL describe a machine into a link graph.

Under `<system>` are CPUs (NUMA nodes), under these the PCIe tree: `<pci>` elements, each with the speed of its own link
upwards; GPUs and NICs are the leaves.  A `<gpu>` lists its `<nvlink>` or `<xgmi>` by target, with how many links go
there: another GPU, or a switch.  Files that clouds publish leave out what NCCL finds by itself, often every `<gpu>`;
what then is missing is said in `LinkGraph.assumed`.  Several hosts differ in `host_hash`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from xml.parsers import expat

from ringreduce.common.failures import TopologyError
from ringreduce.topology.classes import Draft, some
from ringreduce.topology.graph import LinkGraph, LinkKind, Node, NodeKind, both_directions, merged
from ringreduce.topology.rates import (
    NO_PEER_ACCESS,
    Assumed,
    Model,
    Rate,
    fabric_link,
    model,
    model_of_architecture,
    pcie,
    peer_access,
    reduces,
    slot,
    smp,
)

HOW_TO = "start a program that uses NCCL with NCCL_TOPO_DUMP_FILE=topology.xml and give that file"

_NOT_A_SYSTEM = {
    "graphs": "this is what NCCL's search found (NCCL_GRAPH_DUMP_FILE), not the machine",
    "topology": "this is hwloc's description (lstopo), which has no NVLinks",
    "nvidia_smi_log": "this is `nvidia-smi -q -x`, which has no links",
}
_GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
_GPU_VENDORS = ("", "0x10de", "0x1002")
_NETWORK = 0x02
_NVSWITCH, _CPU_NVLINK = 0x068000, 0x068001
_LINK_KINDS = {"nvlink": LinkKind.NVLINK, "xgmi": LinkKind.XGMI}
_PREFIX = {NodeKind.PCIE: "PCIe", NodeKind.NIC: "NIC", NodeKind.NVSWITCH: "NVSwitch"}

MOST_ELEMENTS = 100_000
DEEPEST = 64


@dataclass(eq=False)
class Element:
    """An XML element, and the line and column (from 1) where it begins."""

    tag: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list["Element"] = field(default_factory=list)

    def get(self, name: str) -> str:
        return self.attributes.get(name, "").strip()

    def named(self, *tags: str) -> list["Element"]:
        return [child for child in self.children if child.tag in tags]

    def walk(self) -> Iterator["Element"]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class _Above:
    """Where an element hangs: the node above it, its CPU, its host, and its NUMA node."""

    node: str
    cpu: str
    host: int
    numa: int | None


@dataclass(eq=False)
class _Gpu:
    """A GPU before it has a name: its `<pci>`, its `<gpu>` if it has one, and what is above it."""

    pci: Element
    gpu: Element | None
    above: _Above

    @property
    def bus(self) -> tuple[int, str]:
        return self.above.host, self.pci.get("busid").lower()

    def number(self, name: str) -> int | None:
        return _whole(self.gpu.get(name)) if self.gpu else None


@dataclass(frozen=True)
class _Bond:
    """Links of a kind from a GPU to one target, and where the file says so."""

    kind: LinkKind
    lanes: int
    element: Element


def read_nccl_xml(text: str, where: str, assume: Assumed) -> LinkGraph:
    """The graph of an XML topology, which errors call `where`.  GPUs are named by `dev`, else by `rank`, else by their
    order in the file.

    Raises TopologyError, with line and column, for XML that is broken or that is not a topology.
    """
    system = _parse(text, where)
    if system.tag != "system":
        what = _NOT_A_SYSTEM.get(system.tag, f"<{system.tag}> is not NCCL's <system>")
        raise _error(where, system, f"{what}; {HOW_TO}")
    reader = _Reader(where, assume)
    reader.read(system)
    return reader.graph()


def _parse(text: str, where: str) -> Element:
    """The root element.  Raises TopologyError for XML that is broken, far too large, or that declares entities."""
    parser = expat.ParserCreate()
    root = Element("", {}, 1, 1)
    stack, count = [root], 0

    def here() -> tuple[int, int]:
        return parser.CurrentLineNumber, parser.CurrentColumnNumber + 1

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        element = Element(tag, attributes, *here())
        if count > MOST_ELEMENTS or len(stack) > DEEPEST:
            raise _error(where, element, f"too many elements or levels for a machine; {HOW_TO}")
        stack[-1].children.append(element)
        stack.append(element)

    def end(tag: str) -> None:
        stack.pop()

    def doctype(name: str, *ignored: object) -> None:
        what = _NOT_A_SYSTEM.get(name, "a document type is declared, which NCCL's files have no use for")
        raise _error(where, Element(name, {}, *here()), f"{what}; {HOW_TO}")

    parser.StartElementHandler, parser.EndElementHandler, parser.StartDoctypeDeclHandler = start, end, doctype
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        at = Element("", {}, error.lineno, error.offset + 1)
        raise _error(where, at, f"not well-formed XML: {expat.ErrorString(error.code)}; {HOW_TO}") from None
    return root.children[0]


class _Reader(Draft):
    """Walks the tree and collects nodes, links and what had to be assumed."""

    def __init__(self, where: str, assume: Assumed) -> None:
        super().__init__()
        self.where, self.assume = where, assume
        self.gpus: list[_Gpu] = []
        self.cpus: list[tuple[_Above, Element]] = []
        self.ports: list[tuple[str, Rate]] = []
        self.without_speed: list[str] = []
        self.hosts: list[str] = []
        self.names: dict[_Gpu, str] = {}
        self.count: Counter[tuple[NodeKind, int]] = Counter()
        self.taken: set[str] = set()

    def read(self, system: Element) -> None:
        cpus = system.named("cpu")
        if not cpus:
            raise _error(self.where, system, f"it has no <cpu>, so no machine; {HOW_TO}")
        if system.get("version") not in ("1", "2"):
            self.note(f"Its version is {system.get('version') or 'missing'!r}; read as version 1.")
        self.hosts = list(dict.fromkeys(cpu.get("host_hash") for cpu in cpus))
        for cpu in cpus:
            self.cpu(cpu)
        for above, cpu in self.cpus:
            for child in cpu.children:
                self.element(child, above)
        if not self.gpus:
            raise _error(self.where, system, f"no GPU is in it: no <pci> has a <gpu> or a GPU's class; {HOW_TO}")
        self.name_gpus()
        self.fabric()
        self.join_cpus_of_hosts()
        self.join_hosts()

    def graph(self) -> LinkGraph:
        if self.without_speed:
            names = some(self.without_speed)
            self.note(f"The PCIe speed of {names} is not in it: as the GPU's model has, else 3.0 x16, assumed.")
        order = list(NodeKind)
        nodes = sorted(self.nodes, key=lambda node: (order.index(node.kind), node.host, node.index))
        return LinkGraph(self.where, tuple(nodes), merged(self.links), tuple(self.assumed))

    def add(self, kind: NodeKind, name: str, index: int, above: _Above, detail: str = "") -> str:
        """A new node, with its host before the name if there are several, and marked if the name is taken."""
        name = f"host{above.host}/{name}" if len(self.hosts) > 1 else name
        while name in self.taken:
            name += "'"
        self.taken.add(name)
        self.count[kind, above.host] += 1
        self.nodes.append(Node(name, kind, index, above.host, above.numa, detail))
        return name

    def add_next(self, kind: NodeKind, above: _Above, detail: str, name: str = "") -> str:
        """A new node with the next number of its kind."""
        at = self.count[kind, above.host]
        return self.add(kind, name or f"{_PREFIX[kind]}{at}", at, above, detail)

    # The PCIe tree.

    def cpu(self, cpu: Element) -> None:
        host = self.hosts.index(cpu.get("host_hash"))
        used = {node.index for node in self.nodes if node.host == host}
        given = cpu.get("numaid")
        known = _whole(given)
        numa = known if known is not None and known not in used else None
        index = numa if numa is not None else next(at for at in range(len(used) + 1) if at not in used)
        above = _Above("", "", host, numa)
        name = self.add(NodeKind.CPU, f"CPU{index}", index, above, cpu.get("vendor"))
        self.cpus.append((_Above(name, name, host, numa), cpu))

    def element(self, element: Element, above: _Above) -> None:
        if element.tag == "nic":
            self.nic([element], above, None)
        elif element.tag != "pci":
            self.note(f"<{element.tag}> in line {element.line} is not known; left out.")
        elif _is_gpu(element):
            described = element.named("gpu")
            if len(described) > 1:
                self.note(
                    f"{len(described)} <gpu> in one <pci> (line {element.line}) share its links; taken as one GPU."
                )
            self.gpus.append(_Gpu(element, described[0] if described else None, above))
        elif element.named("nic") or _class(element) >> 16 == _NETWORK:
            self.nic(element.named("nic"), above, element)
        elif any(_is_device(below) for below in element.walk()):
            name = self.add_next(NodeKind.PCIE, above, element.get("busid"))
            self.join(name, above.node, LinkKind.PCIE, self.slot(element, None))
            for child in element.children:
                self.element(child, replace(above, node=name))
        elif not element.get("class"):
            self.note("Some <pci> have no class and nothing below them: what they are is not in it; left out.")

    def slot(self, pci: Element, known: Model | None) -> Rate:
        """What the link from a PCIe device upwards carries."""
        speed = re.match(r"(\d{1,3}(?:\.\d{1,3})?) *GT/s", pci.get("link_speed"))
        width = pci.get("link_width")
        gts, lanes = float(speed[1]) if speed else 0.0, int(width) if re.fullmatch(r"\d{1,2}", width) else 0
        if gts > 0 and 0 < lanes <= 32:
            return Rate(pcie(gts, lanes), f"{gts:g} GT/s x{lanes}")
        self.without_speed.append(pci.get("busid") or f"line {pci.line}")
        found = slot(known, Assumed(pcie=self.assume.pcie))
        return Rate(found.gbps, f"assumed: {found.source.removeprefix('assumed: ')}")

    def nic(self, nics: Sequence[Element], above: _Above, pci: Element | None) -> None:
        """One node for each port; several on one card share its slot."""
        ports = [port for nic in nics for port in nic.named("net")]
        slot = self.slot(pci, None) if pci else None
        bus = pci.get("busid") if pci else ""
        if slot and len(ports) > 1:
            card = self.add_next(NodeKind.PCIE, above, f"card {bus}")
            self.join(card, above.node, LinkKind.PCIE, slot)
            above = replace(above, node=card)
        for port in ports or [Element("net", {}, 0, 0)]:
            name = self.add_next(NodeKind.NIC, above, bus, port.get("name"))
            rate = self.port(port, slot)
            self.join(name, above.node, LinkKind.PCIE, rate)
            self.ports.append((name, rate))

    def port(self, port: Element, slot: Rate | None) -> Rate:
        """What a NIC carries: its port, or its slot if that is less."""
        megabits = int(port.get("speed")) if re.fullmatch(r"\d{1,9}", port.get("speed")) else 0
        if not megabits:
            self.note("The speed of some NICs is not in it: as much as their slot carries is assumed.")
            return slot or Rate(pcie(8.0, 16), "assumed: PCIe 3.0 x16")
        if slot and slot.gbps < megabits / 8000:
            return slot
        return Rate(megabits / 8000, f"{megabits / 1000:g} Gb/s port")

    # The GPUs, and the links that they have for each other.

    def name_gpus(self) -> None:
        for host in range(len(self.hosts)):
            gpus = [gpu for gpu in self.gpus if gpu.above.host == host]
            for index, gpu in sorted(zip(self.numbers(gpus), gpus, strict=True), key=lambda pair: pair[0]):
                name = self.add(NodeKind.GPU, f"GPU{index}", index, gpu.above, gpu.pci.get("busid"))
                if not peer_access(model(self.assume.gpu) if self.assume.gpu else None, self.assume):
                    self.nodes[-1] = replace(self.nodes[-1], peer_access=False)
                    self.note(NO_PEER_ACCESS)
                rate = (
                    Rate(self.assume.pcie, "--pcie-gbps") if self.assume.pcie else self.slot(gpu.pci, self.model(gpu))
                )
                self.join(name, gpu.above.node, LinkKind.PCIE, rate)
                self.names[gpu] = name

    def numbers(self, gpus: Sequence[_Gpu]) -> list[int]:
        for attribute in ("dev", "rank"):
            given = [gpu.number(attribute) for gpu in gpus]
            if None not in given and len(set(given)) == len(given):
                return [number for number in given if number is not None]
        self.note("GPUs are numbered as they follow in it, for it has no dev for each.")
        return list(range(len(gpus)))

    def model(self, gpu: _Gpu) -> Model | None:
        if self.assume.gpu is not None:
            return model(self.assume.gpu)
        return model_of_architecture(gpu.gpu.get("sm"), gpu.gpu.get("gcn")) if gpu.gpu else None

    def fabric(self) -> None:
        if not any(gpu.gpu for gpu in self.gpus):
            self.note(f"It has no <gpu>: NCCL finds NVLinks itself, so none are in it. To get them, {HOW_TO}.")
        by_bus = {gpu.bus: gpu for gpu in self.names}
        bonds: dict[tuple[_Gpu, _Gpu], _Bond] = {}
        switched: dict[tuple[int, str], list[tuple[_Gpu, _Bond]]] = {}
        hidden, absent = [], []
        for gpu, name in self.names.items():
            for element in gpu.gpu.named(*_LINK_KINDS) if gpu.gpu else ():
                if element.get("count") == "0":
                    continue
                bond, target = self.bond(element), element.get("target").lower()
                other, goes_to = by_bus.get((gpu.above.host, target)), _hexadecimal(element.get("tclass"))
                if other is gpu:
                    hidden.append(f"{name} ({bond.lanes})")
                elif other is not None:
                    known = bonds.get((gpu, other))
                    bonds[gpu, other] = replace(bond, lanes=bond.lanes + (known.lanes if known else 0))
                elif goes_to == _NVSWITCH:
                    shared = target.startswith(
                        "fffffff"
                    )  # so NCCL writes all switches, those of other hosts too, as one
                    switched.setdefault((0 if shared else gpu.above.host, target), []).append((gpu, bond))
                elif goes_to == _CPU_NVLINK:
                    self.leave_slot(name, gpu.above.cpu)
                    self.tie(name, gpu.above.cpu, bond, (gpu,), LinkKind.C2C)
                else:
                    absent.append(f"{name} to {target or 'nowhere'}")
            for element in gpu.gpu.named("c2c") if gpu.gpu else ():
                self.chip_to_chip(name, gpu.above.cpu, element)
        self.direct(bonds)
        self.over_switches(switched)
        if hidden:
            self.note(
                f"NVLinks whose other end a hypervisor hides (it names the GPU itself): {some(hidden)}; left out. "
                "`nvidia-smi topo -m` on the machine shows them."
            )
        if absent:
            self.note(f"Links to what is not in it: {some(absent)}; left out.")

    def bond(self, element: Element) -> _Bond:
        if not re.fullmatch(r"[1-9]\d{0,2}", element.get("count")):
            what = f"count of <{element.tag}> is {element.get('count')!r}; it must be a number of links"
            raise _error(self.where, element, what)
        return _Bond(_LINK_KINDS[element.tag], int(element.get("count")), element)

    def direct(self, bonds: dict[tuple[_Gpu, _Gpu], _Bond]) -> None:
        differing = []
        for (one, other), bond in bonds.items():
            name, peer, back = self.names[one], self.names[other], bonds.get((other, one))
            if back and peer < name:
                continue  # done from the other end
            if back is None or back.lanes != bond.lanes:
                differing.append(f"{name} to {peer} {bond.lanes}, back {back.lanes if back else 'none'}")
            more = back if back and back.lanes > bond.lanes else bond
            self.tie(name, peer, more, (one, other))
        if differing:
            self.note(f"Links that the two ends count differently: {some(differing)}; the higher count is taken.")

    def over_switches(self, switched: dict[tuple[int, str], list[tuple[_Gpu, _Bond]]]) -> None:
        """The switches by host and bus id, each with the GPUs' links to it."""
        several = len({gpu.above.host for ends in switched.values() for gpu, _ in ends}) > 1
        lanes = Counter[_Gpu]()
        for gpu, bond in (end for ends in switched.values() for end in ends):
            lanes[gpu] += bond.lanes
        for (host, target), ends in sorted(switched.items(), key=lambda item: item[0]):
            index = self.count[NodeKind.NVSWITCH, host]
            if several and target.startswith("fffffff"):
                name = f"NVSwitch{index}"
                self.taken.add(name)
                self.nodes.append(Node(name, NodeKind.NVSWITCH, index, host, detail=target))
            else:
                name = self.add_next(NodeKind.NVSWITCH, _Above("", "", host, None), target)
            for gpu, bond in ends:
                self.tie(self.names[gpu], name, bond, (gpu,))
            if all(reduces(self.model(gpu), lanes[gpu]) for gpu, _ in ends):
                self.nodes = [replace(node, reduces=True) if node.name == name else node for node in self.nodes]

    def tie(self, one: str, other: str, bond: _Bond, gpus: Sequence[_Gpu], kind: LinkKind | None = None) -> None:
        """Links of a bond, each as fast as the slower of the GPUs has them."""
        rate = self.link_rate(gpus, bond)
        source = f"{bond.lanes} x {rate.gbps:g} GB/s, {rate.source}"
        self.links += both_directions(one, other, kind or bond.kind, bond.lanes * rate.gbps, bond.lanes, source)

    def link_rate(self, gpus: Sequence[_Gpu], bond: _Bond) -> Rate:
        rate = fabric_link(bond.kind, [self.model(gpu) for gpu in gpus], self.assume)
        if rate.assumed and self.assume.gpu is not None:
            what = (
                f"there is {bond.kind.value} in it, which --gpu {self.assume.gpu} does not have; name the right model"
            )
            raise _error(self.where, bond.element, what)
        self.note(rate.assumed)
        return rate

    def leave_slot(self, gpu: str, cpu: str) -> None:
        """Leaves out a PCIe link beside faster ones of the same ends."""
        self.links = [
            link for link in self.links if {link.src, link.dst} != {gpu, cpu} or link.kind is not LinkKind.PCIE
        ]

    def chip_to_chip(self, gpu: str, cpu: str, element: Element) -> None:
        """NVLink-C2C between a Grace CPU and its GPU: `count` links of `bw` MB/s."""
        bandwidth, count = element.get("bw"), element.get("count")
        if not all(re.fullmatch(r"[1-9]\d{0,6}", text) for text in (bandwidth, count)):
            what = f"bw and count of <c2c> are {bandwidth!r} and {count!r}; they must be numbers above 0"
            raise _error(self.where, element, what)
        self.leave_slot(gpu, cpu)
        rate = Rate(int(bandwidth) * int(count) / 1000, f"{count} C2C links of {int(bandwidth) / 1000:g} GB/s")
        self.join(gpu, cpu, LinkKind.C2C, rate)

    # Between CPUs, and between hosts.

    def join_cpus_of_hosts(self) -> None:
        for host in range(len(self.hosts)):
            here = {above.node: above.numa for above, _ in self.cpus if above.host == host}
            cpu = next(cpu for above, cpu in self.cpus if above.host == host)
            family, number = _whole(cpu.get("familyid")), _whole(cpu.get("modelid"))
            between = smp(self.assume, cpu.get("vendor"), family or 0, number or 0, cpu.get("arch"))
            self.join_cpus(here, between)

    def join_hosts(self) -> None:
        if len(self.hosts) > 1 and self.ports:
            self.nodes.append(Node("network", NodeKind.NETWORK))
            for name, rate in self.ports:
                self.join(name, "network", LinkKind.NETWORK, rate)


def _class(pci: Element) -> int:
    """The class, subclass and interface of a PCIe device: 0x030200 is a GPU without a display."""
    return _hexadecimal(pci.get("class"))


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def _hexadecimal(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else 0


def _is_gpu(element: Element) -> bool:
    if element.tag != "pci" or element.named("pci", "nic"):
        return False
    is_class = _class(element) >> 8 in _GPU_CLASSES and element.get("vendor").lower() in _GPU_VENDORS
    return is_class or bool(element.named("gpu"))


def _is_device(element: Element) -> bool:
    return _is_gpu(element) or element.tag == "nic" or _class(element) >> 16 == _NETWORK


def _error(where: str, at: Element, what: str) -> TopologyError:
    return TopologyError(f"{where}: line {at.line}, column {at.column}: {what}")
