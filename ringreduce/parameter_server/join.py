"""Joining a parameter server: finding its servers in a store, and being let in.

Every server tells the store where it is. A worker connects to the Unix sockets of servers on its own host. To other
servers it makes TCP connections, as ranks of a group do (`rendezvous.links`). The first connection to each is for
control messages.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from ringreduce import _C
from ringreduce.config import Options, resolve
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure, TopologyError
from ringreduce.parameter_server import control
from ringreduce.parameter_server.host import GROUP, OBSERVERS, Host, connect
from ringreduce.parameter_server.key_value import KeyValue, Membership
from ringreduce.parameter_server.placement import BLOCK_BYTES, UNIT
from ringreduce.parameter_server.shard import Shard
from ringreduce.parameter_server.snapshots import Saving, file_of
from ringreduce.parameter_server.updates import Function
from ringreduce.rendezvous.interfaces import Filter, local_interfaces
from ringreduce.rendezvous.links import Door, Peer
from ringreduce.rendezvous.secret import group_secret
from ringreduce.rendezvous.sockets import Address, parse_ports
from ringreduce.rendezvous.store import get

WINDOW = 64 << 20
_PREFIX = "ringreduce/parameter server"
_WHY_ALONE = (
    " and listens to none: found it with join(listen=True)",
    ", and has a backup: servers with backups only have workers of their own host",
)
"""By the number of backups: why a server does not let in workers of other hosts."""
_open: set[KeyValue] = set()
"""What is ended with the process, even if the program has dropped it."""
_serving: set[Serving] = set()
"""The same."""


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
    backups: int = 0,
    listen: bool = False,
    workers: int = 0,
    timeout: float = 60.0,
) -> KeyValue:
    """Joins the parameter server `name`; returns when this worker is known to all servers.

    In a plain Python process it is a store of its own. Under torchrun, or with a torch `store`, `rank` and `size`, the
    ranks found one together: each is a worker and a server with 1/size of the blocks, and all return when all are
    there. Other processes join it later, with `role="worker"` and the same `store`, or with `role="reader"`: nobody
    waits for a reader (see `KeyValue.follow`).

    `group` is what this worker counts in (see `sync` and `ssp`), and `workers` how many of it must have joined before
    this returns; `functions` are those that `ps.function` may name.
    `memory` bounds the bytes of this server's values and native optimizer states (default: an equal share of half of
    the machine's), `window` those of this worker's pushes under way, and of what this server keeps of a worker of
    another host: such a worker's window is no larger than the servers'. Tensors are cut in blocks of at most
    `block_bytes`, which must be equal on all founders. With `backups=1`, on all founders, each server has a backup in
    the process of the next one, which takes over if its process ends; for servers and workers of one host. `timeout` is
    in seconds, for this and, as a default, for all calls.

    Processes of one host share memory. Processes of several hosts use TCP, with the settings of
    RINGREDUCE_SOCKET_IFNAME, RINGREDUCE_PORTS, RINGREDUCE_SECRET_FILE, RINGREDUCE_HOST_ID, RINGREDUCE_TRANSPORT,
    RINGREDUCE_CONNECTIONS and RINGREDUCE_DEAD_AFTER. If all founders are on one host, workers of other hosts can join
    later only if the founders gave `listen=True`.

    Raises `CollectiveTimeout` if a founder does not come, `PeerLost` or `SystemFailure` if a server cannot be reached,
    and `TopologyError` if a server on another host does not accept workers of other hosts.
    """
    if role not in ("both", "worker", "reader"):
        raise InvalidArgument(f"role is {role!r}; it must be 'both', 'worker' or 'reader', and `serve` is for servers")
    if role == "reader":
        role, group = "worker", OBSERVERS
    if role == "both":
        _check_sizes(window, block_bytes)
    entry = _Entry(name, group, window, block_bytes, time.monotonic() + timeout, timeout, resolve(None)[0])
    entry.backups = backups
    if store is None:
        store, rank, size = _surroundings(rank, size)
    if role == "worker":
        making = get(store, f"{_PREFIX}/{name}/latest", "the founders of the parameter server", entry.deadline)
        entry.store = PrefixStore(f"{_PREFIX}/{name}/{making}", store)
        entry.servers = int(get(entry.store, "founded", "the founders of the parameter server", entry.deadline))
        entry.worker = entry.servers - 1 + entry.store.add("later workers", 1)
        entry.secret = group_secret(bytes.fromhex(entry.store.get("secret").decode()), entry.options.secret_file or "")
        entry.block_bytes = int(entry.store.get("block bytes"))
        entry.backups = int(entry.store.get("backups"))
        _check_sizes(window, entry.block_bytes)
        return _wait_for_workers(_enter(entry), entry, workers)
    with _founding(entry, store, rank, size, functions, memory, listen):
        kv = _enter(entry)
        _wait_for_founders(entry, store)
    return _wait_for_workers(kv, entry, workers)


class Serving:
    """A server without a worker, made by `serve`. A context manager, at whose end it is closed."""

    def __init__(self, host: Host, number: int, servers: int, store: Any) -> None:
        self._host, self._servers, self._store = host, servers, store
        self.number = number
        self._taken = 0
        self._saving: list[Saving] = []
        self._parts = 1
        """Servers that are served here: this one, and those that have ended and have their backups here."""

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True when workers have come and all have left, or False after so many seconds."""
        return self._host.wait_until_served(timeout)

    def stats(self) -> dict[str, Any]:
        """As `KeyValue.stats` has it of a server."""
        return self._host.statistics()

    def ask_for_snapshot(self, *, last: bool = False) -> int:
        """Has all servers write a snapshot when each next calls `take_snapshots`; returns its number: that of the first
        server that asked, if it is to be the `last`."""
        number = int(self._store.add("snapshots", 1))
        return int(_once(self._store, "last snapshot", str(number))) if last else number

    def serves(self, number: int) -> bool:
        """Whether server `number` is served here: it is this one, or has ended and has its backup here."""
        return number in self._host.serving(self.number)

    def may_leave(self) -> bool:
        """Whether this server can end now and lose nothing, since its backup goes on. Then that one's process has to
        stay until the parameter server ends, so it will not be told the same."""
        if not self._host.server.has_backup or len(self._host.serving(self.number)) > 1:
            return False
        fates = ((self.number, "leaves"), ((self.number + 1) % self._servers, "stays"))
        return all(_once(self._store, f"fate/{number}", fate) == fate for number, fate in fates)

    def may_ask(self) -> bool:
        """Whether all servers have ended their parts of what was asked for, or failed to write them."""
        asked = int(self._store.add("snapshots", 0))
        return asked == 0 or int(self._store.add(f"snapshot {asked} ended", 0)) >= self._servers

    def take_snapshots(self, folder: str | os.PathLike[str], *, last: int = 0) -> int:
        """Begins this server's part of the next snapshot that was asked for, unless one is under way; returns how many
        it has written. Snapshot n is the folder `snapshot_path(folder, n)`, when all servers have written their parts.
        Each part is of a moment of its own; for one round of all servers, a worker calls `KeyValue.snapshot`. What a
        worker has asked for is written first. `last` is the number of the only one that is still to be written.

        Raises `SystemFailure` or `InvalidArgument` if this one's could not be written. The next call goes on with the
        one after it, or tries the `last` again.
        """
        if self._saving:
            if not all(saving.done.is_set() for saving in self._saving):
                return self._taken - 1
            done, self._saving = self._saving, []
            errors = [saving.error for saving in done if saving.error]
            self._end_parts(len(done), bool(errors), last)
            if errors:
                raise SystemFailure(f"the snapshot {done[0].path}: {errors[0]}")
        shards = self._serving(folder)
        self._taken = max(self._taken, last - 1)
        if any(shard.is_saving() for shard in shards.values()):
            return self._taken
        if self._taken >= (last or self._store.add("snapshots", 0)):
            return self._taken
        self._taken += 1
        target = f"{self.snapshot_path(folder, self._taken)}.partial-serve"
        try:
            for number, shard in shards.items():
                part = f"{number}-of-{self._servers}"
                if not Path(target, file_of(part)).exists():  # of a server that wrote it and has ended
                    self._saving.append(shard.save(target, part))
        except BaseException:
            if not self._saving and any(shard.is_saving() for shard in shards.values()):
                self._taken -= 1  # what a worker has asked for in this moment
                return self._taken
            self._saving = []  # those that began go on, but the snapshot will not be whole
            self._end_parts(len(shards), True, last)
            raise
        return self._taken - 1

    def _serving(self, folder: str | os.PathLike[str]) -> dict[int, Shard]:
        """What is served here. When that is more than before, the latest snapshot is taken up again if it still lacks
        parts, and nobody waits any more for parts that servers which have ended owe to earlier ones."""
        shards = self._host.serving(self.number)
        if len(shards) > self._parts:
            asked = int(self._store.add("snapshots", 0))
            self._store.add(f"snapshot {asked} ended", len(shards) - self._parts)
            self._parts = len(shards)
            if self._taken and not self.snapshot_path(folder, self._taken).exists():
                self._taken -= 1
        return shards

    def _end_parts(self, parts: int, failed: bool, last: int) -> None:
        """After the last one the store may end, and the last one is tried again."""
        if not last:
            self._store.add(f"snapshot {self._taken} ended", parts)
        elif failed and self._taken == last:
            self._taken -= 1

    def snapshot_path(self, folder: str | os.PathLike[str], number: int) -> Path:
        """Named by when the servers began, and its number, so that names are in the order of time."""
        begun = _once(self._store, "snapshots begun", time.strftime("%Y%m%dT%H%M%S"))
        return Path(folder).absolute() / f"{begun}-{number:06d}"

    def close(self) -> None:
        """Ends the server; workers that still need it get `ServerLost`. Idempotent."""
        self._host.close()
        _serving.discard(self)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    store: Any = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    name: str = "default",
    functions: dict[str, Function] | None = None,
    memory: int | None = None,
    window: int = WINDOW,
    block_bytes: int = BLOCK_BYTES,
    backups: int = 0,
    timeout: float = 60.0,
) -> Serving:
    """Founds the parameter server `name` as server `rank` of `size`, without a worker. Returns when all have come.

    Workers of any host join with `join(store, role="worker")`, before or after. The other arguments are as for `join`.
    """
    _check_sizes(window, block_bytes)
    entry = _Entry(name, "", window, block_bytes, time.monotonic() + timeout, timeout, resolve(None)[0])
    entry.backups = backups
    if store is None:
        store, rank, size = _surroundings(rank, size)
    with _founding(entry, store, rank, size, functions, memory, listen=not backups) as host:
        _wait_for_founders(entry, store)
    serving = Serving(host, entry.worker, entry.servers, entry.store)
    _serving.add(serving)
    return serving


def _check_sizes(window: int, block_bytes: int) -> None:
    if window < block_bytes or block_bytes < 16 * UNIT:
        raise InvalidArgument(
            f"window is {window} and block_bytes {block_bytes}; a window must hold a block, "
            f"and a block at least {16 * UNIT} bytes"
        )


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
    """What a founder or a worker needs to be let in."""

    name: str
    group: str
    window: int
    block_bytes: int
    deadline: float
    timeout: float
    options: Options
    store: Any = None
    """This making of the parameter server's alone."""
    making: int = 0
    worker: int = -1
    """A founder's is that of its server."""
    servers: int = 0
    backups: int = 0
    secret: bytes = b""
    host: Host | None = None

    @property
    def machine(self) -> str:
        return control.machine(self.options)

    def backup_of(self, server: int) -> int:
        """The server in whose process its backup is."""
        return (server + 1) % self.servers

    def server(self, server: int) -> dict[str, Any]:
        """What a server says of itself."""
        place: dict[str, Any] = json.loads(get(self.store, f"server/{server}", f"server {server}", self.deadline))
        return place | {"name": f"server {server} ({place['host']}, pid {place['pid']})"}


@contextlib.contextmanager
def _founding(
    entry: _Entry,
    store: Any,
    rank: int | None,
    size: int | None,
    functions: dict[str, Function] | None,
    memory: int | None,
    listen: bool,
) -> Iterator[Host]:
    """Makes this process's server and tells the store where it is. It ends if the body raises."""
    if rank is None or size is None or not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size {size}; a store needs 0 <= rank < size")
    if entry.backups not in (0, 1) or (entry.backups and size == 1):
        raise InvalidArgument(f"backups is {entry.backups} with size {size}; it must be 0, or 1 with 2 or more servers")
    if entry.backups and listen:
        raise InvalidArgument("backups is 1 and listen True; servers with backups only have workers of their own host")
    entry.making = store.add(f"{_PREFIX}/{entry.name}/rank {rank}", 1)
    own = PrefixStore(f"{_PREFIX}/{entry.name}/{entry.making}", store)
    secret = bytes.fromhex(_once(own, "secret", secrets.token_hex(32)))
    entry.store, entry.worker, entry.servers = own, rank, size
    entry.secret = group_secret(secret, entry.options.secret_file or "")
    share = _half_of_memory() // (size * (1 + entry.backups))
    host = entry.host = Host(share if memory is None else memory, entry.secret, functions or {})
    try:
        _make_known(entry, host, listen)
        yield host
    except BaseException:
        host.close()
        raise


def _make_known(entry: _Entry, host: Host, listen: bool) -> None:
    me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "machine": entry.machine}
    me |= {"address": host.address.hex(), "window": entry.window}
    entry.store.set(f"server/{entry.worker}", json.dumps(me))
    _agree(entry.store, "block_bytes", entry.block_bytes)
    _agree(entry.store, "backups", entry.backups)
    addresses: list[Address] = []
    if entry.backups:
        _have_backup(entry, host)
    elif listen or any(entry.server(server)["machine"] != entry.machine for server in range(entry.servers)):
        door = _door(entry.options, parse_ports(entry.options.ports or ""))
        host.listen(door, entry.worker, entry.servers, entry.window, entry.options.dead_after or 0)
        addresses = door.addresses
    entry.store.set(f"door/{entry.worker}", json.dumps(addresses))


def _agree(store: Any, name: str, mine: int) -> None:
    agreed = int(_once(store, name.replace("_", " "), str(mine)))
    if agreed != mine:
        raise InvalidArgument(f"{name} is {mine} here and {agreed} on another rank; give all the same")


def _have_backup(entry: _Entry, host: Host) -> None:
    """Has the next server's process keep a backup of this one. The store knows when it is there."""
    for server in range(entry.servers):
        other = entry.server(server)
        if other["machine"] != entry.machine:
            raise TopologyError(
                f"{other['name']} is on another host than this server; backups=1 is for servers of one host", server
            )
    backup = entry.backup_of(entry.worker)
    its = entry.server(backup)
    left = max(0.1, entry.deadline - time.monotonic())
    try:
        host.have_backup(entry.worker, bytes.fromhex(its["address"]), str(its["name"]), left)
    except TimeoutError:
        raise CollectiveTimeout(f"{its['name']} did not make a backup of this server in time", backup) from None
    except OSError as error:
        raise PeerLost(f"making a backup on {its['name']}: {error}", backup) from None
    entry.store.set(f"backup/{entry.worker}", its["address"])


def _wait_for_founders(entry: _Entry, store: Any) -> None:
    if entry.store.add("entered", 1) == entry.servers:
        entry.store.set("founded", str(entry.servers))
    get(entry.store, "founded", "a rank", entry.deadline)
    if entry.worker == 0:
        store.set(f"{_PREFIX}/{entry.name}/latest", str(entry.making))


def _wait_for_workers(kv: KeyValue, entry: _Entry, workers: int) -> KeyValue:
    """Returns when so many have joined this one's group, with those that have left since."""
    key = f"joined/{entry.group}"
    there = entry.store.add(key, 1)
    while there < workers:
        if time.monotonic() > entry.deadline:
            kv._close()
            raise CollectiveTimeout(f"{there} of {workers} workers of group {entry.group!r} have joined in time")
        time.sleep(0.005)
        there = entry.store.add(key, 0)
    return kv


def _door(options: Options, ports: Sequence[int]) -> Door:
    wanted = Filter.parse(options.socket_ifname or "")
    return Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=ports)


def _enter(entry: _Entry) -> KeyValue:
    """Connects a worker to every server."""
    servers = [entry.server(server) for server in range(entry.servers)]
    names = [str(its["name"]) for its in servers]
    far = [server for server, its in enumerate(servers) if its["machine"] != entry.machine]
    window = min([entry.window, *(int(servers[server]["window"]) for server in far)])
    entry.window = window // 64 * 64  # as the client has it
    client = _C.ParameterClient(entry.worker, entry.servers, entry.window)
    if entry.host is not None:
        client.host(entry.host.server)
    connections: list[socket.socket] = []
    backups: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as undo:
        reached = _reach(entry, servers, far, undo) if far else {}
        for server, its in enumerate(servers):
            try:
                if server in reached:
                    connections.append(_enter_far(entry, client, server, names[server], reached[server]))
                    continue
                joined, backup = _enter_near(entry, client, server, its, undo)
            except TimeoutError:
                raise CollectiveTimeout(f"{names[server]} did not let this worker in in time", server) from None
            except OSError as error:
                raise PeerLost(f"joining {names[server]}: {error}", server) from None
            connections.append(joined.connection)
            names[server] = joined.name
            if backup is not None:
                backups[server] = backup.connection, backup.name
        undo.pop_all()
    membership = Membership(
        entry.store,
        entry.worker,
        entry.group,
        client,
        connections,
        names,
        set(far),
        entry.host,
        entry.block_bytes,
        entry.window,
        backups,
    )
    kv = KeyValue(membership, entry.timeout)
    _open.difference_update([each for each in _open if each.has_left])
    _open.add(kv)
    return kv


def _hello(entry: _Entry) -> dict[str, Any]:
    return {"worker": entry.worker, "host": socket.gethostname(), "pid": os.getpid(), "group": entry.group}


@dataclass
class _LetIn:
    """What a server of this host, or the backup of one, has given: a connection, and descriptors for the client."""

    connection: socket.socket
    memory: dict[str, int]
    name: str

    def close(self) -> None:
        self.connection.close()
        for descriptor in ("values", "bell", "pidfd"):
            os.close(self.memory[descriptor])


def _let_in(entry: _Entry, client: Any, server: int, address: str, name: str, **more: int) -> _LetIn:
    hello = _hello(entry) | {"servers": entry.servers, "lane": server, "window_bytes": client.window_bytes} | more
    left = max(0.1, entry.deadline - time.monotonic())
    connection, answer, (values, bell, pidfd) = connect(
        bytes.fromhex(address), entry.secret, hello, client.window, left
    )
    memory = {"server": server, "values": values, "bell": bell, "pidfd": pidfd, "capacity": int(answer["capacity"])}
    return _LetIn(connection, memory, name)


def _enter_near(
    entry: _Entry, client: Any, server: int, its: dict[str, Any], undo: contextlib.ExitStack
) -> tuple[_LetIn, _LetIn | None]:
    """Joins a server of this host, and its backup if it has one. If it has ended, its backup in its place."""
    backup = _let_in_by_backup(entry, client, server) if entry.backups else None
    try:
        joined = _let_in(entry, client, server, its["address"], its["name"])
    except OSError as error:
        if backup is None:
            raise
        if isinstance(error, TimeoutError) or not _serves(entry, backup):
            backup.close()
            raise
        joined, backup = backup, None
    undo.callback(joined.connection.close)
    client.attach(**joined.memory, name=joined.name, was_backup=joined.name != its["name"])
    if backup is not None:
        undo.callback(backup.connection.close)
        client.attach_backup(**backup.memory, name=backup.name)
    return joined, backup


def _let_in_by_backup(entry: _Entry, client: Any, server: int) -> _LetIn | None:
    """Called before the server is joined, since the backup must know every worker that the journal names. Returns None
    if the backup has ended."""
    get(entry.store, f"backup/{server}", f"the backup of server {server}", entry.deadline)
    place = entry.server(entry.backup_of(server))
    name = f"the backup of server {server} ({place['host']}, pid {place['pid']})"
    try:
        return _let_in(entry, client, server, place["address"], name, of=server)
    except TimeoutError:
        raise
    except OSError:
        return None


def _serves(entry: _Entry, backup: _LetIn) -> bool:
    """Waits until a backup, of which the server has ended, has taken over; False if it does not."""
    with contextlib.suppress(OSError):
        while (left := entry.deadline - time.monotonic()) > 0:
            backup.connection.settimeout(left)
            control.send(backup.connection, {"ask": "serves"})
            if control.receive(backup.connection)[0]["serves"]:
                backup.connection.settimeout(entry.timeout)
                return True
            time.sleep(0.002)
    return False


@dataclass
class _Reached:
    """A server of another host: a connection for control messages, and others: descriptors and paths."""

    control: socket.socket
    others: list[tuple[int, str]]

    def close(self) -> None:
        self.control.close()
        while self.others:
            os.close(self.others.pop()[0])


def _reach(
    entry: _Entry, servers: list[dict[str, Any]], far: list[int], undo: contextlib.ExitStack
) -> dict[int, _Reached]:
    """Connects to the doors of servers of other hosts. What is not used in the end is closed by `undo`."""
    peers = {}
    for server in far:
        its = servers[server]
        addresses = json.loads(get(entry.store, f"door/{server}", its["name"], entry.deadline))
        if not addresses or entry.options.transport == "shared_memory":
            raise TopologyError(
                f"{its['name']} is on another host than this worker" + ("" if addresses else _WHY_ALONE[entry.backups]),
                server,
            )
        peers[server] = Peer(its["host"], its["pid"], [Address(*address) for address in addresses])
    reached: dict[int, _Reached] = {}

    def deliver(server: int, descriptor: int, path: str) -> None:
        if server in reached:
            reached[server].others.append((descriptor, path))
        else:
            reached[server] = _Reached(socket.socket(fileno=descriptor), [])
            undo.callback(reached[server].close)

    door = _door(entry.options, ())
    number, connections = entry.servers + entry.worker, 1 + (entry.options.connections or 1)
    try:
        door.open(number, GROUP, entry.secret, peers, deliver, connections, entry.options.dead_after or 0)
        door.connect(far, entry.deadline)
    finally:
        door.close()
    return reached


def _enter_far(entry: _Entry, client: Any, server: int, name: str, reached: _Reached) -> socket.socket:
    reached.control.settimeout(max(0.1, entry.deadline - time.monotonic()))
    control.send(reached.control, _hello(entry) | {"window": entry.window})
    answer, _ = control.receive(reached.control)
    if "error" in answer:
        raise ConnectionError(answer["error"][1])
    client.attach_far(server, name)
    while reached.others:
        client.connect(server, *reached.others.pop())
    return reached.control


def _close_in_child() -> None:
    """A forked child serves nothing and has joined nothing; the others are to see the parent end when it does."""
    for kv in _open:
        kv._disconnect()
        if kv._with.host is not None:
            kv._with.host.close_in_child()
    for serving in _serving:
        serving._host.close_in_child()
    _open.clear()
    _serving.clear()


os.register_at_fork(after_in_child=_close_in_child)


@atexit.register
def _end_all() -> None:
    """A server's thread may not call Python once it is being finalised."""
    for kv in list(_open):
        kv._close()
    for serving in list(_serving):
        serving.close()
