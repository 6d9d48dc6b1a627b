"""Where a tensor's blocks lie: cut at multiples of 64 elements, and each given to the server that has the least."""

from __future__ import annotations

UNIT = 64
"""Elements: blocks begin at multiples of it."""
BLOCK_BYTES = 4 << 20
"""The most a block has."""


def elements_per_block(itemsize: int, block_bytes: int) -> int:
    return max(UNIT, block_bytes // itemsize // UNIT * UNIT)


def cut(count: int, per_block: int) -> list[tuple[int, int]]:
    """(first element, elements) of each block."""
    return [(begin, min(per_block, count - begin)) for begin in range(0, count, per_block)]


def place(sizes: list[int], loads: list[int]) -> list[int]:
    """A server for each of the blocks, of `sizes` bytes; `loads` is what each server has. Of equals the first."""
    loads = list(loads)
    servers = []
    for size in sizes:
        server = loads.index(min(loads))
        loads[server] += size
        servers.append(server)
    return servers
