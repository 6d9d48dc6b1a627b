"""`join` and `serve`: founding a parameter server, or joining one as a worker or as a further process with servers.

Every process with servers tells the store where it is (`founding`). A worker connects to every server.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from ringreduce import _C
from ringreduce.common.checks import check_bool, check_is, check_text, shown, whole
from ringreduce.common.launcher import check_alone
from ringreduce.common.system import WANTS, explained
from ringreduce.config import resolve
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure
from ringreduce.parameter_server import doors, founding
from ringreduce.parameter_server.arguments import MOST_SERVERS, MOST_WORKERS, count_of_bytes, seconds
from ringreduce.parameter_server.client.calls import Calls
from ringreduce.parameter_server.client.failover import FailoverConnector
from ringreduce.parameter_server.client.key_value import KeyValue
from ringreduce.parameter_server.client.questions import Joined, Questions
from ringreduce.parameter_server.doors import Reached, Refused, called, reach
from ringreduce.parameter_server.entry import Entry
from ringreduce.parameter_server.modes import READERS
from ringreduce.parameter_server.placement import BLOCK_BYTES, UNIT
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.server.serving import Serving
from ringreduce.parameter_server.store import Views, new_dialer, process_of
from ringreduce.parameter_server.updates import Function, check_functions
from ringreduce.parameter_server.views import Replica, View

WINDOW = 64 << 20
"""The default size of a worker's window, in bytes."""
_TAKING_OVER = 10.0
"""A worker that joins waits this many seconds for a backup to take over."""
_AGAIN = 0.005
"""Seconds between two attempts to join whoever serves, and between two looks whether workers have joined."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Says of an error of the system what failed, and what to do."""
    try:
        yield
    except OSError as error:
        raise SystemFailure(f"{what}: {explained(error)}") from error


@explaining("joining the parameter server")
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
    timeout: timedelta | float = 60.0,
) -> KeyValue:
    """Joins the parameter server `name`; returns when all servers have let this worker in.

    A plain Python process gets a parameter server of its own; one of several that srun or mpiexec has started must say
    by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT who it is, or by WORLD_SIZE=1 that it is alone. Under torchrun, or
    with a torch `store`, `rank` and `size`, the ranks found one together: each is a worker and a server with about
    1/size of the blocks, and all return when all have come. Other processes join later with the same `store` and
    `role="worker"`, or with `role="reader"`: nobody waits for a reader (see `KeyValue.follow`).

    Arguments, besides those:

    - `group`: the group of workers that this one belongs to (see `sync` and `ssp`).
    - `workers`: returns only when so many workers of this group have joined.
    - `functions`: by name, the functions that `ps.function` may name.
    - `memory`: the most bytes of this server's values and native optimizer states (default: an equal share of half of
      the machine's memory).
    - `window`: the most bytes of this worker's pushes under way. A server keeps as much memory for each worker on
      another host, so the window of such a worker is no larger than the servers'.
    - `block_bytes`: the most bytes of a block. All founders must give the same.
    - `backups`: with 1, on all founders, each server has a backup in the process of the next server, on another host if
      there is one. It takes over if the server's process or host ends.
    - `timeout`: in seconds or as a timedelta, for this call and, as a default, for all calls of the result.

    Processes of one host share memory. Processes of several hosts use TCP, with the settings of
    RINGREDUCE_SOCKET_IFNAME, RINGREDUCE_PORTS, RINGREDUCE_SECRET_FILE, RINGREDUCE_HOST_ID, RINGREDUCE_TRANSPORT,
    RINGREDUCE_CONNECTIONS and RINGREDUCE_DEAD_AFTER. If all founders are on one host, workers of other hosts can join
    later only if the founders gave `listen=True`. With backups all must give the same.

    Raises `CollectiveTimeout` if a founder does not come, `PeerLost` if one ends before all have come, `PeerLost` or
    `SystemFailure` if a server cannot be reached, `InvalidArgument` if other processes have founded it and serve, and
    `TopologyError` if a server on another host does not accept workers from other hosts. If a founder raises, the
    others raise too, and all can join again with the same store.
    """
    role, group = _role(role, group)
    entry = _entry(name, group, window, block_bytes, backups, functions, timeout)
    if role == "both":
        _check_sizes(entry)
    workers = whole("workers", workers, 0, f"a number of workers, 0 to {MOST_WORKERS}", MOST_WORKERS)
    store, rank, size = _surroundings(store, rank, size)
    if role == "worker":
        return _wait_for_workers(_come(entry, store), entry, workers)
    entry.memory, entry.listen = memory, listen
    entry, _, kv = founding.found(enter, entry, store, rank, size)
    return _wait_for_workers(kv, entry, workers)


@explaining("founding the parameter server")
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
    timeout: timedelta | float = 60.0,
) -> Serving:
    """Founds the parameter server `name` as process `rank` of `size`, without a worker. Returns when all have come.

    Workers join with `join(store, role="worker")`, before or after this call. They may be on any host, unless all
    servers are on one host and `listen` is False, which is the default with backups and with more servers than
    processes. The other arguments are as for `join`.

    `servers` is the number of servers that the blocks are spread over (default: one for each process). If there are
    more servers than processes, each process begins with its share, and processes that come later can take over some:
    on the same host or, with backups, on other hosts. Such a process calls this with `joins=True`, `store` and `name`
    alone. The call returns when the process has its share, which it is given one server after the other while calls of
    workers go on. `Serving.give_away` gives the servers back to others. A founder that is started again while
    the others serve joins in the same way if `backups` is 1. If backups are reached by TCP (servers on
    several hosts, or `listen=True`), a process takes no server whose two copies would both be on its own host during
    the move; it may then end up with backups only.
    """
    entry = _entry(name, "", window, block_bytes, backups, functions, timeout)
    _check_sizes(entry)
    what = f"a number of servers, at most {MOST_SERVERS}, or 0 for one for each process"
    entry.servers = whole("servers", servers, 0, what, MOST_SERVERS)
    check_bool("joins", joins)
    if joins:
        if any(each is not None for each in (rank, size, memory)) or entry.backups or entry.servers:
            raise InvalidArgument(
                "joins is True: rank, size, memory, backups and servers are those of the founders; leave them out"
            )
        return founding.come(entry, store)
    store, rank, size = _surroundings(store, rank, size)
    entry.memory, entry.listen = memory, listen
    if listen is None:
        entry.listen = not entry.backups and entry.servers in (0, size)
    try:
        entry, local, _ = founding.found(lambda *_: None, entry, store, rank, size)
    except founding.Served:
        if not entry.backups:
            raise
        log.warning("rank %d of %d has ended and others serve what it did; this process takes a share", rank, size)
        return founding.come(_entry(name, "", window, block_bytes, 0, functions, timeout), store)
    return Serving(local, entry.worker, entry.servers, entry.store)


def _role(role: Any, group: Any) -> tuple[str, Any]:
    """Checks two arguments of `join`. A reader is a worker of a group of its own."""
    if not isinstance(role, str) or role not in ("both", "worker", "reader"):
        raise InvalidArgument(
            f"role is {shown(role)}; it must be 'both', 'worker' or 'reader', and `serve` is for servers"
        )
    if group == READERS:
        raise InvalidArgument(
            f"group is {shown(group)}, which is that of all readers; join with role='reader', or choose another name"
        )
    if role == "reader" and group != "workers":
        raise InvalidArgument(f"group is {shown(group)} with role='reader'; readers are in no such group: leave it out")
    return ("worker", READERS) if role == "reader" else (role, group)


def _entry(name: Any, group: Any, window: Any, block_bytes: Any, backups: Any, functions: Any, timeout: Any) -> Entry:
    """Checks the arguments that `join` and `serve` share. Raises `InvalidArgument`."""
    check_text("name", name)
    check_text("group", group)
    window, block_bytes = count_of_bytes("window", window), count_of_bytes("block_bytes", block_bytes)
    backups = whole("backups", backups, 0, "0, or 1 with 2 or more processes")
    check_functions(functions)
    timeout, options = seconds(timeout), resolve(None)[0]
    deadline = time.monotonic() + timeout
    return Entry(name, group, window, block_bytes, deadline, timeout, options, functions or {}, backups=backups)


def _check_sizes(entry: Entry) -> None:
    if entry.window < entry.block_bytes or entry.block_bytes < 16 * UNIT:
        raise InvalidArgument(
            f"window is {entry.window} and block_bytes {entry.block_bytes}; a window must hold a block, "
            f"and a block at least {16 * UNIT} bytes"
        )


def _surroundings(store: Any, rank: int | None, size: int | None) -> tuple[Any, int | None, int | None]:
    """Returns what is given with a store. Without one, returns the launcher's store, rank and size or, if there is no
    launcher, those of a group of this process alone."""
    if store is not None:
        check_is("store", store, Store, "a torch.distributed.Store")
        return store, rank, size
    if rank is not None or size is not None:
        raise InvalidArgument(
            f"rank is {shown(rank)} and size {shown(size)} without a store; give store= too, or none of them"
        )
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if all(variable in os.environ for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        store, rank, size = next(iter(rendezvous("env://")))
        return store, rank, size
    check_alone("the parameter server", "give store=, rank= and size=")
    return HashStore(), 0, 1


def _come(entry: Entry, store: Any) -> KeyValue:
    """Joins as a worker what others have founded."""
    founding.find(entry, store)
    entry.worker = entry.servers - 1 + entry.store.add("later workers", 1)
    _check_sizes(entry)
    return enter(entry, None)


def _wait_for_workers(kv: KeyValue, entry: Entry, workers: int) -> KeyValue:
    """Returns when `workers` workers have joined this one's group; those that have left since count too."""
    key = f"joined/{entry.group}"
    there = entry.store.add(key, 1)
    while there < workers:
        if time.monotonic() > entry.deadline:
            kv.calls.close()
            raise CollectiveTimeout(f"{there} of {workers} workers of group {entry.group!r} have joined in time")
        time.sleep(_AGAIN)
        there = entry.store.add(key, 0)
    return kv


def enter(entry: Entry, local: ServerProcess | None) -> KeyValue:
    """Connects a worker to every server. `local` has the servers of its process, if there are any."""
    processes = [entry.process(process) for process in range(entry.founders)]
    far = {its["number"]: its for its in processes if entry.has_far_backups or its["machine"] != entry.machine}
    # No larger than any server accepts that may be reached by TCP, and as the client has it.
    entry.window = min([entry.window, *(int(its["window"]) for its in far.values())]) // 64 * 64
    client = _C.ParameterClient(entry.worker, entry.servers, entry.window)
    if local is not None:
        client.host(local.server)
    joined: list[Joined] = []
    with contextlib.ExitStack() as undo:
        reached: dict[int, Reached] = {}
        if far and not entry.has_far_backups:
            number, look = new_dialer(entry.store), entry.check_founding
            reached = reach(entry.options, entry.secret, far, number, entry.deadline, undo, look)
        for server in range(entry.servers):
            name = called(server, entry.process(process_of(entry.store, server, entry.founders)))
            try:
                joined.append(_enter(entry, client, server, reached))
            except TimeoutError:
                raise CollectiveTimeout(f"{name} did not let this worker in in time", server) from None
            except OSError as error:
                if error.errno in WANTS:
                    raise SystemFailure(f"joining {name}: {explained(error)}") from None
                raise PeerLost(f"joining {name}: {error}", server) from None
            undo.callback(joined[-1].connection.close)
        replicas = [each.turn for each in joined]
        failover = FailoverConnector(entry, entry.views, client, replicas) if entry.views else None
        undo.pop_all()
    return KeyValue(Calls(entry, client, local, Questions(entry, client, joined, failover)))


def _enter(entry: Entry, client: Any, server: int, reached: dict[int, Reached]) -> Joined:
    """Joins whoever serves the blocks of a server, on this host or by TCP: over the connections that are `reached`, by
    process, or over new ones if there are views. Waits for another process if that one has ended, or does not serve
    them any more."""
    until, began = time.monotonic() + _TAKING_OVER, process_of(entry.store, server, entry.founders)
    while True:
        view = entry.views.of(server) if entry.views else None
        one = view.server if view else Replica(process_of(entry.store, server, entry.founders), 0)
        its = entry.process(one.process)
        moves = bool(entry.backups or entry.servers > entry.founders or one.process != began)
        try:
            if one.process in reached:
                return _enter_far(entry, client, server, 0, its, reached[one.process])
            if entry.views is None or (one.number == 0 and its["machine"] == entry.machine):
                return _let_in(entry, client, server, its)
            look = functools.partial(_look, entry.views, server, view, its)
            return _enter_far(entry, client, server, one.number, its, entry.dial(its, entry.deadline, look))
        except (TimeoutError, Refused):
            raise
        except (OSError, PeerLost):
            if not moves or time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(_AGAIN)


def _look(views: Views, server: int, seen: View | None, its: dict[str, Any]) -> None:
    """Raises `PeerLost` if another process serves a server now."""
    if views.of(server) != seen:
        raise PeerLost(f"{called(its['number'], its)} does not serve server {server} any more", server)


def _let_in(entry: Entry, client: Any, server: int, its: dict[str, Any]) -> Joined:
    """Joins a server in the process described by `its`."""
    hello = entry.hello() | {"of": server, "servers": entry.servers, "lane": server}
    hello |= {"window_bytes": client.window_bytes}
    left = max(0.1, entry.deadline - time.monotonic())
    address, given = bytes.fromhex(its["address"]), [client.window, client.news]
    connection, answer, (values, bell, pidfd) = doors.enter(address, entry.secret, hello, given, left, 3)
    turn = int(answer["turn"])
    name = called(server, its, turn)
    about = {"capacity": int(answer["capacity"]), "name": name, "turn": turn}
    client.attach(server=server, values=values, bell=bell, pidfd=pidfd, **about)
    return Joined(connection, name, turn)


def _enter_far(entry: Entry, client: Any, server: int, replica: int, its: dict[str, Any], reached: Reached) -> Joined:
    name = called(server, its, replica)
    reached.control.settimeout(max(0.1, entry.deadline - time.monotonic()))
    entry.meet(reached, client, server, name, replica, client.attach_far)
    return Joined(reached.control, name, replica)
