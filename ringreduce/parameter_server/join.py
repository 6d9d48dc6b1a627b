"""Joining a parameter server: finding its servers in a store, and being let in.

Every server tells the store where it is. A worker connects to the Unix sockets of servers on its own host. To other
servers it makes TCP connections, as ranks of a group do (`rendezvous.links`). The first connection to each is for
control messages.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from ringreduce import _C
from ringreduce.config import Options, resolve
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, TopologyError
from ringreduce.parameter_server import control
from ringreduce.parameter_server.host import GROUP, OBSERVERS, Host, Refused, connect, connect_again, number_at_door
from ringreduce.parameter_server.keeper import Directory, Keeper, place_of
from ringreduce.parameter_server.key_value import KeyValue, Membership
from ringreduce.parameter_server.placement import BLOCK_BYTES, UNIT, backup_of
from ringreduce.parameter_server.serving import Serving, once, open_servings
from ringreduce.parameter_server.updates import Function
from ringreduce.rendezvous.interfaces import Filter, local_interfaces
from ringreduce.rendezvous.links import Door, Peer
from ringreduce.rendezvous.secret import group_secret
from ringreduce.rendezvous.sockets import Address, parse_ports
from ringreduce.rendezvous.store import get

WINDOW = 64 << 20
_PREFIX = "ringreduce/parameter server"
_TAKING_OVER = 10.0
"""Seconds in which a backup must have taken over when a worker joins."""
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
    the process of the next one, on another host if there is one, which takes over if its process or its host ends.
    `timeout` is in seconds, for this and, as a default, for all calls.

    Processes of one host share memory. Processes of several hosts use TCP, with the settings of
    RINGREDUCE_SOCKET_IFNAME, RINGREDUCE_PORTS, RINGREDUCE_SECRET_FILE, RINGREDUCE_HOST_ID, RINGREDUCE_TRANSPORT,
    RINGREDUCE_CONNECTIONS and RINGREDUCE_DEAD_AFTER. If all founders are on one host, workers of other hosts can join
    later only if the founders gave `listen=True`. With backups all must give the same.

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
        _find(entry, store)
        entry.worker = entry.servers - 1 + entry.store.add("later workers", 1)
        _check_sizes(window, entry.block_bytes)
        return _wait_for_workers(_enter(entry), entry, workers)
    with _founding(entry, store, rank, size, functions, memory, listen):
        kv = _enter(entry)
        _wait_for_founders(entry, store)
    return _wait_for_workers(kv, entry, workers)


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
    listen: bool | None = None,
    servers: int = 0,
    joins: bool = False,
    timeout: float = 60.0,
) -> Serving:
    """Founds the parameter server `name` as process `rank` of `size`, without a worker. Returns when all have come.

    Workers join with `join(store, role="worker")`, before or after: of any host, unless all servers are on one host and
    `listen` is False, which is the default with backups. The other arguments are as for `join`.

    `servers` is how many servers the blocks are spread over (default: one a process). If there are more than processes,
    each process begins with its share, and others can take some later, on the same host: with `joins=True`, `store` and
    `name` alone, this enters a parameter server that exists. Servers whose backups are reached by TCP, because they are
    on several hosts or listen, do not move. It returns when it has its share, which its servers give
    one after the other, while calls go on. `Serving.give_away` is the way back.
    """
    _check_sizes(window, block_bytes)
    entry = _Entry(name, "", window, block_bytes, time.monotonic() + timeout, timeout, resolve(None)[0])
    entry.backups, entry.servers = backups, servers
    if joins:
        if (rank, size, memory, backups, servers) != (None, None, None, 0, 0):
            raise InvalidArgument(
                "joins is True: rank, size, memory, backups and servers are those of the founders; leave them out"
            )
        serving = _coming(entry, store, functions)
        open_servings.add(serving)
        return serving
    if store is None:
        store, rank, size = _surroundings(rank, size)
    listen = not backups and servers in (0, size) if listen is None else listen
    with _founding(entry, store, rank, size, functions, memory, listen) as host:
        _wait_for_founders(entry, store)
    serving = Serving(host, entry.worker, entry.servers, entry.store)
    open_servings.add(serving)
    return serving


def _coming(entry: _Entry, store: Any, functions: dict[str, Function] | None) -> Serving:
    """A process that comes later: makes itself known, and asks for its share."""
    if store is None:
        raise InvalidArgument("joins is True without a store; give the store of the servers that there are")
    _find(entry, store)
    others = [entry.process(process) for process in range(entry.founders)]
    if any(other["machine"] != entry.machine for other in others):
        raise TopologyError("this process is on another host than the servers, which only move on one host", 0)
    if entry.has_far_backups:
        raise InvalidArgument("joins is True, and these servers have backups that are reached by TCP: they do not move")
    number = entry.worker = entry.founders - 1 + entry.store.add("later processes", 1)
    host = entry.host = Host(0, entry.secret, functions or {}, (), entry.backups > 0)
    try:
        entry.store.set(f"server/{number}", json.dumps(_me(entry, host)))
        keeper = Keeper(host, Directory(entry.store, entry.founders), number, entry.backups)
        host.keep(keeper)
        keeper.take_share(entry.servers, entry.deadline)
    except BaseException:
        host.close()
        raise
    return Serving(host, number, entry.servers, entry.store, taken=int(entry.store.add("snapshots", 0)))


def _find(entry: _Entry, store: Any) -> None:
    """What the founders have told the store."""
    making = get(store, f"{_PREFIX}/{entry.name}/latest", "the founders of the parameter server", entry.deadline)
    entry.store = PrefixStore(f"{_PREFIX}/{entry.name}/{making}", store)
    entry.servers = int(get(entry.store, "founded", "the founders of the parameter server", entry.deadline))
    entry.founders, entry.backups = int(entry.store.get("founders")), int(entry.store.get("backups"))
    entry.has_far_backups = bool(int(entry.store.get("far backups")))
    entry.secret = group_secret(bytes.fromhex(entry.store.get("secret").decode()), entry.options.secret_file or "")
    entry.block_bytes = int(entry.store.get("block bytes"))


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
    """A founder's is that of its process."""
    founders: int = 0
    servers: int = 0
    backups: int = 0
    has_far_backups: bool = False
    """They are reached by TCP."""
    secret: bytes = b""
    host: Host | None = None

    @property
    def machine(self) -> str:
        return control.machine(self.options)

    @functools.cached_property
    def machines(self) -> list[str]:
        """By founder. Waits until all have told the store."""
        wait = functools.partial(get, self.store, deadline=self.deadline)
        return [wait(f"machine/{process}", f"server {process}") for process in range(self.founders)]

    def process(self, process: int) -> dict[str, Any]:
        """What a process with servers says of itself."""
        place: dict[str, Any] = json.loads(get(self.store, f"server/{process}", f"server {process}", self.deadline))
        return place | {"number": process, "name": f"server {process} ({place['host']}, pid {place['pid']})"}

    def place_of(self, server: int) -> int:
        return place_of(self.store, server, self.founders)

    def server(self, server: int, process: int) -> dict[str, Any]:
        """The same of the process that serves this one."""
        place = self.process(process)
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
    if memory is not None and not (isinstance(memory, int) and memory > 0):
        raise InvalidArgument(f"memory is {memory!r}; it must be bytes, a whole number above 0, or None for a share")
    if not isinstance(entry.servers, int) or (entry.servers and entry.servers < size):
        raise InvalidArgument(f"servers is {entry.servers!r} with size {size}; every process begins with one or more")
    entry.making = store.add(f"{_PREFIX}/{entry.name}/rank {rank}", 1)
    own = PrefixStore(f"{_PREFIX}/{entry.name}/{entry.making}", store)
    secret = bytes.fromhex(once(own, "secret", secrets.token_hex(32)))
    entry.store, entry.worker, entry.founders, entry.servers = own, rank, size, entry.servers or size
    entry.secret = group_secret(secret, entry.options.secret_file or "")
    _agree_on_all(entry, listen)
    mine = range(rank, entry.servers, size)
    share = _half_of_memory() // size if memory is None else memory * (1 + entry.backups)
    capacity = share // ((1 + entry.backups) * len(mine))
    has_near_backups = entry.backups > 0 and not entry.has_far_backups
    host = entry.host = Host(capacity, entry.secret, functions or {}, mine, has_near_backups)
    try:
        _make_known(entry, host, listen)
        yield host
        if len(set(entry.machines)) == 1 and not entry.has_far_backups:  # others do not move, nor get new backups
            host.keep(Keeper(host, Directory(own, size), rank, entry.backups))
    except BaseException:
        host.close()
        raise


def _agree_on_all(entry: _Entry, listen: bool) -> None:
    """What all founders must give the same, and where their servers are."""
    entry.store.set(f"machine/{entry.worker}", entry.machine)
    _agree(entry.store, "block_bytes", entry.block_bytes)
    _agree(entry.store, "backups", entry.backups)
    _agree(entry.store, "servers", entry.servers)
    _agree(entry.store, "founders", entry.founders)
    if entry.backups:
        _agree(entry.store, "listen", int(listen))
    entry.has_far_backups = entry.backups > 0 and (listen or len(set(entry.machines)) > 1)
    _agree(entry.store, "far_backups", int(entry.has_far_backups))


def _make_known(entry: _Entry, host: Host, listen: bool) -> None:
    entry.store.set(f"server/{entry.worker}", json.dumps(_me(entry, host)))
    if entry.servers > entry.founders:
        _check_one_host(entry, listen)
    addresses: list[Address] = []
    if listen or len(set(entry.machines)) > 1:
        door = _door(entry.options, parse_ports(entry.options.ports or ""))
        store = entry.store.clone() if hasattr(entry.store, "clone") else entry.store  # which others may be waiting in
        host.listen(door, entry.worker, entry.servers, entry.window, entry.options.dead_after or 0, store)
        addresses = door.addresses
    entry.store.set(f"door/{entry.worker}", json.dumps(addresses))
    if entry.backups:
        _have_backups(entry, host)


def _me(entry: _Entry, host: Host) -> dict[str, Any]:
    me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "machine": entry.machine}
    return me | {"address": host.address.hex(), "window": entry.window}


def _agree(store: Any, name: str, mine: int) -> None:
    agreed = int(once(store, name.replace("_", " "), str(mine)))
    if agreed != mine:
        raise InvalidArgument(f"{name} is {mine} here and {agreed} on another rank; give all the same")


def _check_one_host(entry: _Entry, listen: bool) -> None:
    for process, machine in enumerate(entry.machines):
        if machine != entry.machine:
            name = entry.process(process)["name"]
            raise TopologyError(
                f"{name} is on another host than this server; more servers than processes are for one host", process
            )
    if listen:
        raise InvalidArgument(
            f"listen is True with {entry.servers} servers in {entry.founders} processes; servers that move only have "
            "workers of their own host"
        )


def _have_backups(entry: _Entry, host: Host) -> None:
    """Has another process, the next one or if it can one on another host, keep backups of the servers that begin here.
    Of a backup that is reached by TCP the store knows when it is there."""
    backup = _place_of_backup(entry, entry.worker) if entry.has_far_backups else (entry.worker + 1) % entry.founders
    its = entry.process(backup)
    try:
        for server in list(host.serving()):
            left = max(0.1, entry.deadline - time.monotonic())
            if entry.has_far_backups:
                with contextlib.ExitStack() as undo:
                    host.have_far_backup(server, _reach(entry, {backup: its}, server, undo)[backup], left)
                host.far_backup_at = backup
                entry.store.set(f"backup/{server}", str(backup))
            else:
                host.have_backup(server, bytes.fromhex(its["address"]), left)
    except TimeoutError:
        raise CollectiveTimeout(f"{its['name']} did not make a backup of this server in time", backup) from None
    except OSError as error:
        raise PeerLost(f"making a backup on {its['name']}: {error}", backup) from None


def _place_of_backup(entry: _Entry, server: int) -> int:
    """The process with its backup, if that is reached by TCP. Server n is in process n then."""
    return backup_of(server, entry.machines)


def _wait_for_founders(entry: _Entry, store: Any) -> None:
    if entry.store.add("entered", 1) == entry.founders:
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
    servers = [entry.server(server, entry.place_of(server)) for server in range(entry.servers)]
    names = [str(its["name"]) for its in servers]
    far = [server for server, its in enumerate(servers) if its["machine"] != entry.machine]
    by_tcp = range(entry.servers) if entry.has_far_backups else far
    window = min([entry.window, *(int(servers[server]["window"]) for server in by_tcp)])
    entry.window = window // 64 * 64  # as the client has it
    client = _C.ParameterClient(entry.worker, entry.servers, entry.window)
    turns = [0] * entry.servers
    if entry.host is not None:
        client.host(entry.host.server)
    connections: list[socket.socket] = []
    far_backups: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        alone = {} if entry.has_far_backups else {server: servers[server] for server in far}
        reached = _reach(entry, alone, number_at_door(entry.servers, entry.worker), undo) if alone else {}
        for server in range(entry.servers):
            try:
                if server in reached:
                    connections.append(_enter_far(entry, client, server, names[server], reached[server]))
                    continue
                if entry.has_far_backups:
                    joined = _enter_with_far_backup(entry, client, server, servers[server], undo)
                    connection, names[server], turns[server] = joined[:3]
                    if joined[3] is not None:
                        far_backups[server] = joined[3]
                else:
                    connection, names[server], turns[server] = _enter_near(entry, client, server)
                    undo.callback(connection.close)
            except TimeoutError:
                raise CollectiveTimeout(f"{names[server]} did not let this worker in in time", server) from None
            except OSError as error:
                raise PeerLost(f"joining {names[server]}: {error}", server) from None
            connections.append(connection)
        undo.pop_all()

    def reach(server: int, address: str, timeout: float) -> socket.socket:
        return connect_again(bytes.fromhex(address), entry.secret, _hello(entry) | {"of": server}, timeout)

    membership = Membership(
        entry.store,
        entry.worker,
        entry.group,
        client,
        connections,
        names,
        entry.host,
        entry.block_bytes,
        entry.window,
        turns,
        reach,
        far_backups,
    )
    kv = KeyValue(membership, entry.timeout)
    _open.difference_update([each for each in _open if each.has_left])
    _open.add(kv)
    return kv


def _hello(entry: _Entry) -> dict[str, Any]:
    return {"worker": entry.worker, "host": socket.gethostname(), "pid": os.getpid(), "group": entry.group}


def _enter_near(entry: _Entry, client: Any, server: int) -> tuple[socket.socket, str, int]:
    """Joins a server of this host: the connection, how messages call it, and how many have served these blocks before.

    If its process has ended, or does not serve it any more, the one that does is waited for.
    """
    until, began = time.monotonic() + _TAKING_OVER, entry.place_of(server)
    while True:
        its = entry.process(entry.place_of(server))
        try:
            return _let_in(entry, client, server, its)
        except (TimeoutError, Refused):
            raise
        except OSError:
            others = entry.backups or entry.servers > entry.founders or its["number"] != began
            if not others or time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(0.005)


def _let_in(entry: _Entry, client: Any, server: int, its: dict[str, Any]) -> tuple[socket.socket, str, int]:
    """The same, of that process alone."""
    hello = _hello(entry) | {"servers": entry.servers, "lane": server, "window_bytes": client.window_bytes}
    left = max(0.1, entry.deadline - time.monotonic())
    connection, answer, (values, bell, pidfd) = connect(
        bytes.fromhex(its["address"]), entry.secret, hello | {"of": server}, client, left
    )
    turn = int(answer["turn"])
    called = "the backup of " * (turn > 0)
    name = f"{called}server {server} ({its['host']}, pid {its['pid']})"
    client.attach(
        server=server, values=values, bell=bell, pidfd=pidfd, capacity=int(answer["capacity"]), name=name, turn=turn
    )
    return connection, name, turn


def _enter_with_far_backup(
    entry: _Entry, client: Any, server: int, its: dict[str, Any], undo: contextlib.ExitStack
) -> tuple[socket.socket, str, int, socket.socket | None]:
    """As `_enter_near`, of a server on any host whose backup is reached by TCP, with a connection to the backup.

    The worker joins the backup first, since that must know every worker that the journal names. If the server has
    ended, or is out of reach, the backup is asked from here on.
    """
    get(entry.store, f"backup/{server}", f"the backup of server {server}", entry.deadline)
    place = _place_of_backup(entry, server)
    backup: control.Reached | None = None
    if _view(entry, server) != "server":
        with contextlib.suppress(OSError, PeerLost):
            number = number_at_door(entry.servers, entry.worker, server)
            look = functools.partial(_look, entry, server, "server")
            (found,) = _reach(entry, {place: entry.process(place)}, number, undo, look).values()
            _greet(entry, found.control)
            backup = found
    joined: tuple[socket.socket, str, int] | None = None
    try:
        if _view(entry, server) == "backup":
            raise PeerLost(f"{its['name']} has ended", server)
        if its["machine"] == entry.machine:
            joined = _let_in(entry, client, server, its)
            undo.callback(joined[0].close)
        else:
            number, look = (
                number_at_door(entry.servers, entry.worker),
                functools.partial(_look, entry, server, "backup"),
            )
            reached = _reach(entry, {server: its}, number, undo, look)[server]
            joined = _enter_far(entry, client, server, its["name"], reached), its["name"], 0
    except (TimeoutError, Refused):
        raise
    except (OSError, PeerLost):
        if backup is None:
            raise
        client.attach_far(server, its["name"])
    if backup is None:
        assert joined is not None
        return *joined, None
    name = f"the backup of {entry.server(server, place)['name']}"
    client.attach_far_backup(server, name)
    for descriptor, path in backup.take():
        client.connect(server, descriptor, path, backup=True)
    if joined is not None:
        return *joined, backup.control
    client.turn_to_backup(server)
    if not _serves(entry, backup.control):
        raise PeerLost(f"{its['name']} has ended, and its backup has not taken over", server)
    return backup.control, name, 1, None


def _serves(entry: _Entry, backup: socket.socket) -> bool:
    """Waits until a backup, of which the server has ended, has taken over; False if it does not."""
    with contextlib.suppress(OSError):
        while (left := entry.deadline - time.monotonic()) > 0:
            backup.settimeout(left)
            control.send(backup, {"ask": "serves"})
            if control.receive(backup)[0]["serves"]:
                backup.settimeout(entry.timeout)
                return True
            time.sleep(0.002)
    return False


def _view(entry: _Entry, server: int) -> str:
    """Which of a server and its backup goes on without the other, if that has been decided."""
    key = f"view/{server}"
    return str(entry.store.get(key).decode())[2:] if entry.store.check([key]) else ""


def _look(entry: _Entry, server: int, who: str) -> None:
    if _view(entry, server) == who:
        raise PeerLost(f"server {server} or its backup is out of reach, and the {who} goes on alone", server)


def _reach(
    entry: _Entry,
    servers: dict[int, dict[str, Any]],
    number: int,
    undo: contextlib.ExitStack,
    look: Callable[[], None] | None = None,
) -> dict[int, control.Reached]:
    """Connects to the doors of servers, as `number`. What is not used in the end is closed by `undo`."""
    peers = {}
    for server, its in servers.items():
        addresses = json.loads(get(entry.store, f"door/{server}", its["name"], entry.deadline))
        if not addresses or entry.options.transport == "shared_memory":
            raise TopologyError(
                f"{its['name']} is on another host than this worker"
                + ("" if addresses else " and listens to none: found it with join(listen=True)"),
                server,
            )
        peers[server] = Peer(its["host"], its["pid"], [Address(*address) for address in addresses])
    reached: dict[int, control.Reached] = {}

    def deliver(server: int, descriptor: int, path: str) -> None:
        if server in reached:
            reached[server].others.append((descriptor, path))
        else:
            reached[server] = control.Reached(socket.socket(fileno=descriptor), [])
            undo.callback(reached[server].close)

    door = _door(entry.options, ())
    connections = 1 + (entry.options.connections or 1)
    try:
        door.open(number, GROUP, entry.secret, peers, deliver, connections, entry.options.dead_after or 0)
        door.connect(servers, entry.deadline, look=look)
    finally:
        door.close()
    return reached


def _greet(entry: _Entry, connection: socket.socket) -> None:
    connection.settimeout(max(0.1, entry.deadline - time.monotonic()))
    control.send(connection, _hello(entry) | {"window": entry.window})
    answer, _ = control.receive(connection)
    if "error" in answer:
        raise Refused(answer["error"][1])


def _enter_far(entry: _Entry, client: Any, server: int, name: str, reached: control.Reached) -> socket.socket:
    _greet(entry, reached.control)
    client.attach_far(server, name)
    for descriptor, path in reached.take():
        client.connect(server, descriptor, path)
    return reached.control


def _close_in_child() -> None:
    """A forked child serves nothing and has joined nothing; the others are to see the parent end when it does."""
    for kv in _open:
        kv._disconnect()
        if kv._with.host is not None:
            kv._with.host.close_in_child()
    for serving in open_servings:
        serving._host.close_in_child()
    _open.clear()
    open_servings.clear()


os.register_at_fork(after_in_child=_close_in_child)


@atexit.register
def _end_all() -> None:
    """A server's thread may not call Python once it is being finalised."""
    for kv in list(_open):
        kv._close()
    for serving in list(open_servings):
        serving.close()
