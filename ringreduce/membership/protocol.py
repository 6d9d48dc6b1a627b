"""How members of a view agree on the next one. A pure function: events in, effects out; no clock, process or socket.

A *view* says who is in: its epoch, its members, and the latest step that all of them have committed. An epoch has one
*log*, a value of a directory, to which lines are appended. The directory puts them in one order, and the log alone says
what follows the view, so an epoch has one successor, which everyone who reads the log finds.

    state, effects = step(state, event)

Members leave a view together, in a *round*:

1. Each member appends a line (`Report`): that it is here, what it has committed, and whom it knows to be lost.
2. The answer is the log with the lines of the others. Who misses somebody looks again and again, and appends another
   line when it learns that a member is lost.
3. The round is over with the first line after which every member is accounted for. Those who are here go on, all others
   are lost (`successor`). Later lines count for nothing, so a member that comes too late is expelled. So is one
   that reads in the log that it was given up, at once.

A member is *lost* when its process has ended, which is certain, or when the others have waited for it in vain, which
may be wrong. Safety does not depend on that: a member that was given up wrongly finds a view without it and is
expelled. Of members that want to go on without each other, the one whose line comes first does. Where members come in
*units*, so many in a row, as the ranks that hold one replica, a lost member takes its unit with it, and those who wait
are let in by units.

The *verdict* on the open step is in the successor. A member may report step k only when every member has voted for it,
and has what it needs to go on after it. So if any survivor has committed k, the successor says k, and all go on after
k. A step that must survive the death of those who committed it is written into the log itself (`Commit`), by
compare-and-set: a log that is over is never changed in this way.

What others need to make a group with a member is in its line too, and so in the view: its address, which nothing here
looks into.

Requests may be lost, be carried out without an answer, or be carried out twice. All of them can be repeated: of the
lines of a member the first one says what it reports, and to lose somebody twice is to lose it.

`tests/unit/test_membership_protocol.py` searches all orders of these events for small groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Member:
    """Who can be in a view."""

    name: str
    """Never used by another process, nor again by one that was lost."""
    address: str = ""
    """Whatever others need to reach it."""


@dataclass(frozen=True)
class View:
    """Who is in, from one change to the next."""

    epoch: int
    members: tuple[Member, ...]
    step: int = 0
    """The latest step that is known to be committed."""
    lost: tuple[str, ...] = ()
    """The names of those that were in the view before and are not in this one."""
    alone: bool = False
    """Some member has waited for others to join as long as it may, and nobody has."""
    unit: int = 1
    """So many members in a row are in together or not at all."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def with_units(self, names: Iterable[str]) -> set[str]:
        """These, and the others of their units."""
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
    """Those that it knows to wait for being let in."""
    open: bool = False
    """Whether others may be let in now, as far as this member goes."""
    without: tuple[str, ...] = ()
    """The names of members that it wants to go on without, dead or not."""
    alone: bool = False
    """Whether it has waited for others to join as long as it may, and nobody has."""
    silent: tuple[str, ...] = ()
    """The names of members that are lost unless they have reported before."""
    address: str = ""
    """Its address from now on; '': as it was."""

    def line(self, name: str) -> str:
        """What this member appends to the log."""
        waiting = [[each.name, each.address] for each in self.waiting]
        said = [name, self.step, waiting, self.open, self.without, self.alone, self.silent, self.address]
        return json.dumps(said) + "\n"

    @staticmethod
    def load(said: list[Any]) -> Report:
        step_, waiting, is_open, without, alone, silent, address = said
        members = tuple(Member(name, its_address) for name, its_address in waiting)
        return Report(step_, members, is_open, tuple(without), alone, tuple(silent), address)


# events


@dataclass(frozen=True)
class Leave:
    """This member's program wants the next view."""

    report: Report


@dataclass(frozen=True)
class Commit:
    """This member's program wants a step to outlive all that have committed it."""

    step: int


@dataclass(frozen=True)
class Look:
    """It is time to ask the directory again, with what this member knows of the others."""

    lost: frozenset[str] = frozenset()
    """Those that are lost, whatever they have said."""
    silent: frozenset[str] = frozenset()
    """Those that are lost unless they have reported."""


@dataclass(frozen=True)
class Answer:
    """What the directory has under a key, after what was asked; '': nothing."""

    key: str
    value: str


@dataclass(frozen=True)
class NoAnswer:
    """Nobody knows whether the request was carried out."""


Event: TypeAlias = Leave | Commit | Look | Answer | NoAnswer

# effects; a member has one request under way at most


@dataclass(frozen=True)
class Ask:
    """What does the directory have under a key?"""

    key: str


@dataclass(frozen=True)
class Append:
    """Put this after what is there under a key, and say what is there then."""

    key: str
    text: str


@dataclass(frozen=True)
class CompareSet:
    """Make `desired` the value under a key if it is `expected` ('': there is none), and say which it is then."""

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
    """The step will be in every view to come."""

    step: int


@dataclass(frozen=True)
class Expelled:
    """The others went on without this member."""

    view: View


Effect: TypeAlias = Request | Entered | Committed | Expelled


@dataclass(frozen=True)
class State:
    """What a member knows. It belongs to no round unless `report` is there."""

    me: str
    view: View
    log: str = ""
    """The view's, as this member has seen it last."""
    report: Report | None = None
    committing: int = 0
    """The step that it is writing into the log; 0: none."""
    request: Request | None = field(default=None)
    """What it waits for an answer to."""


def place(epoch: int) -> str:
    """The directory's key for the log of an epoch."""
    return f"log/{epoch}"


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """What a member does about an event."""
    if isinstance(event, Leave):
        return _append(replace(state, report=event.report, committing=0), event.report)
    if isinstance(event, Commit):
        return _commit(replace(state, committing=event.step))
    if isinstance(event, Look):
        return _look(state, event)
    if isinstance(event, NoAnswer):
        # Asking is safe whatever happened. A line counts once, and a commit names what it replaces.
        return state, () if state.request is None else (state.request,)
    state = replace(state, log=event.value, request=None)
    if decided := successor(state.view, state.log):
        return obey(state, decided)
    if (
        state.me in read(state.view, state.log).lost
    ):  # who gave it up may die before the round is over, and nobody end it
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
    return _request(state, Append(place(state.view.epoch), report.line(state.me)))


def _look(state: State, event: Look) -> tuple[State, tuple[Effect, ...]]:
    here = read(state.view, state.log)
    lost = event.lost - here.lost - {state.me}
    silent = event.silent & set(here.missing(state.view))
    if state.report and (lost or silent):
        return _append(state, replace(state.report, without=tuple(sorted(lost)), silent=tuple(sorted(silent))))
    return _request(state, Ask(place(state.view.epoch)))


def _commit(state: State) -> tuple[State, tuple[Effect, ...]]:
    """The committed step is the first line, so that the log does not grow with each."""
    lines = state.log.splitlines(keepends=True)
    reports = "".join(lines[_step_in(state.log) > 0 :])
    return _request(state, CompareSet(place(state.view.epoch), state.log, f"{state.committing}\n{reports}"))


def _step_in(log: str) -> int:
    """The step that was written into a log; 0: none."""
    first = log.partition("\n")[0]
    return int(first) if first.isdecimal() else 0


def obey(state: State, decided: View) -> tuple[State, tuple[Effect, ...]]:
    """This view is the next one, whoever has ended the round; or this member will not be in the next one."""
    state = State(state.me, decided)
    return state, (Entered(decided) if state.me in decided.names else Expelled(decided),)


@dataclass(frozen=True)
class Round:
    """What a log says, up to the line with which the round is over."""

    reports: dict[str, Report]
    """Of the members that are here."""
    lost: frozenset[str]

    def missing(self, view: View) -> list[str]:
        """The members that are neither here nor given up, in the view's order."""
        return [name for name in view.names if name not in self.reports and name not in self.lost]


def read(view: View, log: str) -> Round:
    reports: dict[str, Report] = {}
    lost: set[str] = set()
    for line in log.splitlines()[_step_in(log) > 0 :]:
        name, *said = json.loads(line)
        if name in lost:
            continue
        report = Report.load(said)
        reports.setdefault(name, report)
        lost |= view.with_units([*report.without, *(each for each in report.silent if each not in reports)])
        if all(each in reports or each in lost for each in view.names):
            break
    return Round(reports, frozenset(lost))


def successor(view: View, log: str) -> View | None:
    """The view that follows, when every member is accounted for."""
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
    come: dict[str, Member] = {}
    if all(report.open for report in reports.values()):
        come = {each.name: each for report in reports.values() for each in report.waiting if each.name not in keep_out}
    units = len(come) // view.unit * view.unit
    return View(
        epoch=view.epoch + 1,
        members=(*stay, *(come[name] for name in sorted(come)[:units])),
        step=max(view.step, _step_in(log), *(report.step for report in reports.values())),
        lost=tuple(name for name in view.names if name not in {member.name for member in stay}),
        alone=not units and any(report.alone for report in reports.values()),
        unit=view.unit,
    )
