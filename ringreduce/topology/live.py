"""This machine: GPUs and their links from NVML, PCIe and NUMA from Linux, or cores where there are no GPUs.

`probe` is `look`, which reads and never raises, and then `decide`, which draws the graph from what was read and is the
same for the same reading.  `look` reads through a `System`, so that a test, or a person with a copy of another
machine's /sys, can put something else in its place.

PCIe.  The path of a device in /sys/devices names the bridges above it: a root port, then two bridges (upstream and
downstream port) for every switch.  A GPU slows its link down while it is idle, so the speed that counts is the largest
that both ends can do; the width is what they agreed on.

NVLink.  NVML tells for each link that is up what is at its other end.  How fast it is follows from the GPU model: the
version that NVML states is a number of the driver's, not the generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringreduce.common.cores import own_cores
from ringreduce.common.files import text_of
from ringreduce.common.units import numbers
from ringreduce.topology.classes import between_cpus
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions, merged
from ringreduce.topology.rates import (
    NO_PEER_ACCESS,
    NOTHING,
    NVLINK,
    PCIE_GTS,
    Assumed,
    Model,
    Rate,
    model,
    model_in,
    model_of_architecture,
    pcie,
    peer_access,
    reduces,
    slot,
    smp,
)

MEMORY = 10.0
"""GB/s that a core is supposed to copy while the others copy too, where no probe has told."""

ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI device in sysfs: domain, bus, device, function."""

DRIVERS = {
    "0x10de": (
        ("0x0300", "0x0302"),
        "nvidiactl",
        "NVLinks are not known: NVML tells of them, through the package nvidia-ml-py (`pip install nvidia-ml-py`).",
    ),
    "0x1002": (
        ("0x0302", "0x0380"),
        "kfd",
        "XGMI links are not known: `rocm-smi --showtopotype` tells of them; give its output in RINGREDUCE_TOPO_FILE.",
    ),
}
"""By PCI vendor: the classes of what may be a GPU, what is in /dev if this process can use it, what to say."""

SWITCH, NPU, UNKNOWN = "switch", "npu", "unknown"
"""Ends of NVLinks that are no GPUs: an NVSwitch, a POWER CPU (which carries no traffic between GPUs), not told."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class System:
    """Where to look: folders, NVML's Python module (None: there is none), variables, and the cores of this process."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    nvml: Any = None
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] = frozenset({0})
    memory: float | None = None
    """GB/s that each core copies while all do, if that was measured."""


@dataclass(frozen=True)
class PciDevice:
    """The bridges above a device, the root's first; its NUMA node; GT/s and lanes of its link (0: not told)."""

    bridges: tuple[str, ...] = ()
    numa: int | None = None
    speed: float = 0.0
    width: int = 0

    @property
    def switches(self) -> tuple[str, ...]:
        """The upstream ports of the switches above: after the root port, each is followed by a downstream port."""
        return tuple(port for port, _ in zip(self.bridges[1::2], self.bridges[2::2], strict=False))


@dataclass(frozen=True)
class Gpu:
    """A GPU.  `links` has the other end of each NVLink that is up: a bus id, or one of SWITCH, NPU and UNKNOWN;
    `slot` the generation and the lanes of PCIe, as far as NVML tells."""

    index: int
    bus: str
    name: str = ""
    uuid: str = ""
    model: Model | None = None
    links: tuple[str, ...] = ()
    slot: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Nic:
    """A NIC and the Gbit/s of its port (0: not told)."""

    name: str
    bus: str
    port: float


@dataclass(frozen=True)
class Found:
    """What `look` has read."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    pci: Mapping[str, PciDevice]
    """GPUs, NICs and the bridges above them, by bus id."""
    numa: Mapping[int, frozenset[int]]
    """The cores of each NUMA node that has any."""
    cores: frozenset[int]
    """Those that this process may use."""
    memory: float | None
    cpu: tuple[str, int, int]
    """Vendor, family and model."""
    notes: tuple[str, ...]


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


def this_system(memory: float | None = None) -> System:
    """Where this process runs; `memory` as for `probe`."""
    try:
        import pynvml
    except ImportError:
        pynvml = None
    return System(nvml=pynvml, environ=os.environ, cores=own_cores(), memory=memory)


# Looking.  Nothing here raises: NVML is asked through _ask, files are read through text_of.


def look(system: System) -> Found:
    """What there is, as far as it can be read."""
    notes: list[str] = []
    gpus = _visible(_gpus_of_nvml(system, notes) or _gpus_of_sysfs(system, notes), system.environ, notes)
    nics = _nics(system.sysfs)
    pci = {bus: _pci_device(system.sysfs, bus) for bus in [gpu.bus for gpu in gpus] + [nic.bus for nic in nics]}
    pci |= {bus: _pci_device(system.sysfs, bus) for device in [*pci.values()] for bus in device.bridges}
    return Found(gpus, nics, pci, _numa(system), system.cores, system.memory, _cpu(system.proc), notes=tuple(notes))


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What a function of NVML answers; None if it fails, or is missing in this version."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _gpus_of_nvml(system: System, notes: list[str]) -> tuple[Gpu, ...]:
    nvml = system.nvml
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception as error:
        log.info("NVML tells of no GPUs: %s", error)
        return ()
    try:
        gpus = [_gpu_of_nvml(nvml, index) for index in range(count)]
    finally:
        _ask(nvml, "nvmlShutdown")
    for index in (index for index, gpu in enumerate(gpus) if gpu is None):
        notes.append(f"GPU {index} does not answer NVML; it is left out.")
    return tuple(gpu for gpu in gpus if gpu is not None)


def _gpu_of_nvml(nvml: Any, index: int) -> Gpu | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    bus = _bus(_ask(nvml, "nvmlDeviceGetPciInfo", handle))
    if bus is None:
        return None
    name = _decoded(_ask(nvml, "nvmlDeviceGetName", handle))
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle) or ("", "")
    return Gpu(
        index,
        bus,
        name,
        _decoded(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        model_in(name) or model_of_architecture("".join(map(str, capability)), ""),
        _nvlinks(nvml, handle),
        (
            _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
            _ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        ),
    )


def _nvlinks(nvml: Any, handle: Any) -> tuple[str, ...]:
    ends = []
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, number) != 1:
            continue  # down, or there are no more
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        bus = _bus(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number))
        ends.append({0: bus or UNKNOWN, 1: NPU, 2: SWITCH}.get(kind, UNKNOWN))
    return tuple(ends)


def _bus(info: Any) -> str | None:
    """The bus id in NVML's answer, as sysfs writes it: NVML's domain has eight digits, or four."""
    text = _decoded(getattr(info, "busId", "")).lower()
    if not ADDRESS.fullmatch(text):
        return None
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _decoded(text: Any) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text or "")


def _gpus_of_sysfs(system: System, notes: list[str]) -> tuple[Gpu, ...]:
    """GPUs on PCIe whose driver this process can reach, without their own links."""
    vendors = [vendor for vendor, (_, device, _) in DRIVERS.items() if (system.dev / device).exists()]
    found = []
    for folder in _folders(system.sysfs / "bus/pci/devices"):
        vendor = text_of(folder / "vendor")
        if vendor in vendors and text_of(folder / "class").startswith(DRIVERS[vendor][0]):
            found.append((folder.name, vendor))
    notes += [DRIVERS[vendor][2] for vendor in sorted({vendor for _, vendor in found})]
    return tuple(Gpu(index, bus) for index, (bus, _) in enumerate(found))


def _visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str], notes: list[str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows, in its order: up to the first entry of CUDA_VISIBLE_DEVICES that is none."""
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None or not gpus:
        return gpus
    shown: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in entries.split(","))):
        fits = [gpu for gpu in gpus if entry == str(gpu.index) or (len(entry) > 4 and gpu.uuid.startswith(entry))]
        if len(fits) != 1 or fits[0] in shown:
            notes.append(f"CUDA_VISIBLE_DEVICES has {entry!r}, which is no other GPU here; the list ends there.")
            break
        shown += fits
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "GPUs of several models: CUDA numbers them as here only with CUDA_DEVICE_ORDER=PCI_BUS_ID; set it."
        )
    if not shown:
        notes.append(f"CUDA_VISIBLE_DEVICES is {entries!r}: it shows none of {len(gpus)} GPUs.")
    return tuple(shown)


def _pci_device(sysfs: Path, bus: str) -> PciDevice:
    folder = sysfs / "bus/pci/devices" / bus
    above = [part for part in Path(os.path.realpath(folder)).parts if ADDRESS.fullmatch(part)][:-1]
    bridges = tuple(above)
    numa = text_of(folder / "numa_node")
    speeds = [_first_number(text_of(folder / "max_link_speed"))]
    if bridges:
        speeds.append(_first_number(text_of(folder.parent / bridges[-1] / "max_link_speed")))
    speed = min((speed for speed in speeds if speed), default=0.0)
    width = int(_first_number(text_of(folder / "current_link_width")))
    return PciDevice(bridges, int(numa) if numa.isdecimal() else None, speed, width if 0 < width <= 32 else 0)


def _first_number(text: str) -> float:
    """ "16.0 GT/s PCIe" -> 16.0; 0 if there is none, or none that a device could mean."""
    found = re.match(r"\d{1,9}(?!\d)(\.\d+)?", text)
    return float(found[0]) if found else 0.0


def _nics(sysfs: Path) -> tuple[Nic, ...]:
    """Network devices on PCIe, those of InfiniBand and RoCE under the name that these give them."""
    found: dict[str, Nic] = {}
    for folder in _folders(sysfs / "class/infiniband"):
        rates = [_first_number(text_of(port / "rate")) for port in _folders(folder / "ports")]
        _add_nic(found, folder, max(rates, default=0.0))
    for folder in _folders(sysfs / "class/net"):
        _add_nic(found, folder, _first_number(text_of(folder / "speed")) / 1000)
    return tuple(found[bus] for bus in sorted(found))


def _add_nic(found: dict[str, Nic], folder: Path, port: float) -> None:
    on_path = [part for part in Path(os.path.realpath(folder / "device")).parts if ADDRESS.fullmatch(part)]
    if on_path and on_path[-1] not in found:
        found[on_path[-1]] = Nic(folder.name, on_path[-1], port)


def _numa(system: System) -> dict[int, frozenset[int]]:
    nodes = {}
    for folder in _folders(system.sysfs / "devices/system/node"):
        with contextlib.suppress(ValueError):  # other folders, and nonsense
            nodes[int(folder.name.removeprefix("node"))] = frozenset(numbers(text_of(folder / "cpulist")))
    nodes = {node: cores for node, cores in nodes.items() if cores}
    return dict(sorted(nodes.items())) or {0: system.cores}


def _cpu(proc: Path) -> tuple[str, int, int]:
    """Vendor, family and model."""
    values: dict[str, str] = {}
    for line in text_of(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    family, number = (int(_first_number(values.get(key, ""))) for key in ("cpu family", "model"))
    return values.get("vendor_id", ""), family, number


# Deciding.


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
    return LinkGraph(f"this machine: {name}", tuple(draft.nodes), merged(draft.links), (*dict.fromkeys(draft.assumed),))


class _Draft:
    """The graph in the making."""

    def __init__(self, found: Found, assume: Assumed) -> None:
        self.found = found
        self.assume = assume
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        self.assumed = list(found.notes)
        self.numa: Mapping[int, frozenset[int]] = {}
        self.switches: dict[str, str] = {}
        """Names of PCIe switches, by the bus id of their upstream port."""

    def join(self, one: str, other: str, kind: LinkKind, rate: Rate) -> None:
        self.links += both_directions(one, other, kind, rate.gbps, 1, rate.source)
        if rate.assumed:
            self.assumed.append(rate.assumed)

    def cpus(self, numa: Mapping[int, frozenset[int]]) -> None:
        """NUMA nodes, each joined to each other."""
        self.numa = numa or {0: self.found.cores}
        for node in self.numa:
            self.nodes.append(Node(f"CPU{node}", NodeKind.CPU, node, numa=node))
        between = smp(self.assume, *self.found.cpu, architecture=platform.machine())
        for one, other, rate in between_cpus({f"CPU{node}": node for node in self.numa}, between):
            self.join(one, other, LinkKind.SMP, rate)

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
                self.assumed.append(NO_PEER_ACCESS)

    def home(self, name: str, device: PciDevice) -> int:
        """The NUMA node of a device."""
        if device.numa is not None and device.numa in self.numa:
            return device.numa
        first = min(self.numa)
        if len(self.numa) > 1:
            self.assumed.append(f"Which CPU {name} is at, the system does not tell: CPU{first} is assumed.")
        return first

    def model(self, gpu: Gpu) -> Model | None:
        return model(self.assume.gpu) if self.assume.gpu else gpu.model

    def nvlinks(self) -> None:
        names = {gpu.bus: f"GPU{gpu.index}" for gpu in self.found.gpus}
        links: list[Link] = []
        for gpu in self.found.gpus:
            name = names[gpu.bus]
            rate = self.nvlink(gpu)
            if gpu.links and rate.assumed:
                self.assumed.append(rate.assumed)
            for end in gpu.links:
                if end == gpu.bus:
                    self.assumed.append(f"NVLinks of {name} lead to itself, as virtual machines have it: left out.")
                elif end in names:
                    links.append(Link(name, names[end], LinkKind.NVLINK, rate.gbps, 1, rate.source))
                elif end in (SWITCH, UNKNOWN):
                    links += both_directions(name, "NVSwitch0", LinkKind.NVLINK, rate.gbps, 1, rate.source)
                    if end == UNKNOWN:
                        self.assumed.append(f"Where NVLinks of {name} lead, NVML does not tell: to an NVSwitch.")
        if any(link.src == "NVSwitch0" for link in links):
            lanes = Counter(link.src for link in links if link.dst == "NVSwitch0")
            reducing = all(reduces(self.model(gpu), lanes[names[gpu.bus]]) for gpu in self.found.gpus)
            self.nodes.append(Node("NVSwitch0", NodeKind.NVSWITCH, detail="all NVSwitches", reduces=reducing))
        self.links += links

    def nvlink(self, gpu: Gpu) -> Rate:
        """What one of a GPU's NVLinks carries."""
        if self.assume.nvlink is not None:
            return Rate(self.assume.nvlink, "--nvlink-gbps")
        known = self.model(gpu)
        if known is not None and known.kind is LinkKind.NVLINK:
            return Rate(known.rate, f"NVLink of {known.name}")
        text = f"How fast NVLinks of {gpu.name or 'this GPU'} are is not known: 25 GB/s each; --nvlink-gbps sets it."
        return Rate(NVLINK[4], "assumed", text)

    def nics(self) -> None:
        for index, nic in enumerate(self.found.nics):
            known = [Rate(nic.port / 8, f"port of {nic.port:g} Gbit/s")] if nic.port else []
            if rate := self.told(nic.bus):
                known.append(rate)
            if known:
                self.device(Node(nic.name, NodeKind.NIC, index), nic.bus, min(known, key=lambda each: each.gbps))
            else:
                self.assumed.append(f"How fast {nic.name} is, the system does not tell: it is left out.")
