"""`join` and `serve`: founding a parameter server, finding its servers in a store, and connecting to them.

Every process with servers tells the store where it is. A worker connects to the Unix sockets of servers on its own
host, and makes TCP connections to the others, as ranks of a group do (`network.listener`). The first connection to each
is for control messages.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ringreduce import _C
from ringreduce.config import resolve
from ringreduce.coordination.store import get
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, TopologyError
from ringreduce.network.secret import group_secret
from ringreduce.network.sockets import parse_ports
from ringreduce.parameter_server import control
from ringreduce.parameter_server.arguments import MOST_SERVERS, MOST_WORKERS, count_of_bytes, seconds
from ringreduce.parameter_server.attendant import Attendant
from ringreduce.parameter_server.checks import WHOLE, check_is, check_text, shown, whole
from ringreduce.parameter_server.control import Refused, connect, connect_again
from ringreduce.parameter_server.entry import STORE_GONE, Entry, Stale, called, greet, make_door, reach
from ringreduce.parameter_server.host import Host
from ringreduce.parameter_server.keeper import Directory, Keeper, place_of
from ringreduce.parameter_server.key_value import KeyValue, Membership
from ringreduce.parameter_server.placement import BLOCK_BYTES, UNIT, backup_of
from ringreduce.parameter_server.serving import Serving, once, open_servings
from ringreduce.parameter_server.shard import OBSERVERS
from ringreduce.parameter_server.succession import Succession
from ringreduce.parameter_server.updates import Function, check_functions
from ringreduce.parameter_server.views import Replica, View, Views, beside, visitor

WINDOW = 64 << 20
"""The default size of a worker's window, in bytes."""
_PREFIX = "ringreduce/parameter server"
_TAKING_OVER = 10.0
"""A worker that joins waits this many seconds for a backup to take over."""
_ENDING = 1.0
"""A process that founds servers waits this many seconds for earlier ones that are about to end."""
_AGAIN = 0.005
"""Seconds between two attempts to join whoever serves."""
log = logging.getLogger(__name__)

Entered = TypeVar("Entered")

_open: set[KeyValue] = set()
"""Workers that are closed at the end of the process, even if the program has dropped them."""


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

    A plain Python process gets a parameter server of its own. Under torchrun, or with a torch `store`, `rank` and
    `size`, the ranks found one together: each is a worker and a server with about 1/size of the blocks, and all return
    when all have come. Other processes join later with the same `store` and `role="worker"`, or with `role="reader"`:
    nobody waits for a reader (see `KeyValue.follow`).

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
    if not isinstance(role, str) or role not in ("both", "worker", "reader"):
        raise InvalidArgument(
            f"role is {shown(role)}; it must be 'both', 'worker' or 'reader', and `serve` is for servers"
        )
    if group == OBSERVERS:
        raise InvalidArgument(
            f"group is {shown(group)}, which is that of all readers; join with role='reader', or choose another name"
        )
    if role == "reader" and group != "workers":
        raise InvalidArgument(f"group is {shown(group)} with role='reader'; readers are in no such group: leave it out")
    if role == "reader":
        role, group = "worker", OBSERVERS
    entry = _entry(name, group, window, block_bytes, backups, functions, timeout)
    if role == "both":
        _check_sizes(entry)
    workers = whole("workers", workers, 0, f"a number of workers, 0 to {MOST_WORKERS}", MOST_WORKERS)
    if store is None:
        store, rank, size = _surroundings(rank, size)
    check_is("store", store, Store, "a torch.distributed.Store")
    if role == "worker":
        _find(entry, store)
        entry.worker = entry.servers - 1 + entry.store.add("later workers", 1)
        _check_sizes(entry)
        return _wait_for_workers(_enter(entry), entry, workers)
    entry, _, kv = _found(_enter, entry, store, rank, size, functions, memory, listen)
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
    if not isinstance(joins, bool):
        raise InvalidArgument(f"joins is {shown(joins)}; it must be True or False")
    if joins:
        if any(each is not None for each in (rank, size, memory)) or entry.backups or entry.servers:
            raise InvalidArgument(
                "joins is True: rank, size, memory, backups and servers are those of the founders; leave them out"
            )
        serving = _coming(entry, store, functions)
        open_servings.add(serving)
        return serving
    if store is None:
        store, rank, size = _surroundings(rank, size)
    check_is("store", store, Store, "a torch.distributed.Store")
    if listen is None:
        listen = not entry.backups and entry.servers in (0, size)
    try:
        entry, host, _ = _found(lambda _: None, entry, store, rank, size, functions, memory, listen)
    except _Served:
        if not entry.backups:
            raise
        log.warning("rank %d of %d has ended and others serve what it did; this process takes a share", rank, size)
        serving = _coming(_entry(name, "", window, block_bytes, 0, functions, timeout), store, functions)
    else:
        serving = Serving(host, entry.worker, entry.servers, entry.store)
    open_servings.add(serving)
    return serving


def _found(
    enter: Callable[[Entry], Entered],
    entry: Entry,
    store: Any,
    rank: int | None,
    size: int | None,
    functions: dict[str, Function] | None,
    memory: int | None,
    listen: bool,
) -> tuple[Entry, Host, Entered]:
    """Founds the parameter server with the others, each of which calls `enter` before it counts as there.

    Begins anew if earlier processes, which have ended, had begun to found it.
    """
    while True:
        try:
            with _founding(entry, store, rank, size, functions, memory, listen) as host:
                entered = enter(entry)
                _wait_for_founders(entry, store)
            return entry, host, entered
        except Stale:
            entry = entry.anew()


def _coming(entry: Entry, store: Any, functions: dict[str, Function] | None) -> Serving:
    """Joins as a process that comes later: makes itself known in the store, and asks for its share of servers."""
    if store is None:
        raise InvalidArgument("joins is True without a store; give the store of the servers that there are")
    check_is("store", store, Store, "a torch.distributed.Store")
    _find(entry, store)
    others = [entry.process(process) for process in range(entry.founders)]
    if not entry.has_far_backups and any(other["machine"] != entry.machine for other in others):
        raise TopologyError("this process is on another host than the servers, which only move on one host", 0)
    number = entry.worker = entry.founders - 1 + entry.store.add("later processes", 1)
    entry.window = max(int(other["window"]) for other in others)
    host = entry.host = Host(0, entry.secret, functions or {}, (), entry.backups > 0 and not entry.has_far_backups)
    try:
        _publish(entry, host, entry.has_far_backups)
        keeper = _keep(entry, host)
        if host.succession is None:
            keeper.take_share(entry.servers, entry.deadline)
        else:
            keeper.take_share_between_hosts(entry.servers, entry.deadline)
    except BaseException:
        host.close()
        raise
    return Serving(host, number, entry.servers, entry.store, taken=int(entry.store.add("snapshots", 0)))


def _find(entry: Entry, store: Any) -> None:
    """Fills in the entry from what the founders have told the store. Waits for it."""
    making = get(store, f"{_PREFIX}/{entry.name}/latest", "the founders of the parameter server", entry.deadline)
    entry.store = PrefixStore(f"{_PREFIX}/{entry.name}/{making}", store)
    entry.servers = int(get(entry.store, "founded", "the founders of the parameter server", entry.deadline))
    entry.founders, entry.backups = int(entry.store.get("size")), int(entry.store.get("backups"))
    entry.has_far_backups = bool(int(entry.store.get("far backups")))
    entry.secret = group_secret(bytes.fromhex(entry.store.get("secret").decode()), entry.options.secret_file or "")
    entry.block_bytes = int(entry.store.get("block bytes"))


def _entry(name: Any, group: Any, window: Any, block_bytes: Any, backups: Any, functions: Any, timeout: Any) -> Entry:
    """Checks the arguments that `join` and `serve` share. Raises `InvalidArgument`."""
    check_text("name", name)
    check_text("group", group)
    window, block_bytes = count_of_bytes("window", window), count_of_bytes("block_bytes", block_bytes)
    backups = whole("backups", backups, 0, "0, or 1 with 2 or more servers")
    check_functions(functions)
    timeout = seconds(timeout)
    return Entry(
        name, group, window, block_bytes, time.monotonic() + timeout, timeout, resolve(None)[0], backups=backups
    )


def _check_sizes(entry: Entry) -> None:
    if entry.window < entry.block_bytes or entry.block_bytes < 16 * UNIT:
        raise InvalidArgument(
            f"window is {entry.window} and block_bytes {entry.block_bytes}; a window must hold a block, "
            f"and a block at least {16 * UNIT} bytes"
        )


def _surroundings(rank: int | None, size: int | None) -> tuple[Any, int, int]:
    """Returns the launcher's store, rank and size; without a launcher, those of a group of this process alone."""
    if rank is not None or size is not None:
        raise InvalidArgument(
            f"rank is {shown(rank)} and size {shown(size)} without a store; give store= too, or none of them"
        )
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if all(variable in os.environ for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        store, rank, size = next(iter(rendezvous("env://")))
        return store, rank, size
    return HashStore(), 0, 1


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@contextlib.contextmanager
def _founding(
    entry: Entry,
    store: Any,
    rank: int | None,
    size: int | None,
    functions: dict[str, Function] | None,
    memory: int | None,
    listen: bool,
) -> Iterator[Host]:
    """Makes this process's servers and tells the store where they are. Closes them if the body raises."""
    if not isinstance(rank, WHOLE) or not isinstance(size, WHOLE) or not 0 <= rank < size <= MOST_SERVERS:
        raise InvalidArgument(
            f"rank is {shown(rank)} and size {shown(size)}; a store needs 0 <= rank < size <= {MOST_SERVERS}"
        )
    rank, size = int(rank), int(size)
    if entry.backups > 1 or (entry.backups and size == 1):
        raise InvalidArgument(f"backups is {entry.backups} with size {size}; it must be 0, or 1 with 2 or more servers")
    if memory is not None:
        memory = count_of_bytes("memory", memory)
    if entry.servers and entry.servers < size:
        raise InvalidArgument(f"servers is {entry.servers} with size {size}; every process begins with one or more")
    if not isinstance(listen, bool):
        raise InvalidArgument(f"listen is {shown(listen)}; it must be True or False")
    entry.worker, entry.founders, entry.servers = rank, size, entry.servers or size
    _begin(entry, store)
    try:
        entry.check_founding()  # the others may have given up before this one came
        secret = bytes.fromhex(once(entry.store, "secret", secrets.token_hex(32)))
        entry.secret = group_secret(secret, entry.options.secret_file or "")
        _agree_on_all(entry, listen)
        mine = range(rank, entry.servers, size)
        share = _half_of_memory() // size if memory is None else memory * (1 + entry.backups)
        capacity = share // ((1 + entry.backups) * len(mine))
        has_near_backups = entry.backups > 0 and not entry.has_far_backups
        host = entry.host = Host(capacity, entry.secret, functions or {}, mine, has_near_backups)
        _make_known(entry, host, listen)
        yield host
        # Servers on several hosts without backups do not move and have no backups, so they need no keeper.
        if len(set(entry.machines)) == 1 or entry.has_far_backups:
            _keep(entry, host)
    except BaseException as error:
        stale = isinstance(error, Stale) or (isinstance(error, PeerLost) and entry.is_stale())
        entry.give_up(PeerLost("processes that have ended had begun to found it; join again") if stale else error)
        if entry.host is not None:
            entry.host.close()
        if stale:
            raise Stale from None
        if isinstance(error, STORE_GONE):
            raise entry.without_store(error) from None
        if isinstance(error, PeerLost):
            with contextlib.suppress(*STORE_GONE):
                entry.raise_if_given_up()  # whoever is lost may only have closed because it had lost another
        raise


class _Served(InvalidArgument):
    """The parameter server is there already, and this process is not one of its founders."""


def _begin(entry: Entry, store: Any) -> None:
    """Chooses the incarnation that this founder takes part in, and fills in its store.

    All founders come to an incarnation once. If this one has been there, or an earlier process of its rank, all go on
    with the next one. Raises `_Served` if there is one whose servers live and that this process has not founded.
    """
    key = f"{_PREFIX}/{entry.name}/making"
    entry.making = int(once(store, key, "1"))
    while True:
        entry.store = PrefixStore(f"{_PREFIX}/{entry.name}/{entry.making}", store)
        if entry.is_over() and entry.store.get("founded").isdigit():
            _check_has_ended(entry)
        elif entry.claim() and not (entry.is_over() and entry.is_for_earlier_ones()):
            return
        twice = f"a second process has come as rank {entry.worker}; join again, and give each process its own rank"
        entry.give_up(PeerLost(twice))
        entry.making = int(store.compare_set(key, str(entry.making), str(entry.making + 1)))


def _check_has_ended(entry: Entry) -> None:
    """Checks that no server of the incarnation of `entry.store` lives, unless this process founded it, too. Servers
    that are about to end have `_ENDING` seconds."""
    if entry.is_mine():
        return
    until = time.monotonic() + _ENDING
    processes = Directory(entry.store, int(entry.store.get("size"))).processes()
    while there := [number for number, its in processes.items() if control.lives(its, entry.machine)]:
        if time.monotonic() > until:
            raise _Served(
                f"rank {entry.worker} cannot found the parameter server {entry.name!r} again: "
                f"{called(there[0], processes[there[0]])} serves already. If the servers have backups, join them: "
                "ringreduce serve --join, or serve(store, joins=True). Otherwise end all of them and start them "
                "together, or give another name="
            )
        time.sleep(_AGAIN)


def _agree_on_all(entry: Entry, listen: bool) -> None:
    """Checks that all founders were given equal arguments, and decides how backups are reached."""
    entry.store.set(f"machine/{entry.worker}", entry.machine)
    _agree(entry, "size", entry.founders)
    _agree(entry, "block_bytes", entry.block_bytes)
    _agree(entry, "backups", entry.backups)
    _agree(entry, "servers", entry.servers)
    if entry.backups:
        _agree(entry, "listen", listen)
    entry.has_far_backups = entry.backups > 0 and (listen or len(set(entry.machines)) > 1)
    _agree(entry, "far_backups", int(entry.has_far_backups))


def _make_known(entry: Entry, host: Host, listen: bool) -> None:
    _publish(entry, host, listen or len(set(entry.machines)) > 1)
    if entry.servers > entry.founders and not entry.has_far_backups:
        _check_one_host(entry, listen)
    if entry.backups:
        _have_backups(entry, host)


def _publish(entry: Entry, host: Host, listens: bool) -> None:
    """Tells the store where this process is. With `listens`, opens a door for workers and servers on other hosts."""
    me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "machine": entry.machine}
    me |= {"address": host.address.hex(), "window": entry.window, "door": []}
    if listens:
        door = make_door(entry.options, parse_ports(entry.options.ports or ""))
        if entry.has_far_backups:
            host.succession = _succession(entry)
        host.listen(door, entry.worker, entry.window, entry.options.dead_after or 0)
        me["door"] = door.addresses
    entry.store.set(f"server/{entry.worker}", json.dumps(me))


def _succession(entry: Entry) -> Succession:
    views = Views(entry.store)

    def go_to(process: int, timeout: float, look: Callable[[], None]) -> control.Reached:
        with contextlib.ExitStack() as undo:
            its, number = views.process(process), views.visitor()
            found = reach(entry, {process: its}, number, time.monotonic() + timeout, undo, look)
            undo.pop_all()
        return found[process]

    return Succession(entry.worker, views, go_to)


def _keep(entry: Entry, host: Host) -> Keeper:
    views = None if host.succession is None else host.succession.views
    directory = Directory(beside(entry.store), entry.founders, views)
    keeper = Keeper(host, directory, entry.worker, entry.backups)
    host.keep(keeper)
    return keeper


def _agree(entry: Entry, name: str, mine: int) -> None:
    agreed = once(entry.store, name.replace("_", " "), str(mine))
    if agreed != str(mine):
        its = f"{name} is {agreed} here and {mine} on rank {entry.worker}; give all the same, and join again"
        entry.give_up(InvalidArgument(its, entry.worker))
        raise InvalidArgument(f"{name} is {mine} here and {agreed} on another rank; give all the same, and join again")


def _check_one_host(entry: Entry, listen: bool) -> None:
    for process, machine in enumerate(entry.machines):
        if machine != entry.machine:
            name = entry.process(process)["name"]
            raise TopologyError(
                f"{name} is on another host than this server; more servers than processes need backups=1, or one host",
                process,
            )
    if listen:
        raise InvalidArgument(
            f"listen is True with {entry.servers} servers in {entry.founders} processes; servers that move only have "
            "workers of their own host, unless backups is 1"
        )


def _have_backups(entry: Entry, host: Host) -> None:
    """Makes the first backups of this process's servers, in the next process or, by TCP, in the next one on another
    host."""
    far = host.succession is not None
    backup = backup_of(entry.worker, entry.machines) if far else (entry.worker + 1) % entry.founders
    its = entry.process(backup)
    try:
        for server, shard in host.serving().items():
            if host.succession is not None:
                host.succession.begin(server, shard)
            host.have_backup(server, backup, its, max(0.1, entry.deadline - time.monotonic()))
    except TimeoutError:
        raise CollectiveTimeout(f"{its['name']} did not make a backup of this server in time", backup) from None
    except OSError as error:
        raise PeerLost(f"making a backup on {its['name']}: {error}", backup) from None


def _wait_for_founders(entry: Entry, store: Any) -> None:
    entry.wait_until_founded()
    if entry.worker == 0:
        store.set(f"{_PREFIX}/{entry.name}/latest", str(entry.making))


def _wait_for_workers(kv: KeyValue, entry: Entry, workers: int) -> KeyValue:
    """Returns when `workers` workers have joined this one's group; those that have left since count too."""
    key = f"joined/{entry.group}"
    there = entry.store.add(key, 1)
    while there < workers:
        if time.monotonic() > entry.deadline:
            kv._close()
            raise CollectiveTimeout(f"{there} of {workers} workers of group {entry.group!r} have joined in time")
        time.sleep(0.005)
        there = entry.store.add(key, 0)
    return kv


def _enter(entry: Entry) -> KeyValue:
    """Connects a worker to every server."""
    client = _C.ParameterClient(entry.worker, entry.servers, _window(entry))
    if entry.host is not None:
        client.host(entry.host.server)
    views = Views(entry.store) if entry.has_far_backups else None
    joined: list[_Joined] = []
    with contextlib.ExitStack() as undo:
        reached = {} if views is not None else _reach_all(entry, undo)
        for server in range(entry.servers):
            place = place_of(entry.store, server, entry.founders)
            name = called(server, entry.process(place))
            try:
                if views is not None:
                    joined.append(_enter_viewed(entry, views, client, server, undo))
                elif place in reached:
                    joined.append(_enter_far(entry, client, server, Replica(place, 0), reached[place]))
                else:
                    joined.append(_enter_near(entry, client, server))
            except TimeoutError:
                raise CollectiveTimeout(f"{name} did not let this worker in in time", server) from None
            except OSError as error:
                raise PeerLost(f"joining {name}: {error}", server) from None
            undo.callback(joined[-1].connection.close)
        turns = [each.turn for each in joined]
        attendant = None if views is None else Attendant(entry, views, client, turns)
        undo.pop_all()

    def reach_near(server: int, address: str, timeout: float) -> socket.socket:
        return connect_again(bytes.fromhex(address), entry.secret, entry.hello() | {"of": server}, timeout)

    membership = Membership(
        entry.store,
        entry.worker,
        entry.group,
        client,
        [each.connection for each in joined],
        [each.name for each in joined],
        entry.host,
        entry.block_bytes,
        entry.window,
        turns,
        reach_near,
        attendant,
    )
    kv = KeyValue(membership, entry.timeout)
    _open.difference_update([each for each in _open if each.has_left])
    _open.add(kv)
    return kv


class _Joined(NamedTuple):
    """A server that has let this worker in."""

    connection: socket.socket
    """For control messages."""
    name: str
    """Its name in messages."""
    turn: int
    """How many servers have served these blocks before it; if backups are reached by TCP, its replica number."""


def _window(entry: Entry) -> int:
    """Returns the bytes of the worker's window: no more than any server accepts that may be reached by TCP."""
    places = [entry.process(process) for process in range(entry.founders)]
    far = [its for its in places if entry.has_far_backups or its["machine"] != entry.machine]
    entry.window = min([entry.window, *(int(its["window"]) for its in far)]) // 64 * 64  # as the client has it
    return entry.window


def _reach_all(entry: Entry, undo: contextlib.ExitStack) -> dict[int, control.Reached]:
    """Connections to all processes on other hosts."""
    places = [entry.process(process) for process in range(entry.founders)]
    far = {its["number"]: its for its in places if its["machine"] != entry.machine}
    return reach(entry, far, visitor(entry.store), entry.deadline, undo, entry.check_founding) if far else {}


def _enter_near(entry: Entry, client: Any, server: int) -> _Joined:
    """Joins a server on this host.

    If its process has ended or does not serve it any more, waits for the process that does.
    """
    until, began = time.monotonic() + _TAKING_OVER, place_of(entry.store, server, entry.founders)
    while True:
        its = entry.process(place_of(entry.store, server, entry.founders))
        try:
            return _let_in(entry, client, server, its)
        except (TimeoutError, Refused):
            raise
        except OSError:
            others = entry.backups or entry.servers > entry.founders or its["number"] != began
            if not others or time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(_AGAIN)


def _let_in(entry: Entry, client: Any, server: int, its: dict[str, Any]) -> _Joined:
    """Joins a server in the process described by `its`."""
    hello = entry.hello() | {"servers": entry.servers, "lane": server, "window_bytes": client.window_bytes}
    left = max(0.1, entry.deadline - time.monotonic())
    connection, answer, (values, bell, pidfd) = connect(
        bytes.fromhex(its["address"]), entry.secret, hello | {"of": server}, client, left
    )
    turn = int(answer["turn"])
    name = called(server, its, turn)
    client.attach(
        server=server, values=values, bell=bell, pidfd=pidfd, capacity=int(answer["capacity"]), name=name, turn=turn
    )
    return _Joined(connection, name, turn)


def _enter_far(entry: Entry, client: Any, server: int, replica: Replica, reached: control.Reached) -> _Joined:
    greet(entry, reached.control, server, replica.number, max(0.1, entry.deadline - time.monotonic()))
    name = called(server, entry.process(replica.process), replica.number)
    client.attach_far(server, name, replica.number)
    for descriptor, path in reached.take():
        client.connect(server, descriptor, path, replica.number)
    return _Joined(reached.control, name, replica.number)


def _enter_viewed(entry: Entry, views: Views, client: Any, server: int, undo: contextlib.ExitStack) -> _Joined:
    """Joins whoever serves the blocks of a server, if backups are reached by TCP. Starts again if the view changes."""
    until = time.monotonic() + _TAKING_OVER
    while True:
        view = views.of(server)
        assert view is not None  # since the founders have made it
        one = view.server
        its = entry.process(one.process)

        def look(seen: View = view) -> None:
            if views.of(server) != seen:
                raise PeerLost(f"{its['name']} does not serve server {server} any more", server)  # noqa: B023

        try:
            if one.number == 0 and its["machine"] == entry.machine:
                return _let_in(entry, client, server, its)
            number = views.visitor()
            reached = reach(entry, {one.process: its}, number, entry.deadline, undo, look)[one.process]
            return _enter_far(entry, client, server, one, reached)
        except (TimeoutError, Refused):
            raise
        except (OSError, PeerLost):
            if time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(_AGAIN)


def _close_in_child() -> None:
    """Closes what a forked child has inherited. It has joined nothing, and others must notice the end of the parent."""
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
    """Stops all servers at exit, because their threads must not call Python while the interpreter is finalised."""
    for kv in list(_open):
        kv._close()
    for serving in list(open_servings):
        serving.close()
