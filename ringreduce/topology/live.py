"""This machine: GPUs and their links from NVML, PCIe and NUMA from Linux, or cores where there are no GPUs.

`probe` is `hardware.look`, which reads and never raises, and then `decide`, which draws the graph from what was read,
and the same from the same.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringreduce.topology.classes import Draft
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions, merged
from ringreduce.topology.hardware import SWITCH, UNKNOWN, Found, Gpu, PciDevice, look, this_system
from ringreduce.topology.rates import (
    NO_PEER_ACCESS,
    NOTHING,
    PCIE_GTS,
    Assumed,
    Model,
    Rate,
    fabric_link,
    model,
    pcie,
    peer_access,
    reduces,
    slot,
    smp,
)

MEMORY = 10.0
"""GB/s that a core is supposed to copy while the others copy too, where no probe has told."""


def probe(assume: Assumed = NOTHING, memory: float | None = None) -> LinkGraph:
    """This machine: its GPUs, as far and in the order that CUDA_VISIBLE_DEVICES shows them, or without any its cores.

    A GPU keeps the number that `nvidia-smi` shows in its name, and has its bus id in `detail`.  `memory`: the GB/s that
    a core copies in memory, if that has been measured.

    Never raises: what cannot be read is left out or assumed, and `LinkGraph.assumed` says so.
    """
    return decide(look(this_system(memory)), assume)


def probe_all() -> LinkGraph | None:
    """This machine with all its GPUs, whatever this process is shown of them; None where nobody tells of NVLink.  Never
    raises."""
    system = this_system()
    return None if system.nvml is None else decide(look(replace(system, environ={})))


def decide(found: Found, assume: Assumed = NOTHING) -> LinkGraph:
    """The graph of what was found."""
    draft = _Draft(found, assume)
    if found.gpus:
        draft.cpus(found.numa)
        models = Counter(gpu.name or "GPU" for gpu in found.gpus)
        name = ", ".join(f"{count} x {model}" for model, count in models.items())
        draft.gpus()
        draft.nvlinks()
    else:
        draft.cpus({numa: cores & found.cores for numa, cores in found.numa.items() if cores & found.cores})
        name = f"{len(found.cores)} core{'s' if len(found.cores) > 1 else ''}"
        draft.cores()
    draft.nics()
    return LinkGraph(f"this machine: {name}", tuple(draft.nodes), merged(draft.links), tuple(draft.assumed))


class _Draft(Draft):
    """The graph in the making."""

    def __init__(self, found: Found, assume: Assumed) -> None:
        super().__init__()
        self.found = found
        self.assume = assume
        self.assumed |= dict.fromkeys(found.notes)
        self.numa: Mapping[int, frozenset[int]] = {}
        self.switches: dict[str, str] = {}
        """Names of PCIe switches, by the bus id of their upstream port."""

    def cpus(self, numa: Mapping[int, frozenset[int]]) -> None:
        """NUMA nodes, each joined to each other."""
        self.numa = numa or {0: self.found.cores}
        for node in self.numa:
            self.nodes.append(Node(f"CPU{node}", NodeKind.CPU, node, numa=node))
        between = smp(self.assume, *self.found.cpu, architecture=platform.machine())
        self.join_cpus({f"CPU{node}": node for node in self.numa}, between)

    def cores(self) -> None:
        """The cores that this process may use, at the memory of their NUMA node."""
        memory = self.found.memory
        text = f"How fast the memory is was not measured: {MEMORY:g} GB/s for each core; `ringreduce tune` measures it."
        rate = Rate(MEMORY, "assumed", text) if memory is None else Rate(memory, "probe: copying, all cores at once")
        for numa, cores in self.numa.items():
            for core in sorted(cores):
                self.nodes.append(Node(f"CORE{core}", NodeKind.CORE, core, numa=numa))
                self.join(f"CORE{core}", f"CPU{numa}", LinkKind.MEMORY, rate)

    def device(self, node: Node, bus: str, rate: Rate) -> None:
        """A GPU or NIC, and the switches above it that are not there yet."""
        device = self.found.pci[bus]
        numa = self.home(node.name, device)
        self.nodes.append(replace(node, numa=numa))
        self.join(node.name, self.switch(device.switches, numa), LinkKind.PCIE, rate)

    def switch(self, ports: Sequence[str], numa: int) -> str:
        """The name of the last of the switches with these upstream ports, root first, or of the CPU above."""
        if not ports:
            return f"CPU{numa}"
        *above, port = ports
        if port not in self.switches:
            index = len(self.switches)
            self.switches[port] = f"PCIe{index}"
            self.nodes.append(Node(f"PCIe{index}", NodeKind.PCIE, index, numa=numa, detail=port))
            rate = self.slot(port) or slot(None, self.assume)
            self.join(f"PCIe{index}", self.switch(above, numa), LinkKind.PCIE, rate)
        return self.switches[port]

    def told(self, bus: str) -> Rate | None:
        """What PCIe carries to a device, if sysfs tells."""
        device = self.found.pci[bus]
        if not device.speed or not device.width:
            return None
        return Rate(pcie(device.speed, device.width), f"PCIe, {device.speed:g} GT/s x{device.width}")

    def slot(self, bus: str) -> Rate | None:
        """Likewise, unless the user has said it."""
        return self.told(bus) if self.assume.pcie is None else slot(None, self.assume)

    def gpus(self) -> None:
        for gpu in self.found.gpus:
            generation, width = gpu.slot
            rate = self.slot(gpu.bus)
            if rate is None and width and (speed := PCIE_GTS.get(generation or 0)):
                rate = Rate(pcie(speed, width), f"PCIe {generation}.0 x{width}, says NVML")
            detail = f"{gpu.name} at {gpu.bus}".strip()
            peers = peer_access(self.model(gpu), self.assume)
            node = Node(f"GPU{gpu.index}", NodeKind.GPU, gpu.index, detail=detail, peer_access=peers)
            self.device(node, gpu.bus, rate or slot(self.model(gpu), self.assume))
            if not peers:
                self.note(NO_PEER_ACCESS)

    def home(self, name: str, device: PciDevice) -> int:
        """The NUMA node of a device."""
        if device.numa is not None and device.numa in self.numa:
            return device.numa
        first = min(self.numa)
        if len(self.numa) > 1:
            self.note(f"Which CPU {name} is at, the system does not tell: CPU{first} is assumed.")
        return first

    def model(self, gpu: Gpu) -> Model | None:
        return model(self.assume.gpu) if self.assume.gpu else gpu.model

    def nvlinks(self) -> None:
        names = {gpu.bus: f"GPU{gpu.index}" for gpu in self.found.gpus}
        links: list[Link] = []
        for gpu in self.found.gpus:
            name = names[gpu.bus]
            rate = fabric_link(LinkKind.NVLINK, [self.model(gpu)], self.assume)
            if gpu.links:
                self.note(rate.assumed)
            for end in gpu.links:
                if end == gpu.bus:
                    self.note(f"NVLinks of {name} lead to itself, as virtual machines have it: left out.")
                elif end in names:
                    links.append(Link(name, names[end], LinkKind.NVLINK, rate.gbps, 1, rate.source))
                elif end in (SWITCH, UNKNOWN):
                    links += both_directions(name, "NVSwitch0", LinkKind.NVLINK, rate.gbps, 1, rate.source)
                    if end == UNKNOWN:
                        self.note(f"Where NVLinks of {name} lead, NVML does not tell: to an NVSwitch.")
        if any(link.src == "NVSwitch0" for link in links):
            lanes = Counter(link.src for link in links if link.dst == "NVSwitch0")
            reducing = all(reduces(self.model(gpu), lanes[names[gpu.bus]]) for gpu in self.found.gpus)
            self.nodes.append(Node("NVSwitch0", NodeKind.NVSWITCH, detail="all NVSwitches", reduces=reducing))
        self.links += links

    def nics(self) -> None:
        for index, nic in enumerate(self.found.nics):
            known = [Rate(nic.port / 8, f"port of {nic.port:g} Gbit/s")] if nic.port else []
            if rate := self.told(nic.bus):
                known.append(rate)
            if known:
                self.device(Node(nic.name, NodeKind.NIC, index), nic.bus, min(known, key=lambda each: each.gbps))
            else:
                self.note(f"How fast {nic.name} is, the system does not tell: it is left out.")
