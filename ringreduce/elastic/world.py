"""A world: a changing group, as one of its members sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ringreduce import tuning  # noqa: F401  imported early: a member that becomes rank 0 must not lose time with it
from ringreduce.common.system import explained
from ringreduce.coordination.join_queue import JoinWatcher
from ringreduce.coordination.protocol import Member, Report, View, log_key
from ringreduce.coordination.rounds import Membership
from ringreduce.elastic.groups import destroy_groups, is_of_group, make_group, rebind, resigns_if_it_fails
from ringreduce.elastic.lateness import Late, Lateness
from ringreduce.elastic.settings import Settings
from ringreduce.elastic.state import Holder, State
from ringreduce.errors import (
    CollectiveTimeout,
    Expelled,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TooFewRanks,
)
from ringreduce.groups.lookup import backend_of, links_of

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Wire

Result = TypeVar("Result")
Function = TypeVar("Function", bound="Callable[..., Any]")

log = logging.getLogger(__name__)


class World:
    """A changing group, seen from one of its members. Made by `start`. All calls must come from one thread."""

    def __init__(self, settings: Settings, view: View, founder: bool) -> None:
        """Use `start`. `founder`: whether this process is one of the first members, who are in `view`."""
        self._settings = settings
        self._membership = Membership(settings.context.directory(), settings.me, view, settings.patience)
        self._state: State | None = None
        self._holder = Holder(founder)
        self._callbacks: list[Callable[[World], None]] = []
        self._committed = view.step
        self._unknown = 0
        """A step whose vote an error has interrupted, so that the program does not know whether it counts; 0: none."""
        self._attempting = False
        """Whether the function that was given to `attempt` runs."""
        self._joiners_wait = False
        self._join_watcher = JoinWatcher(settings.context.queue, view.names)
        self._on_straggler: Callable[[Late], bool] | None = None
        self._late: Late | None = None
        """A straggler that the program has not been told of."""
        self._unwanted: tuple[str, ...] = ()
        self._gave_up = False
        self._has_left = False
        self._pid = os.getpid()
        self._is_first_commit = True
        """Whether no step was committed in this epoch."""
        self._wire: Wire | None = None
        """What the latest group with links to other hosts has measured of the network."""
        self._lateness = Lateness(self.view.members, self.rank)
        self._watch = settings.watch(view)

    @property
    def rank(self) -> int:
        """This process's rank among the members. It may change when members come or go.

        Raises `Expelled` if the others went on without this process.
        """
        return self._membership.rank

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
        A sampler or a data loader is no part: make it from `rank` and `size`, and again in `on_change`.
        Every member must call this once, before any other call on the group. It gives all members the state of the
        first one; with `unit`, that of the same position in the first unit. A tensor, NumPy array or generator is
        filled in place, also in a list or dictionary, if it has the same shape and dtype. Other plain values are
        replaced.

        After each change, every `DistributedDataParallel` model among the parts is bound to the new group. Make such a
        model with `init_sync=False`, since this call makes the members' states equal.

        Raises `InvalidArgument` if it was called before, or if a joiner could not receive a part. Raises `TooFewRanks`
        if every member that had the state is lost: also if the first member dies while it sends its state in the first
        call. Also raises what `attempt` raises.
        """
        self._check_membership("state")
        if self._state is not None:
            raise InvalidArgument("state: it was called before; it takes all parts at once")
        self._state = state = State(parts)
        try:
            self._holder.share(state, self.view.unit)
        except BaseException as error:
            if not is_of_group(error):
                self._state = None
                self._break(error)
                raise
            self._change(error)
        return state

    def attempt(self, function: Callable[[], Result]) -> Result:
        """Calls `function()` and returns its result, once all members have completed theirs.

        If a member is lost meanwhile, `attempt` returns on no member: the others go on without the lost one and call
        `function` again. Before each call of `function`, processes that wait to join are let in. If a member is lost
        when all have completed, some members may return with the new `size` and some with the old one, so use `size`
        and `rank` inside `function`.

        If `function` raises an error that is not a failure of the group, the error is raised here. The other members
        go on without this one unless it calls `attempt` again. If such an error comes while the members vote, as
        KeyboardInterrupt may, the next call raises `Expelled` if the others have completed the step.

        Raises `Expelled` if the others went on without this member, `TooFewRanks` on all members if there have been
        fewer than `least` for longer than `patience`, `CollectiveMismatch` on all members if they made different
        calls, and `SystemFailure` if the directory of members is out of reach for `patience`.
        """
        _callable("attempt", function)
        self._check_membership("attempt")
        while True:
            self._tell_of_straggler()
            self._let_in()
            try:
                result = self._call(function)
            except BaseException as error:
                if not is_of_group(error):
                    self._break(error)
                    raise
                self._change(error)
                continue
            if self.commit():
                return result

    def _call(self, function: Callable[[], Result]) -> Result:
        self._attempting = True
        try:
            return function()
        finally:
            self._attempting = False

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
        self._tell_of_straggler()
        step = self._committed + 1
        try:
            return self._vote(step, durable)
        except BaseException as error:
            self._unknown = step
            if not isinstance(error, RingReduceError):
                self._break(error)
            raise

    def _vote(self, step: int, durable: bool) -> bool:
        waits = self.rank == 0 and self._admitted(self._join_watcher.found())
        vote = torch.tensor([int(bool(waits)), *self._lateness.figures()], device="cpu")
        try:
            dist.all_reduce(vote)  # completes only if every member takes part, so completing is the vote
            if durable and not self._membership.commit(step):
                raise PeerLost("commit: the others have gone on to the next epoch")
        except RingReduceError as error:
            if not is_of_group(error):
                raise
            self._change(error)
            return self._committed >= step
        self._committed = step
        waiting, *figures = vote.tolist()
        self._joiners_wait = bool(waiting)
        self._late = self._lateness.judge(figures) or self._late
        if self._is_first_commit and self._settings.context.ledger:  # on several hosts this would hold a port
            with contextlib.suppress(RingReduceError, OSError):  # the step counts; the next change tries again
                self._settings.get_ready(self._wire)
        self._is_first_commit = False
        return True

    def lateness(self) -> list[Late]:
        """The members that the others have waited for since the latest change, worst first. The same on all members."""
        return self._lateness.all()

    def on_straggler(self, function: Callable[[Late], bool]) -> None:
        """Registers `function(late)`, which every member calls before the next step if a member is a straggler.

        A straggler is the latest member in 90 of the last 100 steps, and costs the others a tenth of their time, and at
        least 10 ms. A warning names it, with or without this function.

        If `function` returns True, the members go on without the straggler, whose next `attempt` raises `Expelled`. The
        straggler stays if fewer than `least` would be left. `function` must return the same value on all members. What
        it raises is raised by `attempt` or `commit`, as an error of `attempt`'s function would be.
        """
        self._on_straggler = _callable("on_straggler", function)

    def leave(self) -> None:
        """Ends this process's membership and destroys its groups. The others go on without it, without waiting.

        Call it at the end of the training, too. A process that is started again after that gets `Over` from `start`
        instead of waiting to be let in. A second call does nothing.
        """
        if self._has_left or os.getpid() != self._pid:  # a forked child is no member
            return
        self._has_left = True
        self._watch.stop()
        self._join_watcher.stop()
        with contextlib.suppress(RuntimeError, OSError):  # if not told, the others notice this process's end
            self._membership.resign(self._committed)
            self._settings.context.queue.leave(self._settings.me)
        self._settings.context.give_up()
        destroy_groups(leaves=True)

    def __del__(self) -> None:
        if "_watch" in vars(self) and os.getpid() == self._pid:  # in a forked child its lock may be taken for ever
            self._watch.stop()

    def _check_membership(self, call: str) -> None:
        if self._has_left:
            raise InvalidArgument(
                f"{call}: this process has left the world, by leave() or because an error interrupted a change; call "
                "elastic.start() to join again"
            )
        if os.getpid() != self._pid:
            raise InvalidArgument(f"{call}: process {self._pid} is the member, and this one was forked from it")
        if self._attempting:
            raise InvalidArgument(f"{call}: the function that attempt calls must not call it; call it between attempts")

    # changes

    def _tell_of_straggler(self) -> None:
        late, self._late = self._late, None
        if late is None or self._on_straggler is None:
            return
        try:
            if self._on_straggler(late) and self.size - self.view.unit >= self._settings.least:
                self._unwanted = (self.view.names[late.rank],)
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Ends the attempt on all members, because a function of this member's program has raised `error`."""
        log.warning("%s: %r ends an attempt of this member", self._settings.me, error)
        self._abort()

    def _let_in(self) -> None:
        """Makes the changes that are due between two attempts.

        Drops the straggler that nobody wants, lets waiting processes in, and waits for more if there are too few.
        """
        if self._unwanted:
            self._change(None)
        while self._joiners_wait or self._too_few():
            patience = self._settings.patience if self._too_few() else 0.0
            joiners = self._join_watcher.wait(self._admitted, patience) if self.rank == 0 else ()
            self._gave_up = self.rank == 0 and self._too_few() and not joiners
            self._change(None, joiners)
            self._gave_up = False
            if self.view.alone and self._too_few():
                left = "is 1 rank" if self.size == 1 else f"are {self.size} ranks"
                raise TooFewRanks(
                    f"there {left}, and least is {self._settings.least}; nobody has come for "
                    f"{self._settings.patience:.0f} s"
                )

    def _admitted(self, waiting: tuple[Member, ...]) -> tuple[Member, ...]:
        return self._settings.room_for(self.size, waiting)

    def _too_few(self) -> bool:
        return self.size < self._settings.least

    def _change(self, error: Exception | None, joiners: tuple[Member, ...] = ()) -> None:
        """Goes from view to view until the members of one can make their group.

        `error`: the failure that ended the present epoch; None if this change only lets `joiners` in or drops members.
        Raises `Expelled` or `TooFewRanks`; `SystemFailure` if the directory is out of reach; and the failure itself if
        the same members have tried in vain for `patience` and `timeout`.
        """
        began = time.monotonic()
        while True:
            before, entered = self.view.names, False
            with self._not_interrupted():
                self._leave_view(error, joiners)
            try:
                with self._not_interrupted():
                    self._enter()
                entered = True
                self._call_back()
                return
            except RingReduceError as failed:
                if entered and not is_of_group(failed):
                    raise  # a callback's own error, which it would raise again
                in_vain = time.monotonic() - began > self._settings.patience + self._settings.timeout
                if isinstance(failed, Expelled | TooFewRanks) or (in_vain and self.view.names == before):
                    raise  # the same members cannot make a group
                # The traceback's frames hold the group. With this frame they would form a cycle, which Python may not
                # collect for hours.
                error, joiners = failed.with_traceback(None), ()

    @contextlib.contextmanager
    def _not_interrupted(self) -> Iterator[None]:
        """Ends this membership if the body, a part of a change, raises an error that is not of the group.

        The member could not resume the change, and the others would wait for it.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RingReduceError):
                self.leave()
            if isinstance(error, OSError):
                raise SystemFailure(f"the world cannot change: {explained(error)}") from error
            raise

    def _leave_view(self, error: Exception | None, joiners: tuple[Member, ...]) -> None:
        """Leaves the present view together with the other members, and finds the next one. Arguments as of `_change`.

        Raises `Expelled`, and `SystemFailure` if the directory is out of reach.
        """
        settings, before = self._settings, self.view.names
        report = self._report(error)
        lost = (*self._unwanted, *report.lost)
        silent_after = settings.expel_after
        if error is None:
            report = replace(report, waiting=joiners, open=True, lost=lost, alone=self._gave_up)
            if self._too_few():  # rank 0 may wait for joiners before it reports, and must not be given up meanwhile
                silent_after += settings.patience
        else:
            report = replace(report, lost=lost)
            log.info("%s: epoch %d ends: %s", settings.me, self.epoch, error)
            self._abort()
        try:
            self._membership.leave(report, self._watch.ended, silent_after, self._watch.cut_off)
        except RingReduceError as over:
            if isinstance(over, Expelled):
                self._join_watcher.stop()
            settings.context.give_up()
            raise
        self._committed, unknown, self._unknown = self.view.step, self._unknown, 0
        if 0 < unknown <= self._committed:
            self.leave()
            raise Expelled(
                f"an error interrupted this member while step {unknown} was voted on, and the others have completed "
                "the step; start this process anew to join again"
            )
        log.info("%s: epoch %d begins; lost: %s", settings.me, self.epoch, self.view.lost or "nobody")
        self._join_watcher.pass_over((*self.view.names, *self.view.lost))  # this member may have skipped a view
        settings.context.queue.invite([each for each in self.view.members if each.name not in before], self.view)

    def _report(self, error: Exception | None) -> Report:
        """This member's report for the directory. `error`: the failure that ended the epoch, if it was one.

        `lost` names members that this one has not reached: of two members that cannot reach each other, the first to
        report goes on. `silent` names a member whose connection closed while the group was made. It may have
        reported before it closed the connection, so it is lost only if it has not.
        """
        self._settings.get_ready(self._wire)
        lost, silent = set[int](), set[int]()
        if dist.is_initialized():
            links = links_of(backend_of(None))
            lost = links.unreached if links else lost
        elif isinstance(error, CollectiveTimeout):  # while the group was made
            lost = {error.culprit}
        elif isinstance(error, PeerLost):
            silent = {error.culprit}
        named = [tuple(self.view.names[rank] for rank in each - {-1, self.rank}) for each in (lost, silent)]
        return Report(self._committed, lost=named[0], silent=named[1], address=self._settings.member().address)

    def _abort(self) -> None:
        if dist.is_initialized():
            backend_of(None).abort()

    def _enter(self) -> None:
        """Makes the view's members the default group, and shares the state with joiners."""
        self._joiners_wait, self._unwanted, self._late, self._is_first_commit = False, (), None, True
        self._lateness = Lateness(self.view.members, self.rank)
        self._watch.stop()
        destroy_groups()
        self._watch = self._settings.watch(self.view)
        self._make_group()
        if self._state is not None:
            rebind(vars(self._state).values())
            self._holder.share(self._state, self.view.unit)

    def _call_back(self) -> None:
        """Calls the callbacks of `on_change`. If one raises an error of its own, the others must not wait for it."""
        try:
            for callback in self._callbacks:
                callback(self)
        except BaseException as error:
            if not is_of_group(error):
                self._break(error)
            raise

    def _make_group(self) -> None:
        """Makes the view's members the default group. Fails at once when one of them ends meanwhile."""
        if self.rank == 0:
            try:
                self._settings.context.queue.members_are(self.view)
                self._join_watcher.found()  # those who wait may have to wait for a long step
            except RingReduceError:
                self._settings.context.give_up()  # or the others would wait at its door
                raise
        make_group(self.view, self.rank, self._settings, self._watch.ended, self._report_early)
        self._attach()

    def _attach(self) -> None:
        """To be called once the group has been made."""
        self._watch.attach(backend_of(None))
        backend_of(None).survivors_go_on()
        if links := links_of(backend_of(None)):
            self._wire = links.wire

    def _report_early(self, error: Exception) -> None:
        """Reports before this process closes its connections, so that the others do not take it for dead."""
        report = self._report(error)
        with contextlib.suppress(RuntimeError, OSError):  # `_change` will report again
            self._settings.context.directory().append(log_key(self.epoch), report.line(self._settings.me))


def founded(settings: Settings, view: View) -> World:
    """The world of a first member, whose group has been made."""
    with resigns_if_it_fails(settings, view):
        world = World(settings, view, founder=True)
        if world.rank == 0:
            world._join_watcher.found()
        world._attach()
    return world


def joined(settings: Settings, view: View) -> World:
    """The world of a process that has been let in by `view`. Makes its group. Raises what `start` raises."""
    with resigns_if_it_fails(settings, view):
        world = World(settings, view, founder=False)
        try:
            settings.check(view.members[0], "the members")  # which has been there before: joiners come last
            world._make_group()
            return world
        except InvalidArgument:  # such as other options than the members'; it would be wrong in the next view, too
            world.leave()
            raise
        except RingReduceError as error:
            failed = error.with_traceback(None)
    world._change(failed)
    return world


def _callable(method: str, function: Function) -> Function:
    if not callable(function):
        raise InvalidArgument(f"{method}: function is {function!r:.60}; give a function")
    return function
