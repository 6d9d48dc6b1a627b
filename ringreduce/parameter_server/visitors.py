"""Who has come to a server's door: workers, servers and backups, and those who have not said yet what they are."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringreduce.parameter_server import control
from ringreduce.parameter_server.shard import Shard


@dataclass
class Visitor:
    connection: socket.socket
    nonce: bytes = b""
    worker: int = -1  # -1: has not said who it is
    name: str = ""
    observes: bool = False
    far: Far | None = None
    shard: Shard | None = None
    """Whose worker it is."""
    is_partner: bool = False
    """It is a server with a backup here, or the backup of a server here."""
    meaning: str = ""
    """What its end means, if it is a partner."""


@dataclass
class Far:
    """A worker or a server of another host, of which the door between hosts knows who it is."""

    take: Callable[[int, str], None] | None = None
    """Takes its connections, once it has joined: descriptor and path."""
    sockets: list[tuple[int, str]] = field(default_factory=list)
    """That came before."""
    arriving: control.Arriving = field(default_factory=control.Arriving)


def name_in(hello: dict[str, Any]) -> str:
    """How messages call a worker."""
    return f"{hello['host']}, pid {int(hello['pid'])}"
