"""Founding a parameter server together with other processes, and coming later as a further process with servers.

Founders may have to try several times; each attempt is an incarnation of the parameter server, with keys of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from ringreduce.common.checks import WHOLE, check_bool, check_is, shown
from ringreduce.coordination.endpoint import door_at
from ringreduce.coordination.founding import Founding
from ringreduce.coordination.process import identity
from ringreduce.coordination.store import get, once
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, TopologyError
from ringreduce.groups.ready import location_of
from ringreduce.network.secret import group_secret
from ringreduce.parameter_server.arguments import MOST_SERVERS, count_of_bytes
from ringreduce.parameter_server.doors import called, lives
from ringreduce.parameter_server.entry import STORE_GONE, Entry, Stale
from ringreduce.parameter_server.placement import backup_of
from ringreduce.parameter_server.server.manager import ReplicaManager
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.server.replication import Replication
from ringreduce.parameter_server.server.serving import Serving
from ringreduce.parameter_server.store import Directory, beside

_PREFIX = "ringreduce/parameter server"
_ENDING = 1.0
"""A process that founds servers waits this many seconds for earlier ones that are about to end."""
_LOOK = 0.005
"""Seconds between two looks whether these have ended."""

Entered = TypeVar("Entered")


def found(
    enter: Callable[[Entry, ServerProcess], Entered], entry: Entry, store: Any, rank: int | None, size: int | None
) -> tuple[Entry, ServerProcess, Entered]:
    """Founds the parameter server with the others, each of which calls `enter` before it counts as there. Begins anew
    if earlier processes, which have ended, had begun to found it."""
    while True:
        try:
            with _founding(entry, store, rank, size) as local:
                entered = enter(entry, local)
                _wait_for_founders(entry)
            return entry, local, entered
        except Stale:
            entry = replace(entry, _came={})


def come(entry: Entry, store: Any) -> Serving:
    """Joins as a process that comes later: makes itself known in the store, and asks for its share of servers."""
    if store is None:
        raise InvalidArgument("joins is True without a store; give the store of the servers that there are")
    check_is("store", store, Store, "a torch.distributed.Store")
    find(entry, store)
    others = [entry.process(process) for process in range(entry.founders)]
    if not entry.has_far_backups and any(other["machine"] != entry.machine for other in others):
        raise TopologyError("this process is on another host than the servers, which only move on one host", 0)
    number = entry.worker = entry.founders - 1 + entry.store.add("later processes", 1)
    entry.window = max(int(other["window"]) for other in others)
    local = ServerProcess(0, entry.secret, entry.functions, (), entry.backups > 0 and not entry.has_far_backups)
    try:
        _publish(entry, local, entry.has_far_backups)
        _manage(entry, local).take_share(entry.servers, entry.deadline)
    except BaseException:
        local.close()
        raise
    return Serving(local, number, entry.servers, entry.store, taken=int(entry.store.add("snapshots", 0)))


def find(entry: Entry, store: Any) -> None:
    """Fills in the entry from what the founders have told the store. Waits for it."""
    founding, founders = _founding_in(entry, store), "the founders of the parameter server"
    entry.begin(founding, int(get(founding.store, "latest", founders, entry.deadline)))
    entry.servers = int(get(entry.store, "founded", founders, entry.deadline))
    entry.founders, entry.backups = int(entry.store.get("size")), int(entry.store.get("backups"))
    entry.has_far_backups = bool(int(entry.store.get("far backups")))
    entry.secret = group_secret(bytes.fromhex(entry.store.get("secret").decode()), entry.options.secret_file or "")
    entry.block_bytes = int(entry.store.get("block bytes"))


def _founding_in(entry: Entry, store: Any) -> Founding:
    return Founding(PrefixStore(f"{_PREFIX}/{entry.name}", store))


@contextlib.contextmanager
def _founding(entry: Entry, store: Any, rank: int | None, size: int | None) -> Iterator[ServerProcess]:
    """Makes this process's servers and tells the store where they are. Closes them if the body raises."""
    if not isinstance(rank, WHOLE) or not isinstance(size, WHOLE) or not 0 <= rank < size <= MOST_SERVERS:
        raise InvalidArgument(
            f"rank is {shown(rank)} and size {shown(size)}; a parameter server needs 0 <= rank < size <= {MOST_SERVERS}"
        )
    rank, size = int(rank), int(size)
    if entry.backups > 1 or (entry.backups and size == 1):
        raise InvalidArgument(f"backups is {entry.backups} with size {size}; it must be 0, or 1 with size 2 or more")
    if entry.memory is not None:
        entry.memory = count_of_bytes("memory", entry.memory)
    if entry.servers and entry.servers < size:
        raise InvalidArgument(f"servers is {entry.servers} with size {size}; every process begins with one or more")
    check_bool("listen", entry.listen)
    entry.worker, entry.founders, entry.servers = rank, size, entry.servers or size
    _begin(entry, store)
    local = None
    try:
        entry.check_founding()  # the others may have given up before this one came
        secret = bytes.fromhex(once(entry.store, "secret", secrets.token_hex(32)))
        entry.secret = group_secret(secret, entry.options.secret_file or "")
        _agree_on_all(entry)
        mine = range(rank, entry.servers, size)
        half_of_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        share = half_of_memory // size if entry.memory is None else entry.memory * (1 + entry.backups)
        capacity = share // ((1 + entry.backups) * len(mine))
        has_near_backups = entry.backups > 0 and not entry.has_far_backups
        local = ServerProcess(capacity, entry.secret, entry.functions, mine, has_near_backups)
        _make_known(entry, local)
        yield local
        # Servers on several hosts without backups do not move and have no backups, so they need no manager.
        if len(set(entry.machines)) == 1 or entry.has_far_backups:
            _manage(entry, local)
    except BaseException as error:
        stale = isinstance(error, Stale) or (isinstance(error, (PeerLost, InvalidArgument)) and entry.is_stale())
        entry.give_up(PeerLost("processes that have ended had begun to found it; join again") if stale else error)
        if local is not None:
            local.close()
        if stale:
            raise Stale from None
        if isinstance(error, STORE_GONE):
            raise entry.without_store(error) from None
        if isinstance(error, PeerLost):
            with contextlib.suppress(*STORE_GONE):
                entry.raise_if_given_up()  # whoever is lost may only have closed because it had lost another
        raise


class Served(InvalidArgument):
    """The parameter server is there already, and this process is not one of its founders."""


def _begin(entry: Entry, store: Any) -> None:
    """Chooses the incarnation that this founder takes part in, and fills in its store. All founders come to it once. If
    this one has been there, or an earlier process of its rank, all go on with the next one. Raises `Served` if there is
    one whose servers live and that this process has not founded."""
    founding, me = _founding_in(entry, store), secrets.token_hex(4)
    while True:
        entry.begin(founding, founding.latest())
        if entry.is_over() and entry.store.get("founded").isdigit():
            _check_has_ended(entry)
        elif founding.claim(entry.attempt, entry.worker, me).name == me and (
            not entry.is_over() or entry.tells_this_process()
        ):
            return
        twice = f"a second process has come as rank {entry.worker}; join again, and give each process its own rank"
        entry.give_up(PeerLost(twice))
        founding.end(entry.attempt)


def _check_has_ended(entry: Entry) -> None:
    """Waits a second at most for the end of the servers of `entry.store`, unless this process founded them, then raises
    `Served`."""
    founder = entry.founding.founder(entry.attempt, entry.worker)
    if founder and founder.who == identity():
        return
    until = time.monotonic() + _ENDING
    processes = Directory(entry.store, int(entry.store.get("size"))).processes().values()
    while there := [its for its in processes if lives(its, entry.machine)]:
        if time.monotonic() > until:
            raise Served(
                f"rank {entry.worker} cannot found the parameter server {entry.name!r} again: "
                f"{called(there[0]['number'], there[0])} serves already. If the servers have backups, join them: "
                "ringreduce serve --join, or serve(store, joins=True). Otherwise end all of them and start them "
                "together, or give another name="
            )
        time.sleep(_LOOK)


def _agree_on_all(entry: Entry) -> None:
    """Checks that all founders were given equal arguments, and decides how backups are reached."""
    entry.store.set(f"machine/{entry.worker}", entry.machine)
    _agree(entry, size=entry.founders, block_bytes=entry.block_bytes, backups=entry.backups, servers=entry.servers)
    if entry.backups:
        _agree(entry, listen=entry.listen)
    entry.has_far_backups = entry.backups > 0 and (entry.listen or len(set(entry.machines)) > 1)
    _agree(entry, far_backups=int(entry.has_far_backups))


def _make_known(entry: Entry, local: ServerProcess) -> None:
    _publish(entry, local, entry.listen or len(set(entry.machines)) > 1)
    if entry.servers > entry.founders and not entry.has_far_backups:
        _check_one_host(entry)
    if entry.backups:
        _have_backups(entry, local)


def _publish(entry: Entry, local: ServerProcess, listens: bool) -> None:
    """Tells the store where this process is. With `listens`, opens a door for workers and servers on other hosts."""
    me: dict[str, Any] = {"number": entry.worker, "host": socket.gethostname(), "pid": os.getpid()}
    me |= {"machine": entry.machine, "address": local.listener.address.hex(), "window": entry.window, "door": []}
    if listens:
        if entry.views is not None:
            local.replication = Replication(entry.worker, entry.views, entry.dial)
        door = door_at(location_of(entry.options))
        local.listen(door, entry.worker, entry.window, entry.options.dead_after or 0)
        me["door"] = door.addresses
    entry.store.set(f"server/{entry.worker}", json.dumps(me))


def _manage(entry: Entry, local: ServerProcess) -> ReplicaManager:
    directory = Directory(beside(entry.store), entry.founders, entry.views)
    local.manager = manager = ReplicaManager(local, directory, entry.worker, entry.backups)
    return manager


def _agree(entry: Entry, **values: int) -> None:
    for name, mine in values.items():
        agreed = once(entry.store, name.replace("_", " "), str(mine))
        if agreed != str(mine):
            if entry.is_stale():
                raise Stale
            its = f"{name} is {agreed} here and {mine} on rank {entry.worker}; give all the same, and join again"
            entry.give_up(InvalidArgument(its, entry.worker))
            raise InvalidArgument(
                f"{name} is {mine} here and {agreed} on another rank; give all the same, and join again"
            )


def _check_one_host(entry: Entry) -> None:
    for process, machine in enumerate(entry.machines):
        if machine != entry.machine:
            name = called(process, entry.process(process))
            raise TopologyError(
                f"{name} is on another host than this server; more servers than processes need backups=1, or one host",
                process,
            )
    if entry.listen:
        raise InvalidArgument(
            f"listen is True with {entry.servers} servers in {entry.founders} processes; servers that move only have "
            "workers of their own host, unless backups is 1"
        )


def _have_backups(entry: Entry, local: ServerProcess) -> None:
    """Makes the first backups of this process's servers, in the next process (by TCP: on another host, if any)."""
    far = local.replication is not None
    backup = backup_of(entry.worker, entry.machines) if far else (entry.worker + 1) % entry.founders
    its = entry.process(backup)
    name = called(backup, its)
    try:
        for server, shard in local.serving().items():
            if local.replication is not None:
                local.replication.begin(server, shard)
            local.have_backup(server, its, max(0.1, entry.deadline - time.monotonic()))
    except TimeoutError:
        raise CollectiveTimeout(f"{name} did not make a backup of this server in time", backup) from None
    except OSError as error:
        raise PeerLost(f"making a backup on {name}: {error}", backup) from None


def _wait_for_founders(entry: Entry) -> None:
    entry.wait_until_founded()
    if entry.worker == 0:
        entry.founding.store.set("latest", str(entry.attempt))
