"""Joining a parameter server: finding its servers by a store, and being let in."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, TopologyError
from ringreduce.parameter_server import control
from ringreduce.parameter_server.host import Host, connect
from ringreduce.parameter_server.key_value import KeyValue, Membership
from ringreduce.parameter_server.placement import BLOCK_BYTES, UNIT
from ringreduce.parameter_server.updates import Function
from ringreduce.rendezvous.store import get

WINDOW = 64 << 20
_PREFIX = "ringreduce/parameter server"
_open: set[KeyValue] = set()
"""What is ended with the process, even if the program has dropped it."""


def join(
    store: Any = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    role: str = "both",
    name: str = "default",
    group: str = "workers",
    functions: dict[str, Function] | None = None,
    memory: int | None = None,
    window: int = WINDOW,
    block_bytes: int = BLOCK_BYTES,
    timeout: float = 60.0,
) -> KeyValue:
    """Joins the parameter server `name`; returns when this worker is known to all servers.

    In a plain Python process it is a store of its own. Under torchrun, or with a torch `store`, `rank` and `size`, the
    ranks found one together: each is a worker and a server with 1/size of the blocks, and all return when all are
    there. Other processes join it later, with `role="worker"` and the same `store`.

    `group` is what this worker counts in (see `sync` and `ssp`); `functions` are those that `ps.function` may name.
    `memory` bounds the bytes of this server's values and native optimizer states (default: an equal share of half of
    the machine's), `window` those of this worker's pushes under way. Tensors are cut in blocks of at most
    `block_bytes`, which must be equal on all founders. `timeout` is in seconds, for this and, as a default, for all
    calls.

    Raises `TopologyError` if a server is on another host, `CollectiveTimeout` if a founder does not come.
    """
    if role not in ("both", "worker"):
        raise InvalidArgument(f"role is {role!r}; it must be 'both' or 'worker'")
    if window < block_bytes or block_bytes < 16 * UNIT:
        raise InvalidArgument(
            f"window is {window} and block_bytes {block_bytes}; a window must hold a block, and that {16 * UNIT} bytes"
        )
    deadline = time.monotonic() + timeout
    if store is None:
        store, rank, size = _surroundings(rank, size)
    if role == "worker":
        making = get(store, f"{_PREFIX}/{name}/latest", "the founders of the parameter server", deadline)
        own = PrefixStore(f"{_PREFIX}/{name}/{making}", store)
        servers = int(get(own, "founded", "the founders of the parameter server", deadline))
        worker = servers - 1 + own.add("later workers", 1)
        secret, agreed = bytes.fromhex(own.get("secret").decode()), int(own.get("block bytes"))
        if window < agreed:
            raise InvalidArgument(f"window is {window}; it must hold a block of this parameter server, {agreed} bytes")
        return _enter(_Entry(own, worker, servers, group, secret, None, window, agreed, deadline, timeout))
    if rank is None or size is None or not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size {size}; a store needs 0 <= rank < size")
    making = store.add(f"{_PREFIX}/{name}/rank {rank}", 1)
    own = PrefixStore(f"{_PREFIX}/{name}/{making}", store)
    secret = bytes.fromhex(_once(own, "secret", secrets.token_hex(32)))
    host = Host(_half_of_memory() // size if memory is None else memory, secret, functions or {})
    try:
        kv = _found(_Entry(own, rank, size, group, secret, host, window, block_bytes, deadline, timeout), host)
    except BaseException:
        host.close()
        raise
    if rank == 0:
        store.set(f"{_PREFIX}/{name}/latest", str(making))
    return kv


def _surroundings(rank: int | None, size: int | None) -> tuple[Any, int, int]:
    """The store, rank and size of the launcher; without one, of a process by itself."""
    if rank is not None or size is not None:
        raise InvalidArgument(f"rank is {rank} and size {size} without a store; give store= too, or none of them")
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if all(variable in os.environ for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        store, rank, size = next(iter(rendezvous("env://")))
        return store, rank, size
    return HashStore(), 0, 1


def _once(store: Any, key: str, value: str) -> str:
    """What the first process to come set."""
    return str(store.compare_set(key, "", value).decode())


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclass
class _Entry:
    """What a worker needs to be let in."""

    store: Any
    """This making of the parameter server's alone."""
    worker: int
    servers: int
    group: str
    secret: bytes
    host: Host | None
    window: int
    block_bytes: int
    deadline: float
    timeout: float


def _found(entry: _Entry, host: Host) -> KeyValue:
    """Makes this rank's server known, and enters with the other founders."""
    me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": control.machine(), "address": host.address.hex()}
    entry.store.set(f"server/{entry.worker}", json.dumps(me))
    agreed = int(_once(entry.store, "block bytes", str(entry.block_bytes)))
    if agreed != entry.block_bytes:
        raise InvalidArgument(
            f"block_bytes is {entry.block_bytes} here and {agreed} on another rank; give all the same"
        )
    kv = _enter(entry)
    if entry.store.add("entered", 1) == entry.servers:
        entry.store.set("founded", str(entry.servers))
    get(entry.store, "founded", "a rank", entry.deadline)
    return kv


def _enter(entry: _Entry) -> KeyValue:
    """Connects a worker to every server."""
    client = _C.ParameterClient(entry.worker, entry.servers, entry.window)
    hello = {
        "worker": entry.worker,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "group": entry.group,
        "servers": entry.servers,
        "window_bytes": client.window_bytes,
    }
    with contextlib.ExitStack() as undo:
        connections, names = [], []
        for server in range(entry.servers):
            its = json.loads(get(entry.store, f"server/{server}", f"server {server}", entry.deadline))
            name = f"server {server} ({its['host']}, pid {its['pid']})"
            if its["machine"] != control.machine():
                raise TopologyError(f"{name} is on another host than this worker; all must be on one today", server)
            try:
                connection, answer, (values, bell, pidfd) = connect(
                    bytes.fromhex(its["address"]),
                    entry.secret,
                    hello | {"lane": server},
                    client.window,
                    max(0.1, entry.deadline - time.monotonic()),
                )
            except TimeoutError:
                raise CollectiveTimeout(f"{name} did not let this worker in within the timeout", server) from None
            except OSError as error:
                raise PeerLost(f"joining {name}: {error}", server) from None
            undo.callback(connection.close)
            capacity = int(answer["capacity"])
            client.attach(server=server, values=values, bell=bell, pidfd=pidfd, capacity=capacity, name=name)
            connections.append(connection)
            names.append(name)
        undo.pop_all()
    kv = KeyValue(
        Membership(entry.store, entry.worker, entry.group, client, connections, names, entry.host, entry.block_bytes),
        entry.timeout,
    )
    _open.difference_update([each for each in _open if each.has_left])
    _open.add(kv)
    return kv


@atexit.register
def _end_all() -> None:
    """A server's thread may not call Python once it is being finalised."""
    for kv in list(_open):
        kv._close()
