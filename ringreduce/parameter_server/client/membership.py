"""`Membership`: what a worker has learnt when all servers have let it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ringreduce._C import ParameterClient


class LocalServers(Protocol):
    """The servers of this process, as its worker sees them."""

    def wait_until_left(self, timeout: float) -> list[str]:
        """Waits until all workers have gone; returns the names of those that have not after `timeout` seconds."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Membership:
    store: Any  # a torch store or one that works like it, under a prefix of this parameter server
    worker: int
    group: str
    client: ParameterClient
    local: LocalServers | None  # the servers of this process, if it has any
    block_bytes: int
    window: int
    loads: list[int]  # by server: the bytes of the blocks there that this worker knows of, without tables
