"""Which machine this is, and how fast it is."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import ringreduce
from ringreduce.common.files import text_of
from ringreduce.common.units import numbers, parse_bytes
from ringreduce.config import SPINS_SHARING_CORES
from ringreduce.plan.cost import Machine

LOOK = 120e-9
"""Seconds for one look of a waiting rank: Execution::advance and a pause.  Fitted, see plan/cost.py."""

PROCESSES = 4
"""How much longer a core takes from a process to another than between the probe's threads.  Fitted too."""

SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Identity:
    """What makes two machines the same as far as speed goes."""

    cpu: str
    cores: int
    """How many the ranks may use."""
    sockets: int
    """How many these are on."""
    caches: tuple[str, ...]
    """Of the first core, as "L2 Unified 2048K"."""
    instruction_set: str
    ringreduce: str

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def identify(cores: Collection[int]) -> Identity:
    """The machine that this process runs on, as far as these cores go."""
    from ringreduce import _C

    return Identity(
        cpu=_cpu_model(),
        cores=len(cores),
        sockets=len({text_of(SYSTEM / f"cpu{core}/topology/physical_package_id") for core in cores}),
        caches=tuple(f"L{level} {kind} {size}" for level, kind, size, _ in _caches(min(cores))),
        instruction_set=_C.instruction_set(),
        ringreduce=ringreduce.__version__,
    )


def probe(cores: Collection[int]) -> Machine:
    """Takes some 40 ms, all of the cores."""
    from ringreduce import _C

    figures = _C.probe(sorted(cores))
    return Machine.load(
        {
            **figures,
            "turn": figures["turn"] * PROCESSES,
            "wake": figures["wake"] * PROCESSES,
            "patience": SPINS_SHARING_CORES * LOOK,
            "cores": len(cores),
            "cache_bytes": _own_cache(cores),
        }
    )


def _own_cache(cores: Collection[int]) -> int:
    """Bytes of the largest cache that the first core shares with no other of them; 1 MB if the kernel does not say."""
    first = min(cores)
    sizes = [
        parse_bytes(size)
        for _, kind, size, shared in _caches(first)
        if kind != "Instruction" and shared & {*cores} == {first}
    ]
    return max(sizes, default=1024**2)


def _caches(core: int) -> list[tuple[str, str, str, set[int]]]:
    """(level, kind, size, the cores that share it) of each cache of a core."""
    found = []
    for folder in sorted(SYSTEM.glob(f"cpu{core}/cache/index*")):
        level, kind, size, shared = (text_of(folder / name) for name in ("level", "type", "size", "shared_cpu_list"))
        if size and shared:
            found.append((level, kind, size, numbers(shared)))
    return found


def _cpu_model() -> str:
    """The kernel's name for the processor: the model, or on Arm its implementer and part."""
    names: dict[str, str] = {}
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        names.setdefault(key.strip(), value.strip())
    parts = [names[key] for key in ("model name", "CPU implementer", "CPU part", "CPU variant") if key in names]
    return " ".join(parts) or platform.machine()
