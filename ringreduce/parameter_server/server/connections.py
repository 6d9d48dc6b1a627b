"""Connections to a process's door: of workers, servers, backups, and of those that have not proved who they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringreduce.parameter_server import control
from ringreduce.parameter_server.modes import READERS
from ringreduce.parameter_server.server.shard import Shard


@dataclass(eq=False)
class Connection:
    socket: socket.socket
    """For control messages."""
    nonce: bytes = b""
    data: DataConnections | None = None
    """Set if the other side is on another host."""
    shard: Shard | None = None
    """The server or backup here that it belongs to."""
    worker: int = -1
    """-1: it is not a worker's, or that has not said yet who it is."""
    name: str = ""
    """The worker's name in messages."""
    is_reader: bool = False
    is_partner: bool = False
    """Whether the other side is a server with a backup here, or the backup of a server here."""
    meaning: str = ""
    """For a partner: what is logged when it ends; "" if nothing is."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_unauthenticated(self) -> bool:
        """Whether the other side has not proved yet that it knows the secret. From another host it has, before it gets
        here."""
        return self.worker < 0 and self.data is None and not self.is_partner

    def introduce(self, worker: int, shard: Shard, hello: dict[str, Any]) -> None:
        """Notes which worker this is, and the server that has let it in."""
        self.worker, self.shard = worker, shard
        self.name, self.is_reader = name_in(hello), hello["group"] == READERS


@dataclass
class DataConnections:
    """The further connections of a worker or server on another host."""

    take: Callable[[int, str], None] | None = None
    """Takes a connection (descriptor and path); set when the other side has joined."""
    sockets: list[tuple[int, str]] = field(default_factory=list)
    """Connections that have arrived before that."""
    arriving: control.Arriving = field(default_factory=control.Arriving)


def name_in(hello: dict[str, Any]) -> str:
    """Returns the name of a worker in messages."""
    return f"{hello['host']}, pid {int(hello['pid'])}"
