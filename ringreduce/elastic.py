"""A training that goes on when ranks die, and lets others in: docs/elastic.md.

    world = elastic.start(least=2)                       # instead of init_process_group
    model = DDP(net, init_sync=False)
    state = world.state(model=model, optimizer=optimizer, step=0)    # what a joiner receives
    while state.step < 10_000:
        loss = world.attempt(backward)                   # ends on all members or on none; then again, with those left
        optimizer.step()
        state.step += 1

`backward` may run again with other ranks, so it must not change `state`. Its data depend on `world.rank`, `world.size`
and `state.step` alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as env_rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ringreduce.api import backend_of
from ringreduce.config import Options
from ringreduce.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    Expelled,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TooFewRanks,
)
from ringreduce.membership.directory import Directory, OfStore
from ringreduce.membership.ledger import Ledger
from ringreduce.membership.protocol import Member, Report, View, place
from ringreduce.membership.rounds import Membership
from ringreduce.rendezvous import store as rendezvous
from ringreduce.survivors import LedgerStore

Result = TypeVar("Result")

LEDGER_BYTES = 256 << 20
"""Of a world on one host; what was never written takes no memory. A change takes some 10 KB with 8 ranks."""
LOOK_FOR_JOINERS = 0.05
"""Seconds between two looks of rank 0 for those who wait to be let in."""

LOOK_IN_LEDGER, LOOK_IN_STORE = 0.2, 1.0
"""Seconds between two looks whether a member has left the view."""

_OVER_AFTER = 1.0
"""Seconds between the two looks after which a process that is started again believes that all members have gone."""

log = logging.getLogger(__name__)


class Over(SystemExit):
    """Raised by `start` in a process that was started again when all members had left or ended: there is nothing to
    join. Ends the process with exit code 0 unless it is caught, so a launcher sees no failure."""


class State:
    """What a joiner receives: see `World.state`. Its attributes are those that were given. They can be set."""

    def __init__(self, parts: dict[str, Any]) -> None:
        vars(self).update(parts)

    def _dump(self) -> Any:
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in vars(self).items()}

    def _load(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            part: Any = getattr(self, name, None)
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)


class World:
    """The members of a changing group, of which this process is one. Its calls are for one thread."""

    def __init__(self, config: _Config, membership: Membership, founder: bool) -> None:
        """For `start`. `founder`: this process was among the first members."""
        self._founder = founder
        self._config, self._membership = config, membership
        self._state: State | None = None
        self._has_state = False
        self._callbacks: list[Callable[[World], None]] = []
        self._committed = membership.view.step
        self._joiners_wait = False
        self._looked = 0.0
        self._refused: set[str] = set()
        self._watch = _Watch()

    @property
    def rank(self) -> int:
        """This process's, among the members; changes with them."""
        if self._config.me.name not in self.view.names:
            raise Expelled(f"the other members went on without this process in epoch {self.epoch}")
        return self.view.names.index(self._config.me.name)

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.view.members)

    @property
    def epoch(self) -> int:
        """Counts the changes."""
        return self.view.epoch

    @property
    def view(self) -> View:
        """The members, with what was decided when they came together."""
        return self._membership.view

    def on_change(self, function: Callable[[World], None]) -> None:
        """`function(world)` is called on every member after each change, when the default group is the new one: for
        meshes, other groups, hooks and samplers. It may make calls on the group. If those fail, the change is made
        again.
        """
        self._callbacks.append(function)

    def state(self, **parts: Any) -> State:
        """What all members have alike, and joiners get: objects that have `state_dict` and `load_state_dict`, such as
        models and optimizers, and plain values. Returns it as an object with these attributes.

        All members get the first one's now. To be called once, by all, before any other call on the group. A
        `DistributedDataParallel` among the parts is bound to the new group after each change; make it with
        `init_sync=False`, as its members' states are equalised here.
        """
        if self._state is not None:
            raise InvalidArgument("state: it was called before; it takes all parts at once")
        self._state = State(parts)
        try:
            self._share_state()
        except RingReduceError as error:
            self._change(error)
        return self._state

    def attempt(self, function: Callable[[], Result]) -> Result:
        """`function()`, for which all members have made all their calls, or none returns.

        Where a member is lost meanwhile, the others go on without it and call `function` again. Those who wait are let
        in before. An exception of this member's own goes through, and the others go on without it unless it calls
        `attempt` again. Raises `Expelled` if the others went on without this member, `TooFewRanks` on all members if
        there have been fewer than `least` for longer than `patience`.
        """
        while True:
            self._let_in()
            try:
                result = function()
            except Exception as error:
                if not self._is_of_group(error):
                    self._break(error)
                    raise
                self._change(error)
                continue
            if self.commit():
                return result

    def commit(self, durable: bool = False) -> bool:
        """Whether all members have come here: then all of them hear True. If False, what was done since the last commit
        is to be done again, by the members there are now: everyone who survives hears that.

        With `durable`, what returned True on one member holds even if that one dies at once; without, members that died
        or were expelled may have heard True where the others do it again. Costs an all_reduce of 8 bytes, and with
        `durable` a request to the directory.
        """
        step = self._committed + 1
        waiting = torch.tensor([int(self._somebody_waits())])
        try:
            dist.all_reduce(waiting)  # returns where all have come
            if durable and not self._membership.commit(step):
                raise PeerLost("commit: the others have gone on to the next epoch")
        except RingReduceError as error:
            self._change(error)
            return self._committed >= step
        self._committed = step
        self._joiners_wait = bool(waiting)
        return True

    def leave(self) -> None:
        """Ends this process's membership; the others go on without it. To be called when the training is over, too:
        a process that is started again then ends at once (`Over`) instead of waiting to be let in.
        """
        self._watch.stop()
        with contextlib.suppress(RuntimeError, OSError):  # what is told to nobody shows by the end of this process
            self._membership.resign(self._committed)
            self._config.store.set(f"left/{self._config.me.name}", "")
        dist.destroy_process_group()

    # changes

    def _is_of_group(self, error: Exception) -> bool:
        """Whether it is the group that has failed, and not the function itself."""
        if isinstance(error, Expelled | TooFewRanks | InvalidArgument | CollectiveMismatch):
            return False
        if isinstance(error, RingReduceError):
            return True
        return bool(backend_of(None).get_error() != ErrorType.SUCCESS)  # torch may have wrapped it

    def _break(self, error: Exception) -> None:
        log.warning("%s: %r ends an attempt of this member", self._config.me.name, error)
        backend_of(None).abort()

    def _let_in(self) -> None:
        """Between two attempts: takes in who waits, and waits for ranks if there are too few."""
        too_few = self.size < self._config.least
        while self._joiners_wait or too_few:
            before = self.view.members
            joiners = self._joiners(self._config.patience if too_few else 0.0) if self.rank == 0 else ()
            self._change(None, joiners)
            too_few = self.size < self._config.least
            if too_few and self.view.members == before:
                raise TooFewRanks(
                    f"there are {self.size} ranks, and least is {self._config.least}; nobody has come for "
                    f"{self._config.patience:.0f} s"
                )

    def _change(self, error: Exception | None, joiners: tuple[Member, ...] = ()) -> None:
        """To the next view whose members come together. `error`: what this one has ended with, if it has."""
        lets_in = error is None
        while True:
            if error is not None:
                log.info("%s: epoch %d ends: %s", self._config.me.name, self.epoch, error)
                self._abort()
            report = Report(self._committed, joiners, open=lets_in)
            silent_after = self._config.expel_after + (self._config.patience if lets_in else 0.0)
            before = self.view.names
            self._membership.leave(report, self._watch.ended, silent_after)
            self._committed = self.view.step
            self._refused |= set(self.view.lost)
            self._invite([member for member in self.view.members if member.name not in before])
            try:
                self._enter()
                return
            except RingReduceError as failed:
                if isinstance(failed, Expelled | TooFewRanks):
                    raise
                error, joiners, lets_in = failed, (), False

    def _abort(self) -> None:
        if dist.is_initialized():
            backend_of(None).abort()

    def _enter(self) -> None:
        """Makes the group of the view's members, the default one."""
        self._joiners_wait = False
        if dist.is_initialized():
            self._watch.stop()
            dist.destroy_process_group()
        _init(self._config, self.view, self._watch)
        self._tell_members()
        if self._state is not None:
            for part in vars(self._state).values():
                for module in part.modules() if isinstance(part, torch.nn.Module) else ():
                    if isinstance(module, DistributedDataParallel):
                        _rebind(module)
            self._share_state()
        for callback in self._callbacks:
            callback(self)

    # joiners

    def _tell_members(self) -> None:
        """So that a process that is started again knows whether anybody is left who could let it in."""
        if self.rank == 0:
            with contextlib.suppress(RuntimeError, OSError):  # without the launcher's store nobody can join
                self._config.store.set("members now", self.view.dump())

    def _somebody_waits(self) -> bool:
        now = time.monotonic()
        if self.rank != 0 or now - self._looked < LOOK_FOR_JOINERS:
            return False
        self._looked = now
        return bool(self._joiners(0.0))

    def _joiners(self, patience: float) -> tuple[Member, ...]:
        """Those who wait, as the launcher's store says. Without that store, nobody can join."""
        store, end = self._config.store, time.monotonic() + patience
        while True:
            found: list[Member] = []
            try:
                for number in range(1, store.add("waiting", 0) + 1):
                    if store.check([f"joiner/{number}"]):
                        member = Member(*json.loads(store.get(f"joiner/{number}")))
                        if member.name not in {*self.view.names, *self._refused} and not _has_ended(member):
                            found.append(member)
            except (RuntimeError, OSError) as error:
                log.info("nobody can join: the launcher's store is gone: %s", error)
            if found or time.monotonic() >= end:
                return tuple(found)
            time.sleep(LOOK_FOR_JOINERS)

    def _invite(self, members: list[Member]) -> None:
        """Tells those who were let in where the others meet. Every other member does, as any may die before it has."""
        invitation = json.dumps({"view": self.view.dump(), "ledger": self._config.ledger_place()})
        for member in members:
            try:
                self._config.store.set(f"invited/{member.name}", invitation)
            except (RuntimeError, OSError) as error:
                log.info("cannot invite %s: the launcher's store is gone: %s", member.name, error)

    def _share_state(self) -> None:
        """Gives the state to those members who have none."""
        state = self._state
        assert state is not None
        flags = torch.zeros(self.size, dtype=torch.int64)
        flags[self.rank] = 2 if self._has_state else int(self._founder)
        dist.all_reduce(flags)
        if int(flags.min()) == 2:
            return
        # A founder that has none yet has not let anybody take a step, so its own is as good as any.
        if not bool(flags.any()):
            raise TooFewRanks("every member that had the state is lost; start again from a checkpoint")
        source = int(flags.argmax())
        tensors, shape = pytree.tree_flatten(state._dump())
        plain = [None if isinstance(each, torch.Tensor) else each for each in tensors]
        described = [(each.dtype, each.shape) if isinstance(each, torch.Tensor) else None for each in tensors]
        told: list[Any] = [plain, described, shape]
        dist.broadcast_object_list(told, source)
        plain, described, shape = told
        values: list[Any] = []
        for number, (value, tensor) in enumerate(zip(plain, described, strict=True)):
            if tensor is None:
                values.append(value)
                continue
            mine = tensors[number].contiguous() if self.rank == source else torch.empty(tensor[1], dtype=tensor[0])
            dist.broadcast(mine, source)
            values.append(mine)
        if not self._has_state and self.rank != source:
            state._load(pytree.tree_unflatten(values, shape))
        self._has_state = True


class _Config:
    """What does not change in the life of a world."""

    def __init__(
        self,
        me: Member,
        store: Store,
        options: Options | None,
        timeout: float,
        least: int,
        patience: float,
        expel_after: float,
    ) -> None:
        self.me, self.store, self.options, self.timeout = me, store, options, timeout
        self.least, self.patience, self.expel_after = least, patience, expel_after
        self.ledger: Ledger | None = None
        self.memfd = -1
        self.kept: tuple[Any, Any] = (None, None)
        """torch keeps the C++ half alone of a store that Python implements."""

    def ledger_place(self) -> list[Any] | None:
        """Where processes of this machine find the ledger: a path, and what the file there must be."""
        if self.ledger is None:
            return None
        return [f"/proc/{os.getpid()}/fd/{self.memfd}", rendezvous.kernel(), os.fstat(self.memfd).st_ino]

    def open_ledger(self, place: list[Any] | None) -> bool:
        """Whether it could be opened here."""
        if place is None or place[1] != rendezvous.kernel():
            return False
        try:
            memfd = os.open(place[0], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        if os.fstat(memfd).st_ino != place[2]:
            os.close(memfd)
            return False
        self.memfd, self.ledger = memfd, Ledger(memfd, 0, LEDGER_BYTES)
        return True

    def make_ledger(self) -> None:
        self.memfd = os.memfd_create("ringreduce world", os.MFD_CLOEXEC)
        os.ftruncate(self.memfd, LEDGER_BYTES)
        self.ledger = Ledger(self.memfd, 0, LEDGER_BYTES)

    def look_every(self) -> float:
        """Seconds between two looks whether a member has left."""
        return LOOK_IN_LEDGER if self.ledger else LOOK_IN_STORE

    def directory(self) -> Directory:
        return self.ledger if self.ledger else OfStore(self.store, "members")

    def place(self, epoch: int) -> Store:
        """Where the group of an epoch is made."""
        if self.ledger:
            self.kept = LedgerStore(self.ledger, f"epoch {epoch}/"), self.kept[0]
            return self.kept[0]
        return PrefixStore(f"epoch {epoch}", self.store)


class _Watch:
    """A thread that sees members of this machine end, and makes the group notice at once.

    It also looks now and then whether a member has left the view. One that could not make the group with the others has
    no other way to tell them, and they would wait for it until a call's timeout.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, str] = {}
        self._found: set[str] = set()
        self._lock = threading.Lock()
        self._bell: tuple[int, int] | None = None
        self._group: list[Any] = [None]
        """A thread has one of its own, so that it cannot touch the group of the next view."""
        self._names: tuple[str, ...] = ()

    def start(self, view: View, config: _Config) -> None:
        """Watches the other members of a view, until `stop`."""
        self.stop()
        members, me = view.members, config.me.name
        self._found, self._names = set(), tuple(member.name for member in members)
        for member in members:
            if member.name != me and (pid := _pid_here(member)):
                try:
                    self._pidfds[os.pidfd_open(pid)] = member.name
                except ProcessLookupError:
                    self._found.add(member.name)
                except OSError:  # only an error of a call will tell
                    pass
        self._bell = os.pipe2(os.O_CLOEXEC)
        directory, names = config.directory(), self._names

        def somebody_left() -> bool:
            return any(directory.get(place(view.epoch, name)) for name in names)

        self._group = [None]
        given = (self._bell[0], dict(self._pidfds), self._found, self._group, somebody_left, config.look_every())
        threading.Thread(target=self._run, args=given, daemon=True, name="ringreduce elastic").start()

    def attach(self, group: Any) -> None:
        with self._lock:
            self._group[0] = group
            if self._found:
                group.notice()

    def ended(self) -> list[str]:
        """The names of members that have ended, as far as this process can see."""
        names = set(self._found)
        for fd in _readable(self._pidfds):
            names.add(self._pidfds[fd])
        group = self._group[0]
        if group is not None:  # those on other machines, whose connections have ended
            names |= {self._names[rank] for rank in group.ended()}
        return sorted(names)

    def stop(self) -> None:
        with self._lock:
            self._group[0] = None
        if self._bell:
            os.write(self._bell[1], b"x")  # a forked child may hold this end open, so closing it would not be heard
            os.close(self._bell[1])  # the thread ends, and closes the other end and the descriptors
            self._bell = None
        self._pidfds = {}

    def _abort_if(self, group: list[Any], somebody_left: Callable[[], bool]) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone
            if somebody_left():
                with self._lock:
                    if group[0] is not None:
                        group[0].abort()

    def _run(
        self,
        bell: int,
        pidfds: dict[int, str],
        found: set[str],
        group: list[Any],
        somebody_left: Callable[[], bool],
        every: float,
    ) -> None:
        poll = select.poll()
        for fd in (bell, *pidfds):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(1000 * every)]
            if bell in ready:
                break
            if not ready:
                self._abort_if(group, somebody_left)
            for fd in ready:
                poll.unregister(fd)
                found.add(pidfds[fd])
            with self._lock:
                if group[0] is not None:
                    group[0].notice()
        for fd in (bell, *pidfds):
            os.close(fd)


def _readable(fds: dict[int, str]) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, event in poll.poll(0) if event & select.POLLIN]


def start(
    least: int = 1,
    *,
    patience: float = 60.0,
    expel_after: float | None = None,
    timeout: timedelta = dist.distributed_c10d.default_pg_timeout,
    options: Options | None = None,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> World:
    """Makes this process a member, and the default group that of all members; instead of `init_process_group`.

    The first members are the `world_size` processes that the launcher has started. `store`, `rank` and `world_size` are
    as for `init_process_group`; without them, the variables of `env://` say so. A process that starts later under the
    same rank, such as one that was started again, joins at the next attempt of the others, and gets their state from
    `World.state`. Needs backend ringreduce, and tensors on CPUs.

    `least`: with fewer members nobody goes on: see `World.attempt`. `patience`: seconds to wait for more, and for a
    directory that is out of reach. `expel_after`: seconds after which others go on without a member that lives and does
    not come; by default `timeout`, that of calls. Raises `CollectiveTimeout` if nobody lets this process in for
    `timeout`, `Over` if all members have left or ended, `InvalidArgument`, and what `init_process_group` raises.
    """
    if not isinstance(least, int) or least < 1:
        raise InvalidArgument(f"start: least is {least!r}; it must be a whole number, 1 or more")
    seconds, patience = _seconds("timeout", timeout), _seconds("patience", patience)
    expel_after = seconds if expel_after is None else _seconds("expel_after", expel_after)
    timeout = timedelta(seconds=seconds)
    if store is None:
        store, rank, world_size = next(env_rendezvous("env://", timeout=timeout))
    elif not 0 <= rank < world_size:
        raise InvalidArgument(
            f"start: rank is {rank} and world_size {world_size}; with a store, give both: 0 <= rank < world_size"
        )
    store = PrefixStore(f"ringreduce/elastic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    joins = store.add(f"rank/{rank}", 1) > 1
    who = rendezvous.identity()
    address = json.dumps({"host": who.host, "pid": who.pid, "pids": who.pids})
    me = Member(f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}", address)
    config = _Config(me, store, options, seconds, least, patience, expel_after)
    return _join(config) if joins else _begin(config, rank, world_size)


def _seconds(name: str, value: Any) -> float:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
        raise InvalidArgument(f"start: {name} is {value!r}; it must be a time above 0, in seconds or as a timedelta")
    return float(number)


def _begin(config: _Config, rank: int, size: int) -> World:
    first = PrefixStore("epoch 0", config.store)
    dist.init_process_group(
        "ringreduce",
        store=first,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.timeout),
        pg_options=config.options,
    )
    if rank == 0:
        config.make_ledger()
    told: list[Any] = [config.ledger_place()]
    dist.broadcast_object_list(told, 0)
    shared = torch.tensor([float(rank == 0 or config.open_ledger(told[0]))])
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    if not shared:  # ranks of several hosts, or processes that may not see each other's
        config.ledger = None
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (config.me.name, config.me.address))
    view = View(0, tuple(Member(*each) for each in everyone))
    world = World(config, Membership(config.directory(), config.me.name, view, config.patience), founder=True)
    world._tell_members()
    world._watch.start(view, config)
    world._watch.attach(backend_of(None))
    return world


def _join(config: _Config) -> World:
    store, me = config.store, config.me
    number = store.add("waiting", 1)
    store.set(f"joiner/{number}", json.dumps([me.name, me.address]))
    deadline = time.monotonic() + config.timeout
    invited, look, over = f"invited/{me.name}", 0.0, False
    while not store.check([invited]):
        if time.monotonic() > deadline:
            store.delete_key(f"joiner/{number}")
            raise CollectiveTimeout(f"start: nobody has let this process in for {config.timeout:.0f} s")
        if time.monotonic() > look:
            look = time.monotonic() + _OVER_AFTER
            over, before = _all_gone(store), over
            if over and before:
                log.warning("start: all members have left or ended; there is nothing to join")
                raise Over(0)
        time.sleep(0.005)
    invitation = json.loads(store.get(invited))
    if invitation["ledger"] is not None and not config.open_ledger(invitation["ledger"]):
        raise SystemFailure(
            "start: the members share a ledger, which this process cannot open: it must run on their host as their user"
        )
    view = View.load(invitation["view"])
    world = World(config, Membership(config.directory(), me.name, view, config.patience), founder=False)
    try:
        _init(config, view, world._watch)
    except RingReduceError as error:
        world._change(error)
    return world


def _init(config: _Config, view: View, watch: _Watch) -> None:
    """Makes the default group of a view's members. Sees at once when one of them ends."""
    watch.start(view, config)
    names = list(view.names)
    hook = sys.excepthook  # torch puts another one around it each time
    known = rendezvous.ended.set(lambda: [names.index(name) for name in watch.ended()])
    # torch names groups by a count, which is part of where they meet, and does not take it back when making one fails.
    dist.distributed_c10d._world.group_count = 0
    try:
        dist.init_process_group(
            "ringreduce",
            store=config.place(view.epoch),
            rank=names.index(config.me.name),
            world_size=len(names),
            timeout=timedelta(seconds=config.timeout),
            pg_options=config.options,
        )
    finally:
        rendezvous.ended.reset(known)
        sys.excepthook = hook
    watch.attach(backend_of(None))


def _all_gone(store: Store) -> bool:
    """Whether every member that the store knows of has left, or has ended on this machine."""
    if not store.check(["members now"]):
        return False
    members = View.load(store.get("members now").decode()).members
    return all(store.check([f"left/{member.name}"]) or _has_ended(member) for member in members)


def _pid_here(member: Member) -> int:
    """Its process's number, where this process can see it; else 0."""
    who = json.loads(member.address)
    return int(who["pid"]) if who["pids"] == rendezvous.identity().pids else 0


def _has_ended(member: Member) -> bool:
    pid = _pid_here(member)
    return bool(pid) and rendezvous.has_ended(pid)


def _rebind(model: DistributedDataParallel) -> None:
    """To the default group, as unpickling does: with new buckets and hooks, as a joiner's has."""
    group = dist.group.WORLD
    assert group is not None
    model.process_group = group
    model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
