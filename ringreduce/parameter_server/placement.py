"""Where a tensor's blocks lie: cut at multiples of 64 elements, and each given to the server that has the least. Where
a server's backup is."""

from __future__ import annotations

from collections.abc import Sequence

UNIT = 64
"""Elements: blocks begin at multiples of it."""
BLOCK_BYTES = 512 << 10
"""The most a block has. While one is updated the next is copied, so smaller ones overlap better, and larger ones need
fewer requests: with 2 workers on 2 cores, steps of 1, 4 and 64 MB took 0.68, 0.75 and 0.95 of the time of 4 MB."""


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


def backup_of(server: int, machines: Sequence[str]) -> int:
    """The server in whose process its backup is: the next one on another machine, or else the next one. `machines` has
    each server's."""
    others = [(server + i) % len(machines) for i in range(1, len(machines))]
    return next((other for other in others if machines[other] != machines[server]), others[0])
