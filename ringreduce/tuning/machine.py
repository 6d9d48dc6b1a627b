"""Which machine this is, and how fast it is."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import ringreduce
from ringreduce import _C
from ringreduce.config import SPINS_SHARING_CORES
from ringreduce.plan import Machine

LOOK = 120e-9
"""Seconds for one look of a waiting rank: Execution::advance and a pause.  Fitted, see plan/cost.py."""

PROCESSES = 4
"""How much longer a core takes from a process to another than between the probe's threads.  Fitted too."""

SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Identity:
    """What makes two machines the same as far as speed goes."""

    cpu: str
    cores: tuple[int, ...]
    """The numbers of the cores that the ranks may use."""
    caches: tuple[str, ...]
    """Of the first of them, as "L2 Unified 2048K"."""
    instruction_set: str
    ringreduce: str

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def identify(cores: Collection[int]) -> Identity:
    """The machine that this process runs on, as far as these cores go."""
    return Identity(
        cpu=_cpu_model(),
        cores=tuple(sorted(cores)),
        caches=tuple(f"L{level} {kind} {size}" for level, kind, size, _ in _caches(min(cores))),
        instruction_set=_C.instruction_set(),
        ringreduce=ringreduce.__version__,
    )


def probe(cores: Collection[int]) -> Machine:
    """Takes some 40 ms, all of the cores."""
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
        _bytes(size)
        for _, kind, size, shared in _caches(first)
        if kind != "Instruction" and shared & {*cores} == {first}
    ]
    return max(sizes, default=1024**2)


def _caches(core: int) -> list[tuple[str, str, str, set[int]]]:
    """(level, kind, size, the cores that share it) of each cache of a core."""
    found = []
    for folder in sorted(SYSTEM.glob(f"cpu{core}/cache/index*")):
        try:
            level, kind, size, shared = (
                (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        found.append((level, kind, size, numbers(shared)))
    return found


def numbers(text: str) -> set[int]:
    """ "0-2,8" -> {0, 1, 2, 8}."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _bytes(text: str) -> int:
    return int(text.rstrip("KMG")) * {"K": 1024, "M": 1024**2, "G": 1024**3}.get(text[-1:], 1)


def _cpu_model() -> str:
    """The kernel's name for the processor: the model, or on Arm its implementer and part."""
    names: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            names.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    parts = [names[key] for key in ("model name", "CPU implementer", "CPU part", "CPU variant") if key in names]
    return " ".join(parts) or platform.machine()
