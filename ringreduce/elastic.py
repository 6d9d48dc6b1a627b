"""Training that goes on when ranks die, and that lets fresh processes join. docs/elastic.md has the promises.

    world = elastic.start(least=2)                       # instead of init_process_group
    model = DDP(net, init_sync=False)
    state = world.state(model=model, optimizer=optimizer, step=0)    # what a joiner receives
    while state.step < 10_000:
        loss = world.attempt(backward)                   # returns on all members or on none; if on none, it runs again
        optimizer.step()
        state.step += 1

`backward` may run again with other ranks. So it must not change `state`, and its data must depend only on `world.rank`,
`world.size` and `state.step`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as env_rendezvous
from torch.nn.parallel import DistributedDataParallel

from ringreduce import tuning  # noqa: F401  rank 0 needs it; a member that becomes rank 0 must not import
from ringreduce.api import backend_of
from ringreduce.common.units import duration
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
from ringreduce.group_links import links_of
from ringreduce.lateness import STEPS, Late, Lateness
from ringreduce.lobby import Home, Lookout, destroy_groups
from ringreduce.membership.directory import Bounded, Values
from ringreduce.membership.protocol import Member, Report, View, place
from ringreduce.membership.rounds import Membership
from ringreduce.ready import ready_for_a_group
from ringreduce.rendezvous import store as rendezvous
from ringreduce.rendezvous.card import prepared
from ringreduce.shared_state import State
from ringreduce.survivors import KeyStore
from ringreduce.watch import Watch, has_ended

if TYPE_CHECKING:
    from ringreduce.host_links import Wire

Result = TypeVar("Result")
Function = TypeVar("Function", bound="Callable[..., Any]")

LOOK_AGAIN = 0.01
"""Seconds between two looks of rank 0 at what its lookout has found, while there are too few members."""

log = logging.getLogger(__name__)


class Over(SystemExit):
    """Raised by `start` when the training is over: all members have ended, and at least one has called `leave`.

    Unless it is caught, it ends the process with exit code 0, so a launcher sees no failure.
    """


class World:
    """A changing group, seen from one of its members. Made by `start`. All calls must come from one thread."""

    def __init__(self, config: _Config, membership: Membership, founder: bool) -> None:
        """Called by `start` only. `founder`: whether this process is one of the first members."""
        self._founder = founder
        self._config, self._membership = config, membership
        self._state: State | None = None
        self._has_state = False
        self._callbacks: list[Callable[[World], None]] = []
        self._committed = membership.view.step
        self._joiners_wait = False
        self._lookout = Lookout(config.home.lobby, membership.view.names)
        self._watch: Watch | None = None
        self._on_straggler: Callable[[Late], bool] | None = None
        self._unwanted: tuple[str, ...] = ()
        self._gave_up = False
        self._has_left = False
        self._wire: Wire | None = None
        """What the latest group with links to other hosts has measured of the network."""
        self._lateness = Lateness(self.view.members, self.rank)

    @property
    def rank(self) -> int:
        """This process's rank among the members. It may change when members come or go.

        Raises `Expelled` if the others went on without this process.
        """
        if self._config.me not in self.view.names:
            raise Expelled(f"the other members went on without this process in epoch {self.epoch}")
        return self.view.names.index(self._config.me)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.view.members)

    @property
    def epoch(self) -> int:
        """The number of changes of membership so far; 0 for the first members."""
        return self.view.epoch

    @property
    def view(self) -> View:
        """The present members, and what was decided about them in the latest change."""
        return self._membership.view

    def on_change(self, function: Callable[[World], None]) -> None:
        """Registers `function(world)`, which every member calls after each change, once the default group is new.

        Use it to renew meshes, other groups, hooks and samplers. It may call collectives. If one of them fails because
        the group has, the change is made again. Any other error, such as `InvalidArgument` or `CollectiveMismatch`, is
        raised by the call that made the change, as by `attempt`. A joiner does not call it for the change with which it
        joins.
        """
        self._callbacks.append(_callable("on_change", function))

    def state(self, **parts: Any) -> State:
        """Declares what all members hold alike and what joiners receive. Returns it as an object with these attributes.

        A part is an object with `state_dict` and `load_state_dict`, such as a model or an optimizer, or a plain value.
        Every member must call this once, before any other call on the group. It gives all members the state of the
        first one; with `unit`, that of the same place in the first unit.

        After each change, every `DistributedDataParallel` model among the parts is bound to the new group. Make such a
        model with `init_sync=False`, since this call makes the members' states equal.

        Raises `InvalidArgument` if it was called before, `TooFewRanks` if every member that had the state is lost, and
        what `attempt` raises.
        """
        if self._state is not None:
            raise InvalidArgument("state: it was called before; it takes all parts at once")
        self._state = State(parts)
        try:
            self._share_state()
        except RingReduceError as error:
            if not self._is_of_group(error):
                raise
            self._change(error)
        return self._state

    def attempt(self, function: Callable[[], Result]) -> Result:
        """Calls `function()` and returns its result, once all members have completed theirs.

        If a member is lost meanwhile, `attempt` returns on no member: the others go on without the lost one and call
        `function` again. Before each call of `function`, processes that wait to join are let in.

        If `function` raises an error that is not a failure of the group, the error is raised here. The other members
        go on without this one unless it calls `attempt` again.

        Raises `Expelled` if the others went on without this member, `TooFewRanks` on all members if there have been
        fewer than `least` for longer than `patience`, `CollectiveMismatch` on all members if they made different
        calls, and `SystemFailure` if the directory of members is out of reach for `patience`.
        """
        _callable("attempt", function)
        self._check_membership("attempt")
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
        """Returns True if all members have completed the step, and the same answer on all members that survive.

        False means that the members have changed: do again what was done since the last commit, with the present
        members. `attempt` calls this; call it yourself only if you write your own loop.

        A member that dies or is expelled may have got True for a step that the others do again. With `durable` this
        cannot happen: if any member got True, the step counts for all, even if that member dies at once.

        Costs an all_reduce of 16 bytes and 8 more for each rank; with `durable` also a request to the directory. Raises
        `Expelled` and `SystemFailure` as `attempt` does.
        """
        self._check_membership("commit")
        step = self._committed + 1
        vote = torch.tensor([int(self._somebody_waits()), *self._lateness.figures()])
        try:
            dist.all_reduce(vote)  # completes only if every member takes part, so completing is the vote
            if durable and not self._membership.commit(step):
                raise PeerLost("commit: the others have gone on to the next epoch")
        except RingReduceError as error:
            if not self._is_of_group(error):
                raise
            self._change(error)
            return self._committed >= step
        self._committed = step
        waiting, *figures = vote.tolist()
        self._joiners_wait = bool(waiting)
        self._judge(figures)
        if self._config.home.ledger:  # no ports are held for it then
            self._get_ready()
        return True

    def lateness(self) -> list[Late]:
        """The members that the others have waited for since the latest change, worst first. The same on all members."""
        return self._lateness.all()

    def on_straggler(self, function: Callable[[Late], bool]) -> None:
        """Registers `function(late)`, which every member calls after a commit if a member is a straggler.

        A straggler is the latest member in 90 of the last 100 steps, and costs the others a tenth of their time. A
        warning names it, with or without this function.

        If `function` returns True, the members go on without the straggler, whose next `attempt` raises `Expelled`.
        `function` must return the same value on all members.
        """
        self._on_straggler = _callable("on_straggler", function)

    def leave(self) -> None:
        """Ends this process's membership and destroys its groups. The others go on without it, without waiting.

        Call it at the end of the training, too. A process that is started again after that gets `Over` from `start`
        instead of waiting to be let in. A second call does nothing.
        """
        if self._has_left:
            return
        self._has_left = True
        self._stop_watching()
        self._lookout.stop()
        with contextlib.suppress(RuntimeError, OSError):  # if not told, the others notice this process's end
            self._membership.resign(self._committed)
            self._config.home.lobby.leave(self._config.me)
        self._config.home.give_up()
        if dist.is_initialized():  # not if the latest change could not make a group
            dist.destroy_process_group()

    def _check_membership(self, call: str) -> None:
        if self._has_left:
            raise InvalidArgument(f"{call}: this process has called leave(); call elastic.start() to join again")

    # changes

    def _judge(self, figures: list[int]) -> None:
        """Looks for a straggler in the members' waiting times, which the vote has summed."""
        if self.size < 2:
            return
        self._lateness.take(figures)
        if late := self._lateness.straggler():
            if self.rank == 0:
                log.warning(
                    "rank %d (%s, pid %d) is a straggler: the others have waited %.3g s for it in %d steps, %.0f%% of "
                    "their time",
                    *(late.rank, late.host, late.pid, late.seconds, STEPS, 100 * late.share),
                )
            if self._on_straggler and self._on_straggler(late):
                self._unwanted = (self.view.names[late.rank],)

    def _is_of_group(self, error: Exception) -> bool:
        """Whether the error is a failure of the group, after which the members repeat the attempt."""
        if isinstance(error, Expelled | TooFewRanks | InvalidArgument | CollectiveMismatch):
            return False
        if any(isinstance(each, RingReduceError) for each in _with_causes(error)):
            return True
        # torch raises RuntimeError for a group that has failed, such as in a hook of DistributedDataParallel.
        return isinstance(error, RuntimeError) and backend_of(None).get_error() != ErrorType.SUCCESS

    def _break(self, error: Exception) -> None:
        """Ends the attempt on all members, because a function of this member's program has raised `error`."""
        log.warning("%s: %r ends an attempt of this member", self._config.me, error)
        backend_of(None).abort()

    def _let_in(self) -> None:
        """Makes the changes that are due between two attempts.

        Drops the straggler that nobody wants, lets waiting processes in, and waits for more if there are too few.
        """
        if self._unwanted:
            self._change(None)
        while self._joiners_wait or self._too_few():
            joiners = self._joiners(self._config.patience if self._too_few() else 0.0) if self.rank == 0 else ()
            self._gave_up = self.rank == 0 and self._too_few() and not joiners
            self._change(None, joiners)
            self._gave_up = False
            if self.view.alone and self._too_few():
                raise TooFewRanks(
                    f"there are {self.size} ranks, and least is {self._config.least}; nobody has come for "
                    f"{self._config.patience:.0f} s"
                )

    def _too_few(self) -> bool:
        return self.size < self._config.least

    def _change(self, error: Exception | None, joiners: tuple[Member, ...] = ()) -> None:
        """Goes from view to view until the members of one can make their group.

        `error`: the failure that ended the present epoch; None if this change only lets `joiners` in or drops members.
        Raises `Expelled` or `TooFewRanks`; `SystemFailure` if the directory is out of reach; and the failure itself if
        the same members have tried in vain for `patience` and `timeout`.
        """
        lets_in, began = error is None, time.monotonic()
        while True:
            told = self._report(error)
            if error is not None:
                log.info("%s: epoch %d ends: %s", self._config.me, self.epoch, error)
                self._abort()
            # Rank 0 may wait for joiners for `patience` before it reports, and must not be given up meanwhile.
            silent_after = self._config.expel_after + (self._config.patience if lets_in and self._too_few() else 0.0)
            without, alone = (*self._unwanted, *told.without), lets_in and self._gave_up
            report = replace(told, waiting=joiners, open=lets_in, without=without, alone=alone)
            before = self.view.names
            try:
                self._membership.leave(report, self._ended, silent_after, self._cut_off)
            except Expelled:
                self._lookout.stop()
                self._config.home.give_up()
                raise
            self._committed = self.view.step
            log.info("%s: epoch %d begins; lost: %s", self._config.me, self.epoch, self.view.lost or "nobody")
            self._lookout.pass_over((*self.view.names, *self.view.lost))  # this member may have skipped a view
            came = [member for member in self.view.members if member.name not in before]
            self._config.home.lobby.invite(came, self.view)
            entered = False
            try:
                self._enter()
                entered = True
                self._call_back()
                return
            except RingReduceError as failed:
                if entered and not self._is_of_group(failed):
                    raise  # a callback's own error, which it would raise again
                in_vain = time.monotonic() - began > self._config.patience + self._config.timeout
                if isinstance(failed, Expelled | TooFewRanks) or (in_vain and self.view.names == before):
                    raise  # the same members cannot make a group
                # The traceback's frames hold the group. With this frame they would form a cycle, which Python may not
                # collect for hours.
                error, joiners, lets_in = failed.with_traceback(None), (), False

    def _report(self, error: Exception | None) -> Report:
        """This member's report for the directory. `error`: the failure that ended the epoch, if it was one.

        `without` names members that this one has not reached: of two members that cannot reach each other, the first
        to report goes on. `silent` names a member whose connection closed while the group was made. It may have
        reported before it closed the connection, so it is lost only if it has not.
        """
        self._get_ready()
        without, silent = set[int](), set[int]()
        if dist.is_initialized():
            links = links_of(backend_of(None))
            without = links.unreached if links else without
        elif isinstance(error, CollectiveTimeout):  # while the group was made
            without = {error.culprit}
        elif isinstance(error, PeerLost):
            silent = {error.culprit}
        named = [tuple(self.view.names[rank] for rank in each - {-1, self.rank}) for each in (without, silent)]
        return Report(self._committed, without=named[0], silent=named[1], address=self._config.home.address())

    def _get_ready(self) -> None:
        """Prepares this process's part of the next group. Does nothing the second time in an epoch."""
        home = self._config.home
        home.ready = home.ready or ready_for_a_group(self._config.options, not home.ledger, self._wire)

    def _abort(self) -> None:
        if dist.is_initialized():
            backend_of(None).abort()

    def _enter(self) -> None:
        """Makes the view's members the default group, and shares the state with joiners."""
        self._joiners_wait, self._unwanted = False, ()
        self._lateness = Lateness(self.view.members, self.rank)
        self._stop_watching()
        destroy_groups()
        self._init()
        if self._state is not None:
            for part in vars(self._state).values():
                for module in part.modules() if isinstance(part, torch.nn.Module) else ():
                    if isinstance(module, DistributedDataParallel):
                        _rebind(module)
            self._share_state()

    def _call_back(self) -> None:
        """Calls the callbacks of `on_change`. If one raises an error of its own, the others must not wait for it."""
        try:
            for callback in self._callbacks:
                callback(self)
        except Exception as error:
            if not self._is_of_group(error):
                self._break(error)
            raise

    def _init(self) -> None:
        """Makes the view's members the default group. Fails at once when one of them ends meanwhile."""
        config, names = self._config, list(self.view.names)
        watch = self._begin_watching()
        hook = sys.excepthook  # init_process_group wraps it, once more in each change
        known = rendezvous.ended.set(lambda: [names.index(name) for name in watch.ended()])
        gives_up = rendezvous.gives_up.set(self._report_early)
        ready = prepared.set(config.home.prepared(self.view))
        # torch names a group by a counter, and the ranks meet under keys that contain the name. A failure leaves the
        # members with different counters, since torch does not take the number back.
        dist.distributed_c10d._world.group_count = 0
        try:
            dist.init_process_group(
                "ringreduce",
                store=config.home.place(self.epoch),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=config.timeout),
                pg_options=config.options,
            )
        except (RuntimeError, OSError) as error:
            if isinstance(error, RingReduceError):
                raise
            raise SystemFailure(f"making the group of epoch {self.epoch}: {error}") from error  # its store is gone
        finally:
            rendezvous.ended.reset(known)
            rendezvous.gives_up.reset(gives_up)
            prepared.reset(ready)
            sys.excepthook = hook
        self._attach(watch)

    def _attach(self, watch: Watch) -> None:
        """To be called once the group has been made."""
        watch.attach(backend_of(None))
        if links := links_of(backend_of(None)):
            self._wire = links.wire

    def _report_early(self, error: Exception) -> None:
        """Reports before this process closes its connections, so that the others do not take it for dead."""
        report = self._report(error)
        with contextlib.suppress(RuntimeError, OSError):  # `_change` will report again
            self._config.home.directory().append(place(self.epoch), report.line(self._config.me))

    def _begin_watching(self) -> Watch:
        home, view = self._config.home, self.view
        if self.rank == 0:
            home.lobby.members_are(view)
        self._watch = Watch(view, self._config.me, home.directory(), home.look_every())
        return self._watch

    def _stop_watching(self) -> None:
        if self._watch:
            self._watch.stop()

    def _ended(self) -> list[str]:
        return self._watch.ended() if self._watch else []

    def _cut_off(self) -> list[str]:
        return self._watch.cut_off() if self._watch else []

    # joiners

    def _somebody_waits(self) -> bool:
        return self.rank == 0 and bool(self._room_for(self._lookout.found()))

    def _joiners(self, patience: float) -> tuple[Member, ...]:
        """The processes that wait to join, as many as there is room for. Waits `patience` seconds for the first."""
        end = time.monotonic() + patience
        while True:
            found = self._room_for(tuple(member for member in self._lookout.found() if not has_ended(member)))
            if found or time.monotonic() >= end:
                return found
            time.sleep(LOOK_AGAIN)

    def _room_for(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """The first of these processes, in whole units, for which there is room."""
        found = members[: max(self._config.most - self.size, 0)]
        return found[: len(found) // self.view.unit * self.view.unit]

    def _share_state(self) -> None:
        """Gives the state to the members that have none. Called on all members; raises `TooFewRanks` if none has it."""
        state = self._state
        assert state is not None
        flags = torch.zeros(self.size, dtype=torch.int64)
        flags[self.rank] = 2 if self._has_state else int(self._founder)
        dist.all_reduce(flags)
        if int(flags.min()) == 2:
            return
        # If no member has taken part in sharing yet, nobody has taken a step, and the state of any founder will do.
        unit = self.view.unit
        if not all(bool(flags[first::unit].any()) for first in range(unit)):
            raise TooFewRanks("every member that had the state is lost; start again from a checkpoint")
        for first in range(unit):  # a member takes the state of the same place in another unit
            source = first + unit * int(flags[first::unit].argmax())
            state.share(source, takes=not self._has_state and self.rank != source and self.rank % unit == first)
        self._has_state = True


@dataclass
class _Config:
    """What stays the same throughout the life of a world."""

    me: str
    """This process's name, which no other process ever has."""
    options: Options | None
    timeout: float
    least: int
    unit: int
    most: int
    patience: float
    expel_after: float
    home: Home

    def settings(self) -> dict[str, int]:
        """What must be alike on all members, by the names of `start`'s arguments."""
        most = self.most if self.most < sys.maxsize else 0
        return {"least": self.least, "unit": self.unit, "world_size - spares": most}

    def check(self, others: dict[str, int], who: str) -> None:
        for name, mine in self.settings().items():
            if others[name] != mine:
                raise InvalidArgument(
                    f"start: {name} is {mine} here and {others[name]} on {who}; give all processes the same"
                )


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
        one of them is lost, the others of its unit raise `Expelled`. Waiting processes are let in by whole units.
    `patience`: how long to wait for joiners when there are too few members, and for a directory that is out of reach.
    `expel_after`: how long to wait for a living member that does not report in a change; by default `timeout`.
    `timeout`: for making a group and for each call on it.
    `options`: as for `init_process_group`. Members go on without a joiner that has other options than they have.
    `store`, `rank`, `world_size`: as for `init_process_group`; by default, the variables of `env://` say them. `store`
        may also be an address in etcd, "etcd://HOST:PORT,HOST:PORT/NAME" with a NAME that no other job has used. Then
        no single host has to live until the job ends, and `rank` and `world_size` are by default RANK and WORLD_SIZE.

    Raises `Over` if the training is over, `TooFewRanks` if all members have died, `CollectiveTimeout` if no member has
    looked for joiners for `timeout`, `SystemFailure` if the members share memory that this process cannot open,
    `InvalidArgument`, and what `init_process_group` raises.
    """
    if not isinstance(least, int) or least < 1:
        raise InvalidArgument(f"start: least is {least!r}; it must be a whole number, 1 or more")
    timeout = duration("start: timeout", timeout, positive=True)
    patience = duration("start: patience", patience, positive=True).total_seconds()
    silence = timeout if expel_after is None else duration("start: expel_after", expel_after, positive=True)
    if store is None:
        store, rank, world_size = next(env_rendezvous("env://", timeout=timeout))
    elif isinstance(store, str) and rank < 0:
        rank, world_size = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"start: rank is {rank} and world_size {world_size}; with a store, give both: 0 <= rank < world_size"
        )
    if not isinstance(spares, int) or not 0 <= spares <= world_size - least:
        raise InvalidArgument(
            f"start: spares is {spares!r}; of {world_size} processes, {least} must be left: 0 <= spares <= "
            f"{world_size - least}"
        )
    if not isinstance(unit, int) or unit < 1 or (world_size - spares) % unit or spares % unit:
        raise InvalidArgument(
            f"start: unit is {unit!r}; it must divide the {world_size - spares} first members and the {spares} spares"
        )
    founders, restart = world_size - spares, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    values = _etcd(store) if isinstance(store, str) else Bounded(store)
    here = KeyStore(values, f"ringreduce/elastic/{restart}/")
    # Who comes again before the first members have made their group is one of them again.
    joins = rank >= founders or (here.add(f"rank/{rank}", 1) > 1 and here.value("settings") is not None)
    config = _Config(
        me=f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}",
        options=options,
        timeout=timeout.total_seconds(),
        least=least,
        unit=unit,
        most=founders if spares else sys.maxsize,
        patience=patience,
        expel_after=silence.total_seconds(),
        home=Home(here),
    )
    return _join(config) if joins else _begin(config, rank, founders)


def _etcd(address: str) -> Values:
    from ringreduce.membership.etcd import Etcd

    return Etcd(address)


def _begin(config: _Config, rank: int, size: int) -> World:
    store = config.home.store
    trial = store.value("trial") or b"0"
    try:
        dist.init_process_group(
            "ringreduce",
            store=PrefixStore(f"epoch 0, trial {trial.decode()}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.timeout),
            pg_options=config.options,
        )
    except Exception:
        with contextlib.suppress(RuntimeError, OSError):  # those that are started again meet elsewhere
            store.compare_set("trial", b"" if trial == b"0" else trial, str(int(trial) + 1))
        raise
    if not links_of(backend_of(None)):  # all ranks are on one host
        config.home.share_ledger(rank)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (config.me, config.home.address(), config.settings()))
    for other, (*_, settings) in enumerate(everyone):
        config.check(settings, f"rank {other}")
    if rank == 0:
        config.home.store.set("settings", json.dumps(config.settings()))
    view = View(0, tuple(Member(name, address) for name, address, _ in everyone), unit=config.unit)
    world = World(config, Membership(config.home.directory(), config.me, view, config.patience), founder=True)
    world._attach(world._begin_watching())
    return world


def _join(config: _Config) -> World:
    home = config.home
    home.ready = ready_for_a_group(config.options, listens=True)
    view = home.lobby.wait(Member(config.me, home.address()), config.timeout)
    opened = view is not None and home.open_a_ledger(config.me, view, config.timeout)
    if view is None or (not opened and home.lobby.all_gone(config.me)):
        if not home.lobby.ended_well():
            raise TooFewRanks(
                "start: all members have died, and no process has the state any more; start the training again from a "
                "checkpoint"
            )
        log.warning("start: the training is over; there is nothing to join")
        raise Over(0)
    if not opened:
        raise SystemFailure(
            "start: the members share a ledger, which this process cannot open: it must run on their host as their user"
        )
    world = World(config, Membership(config.home.directory(), config.me, view, config.patience), founder=False)
    try:
        config.check(json.loads(home.store.get("settings")), "the members")
        world._init()
    except InvalidArgument:  # such as other options than the members'; it would be wrong in the next view, too
        world.leave()
        raise
    except RingReduceError as error:
        world._change(error)
    return world


def _callable(method: str, function: Function) -> Function:
    if not callable(function):
        raise InvalidArgument(f"{method}: function is {function!r:.60}; give a function")
    return function


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from. Not what was being handled: a callback runs while a failure is."""
    while error is not None:
        yield error
        error = error.__cause__


def _rebind(model: DistributedDataParallel) -> None:
    """Binds `model` to the default group, with new buckets and hooks like a joiner's, by the steps of unpickling."""
    group = dist.group.WORLD
    assert group is not None
    model.process_group = group
    model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
    # With static_graph=True the first backward pass of a reducer queues its own all_reduce. This says it has not yet.
    model._static_graph_delay_allreduce_enqueued = False
