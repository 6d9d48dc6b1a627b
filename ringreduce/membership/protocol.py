"""How members of a view agree on the next one. A pure function: events in, effects out; no clock, process or socket.

A *view* says who is in: its epoch, its members, and the latest step that all of them have committed. The current view
is one value of a directory. It is only ever changed by compare-and-set, so an epoch has one view and one successor.

    state, effects = step(state, event)

Members leave a view together, in a *round*:

1. Each member tells the directory that it is here, and what it has committed (`Report`), under a key of the epoch.
2. It then asks for the view and for the first member that is neither here nor known to be lost, again and again.
3. Who finds every member accounted for proposes the successor by compare-and-set: those who are here go on, all others
   are lost. Whatever the directory says afterwards is the next view; the losers of the race obey it.

A member is *lost* when its process has ended, which is certain, or when the others have waited for it in vain, which
may be wrong. Safety does not depend on that: a member that was given up wrongly finds a view without it and is
expelled.

The *verdict* on the open step is in the view. A member may report step k only when every member has voted for it, and
has what it needs to go on after it. So if any survivor has committed k, the successor says k, and all go on after k. A
step that must survive the death of those who committed it is written into the view itself (`Commit`), by
compare-and-set.

Requests may be lost, be carried out without an answer, or be carried out twice. All of them can be repeated: a report
is written once, and a proposal names the text that it replaces.

`tests/unit/test_membership_protocol.py` searches all orders of these events for small groups.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TypeAlias

VIEW = "view"
"""The directory's key for the current view."""


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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def dump(self) -> str:
        members = [[member.name, member.address] for member in self.members]
        return json.dumps([self.epoch, self.step, members, self.lost, self.alone])

    @staticmethod
    def load(text: str) -> View:
        epoch, step_, members, lost, alone = json.loads(text)
        return View(epoch, tuple(Member(name, address) for name, address in members), step_, tuple(lost), alone)


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

    def dump(self) -> str:
        return json.dumps(
            [self.step, [[each.name, each.address] for each in self.waiting], self.open, self.without, self.alone]
        )

    @staticmethod
    def load(text: str) -> Report:
        step_, waiting, is_open, without, alone = json.loads(text)
        members = tuple(Member(name, address) for name, address in waiting)
        return Report(step_, members, is_open, tuple(without), alone)


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
    """It is time to ask the directory again. `lost`: the members that are lost, as far as this member knows."""

    lost: frozenset[str] = frozenset()


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
class CompareSet:
    """Make `desired` the value under a key if it is `expected` ('': there is none), and say which it is then."""

    key: str
    expected: str
    desired: str


Request: TypeAlias = Ask | CompareSet


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
    report: Report | None = None
    here: tuple[tuple[str, Report], ...] = ()
    """The reports that it has seen in this round."""
    lost: frozenset[str] = frozenset()
    committing: int = 0
    """The step that it is writing into the view; 0: none."""
    request: Request | None = field(default=None)
    """What it waits for an answer to."""


def place(epoch: int, name: str) -> str:
    """The directory's key for a member's report."""
    return f"here/{epoch}/{name}"


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """What a member does about an event."""
    if isinstance(event, Leave):
        state = replace(state, report=event.report, here=(), committing=0)
        return _request(state, CompareSet(place(state.view.epoch, state.me), "", event.report.dump()))
    if isinstance(event, Commit):
        state = replace(state, committing=event.step)
        return _request(state, _with_step(state.view, event.step))
    if isinstance(event, Look):
        state = replace(state, lost=state.lost | event.lost - {state.me})
        return _request(state, Ask(VIEW))
    if isinstance(event, NoAnswer):
        # Asking is safe whatever happened. A report and a proposal name what they replace, so they can be sent again.
        return state, () if state.request is None else (state.request,)
    state = replace(state, request=None)
    if event.key == VIEW:
        return _seen_view(state, View.load(event.value))
    if event.value:  # somebody's report
        name = event.key.removeprefix(place(state.view.epoch, ""))
        state = replace(state, here=(*state.here, (name, Report.load(event.value))))
        return _missing_or_propose(state)
    return state, ()


def _request(state: State, request: Request) -> tuple[State, tuple[Effect, ...]]:
    return replace(state, request=request), (request,)


def _with_step(view: View, committed: int) -> CompareSet:
    return CompareSet(VIEW, view.dump(), replace(view, step=max(view.step, committed)).dump())


def _seen_view(state: State, seen: View) -> tuple[State, tuple[Effect, ...]]:
    """The directory has this view."""
    if seen.epoch > state.view.epoch:
        return obey(state, seen)
    state = replace(state, view=seen)  # of the same epoch: somebody has written a step into it
    if state.committing:
        if seen.step >= state.committing:
            done = Committed(state.committing)
            return replace(state, committing=0), (done,)
        return _request(state, _with_step(seen, state.committing))
    if state.report is None:
        return state, ()
    return _missing_or_propose(state)


def obey(state: State, decided: View) -> tuple[State, tuple[Effect, ...]]:
    """The directory's view is the next one, whoever has proposed it."""
    state = State(state.me, decided)
    return state, (Entered(decided) if state.me in decided.names else Expelled(decided),)


def missing(state: State) -> list[str]:
    """The members that are neither here nor given up, in the view's order."""
    here = {name for name, _ in state.here}
    unwanted = {name for _, report in state.here for name in report.without}
    return [name for name in state.view.names if name not in here | state.lost | unwanted]


def _missing_or_propose(state: State) -> tuple[State, tuple[Effect, ...]]:
    if still := missing(state):
        return _request(state, Ask(place(state.view.epoch, still[0])))
    return _request(state, CompareSet(VIEW, state.view.dump(), successor(state).dump()))


def successor(state: State) -> View:
    """The view that follows when every member is accounted for."""
    reports = dict(state.here)
    unwanted = {name for report in reports.values() for name in report.without}
    gone = unwanted | state.lost
    stay = [member for member in state.view.members if member.name in reports and member.name not in gone]
    keep_out = gone | set(state.view.names)
    come: dict[str, Member] = {}
    if all(report.open for report in reports.values()):
        come = {each.name: each for report in reports.values() for each in report.waiting if each.name not in keep_out}
    return View(
        epoch=state.view.epoch + 1,
        members=(*stay, *(come[name] for name in sorted(come))),
        step=max(state.view.step, *(report.step for report in reports.values())),
        lost=tuple(name for name in state.view.names if name not in {member.name for member in stay}),
        alone=not come and any(report.alone for report in reports.values()),
    )
