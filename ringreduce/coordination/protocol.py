"""How the members of a view agree on the next one: a pure function from events to effects.

    state, effects = step(state, event)

There is no clock, process or socket here; `rounds` has these.

A *view* names the members of one epoch, and the latest step that all of them have committed. An epoch has one *log*: a
value in a directory, to which members append lines. The directory puts the lines into one order, and the log alone
determines the next view. So an epoch has one successor, and every member that reads the log finds the same one.

Members leave a view together, in a *round*:

1. Each member appends a line (`Report`). It says that the member is here, which step it has committed, and which
   members it knows to be lost.
2. The answer is the log, with the lines of the others. A member that misses others looks again and again. It appends
   another line when it learns that a member is lost.
3. The round ends with the first line after which every member has reported or is named as lost. Members that have
   reported and are not named as lost go on; all others are lost (`successor`). Later lines do not count.

A member that reports too late is expelled. One that reads in the log that it was named as lost is expelled at once.

A member is *lost* when its process has ended, which is certain, or when the others have waited for it in vain, which
may be a mistake. Safety does not depend on the difference: a living member that was given up finds a view without
itself, and is expelled. If two members name each other as lost, the one whose line comes first goes on.

Members may come in *units* of consecutive ranks, such as the ranks that hold one replica. Then a lost member takes its
unit with it, and waiting processes are let in by whole units.

The successor also contains the *verdict* on the open step. A member may commit step k only after every member has voted
for it, and so has all that it needs to go on after k. If any survivor reports k, the successor says k, and all members
go on after k. A durable step must survive even the death of every member that committed it. It is written into the log
itself (`Commit`) by a compare-and-set, which fails once the round has ended.

A line also carries the member's address: what others must know to make a group with it. Nothing here looks into it.

A request may be lost, be carried out without an answer, or be carried out twice, so all requests can be repeated. Only
the first line of a member counts as its report, and naming a member as lost twice is the same as naming it once.

`tests/unit/test_membership_protocol.py` searches all orders of these events for small groups.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Member:
    """A process that is in a view, or may join one."""

    name: str
    """Unique for all time: no other process has it, and a lost process that joins again takes another one."""
    address: str = ""
    """What others must know to make a group with the member; this module does not look into it."""


@dataclass(frozen=True)
class View:
    """The members from one change to the next."""

    epoch: int
    members: tuple[Member, ...]
    step: int = 0
    """The latest step that is known to be committed."""
    lost: tuple[str, ...] = ()
    """The names of members of the view before that are not in this one."""
    alone: bool = False
    """Whether a member has waited for joiners for as long as it may, and none has come."""
    unit: int = 1
    """The number of consecutive members that are in together or not at all."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def with_units(self, names: Iterable[str]) -> set[str]:
        """The given members and all others of their units."""
        found = set(names)
        if self.unit == 1:
            return found
        units = [self.names[first : first + self.unit] for first in range(0, len(self.members), self.unit)]
        return found.union(*(unit for unit in units if not found.isdisjoint(unit)))

    def dump(self) -> str:
        members = [[member.name, member.address] for member in self.members]
        return json.dumps([self.epoch, self.step, members, self.lost, self.alone, self.unit])

    @staticmethod
    def load(text: str) -> View:
        epoch, step_, members, *rest = json.loads(text)
        lost, alone, unit = rest
        return View(epoch, tuple(Member(name, address) for name, address in members), step_, tuple(lost), alone, unit)


@dataclass(frozen=True)
class Report:
    """What a member says when it leaves a view."""

    step: int = 0
    """The latest step that it has committed."""
    waiting: tuple[Member, ...] = ()
    """The processes that wait to be let in, as far as it knows, by units in the order of their positions."""
    open: bool = False
    """Whether it agrees that waiting processes are let in now. All members must agree."""
    lost: tuple[str, ...] = ()
    """The names of members that are lost even if they have reported: dead ones, and those that it excludes."""
    alone: bool = False
    """Whether it has waited for joiners for as long as it may, and none has come."""
    silent: tuple[str, ...] = ()
    """The names of members that are lost unless they have reported on an earlier line."""
    address: str = ""
    """Its address from now on; '': unchanged."""

    def line(self, name: str) -> str:
        """The line that this member appends to the log."""
        waiting = [[each.name, each.address] for each in self.waiting]
        said = [name, self.step, waiting, self.open, self.lost, self.alone, self.silent, self.address]
        return json.dumps(said) + "\n"

    @staticmethod
    def load(said: list[Any]) -> Report:
        step_, waiting, is_open, lost, alone, silent, address = said
        members = tuple(Member(name, its_address) for name, its_address in waiting)
        return Report(step_, members, is_open, tuple(lost), alone, tuple(silent), address)


# events


@dataclass(frozen=True)
class Leave:
    """This member's program wants to go on to the next view."""

    report: Report


@dataclass(frozen=True)
class Commit:
    """This member's program wants a step to survive the death of every member that has committed it."""

    step: int


@dataclass(frozen=True)
class Look:
    """It is time to ask the directory again, with what this member knows about the others."""

    lost: frozenset[str] = frozenset()
    """Members that are lost even if they have reported."""
    silent: frozenset[str] = frozenset()
    """Members that are lost unless they have reported."""


@dataclass(frozen=True)
class Answer:
    """The directory's answer: the value under a key after the request was carried out; '': none."""

    key: str
    value: str


@dataclass(frozen=True)
class NoAnswer:
    """The directory has not answered. The request may have been carried out or not."""


Event: TypeAlias = Leave | Commit | Look | Answer | NoAnswer

# effects; a member has at most one request under way


@dataclass(frozen=True)
class Ask:
    """Read the value under a key."""

    key: str


@dataclass(frozen=True)
class Append:
    """Append `text` to the value under a key, and read the value after that."""

    key: str
    text: str


@dataclass(frozen=True)
class CompareSet:
    """Set the value under a key to `desired` if it is `expected` ('': none), and read the value after that."""

    key: str
    expected: str
    desired: str


Request: TypeAlias = Ask | Append | CompareSet


@dataclass(frozen=True)
class Entered:
    """This member is in the next view."""

    view: View


@dataclass(frozen=True)
class Committed:
    """The step is durable: every later view contains it."""

    step: int


@dataclass(frozen=True)
class Expelled:
    """The others went on without this member. `view` is their view."""

    view: View


Effect: TypeAlias = Request | Entered | Committed | Expelled


@dataclass(frozen=True)
class State:
    """What a member knows. It takes part in a round if `report` is set."""

    me: str
    view: View
    log: str = ""
    """The log of the view's epoch, as this member has seen it last."""
    report: Report | None = None
    committing: int = 0
    """The durable step that it is writing into the log; 0: none."""
    request: Request | None = field(default=None)
    """The request that it waits for an answer to."""


def log_key(epoch: int) -> str:
    """The directory's key for the log of an epoch."""
    return f"log/{epoch}"


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The member's state after an event, and what it does now: one request, one decision, or nothing."""
    if isinstance(event, Leave):
        return _append(replace(state, report=event.report, committing=0), event.report)
    if isinstance(event, Commit):
        return _commit(replace(state, committing=event.step))
    if isinstance(event, Look):
        return _look(state, event)
    if isinstance(event, NoAnswer):
        # Repeating is safe: only a member's first line is its report, and a compare-and-set names what it replaces.
        return state, () if state.request is None else (state.request,)
    if event.value == state.log and not state.committing:
        return replace(state, request=None), ()
    state = replace(state, log=event.value, request=None)
    if decided := successor(state.view, state.log):
        return obey(state, decided)
    if state.me in read(state.view, state.log).lost:
        # Do not wait for the round to end: if the members that gave this one up die, nobody may ever end it.
        others = tuple(member for member in state.view.members if member.name != state.me)
        return obey(state, replace(state.view, members=others))
    if not state.committing:
        return state, ()
    if _step_in(state.log) < state.committing:
        return _commit(state)
    return replace(state, committing=0), (Committed(state.committing),)


def _request(state: State, request: Request) -> tuple[State, tuple[Effect, ...]]:
    return replace(state, request=request), (request,)


def _append(state: State, report: Report) -> tuple[State, tuple[Effect, ...]]:
    return _request(state, Append(log_key(state.view.epoch), report.line(state.me)))


def _look(state: State, event: Look) -> tuple[State, tuple[Effect, ...]]:
    if state.report and (event.lost or event.silent):
        here = read(state.view, state.log)
        lost = event.lost - here.lost - {state.me}
        silent = event.silent & set(here.missing(state.view))
        if lost or silent:
            return _append(state, replace(state.report, lost=tuple(sorted(lost)), silent=tuple(sorted(silent))))
    return _request(state, Ask(log_key(state.view.epoch)))


def _commit(state: State) -> tuple[State, tuple[Effect, ...]]:
    """Replaces the first line, which holds the durable step, so the log does not grow with each commit."""
    lines = state.log.splitlines(keepends=True)
    reports = "".join(lines[_step_in(state.log) > 0 :])
    return _request(state, CompareSet(log_key(state.view.epoch), state.log, f"{state.committing}\n{reports}"))


def _step_in(log: str) -> int:
    """The durable step that is written into a log; 0: none."""
    first = log.partition("\n")[0]
    return int(first) if first.isdecimal() else 0


def obey(state: State, decided: View) -> tuple[State, tuple[Effect, ...]]:
    """Enters the view `decided` if this member is in it, and is expelled otherwise."""
    state = State(state.me, decided)
    return state, (Entered(decided) if state.me in decided.names else Expelled(decided),)


@dataclass(frozen=True)
class Cause:
    """Why a member is lost."""

    by: str
    """The member whose line says so."""
    named: str
    """The member that the line names: the lost one itself, or another one of its unit."""
    silent: bool
    """Whether it was lost because it had not reported."""


@dataclass(frozen=True)
class Round:
    """What a log says, up to the line that ends the round."""

    reports: dict[str, Report]
    """The reports so far, by member name."""
    causes: dict[str, Cause]
    """Why members are lost, by the names of those that are named as lost and of the others of their units."""

    @functools.cached_property
    def lost(self) -> frozenset[str]:
        """The names of members that are named as lost, with their units."""
        return frozenset(self.causes)

    def missing(self, view: View) -> list[str]:
        """The members that have neither reported nor are named as lost, in the view's order."""
        return [name for name in view.names if name not in self.reports and name not in self.lost]


@functools.lru_cache(maxsize=4)  # the same log is read for several questions
def read(view: View, log: str) -> Round:
    """Reads the log of the view's epoch up to the line that ends the round, or all of it if none does.

    Lines of processes that are not in the view do not count. A process that was expelled may still write some.
    """
    reports: dict[str, Report] = {}
    lost: dict[str, Cause] = {}
    for line in log.splitlines()[_step_in(log) > 0 :]:
        name, *said = json.loads(line)
        if name in lost or name not in view.names:
            continue
        report = Report.load(said)
        reports.setdefault(name, report)
        silent = [each for each in report.silent if each not in reports]
        for named in (*report.lost, *silent):
            for each in view.with_units([named]):
                lost.setdefault(each, Cause(name, named, named not in report.lost))
        if all(each in reports or each in lost for each in view.names):
            break
    return Round(reports, lost)


def successor(view: View, log: str) -> View | None:
    """The view after `view`, as its log determines it; None if the round has not ended yet."""
    here = read(view, log)
    if here.missing(view):
        return None
    reports = here.reports
    stay = [
        replace(member, address=reports[member.name].address or member.address)
        for member in view.members
        if member.name in reports and member.name not in here.lost
    ]
    keep_out = here.lost | set(view.names)
    come: list[Member] = []
    for report in reports.values() if all(report.open for report in reports.values()) else ():
        for first in range(0, len(report.waiting) - view.unit + 1, view.unit):
            together = report.waiting[first : first + view.unit]
            if keep_out.isdisjoint(names := {each.name for each in together}):
                come += together
                keep_out |= names
    return View(
        epoch=view.epoch + 1,
        members=(*stay, *come),
        step=max(view.step, _step_in(log), *(report.step for report in reports.values())),
        lost=tuple(name for name in view.names if name not in {member.name for member in stay}),
        alone=not come and any(report.alone for report in reports.values()),
        unit=view.unit,
    )
