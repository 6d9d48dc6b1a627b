"""The well-known machines, as link graphs, and several of one kind joined by their NICs.

Wiring and link counts are those of the machines' own listings (`nvidia-smi topo -m`) and vendors' descriptions; what
differs from build to build, such as what an HGX board is plugged into, is in `LinkGraph.assumed`.  Capacities are line
rates in one direction; `preset(name, Assumed(nvlink=18))` puts measured ones in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions, merged
from ringreduce.topology.rates import (
    NO_PEER_ACCESS,
    NOTHING,
    NVLINK,
    PCIE_GTS,
    Assumed,
    model,
    model_in,
    pcie,
    peer_access,
    smp,
)

Wiring = Mapping[int, Sequence[tuple[int, int]]]
"""Pairs of GPUs by the number of links that join them."""

Preset = Callable[..., LinkGraph]
"""Takes an `Assumed`, or nothing."""

CUBE_MESH_V100: Wiring = {
    2: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)),
    1: ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)),
}
"""The hybrid cube mesh of V100s, which have six links each."""

CUBE_MESH_P100: Wiring = {1: (*CUBE_MESH_V100[2], *CUBE_MESH_V100[1])}
"""That of P100s, which have four links: the same pairs, joined once each."""


@dataclass
class _Draft:
    """A machine in the making."""

    name: str
    assume: Assumed
    nodes: list[Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def graph(self) -> LinkGraph:
        return LinkGraph(self.name, tuple(self.nodes), merged(self.links), tuple(self.assumed))

    def join(self, one: str, other: str, kind: LinkKind, lane: float, lanes: int, source: str) -> None:
        self.links += both_directions(one, other, kind, lane * lanes, lanes, source)

    def gpus(self, count: int, model: str, cpus: int) -> None:
        """GPUs, shared out evenly among the CPUs."""
        for index in range(count):
            peers = peer_access(model_in(model), self.assume)
            self.nodes.append(
                Node(f"GPU{index}", NodeKind.GPU, index, numa=index * cpus // count, detail=model, peer_access=peers)
            )
        if not peers:
            self.assumed.append(NO_PEER_ACCESS)

    def nvlink(self, one: str, other: str, generation: int, lanes: int) -> None:
        given = self.assume.nvlink
        source = f"NVLink {generation}" if given is None else "--nvlink-gbps"
        self.join(one, other, LinkKind.NVLINK, NVLINK[generation] if given is None else given, lanes, source)

    def nvswitch(self, generation: int, lanes: int, detail: str) -> None:
        """Switches that no traffic fills are one."""
        self.nodes.append(Node("NVSwitch0", NodeKind.NVSWITCH, detail=detail, reduces=generation >= 4))
        for gpu in [node.name for node in self.nodes if node.kind is NodeKind.GPU]:
            self.nvlink(gpu, "NVSwitch0", generation, lanes)

    def cpus(self, model: str, number: int, vendor: str = "GenuineIntel", family: int = 6) -> None:
        """Two CPUs and what joins them; `number` is the model as /proc/cpuinfo has it."""
        self.nodes += [Node(f"CPU{index}", NodeKind.CPU, index, numa=index, detail=model) for index in range(2)]
        rate = smp(self.assume, vendor, family, number)
        self.join("CPU0", "CPU1", LinkKind.SMP, rate.gbps, 1, rate.source)

    def pcie(self, one: str, other: str, generation: int) -> None:
        """Sixteen lanes of PCIe."""
        given = self.assume.pcie
        source = f"PCIe {generation}.0 x16" if given is None else "--pcie-gbps"
        self.join(one, other, LinkKind.PCIE, pcie(PCIE_GTS[generation], 16) if given is None else given, 1, source)

    def switch(self, index: int, below: Sequence[str], above: str, generation: int) -> None:
        """PCIe switch `index` with what is plugged into it."""
        self.nodes.append(Node(f"PCIe{index}", NodeKind.PCIE, index, numa=self.numa(above)))
        self.pcie(f"PCIe{index}", above, generation)
        for name in below:
            self.pcie(name, f"PCIe{index}", generation)

    def nic(self, name: str, index: int, above: str, generation: int, port: float) -> None:
        """A NIC in a slot of sixteen lanes: its link is as fast as the slot or its port, of `port` Gbit/s."""
        self.nodes.append(Node(name, NodeKind.NIC, index, numa=self.numa(above)))
        gbps = min(port / 8, pcie(PCIE_GTS[generation], 16))
        self.join(name, above, LinkKind.PCIE, gbps, 1, f"port of {port:g} Gbit/s, PCIe {generation}.0 x16")

    def numa(self, name: str) -> int | None:
        return next(node.numa for node in self.nodes if node.name == name)


def _cube_mesh(name: str, model: str, generation: int, wiring: Wiring, assume: Assumed) -> _Draft:
    """Two GPUs to a PCIe switch, two switches to a CPU."""
    draft = _Draft(name, assume)
    draft.gpus(8, model, cpus=2)
    for lanes, pairs in wiring.items():
        for one, other in pairs:
            draft.nvlink(f"GPU{one}", f"GPU{other}", generation, lanes)
    draft.cpus("Xeon E5 v4", 0x4F)
    for index in range(4):
        draft.switch(index, [f"GPU{2 * index}", f"GPU{2 * index + 1}"], f"CPU{index // 2}", 3)
    return draft


def _dgx1(name: str, model: str, generation: int, wiring: Wiring, assume: Assumed = NOTHING) -> LinkGraph:
    draft = _cube_mesh(name, model, generation, wiring, assume)
    for index in range(4):
        draft.nic(f"mlx5_{index}", index, f"PCIe{index}", 3, 100)
    return draft.graph()


def _p3_16xlarge(assume: Assumed = NOTHING) -> LinkGraph:
    draft = _cube_mesh("p3.16xlarge", "V100", 2, CUBE_MESH_V100, assume)
    draft.nic("NIC0", 0, "CPU0", 3, 25)
    draft.assumed.append("The PCIe switches are those of a DGX-1: the virtual machine does not show its own.")
    return draft.graph()


def _p3_8xlarge(assume: Assumed = NOTHING) -> LinkGraph:
    """One of the two boards of a p3.16xlarge."""
    draft = _Draft("p3.8xlarge", assume)
    draft.gpus(4, "V100", cpus=1)
    for lanes, pairs in CUBE_MESH_V100.items():
        for one, other in pairs:
            if one < 4 and other < 4:
                draft.nvlink(f"GPU{one}", f"GPU{other}", 2, lanes)
    draft.nodes.append(Node("CPU0", NodeKind.CPU, numa=0, detail="Xeon E5 v4"))
    for index in range(2):
        draft.switch(index, [f"GPU{2 * index}", f"GPU{2 * index + 1}"], "CPU0", 3)
    draft.nic("NIC0", 0, "CPU0", 3, 10)
    draft.assumed.append("The PCIe switches are those of a DGX-1: the virtual machine does not show its own.")
    return draft.graph()


def _dgx2(assume: Assumed = NOTHING) -> LinkGraph:
    draft = _Draft("dgx2", assume)
    draft.gpus(16, "V100", cpus=2)
    draft.nvswitch(2, 6, "12 NVSwitches on two boards, joined by 48 links")
    draft.cpus("Xeon Platinum 8168", 0x55)
    # Two levels of switches: four GPUs and two NICs share one way to a CPU.
    for upper in range(4):
        draft.switch(8 + upper, [], f"CPU{upper // 2}", 3)
    for index in range(8):
        draft.switch(index, [f"GPU{2 * index}", f"GPU{2 * index + 1}"], f"PCIe{8 + index // 2}", 3)
        draft.nic(f"mlx5_{index}", index, f"PCIe{index}", 3, 100)
    return draft.graph()


def _dgx_a100(assume: Assumed = NOTHING) -> LinkGraph:
    draft = _Draft("dgx-a100", assume)
    draft.gpus(8, "A100", cpus=2)
    draft.nvswitch(3, 12, "6 NVSwitches")
    draft.cpus("EPYC 7742", 0x31, "AuthenticAMD", 0x17)
    for index in range(4):
        draft.switch(index, [f"GPU{2 * index}", f"GPU{2 * index + 1}"], f"CPU{index // 2}", 4)
        for nic in (2 * index, 2 * index + 1):
            draft.nic(f"mlx5_{nic}", nic, f"PCIe{index}", 4, 200)
    return draft.graph()


def _hgx(name: str, model: str, generation: int, switches: str, assume: Assumed = NOTHING) -> LinkGraph:
    draft = _Draft(name, assume)
    draft.gpus(8, model, cpus=2)
    draft.nvswitch(generation, 18, switches)
    draft.cpus("Xeon Platinum 8480", 0x8F)
    for index in range(8):
        draft.switch(index, [f"GPU{index}"], f"CPU{index // 4}", 5)
        draft.nic(f"mlx5_{index}", index, f"PCIe{index}", 5, 400)
    draft.assumed.append(
        "The board is in a machine with two Sapphire Rapids CPUs, and a PCIe 5.0 x16 switch for each GPU and a NIC "
        "of 400 Gbit/s; --pcie-gbps and --smp-gbps set rates, a listing of the machine (`nvidia-smi topo -m`) all."
    )
    return draft.graph()


def _gb200_nvl72(assume: Assumed = NOTHING) -> LinkGraph:
    """The rack as one machine.  Its CPUs and NICs are left out: no GPU needs them to reach another."""
    draft = _Draft("gb200-nvl72", assume)
    draft.gpus(72, "B200", cpus=36)
    draft.nvswitch(5, 18, "18 NVSwitches in 9 trays")
    return draft.graph()


def _pcie_box(count: int, assume: Assumed = NOTHING) -> LinkGraph:
    """GPUs without links of their own: two to a PCIe switch, half of the switches on each of two CPUs."""
    draft = _Draft(f"pcie-{count}", assume)
    draft.gpus(count, assume.gpu or "", cpus=2)
    draft.cpus("Skylake", 0x55)
    generation = model(assume.gpu).pcie if assume.gpu else 3
    for index in range(count // 2):
        draft.switch(index, [f"GPU{2 * index}", f"GPU{2 * index + 1}"], f"CPU{index * 4 // count}", generation)
    if assume.smp is None:
        draft.assumed.append("The two CPUs are Skylake, joined by three UPI, 78 GB/s; --smp-gbps sets it.")
    if assume.pcie is None and assume.gpu is None:
        draft.assumed.append("Slots and switches are PCIe 3.0 x16, 15.75 GB/s; --gpu or --pcie-gbps sets it.")
    return draft.graph()


PRESETS: Mapping[str, Preset] = {
    "dgx1-p100": partial(_dgx1, "dgx1-p100", "P100", 1, CUBE_MESH_P100),
    "dgx1-v100": partial(_dgx1, "dgx1-v100", "V100", 2, CUBE_MESH_V100),
    "p3.16xlarge": _p3_16xlarge,
    "p3.8xlarge": _p3_8xlarge,
    "dgx2": _dgx2,
    "dgx-a100": _dgx_a100,
    "hgx-h100": partial(_hgx, "hgx-h100", "H100", 4, "4 NVSwitches"),
    "hgx-h200": partial(_hgx, "hgx-h200", "H200", 4, "4 NVSwitches"),
    "hgx-b200": partial(_hgx, "hgx-b200", "B200", 5, "2 NVSwitches"),
    "gb200-nvl72": _gb200_nvl72,
    "pcie-4": partial(_pcie_box, 4),
    "pcie-8": partial(_pcie_box, 8),
}


def preset(name: str, assume: Assumed = NOTHING) -> LinkGraph:
    """A well-known machine, with the rates that `assume` has; its `gpu` goes with PCIe boxes only.

    Raises TopologyError, with the names there are, for another name, and for a `gpu` where the preset has its own.
    """
    if name not in PRESETS:
        raise TopologyError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    if assume.gpu and not name.startswith("pcie"):
        raise TopologyError(f"preset {name!r} has GPUs of its own; leave --gpu {assume.gpu} out")
    return PRESETS[name](assume)
