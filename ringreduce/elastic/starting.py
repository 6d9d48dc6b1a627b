"""How a process gets into a world: as one of the first members, or by joining those that are there."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as env_rendezvous

from ringreduce.common.system import explained
from ringreduce.common.units import duration
from ringreduce.config import Options
from ringreduce.coordination.founding import Founding
from ringreduce.coordination.join_queue import Patient
from ringreduce.coordination.process import Who
from ringreduce.coordination.protocol import Member, View
from ringreduce.coordination.store import Bounded, Values
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.elastic.context import WorldContext
from ringreduce.elastic.groups import init_group, resign
from ringreduce.elastic.settings import Settings
from ringreduce.elastic.world import World, founded, joined
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, RingReduceError, SystemFailure, TooFewRanks
from ringreduce.groups.arrivals import known_beforehand
from ringreduce.groups.lookup import backend_of, links_of
from ringreduce.groups.ready import ready_for_a_group

SLACK = 5.0
"""Seconds that a joiner waits longer than the members may need to notice that one of them has stopped."""

MOST_RANKS = 1 << 16

log = logging.getLogger(__name__)

_names: list[str] = []
"""The names that this process has had in worlds."""
os.register_at_fork(after_in_child=_names.clear)


class Over(SystemExit):
    """Raised by `start` when the training is over: all members have ended, and at least one has called `leave`.

    Unless it is caught, it ends the process with exit code 0, so a launcher sees no failure. A process that has itself
    left this world gets `InvalidArgument` instead.
    """


def start(
    least: int = 1,
    *,
    spares: int = 0,
    unit: int = 1,
    patience: timedelta | float = 60.0,
    expel_after: timedelta | float | None = None,
    timeout: timedelta | float = dist.distributed_c10d.default_pg_timeout,
    options: Options | None = None,
    store: Store | str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> World:
    """Makes this process a member, and the members its default group. To be called instead of `init_process_group`.

    The first members are the `world_size` processes that the launcher has started. A process that starts later with a
    rank that was used before, such as one that was started again, joins at the next attempt of the members, and gets
    their state from `World.state`. Needs backend ringreduce and tensors on CPUs. Durations may be numbers, in seconds.

    `least`: the number of members below which nobody goes on; see `World.attempt`.
    `spares`: how many of the processes, those with the last ranks, wait in this call until a member is lost. With
        spares, there are never more than `world_size - spares` members. If `least` is that number, every step is done
        by the same number of ranks, so a spare on the same host changes no bit of the result.
    `unit`: the number of consecutive ranks that are in together or not at all, such as those that hold one replica. If
        one of them is lost, the others of its unit raise `Expelled`. Waiting processes are let in by whole units, in
        which a process with rank r takes position r % unit.
    `patience`: how long to wait for joiners when there are too few members, and for a directory that is out of reach.
        A process that waits to be let in waits as long for a store that is out of reach.
    `expel_after`: how long to wait for a living member that does not report in a change; by default `timeout`.
    `timeout`: for making a group and for each call on it.
    `options`: as for `init_process_group`. Members go on without a joiner that has other options than they have.
    `store`, `rank`, `world_size`: as for `init_process_group`; by default, the variables of `env://` say them. `store`
        may also be an address in etcd, "etcd://HOST:PORT,HOST:PORT/NAME" with a NAME that no other job has used, or
        etcds:// for TLS. Then no single host has to live until the job ends, and `rank` and `world_size` are by default
        RANK and WORLD_SIZE.

    Raises `Over` if the training is over, `TooFewRanks` if all members have died, `CollectiveTimeout` if another
    process has this rank for longer than `timeout`, or if no member has looked for joiners for longer than `timeout`
    and `expel_after` together, `SystemFailure` if the store is out of reach or the members share memory that this
    process cannot open, `InvalidArgument`, and what `init_process_group` raises.
    """
    timeout = duration("start: timeout", timeout, positive=True)
    patience = duration("start: patience", patience, positive=True)
    silence = timeout if expel_after is None else duration("start: expel_after", expel_after, positive=True)
    here, rank, world_size = _meeting_point(store, rank, world_size, timeout)
    founders = _check_counts(least, spares, unit, world_size)
    settings = Settings(
        me=_new_name(),
        options=options,
        timeout=timeout.total_seconds(),
        least=least,
        unit=unit,
        position=rank % unit,
        most=founders if spares else sys.maxsize,
        patience=patience.total_seconds(),
        expel_after=silence.total_seconds(),
        context=WorldContext(here),
    )
    return _take_part(settings, here, rank, founders)


def _take_part(settings: Settings, here: KeyStore, rank: int, founders: int) -> World:
    founding = Founding(here, lambda: settings.context.queue.latest() is not None)
    # Who comes again before the first members have made their group is one of them again.
    try:
        joins = rank >= founders or settings.context.queue.latest() is not None
        attempt = None if joins else founding.take_part(rank, settings.me, _taken(rank, settings.timeout))
    except RingReduceError:
        raise
    except (RuntimeError, OSError) as error:
        raise SystemFailure(f"start: the store is out of reach: {error}") from error
    try:
        return _join(settings) if attempt is None else _found(settings, founding, rank, founders, attempt)
    except OSError as error:
        raise SystemFailure(f"start: {explained(error)}") from error


def _meeting_point(
    store: Store | str | None, rank: int, world_size: int, timeout: timedelta
) -> tuple[KeyStore, int, int]:
    """Where the processes meet, and this process's rank among `world_size`, by the arguments of `start`."""
    if dist.is_initialized():
        raise InvalidArgument(
            "start: this process has a default group; call world.leave() or dist.destroy_process_group() first"
        )
    by_environment = store is None or (isinstance(store, str) and rank == -1)
    if store is None:
        store, rank, world_size = next(env_rendezvous("env://", rank, world_size, timeout=timeout))
    elif isinstance(store, str) and rank == -1:
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    elif not isinstance(store, Store | str):
        raise InvalidArgument(f"start: store is {store!r:.60}; it must be a store of torch, or an address in etcd")
    if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
        if by_environment:
            raise InvalidArgument(
                f"start: RANK is {rank!r} and WORLD_SIZE {world_size!r}; 0 <= RANK < WORLD_SIZE must hold. A process "
                "that joins takes any RANK below WORLD_SIZE that was used before"
            )
        raise InvalidArgument(
            f"start: rank is {rank!r} and world_size {world_size!r}; with a store, give both: 0 <= rank < world_size"
        )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return KeyStore(_values(store), f"ringreduce/elastic/{restart}/"), rank, world_size


def _values(store: Store | str) -> Values:
    if not isinstance(store, str):
        return Bounded(store)
    from ringreduce.coordination.etcd import Etcd

    return Etcd(store)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "-1")
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"start: {variable} is {text!r}; it must be a whole number") from None


def _check_counts(least: int, spares: int, unit: int, world_size: int) -> int:
    """The number of first members."""
    if world_size > MOST_RANKS:
        raise InvalidArgument(f"start: world_size is {world_size}; it must be at most {MOST_RANKS}")
    if not isinstance(least, int) or not 1 <= least <= world_size:
        raise InvalidArgument(
            f"start: least is {least!r}; it must be a whole number from 1 to world_size, {world_size}"
        )
    if not isinstance(spares, int) or not 0 <= spares <= world_size - least:
        raise InvalidArgument(
            f"start: spares is {spares!r}; of {world_size} processes, {least} must be left: 0 <= spares <= "
            f"{world_size - least}"
        )
    founders = world_size - spares
    if not isinstance(unit, int) or unit < 1 or founders % unit or spares % unit:
        raise InvalidArgument(
            f"start: unit is {unit!r}; it must divide the {founders} first members and the {spares} spares"
        )
    return founders


def _new_name() -> str:
    """A name for this process as a member, which no member has had before."""
    _names.append(f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}")
    return _names[-1]


def _taken(rank: int, timeout: float) -> Callable[[Who], None]:
    """For `Founding.take_part`. One rank may have been given to two processes, or the earlier one is stopped."""
    until, told = time.monotonic() + timeout, False

    def taken(earlier: Who) -> None:
        nonlocal told
        first = f"rank {rank} is taken by another process ({earlier.host}, pid {earlier.pid}) that lives"
        if time.monotonic() > until:
            raise CollectiveTimeout(f"start: {first}; end it, or give each process a rank of its own", rank)
        if not told:
            log.warning("start: %s; this one waits for its end", first)
        told = True

    return taken


def _found(settings: Settings, founding: Founding, rank: int, size: int, attempt: int) -> World:
    """Makes the first group together with the others that take part in this attempt."""
    context = settings.context
    over = PeerLost("making the group: one of the first members has ended, or cannot go on")
    try:
        with known_beforehand(look=founding.look_at(attempt, over)):
            view = _first_view(settings, rank, size, PrefixStore(f"epoch 0, attempt {attempt}", context.store))
    except Exception as error:
        made = None
        with contextlib.suppress(RuntimeError, OSError):
            founding.end(attempt)  # those that are started again meet in the next one
            made = context.queue.latest()
        resign(settings, made or View(0, (Member(settings.me),)))  # the others may have made the group with it
        if made is None:
            raise
        log.info("%s joins, since others have made the group: %s", settings.me, error)
    else:
        return founded(settings, view)
    return _join(replace(settings, me=_new_name()))


def _first_view(settings: Settings, rank: int, size: int, store: Store) -> View:
    """Makes the first group, whose ranks meet in `store`, and returns the view of its members."""
    init_group(store, rank, size, settings)
    if not links_of(backend_of(None)):  # all ranks are on one host
        settings.context.share_ledger(rank)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, settings.member())
    for other, member in enumerate(everyone):
        settings.check(member, f"rank {other}")
    view = View(0, tuple(everyone), unit=settings.unit)
    if rank == 0:
        settings.context.queue.publish(view)
    return view


def _join(settings: Settings) -> World:
    context = settings.context
    context.ready = ready_for_a_group(settings.options, listens=True)
    silence = settings.timeout + settings.expel_after + SLACK
    ask = Patient(settings.patience)
    number = context.queue.come(settings.member(), ask)
    _import_what_makes_groups()  # while the members look who has come
    view = context.queue.wait(settings.me, number, silence, ask)
    opened = view is not None and ask(context.open_a_ledger, settings.me, view, settings.timeout)
    if view is None or (not opened and ask(context.queue.all_gone, settings.me)):
        if not ask(context.queue.ended_well):
            raise TooFewRanks(
                "start: all members have died, and no process has the state any more; start the training again from a "
                "checkpoint"
            )
        if any(ask(context.queue.has_left, name) for name in _names):
            raise InvalidArgument(
                "start: this process has left the world of this store, and the training there is over; give another "
                "store, such as PrefixStore('phase 2', store), to start another world"
            )
        log.warning("start: the training is over; there is nothing to join")
        raise Over(0)
    if not opened:
        raise SystemFailure(
            "start: the members share a ledger, which this process cannot open: it must run on their host as their user"
        )
    return joined(settings, view)


def _import_what_makes_groups() -> None:
    """The members wait for a joiner from when they let it in until it has made the group with them."""
    from ringreduce.groups import between_hosts, make  # noqa: F401
