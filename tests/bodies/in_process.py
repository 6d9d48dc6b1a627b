"""A server, its backup and its workers in one process, joined by hand, as several test files need them."""

from __future__ import annotations

import os
import socket
from typing import Any

from processes import until

from ringreduce import _C
from ringreduce.coordination.process import own_pidfd


def server_and_backup() -> list[Any]:
    servers = [_C.ParameterServer(1 << 20, print) for _ in range(2)]
    make_backup(*servers)
    return servers


def make_backup(server: Any, backup: Any) -> None:
    log, about = _C.ParameterServer.log(), {"name": "the backup", "address": ""}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = {"bell": os.dup(server.bell), "values": os.dup(server.values), "pidfd": own_pidfd()}
    backup.follow(log=os.dup(log), passage=theirs.detach(), **given, **about)
    given = {"bell": os.dup(backup.bell), "values": os.dup(backup.values), "pidfd": own_pidfd()}
    server.lead(log=log, passage=ours.detach(), capacity=backup.capacity, **given, **about)
    until(lambda: not server.backup_starts)


def let_in(server: Any, client: Any, number: int = 0) -> None:
    window = {"window": os.dup(client.window), "window_bytes": client.window_bytes, "pidfd": own_pidfd()}
    server.join(id=number, group="workers", servers=1, lane=0, news=os.dup(client.news), **window)


def attach(client: Any, server: Any) -> None:
    given = {"values": os.dup(server.values), "bell": os.dup(server.bell), "pidfd": own_pidfd()}
    client.attach(server=0, capacity=1 << 20, name="the server", turn=server.turn, **given)


def make_block(server: Any, note: str = "", count: int = 16) -> tuple[int, int]:
    mode = {"mode": "asynchronous", "quorum": 0, "grace": 0.0, "staleness": 0, "group": "workers"}
    made: tuple[int, int] = server.create(
        dtype="float32", count=count, rule={"kind": "reduce", "op": "sum"}, note=note, **mode
    )
    return made
