"""How fast a core reads what another core has just written, next to memory and to its own cache: GB/s, as JSON.

    python bench/cache_probe.py

Two processes, each bound to a core, take turns on a block of shared memory: one writes it, the other reads it once,
timed. `memory` is a private block that no cache holds. The cores share a cache, as far as a collective notices, if
reading the other's block beats reading memory at every size.
"""

import json
import mmap
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.uint64]

BLOCKS = {"256 KiB": 1 << 18, "4 MiB": 1 << 22}
MEMORY = 1 << 30  # bytes; more than any cache of a machine met so far, the largest being 480 MiB
TURNS = 30


def read(block: Block) -> float:
    """Read every byte once; GB/s. max() keeps nothing but a register, so nothing but reading is timed."""
    start = time.perf_counter()
    block.max()
    return block.nbytes / (time.perf_counter() - start) / 1e9


def from_other_core(block: Block, cores: tuple[int, int]) -> float:
    """The median over TURNS of reading `block`, which lies in shared memory, after another process wrote it."""
    mine, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        mine.close()
        os.sched_setaffinity(0, {cores[1]})
        while order := theirs.recv(1):
            block.fill(order[0])
            theirs.send(order)
        os._exit(0)
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    speeds = []
    for turn in range(1, TURNS + 1):
        mine.send(bytes([turn]))
        mine.recv(1)
        speeds.append(read(block))
        if block[-1] != turn:
            raise RuntimeError(f"read {block[-1]} where the other process wrote {turn}")
    mine.close()
    os.waitpid(child, 0)
    return statistics.median(speeds)


def probe() -> dict[str, Any]:
    """{"cores": [reader, writer], "memory": GB/s, "own_cache": {block: GB/s}, "other_core": {...}, "case": ...}."""
    reader, writer, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {reader})
    private = np.ones(MEMORY // 8, np.uint64)
    memory = statistics.median(read(private) for _ in range(3))
    own, other = {}, {}
    for name, size in BLOCKS.items():
        block = np.frombuffer(mmap.mmap(-1, size), np.uint64)
        block.fill(1)
        own[name] = statistics.median(read(block) for _ in range(TURNS))
        other[name] = from_other_core(block, (reader, writer))
    case = "shared cache" if min(other.values()) > memory else "no shared cache"
    return {"cores": [reader, writer], "memory": memory, "own_cache": own, "other_core": other, "case": case}


def caches() -> list[str]:
    """What the kernel says of the first core's caches, as "L3 Unified 480M, cores 0-1"; empty if it says nothing."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size, cores = (
            (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        found.append(f"L{level} {kind} {size}, cores {cores}")
    return found


if __name__ == "__main__":
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("cache_probe.py needs two cores")
    print(json.dumps(probe() | {"caches": caches()}))
