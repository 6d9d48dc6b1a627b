"""Who is connected to a process's door: workers, servers, backups, and those that have not said yet what they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringreduce.parameter_server import control
from ringreduce.parameter_server.server.shard import Shard


@dataclass
class Visitor:
    connection: socket.socket
    nonce: bytes = b""
    worker: int = -1  # -1: has not said who it is
    name: str = ""
    observes: bool = False
    far: Far | None = None
    shard: Shard | None = None
    """The server or backup here that it belongs to."""
    is_partner: bool = False
    """Whether it is a server with a backup here, or the backup of a server here."""
    meaning: str = ""
    """For a partner: what is logged when it ends; "" if nothing is."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_stranger(self) -> bool:
        """Whether it has not proved yet that it knows the secret. One from another host has, before it gets here."""
        return self.worker < 0 and self.far is None and not self.is_partner


@dataclass
class Far:
    """The further state of a visitor on another host."""

    take: Callable[[int, str], None] | None = None
    """Takes a connection of this visitor (descriptor and path); set when it has joined."""
    sockets: list[tuple[int, str]] = field(default_factory=list)
    """Connections that have arrived before that."""
    arriving: control.Arriving = field(default_factory=control.Arriving)


def name_in(hello: dict[str, Any]) -> str:
    """Returns the name of a worker in messages."""
    return f"{hello['host']}, pid {int(hello['pid'])}"
