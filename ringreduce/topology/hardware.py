"""What hardware this machine has, as Linux and NVML tell.

`look` reads through a `System`, so that a test, or a person with a copy of another machine's /sys, can put something
else in its place.  Nothing raises: NVML is asked through `_ask`, files are read through `text_of`.

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
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.common.cores import own_cores
from ringreduce.common.files import text_of
from ringreduce.common.units import numbers
from ringreduce.topology.rates import Model, model_in, model_of_architecture

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


def this_system(memory: float | None = None) -> System:
    """Where this process runs; `memory` as for `probe`."""
    try:
        import pynvml
    except ImportError:
        pynvml = None
    return System(nvml=pynvml, environ=os.environ, cores=own_cores(), memory=memory)


def look(system: System) -> Found:
    """What there is, as far as it can be read."""
    notes: list[str] = []
    gpus = _visible(_gpus_of_nvml(system, notes) or _gpus_of_sysfs(system, notes), system.environ, notes)
    nics = _nics(system.sysfs)
    pci = {bus: _pci_device(system.sysfs, bus) for bus in [gpu.bus for gpu in gpus] + [nic.bus for nic in nics]}
    pci |= {bus: _pci_device(system.sysfs, bus) for device in [*pci.values()] for bus in device.bridges}
    numa = numa_nodes(system.sysfs) or {0: system.cores}
    return Found(gpus, nics, pci, numa, system.cores, system.memory, _cpu(system.proc), tuple(notes))


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


def numa_nodes(sysfs: Path = Path("/sys")) -> dict[int, frozenset[int]]:
    """The cores of each NUMA node that has any, by its number."""
    nodes = {}
    for folder in _folders(sysfs / "devices/system/node"):
        with contextlib.suppress(ValueError):  # other folders, and nonsense
            nodes[int(folder.name.removeprefix("node"))] = frozenset(numbers(text_of(folder / "cpulist")))
    return dict(sorted((node, cores) for node, cores in nodes.items() if cores))


def _cpu(proc: Path) -> tuple[str, int, int]:
    """Vendor, family and model."""
    values: dict[str, str] = {}
    for line in text_of(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    family, number = (int(_first_number(values.get(key, ""))) for key in ("cpu family", "model"))
    return values.get("vendor_id", ""), family, number
