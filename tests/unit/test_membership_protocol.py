"""Every order of events in small groups: members that leave, commit, die, are cut off or given up wrongly, a joiner,
and requests that are lost or carried out without an answer. Seeded bugs are found by the same search.

What is searched is the function that production runs. In every state that can be reached:

- an epoch has one view: no two members enter different ones, and no later line changes what follows it;
- nobody enters a view that it is not in, and nobody is given up who was neither dead nor suspected;
- a step that a member of the next view has committed is committed in that view;
- a step that was committed durably is in every later view;
- no log grows for ever;
- whatever has happened, all living members can still come to a view or an expulsion, once requests are answered again.

Worlds that differ only in the names of members count as one: the protocol treats all alike, and so does a scenario, but
for hosts and for what the first member alone does. So do worlds whose logs differ only in what no member can ever tell,
such as the order of two reports. One of each such class is searched (`Search.key`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
from worlds import never_settles

from ringreduce.coordination import protocol
from ringreduce.coordination.protocol import (
    Answer,
    Append,
    Commit,
    Committed,
    CompareSet,
    Entered,
    Expelled,
    Leave,
    Look,
    Member,
    NoAnswer,
    Report,
    State,
    View,
    log_key,
)

JOINER = Member("joiner")
MOST_LINES = 20
"""Of a log: more than its members have to say."""


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how often."""

    members: int
    on_second_host: int = 0
    """The last so many are on a host that may be cut off from the directory, and is linked again later. Of members on
    the other host only connections are seen to end, which those that go on close as well."""
    crashes: int = 0
    losses: int = 0
    """Requests that are lost, or carried out without an answer."""
    suspicions: int = 0
    """Living members that others take for lost."""
    partitions: int = 0
    joiner: bool = False
    durable: bool = False
    """Member 0 commits durably, the others as usual."""
    unwanted: bool = False
    """Member 0 wants to go on without the last one, which lives."""
    at_once: bool = False
    """A member that leaves while it can reach the directory has its line in the log at the same moment."""
    unit: int = 1
    """So many members in a row are in together or not at all."""


class Process(NamedTuple):
    state: State
    alive: bool = True
    leaving: bool = False
    request: Any = None
    committed: int = 0
    expelled: bool = False


class World(NamedTuple):
    processes: tuple[Process, ...]
    directory: tuple[tuple[str, str], ...]
    crashes: int
    losses: int
    suspicions: int
    partitions: int
    cut_off: bool
    blamed: frozenset[str]
    """The names of those that have been dead, suspected or unwanted at some time."""
    durable: int


class Broken(AssertionError):
    """An invariant does not hold."""


NAMES = "WXYZ"
"""Of members; letters that are nowhere else in what `repr` says of a world."""
LISTED = rf"(?:Member\(name='\w+', address=''\)|'[{NAMES}]'|\"[{NAMES}]\")"
LIST = re.compile(rf"(?<=[(\[]){LISTED}(?:, {LISTED})*(?=,?[)\]])")
"""A list of members or names there. All are in the order of names, and must be so in another naming."""


class Search:
    """All worlds that can be reached."""

    def __init__(self, scenario: Scenario, step: Callable[..., Any] = protocol.step) -> None:
        self.scenario, self._step = scenario, step
        self.successor = functools.cache(protocol.successor)
        self.views = functools.cache(self._views)
        self._seen_steps: dict[Any, Any] = {}
        self._numbers: dict[bytes, int] = {}
        self._parts: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        members = tuple(map(Member, NAMES[: scenario.members]))
        self.first = View(0, members, unit=scenario.unit)
        self._namings = [order for order in itertools.permutations(range(scenario.members)) if self._is_alike(order)]
        everyone = tuple(Process(State(member.name, self.first)) for member in members)
        limits = scenario.crashes, scenario.losses, scenario.suspicions, scenario.partitions
        self.start = World(everyone, (), *limits, cut_off=False, blamed=frozenset(), durable=0)

    def run(self, most: int = 10**6) -> int:
        """Returns how many worlds there are. Raises `Broken`."""
        number = {self.key(self.start)[1]: 0}
        settled = bytearray([False])
        before, after = array("l"), array("l")
        todo = [(self.start, 0)]
        while todo:
            world, here = todo.pop()
            settled[here] = self.is_settled(world)
            for each, costs in self.after(world):
                following, key = self.key(each)
                there = number.setdefault(key, len(number))
                if there == len(settled):
                    assert there < most, "the search is too large for a test"
                    settled.append(False)
                    todo.append((following, there))
                    self.check(following)
                if not costs:
                    before.append(here)
                    after.append(there)
        never = never_settles(settled, before, after)
        if never:
            raise Broken(f"{never} of {len(number)} worlds never settle")
        return len(number)

    def key(self, world: World) -> tuple[World, bytes]:
        """The world, and what it has in common with those that differ only in names. Equal parts become the same."""
        processes, directory, *rest = world
        found = [self._part(process) for process in processes]
        logs = [self._part(log, view) for log, view in zip(directory, self.views(directory), strict=False)]
        blamed = self._part(tuple(sorted(world.blamed)))[1]
        world = World(tuple(part for part, _ in found), tuple(log for log, _ in logs), *rest)
        others = range(self.scenario.members, len(found))
        begins = [found[order[0]][1][naming] for naming, order in enumerate(self._namings)]
        least, keys = min(begins), []
        for naming, order in enumerate(self._namings):
            if begins[naming] == least:
                numbers = [found[index][1][naming] for index in (*order, *others)]
                keys.append((*numbers, blamed[naming], *(log[naming] for _, log in logs)))
        limits = world.crashes, world.losses, world.suspicions, world.partitions, world.cut_off, world.durable
        return world, array("I", (*limits, *min(keys))).tobytes()

    def _part(self, part: Any, view: View | None = None) -> tuple[Any, tuple[int, ...]]:
        """The first one that is equal, and its number in each naming. `view`: of the epoch, if the part is a log."""
        if (part, view) not in self._parts:
            text = repr(part)
            if isinstance(part, Process) and not self.scenario.durable:
                state = part.state
                text = repr(part._replace(state=replace(state, log=self.gist(state.view, state.log))))
            elif view and not self.scenario.durable:
                text = repr(self.gist(view, part[1]))
            numbers = []
            for order in self._namings:
                names = str.maketrans("".join(NAMES[old] for old in order), NAMES[: len(order)])
                named = LIST.sub(in_order, text.translate(names)).encode()
                number = self._numbers.setdefault(hashlib.blake2b(named, digest_size=16).digest(), len(self._numbers))
                numbers.append(number)
            self._parts[part, view] = part, tuple(numbers)
        return self._parts[part, view]

    def gist(self, view: View, log: str) -> Any:
        """What a log means: logs with the same gist have the same future, since `protocol.read` folds over the lines.

        With durable commits this is not enough, because a compare-and-set depends on every letter.
        """
        if not log or (decided := self.successor(view, log)):
            return log and decided
        here, said = protocol.read(view, log), dict[Report, list[str]]()
        for name in sorted(here.reports):
            said.setdefault(replace(here.reports[name], lost=(), silent=()), []).append(name)
        return sorted(said.items(), key=repr), sorted(here.lost), log.count("\n")

    def _is_alike(self, order: tuple[int, ...]) -> bool:
        """Whether all would be the same if member `order[i]` had the name of member i."""
        scenario, last = self.scenario, self.scenario.members - 1
        leads = scenario.joiner or scenario.durable or scenario.unwanted
        return (
            all(self.is_far(old) == self.is_far(new) for new, old in enumerate(order))
            and all(order[i] // scenario.unit == order[i - i % scenario.unit] // scenario.unit for i in order)
            and not (leads and order[0] != 0)
            and not (scenario.unwanted and order[last] != last)
        )

    # what may happen

    def after(self, world: World) -> Iterator[tuple[World, bool]]:
        """The worlds that may follow, and whether it takes something that need not happen."""
        for index, process in enumerate(world.processes):
            if process.alive and not process.expelled:
                yield from self.moves(world, index, process)
                if world.crashes > 0:
                    dead = Process(State(process.state.me, View(0, ())), alive=False)
                    name = frozenset({process.state.me})
                    yield put(world, index, dead)._replace(crashes=world.crashes - 1, blamed=world.blamed | name), True
        if world.cut_off:
            yield world._replace(cut_off=False), False
        elif world.partitions > 0:
            yield world._replace(cut_off=True, partitions=world.partitions - 1), True

    def moves(self, world: World, index: int, process: Process) -> Iterator[tuple[World, bool]]:
        if process.request is not None:
            if not self.is_cut_off(world, index):
                yield self.serve(world, index, process), False
                if world.losses > 0:
                    fewer = world._replace(losses=world.losses - 1)
                    yield self.serve(fewer, index, process, answered=False), True
                    yield self.event(fewer, index, process, NoAnswer()), True  # it was lost on its way
        elif process.leaving:
            yield from self.looks(world, index, process)
        else:
            yield from self.works(world, index, process)

    def works(self, world: World, index: int, process: Process) -> Iterator[tuple[World, bool]]:
        """In a view. All members have voted for the step after the view's, so any may find that it is committed."""
        view, me = process.state.view, process.state.me
        if process.committed == 0 and view.epoch == 0:
            if self.scenario.durable and index == 0:
                yield self.event(world, index, process, Commit(1)), False
            else:
                yield put(world, index, process._replace(committed=1)), False
        if self.must_leave(world, view):
            waiting = (JOINER,) if self.scenario.joiner and index == 0 and view.epoch == 0 else ()
            without = (self.first.names[-1],) if self.scenario.unwanted and index == 0 else ()
            without = tuple(name for name in without if name in view.names and name != me)
            blamed = world._replace(blamed=world.blamed | set(without))
            report = Report(max(process.committed, view.step), waiting, self.scenario.joiner, without)
            world = self.event(blamed, index, process._replace(leaving=True), Leave(report))
            if self.scenario.at_once and not self.is_cut_off(world, index):
                world = self.serve(world, index, world.processes[index])
            yield world, False

    def must_leave(self, world: World, view: View) -> bool:
        by_name = {process.state.me: process for process in world.processes}
        return view.epoch == 0 or any(
            not by_name[name].alive
            or by_name[name].expelled
            or (by_name[name].leaving and by_name[name].state.view.epoch == view.epoch)
            or by_name[name].state.view.epoch > view.epoch
            for name in view.names
            if name in by_name
        )

    def looks(self, world: World, index: int, process: Process) -> Iterator[tuple[World, bool]]:
        if self.is_cut_off(world, index):
            return
        lost, silent = self.known(world, index)
        yield self.look(world, index, Look(lost, silent)), False
        if world.suspicions > 0:
            for name in protocol.read(process.state.view, process.state.log).missing(process.state.view):
                if name not in lost | silent:
                    fewer = world._replace(suspicions=world.suspicions - 1, blamed=world.blamed | {name})
                    yield self.look(fewer, index, Look(lost, silent | {name})), True

    def known(self, world: World, index: int) -> tuple[frozenset[str], frozenset[str]]:
        """Whose end a member sees, for certain and by closed connections."""
        lost, silent = set(), set()
        mine = world.processes[index].state.view.epoch
        for other, each in enumerate(world.processes):
            far = self.is_far(index) != self.is_far(other)
            if not each.alive and not far:
                lost.add(each.state.me)
            elif far and (not each.alive or has_left(each, mine)):
                silent.add(each.state.me)
        return frozenset(lost), frozenset(silent)

    def look(self, world: World, index: int, look: Look) -> World:
        """With the answer, since nothing depends on what happens between the two."""
        world = self.event(world, index, world.processes[index], look)
        return self.serve(world, index, world.processes[index])

    def serve(self, world: World, index: int, process: Process, answered: bool = True) -> World:
        """The directory carries out the process's request."""
        request, values = process.request, dict(world.directory)
        if isinstance(request, Append):
            values[request.key] = values.get(request.key, "") + request.text
        if isinstance(request, CompareSet) and values.get(request.key, "") == request.expected:
            values[request.key] = request.desired
        before = self.views(world.directory)
        if values.get(request.key, "").count("\n") > MOST_LINES:
            raise Broken(f"a log grows for ever: {values[request.key]}")
        directory = tuple(sorted(values.items()))
        after = self.views(directory)
        if after[: len(before)] != before:
            raise Broken(f"{request} changes {before} to {after}")
        if request.key == log_key(before[-1].epoch):  # else the line has changed nothing, and is forgotten
            world = world._replace(directory=directory)
        for view in after[len(before) :]:
            world = self.admit(world, view)
        answer = Answer(request.key, values.get(request.key, "")) if answered else NoAnswer()
        return self.event(world, index, world.processes[index], answer)

    def _views(self, directory: tuple[tuple[str, str], ...]) -> list[View]:
        """The first one, and what follows by the directory."""
        views, logs = [self.first], dict(directory)
        while (log := logs.get(log_key(views[-1].epoch))) and (after := self.successor(views[-1], log)):
            views.append(after)
        return views

    def admit(self, world: World, view: View) -> World:
        """The joiner begins when it has been let in."""
        if JOINER.name in view.names and not any(process.state.me == JOINER.name for process in world.processes):
            world = world._replace(processes=(*world.processes, Process(State(JOINER.name, view))))
        return world

    def event(self, world: World, index: int, process: Process, event: Any) -> World:
        key = (process.state, event)
        if key not in self._seen_steps:
            self._seen_steps[key] = self._step(process.state, event)
        state, effects = self._seen_steps[key]
        process = process._replace(state=state, request=None)
        for effect in effects:
            if isinstance(effect, protocol.Request):
                process = process._replace(request=effect)
            elif isinstance(effect, Committed):
                process = process._replace(committed=effect.step)
                world = world._replace(durable=max(world.durable, effect.step))
            elif isinstance(effect, Entered):
                self.check_entry(world, process, effect.view)
                process = process._replace(leaving=False, committed=0)  # it is in the view
            elif isinstance(effect, Expelled):
                process = Process(State(process.state.me, View(0, ())), expelled=True)
        return put(world, index, process)

    def is_cut_off(self, world: World, index: int) -> bool:
        return world.cut_off and self.is_far(index)

    def is_far(self, index: int) -> bool:
        first = self.scenario.members - self.scenario.on_second_host
        return first <= index < self.scenario.members

    # what must hold

    def check_entry(self, world: World, process: Process, view: View) -> None:
        me, views = process.state.me, self.views(world.directory)
        if me not in view.names:
            raise Broken(f"{me} enters a view that it is not in: {view}")
        if view not in views:
            raise Broken(f"{me} enters {view}; by the directory there have been {views}")
        if process.committed > view.step:
            raise Broken(f"{me} has committed step {process.committed}, and enters {view}")

    def check(self, world: World) -> None:
        views: dict[int, View] = {}
        for process in world.processes:
            view = process.state.view
            if not view.members:
                continue  # it is no member any more
            other = views.setdefault(view.epoch, view)
            if view != other:
                raise Broken(f"two views of one epoch: {view} and {other}")
        now = self.views(world.directory)[-1]
        if now.epoch > 0 and now.step < world.durable:
            raise Broken(f"step {world.durable} was committed durably; {now}")
        if set(now.lost) != self.first.with_units(now.lost):
            raise Broken(f"a part of a unit is lost: {now}")
        if wrongly := set(now.lost) - self.first.with_units(world.blamed):
            raise Broken(f"{wrongly} lived, and nobody suspected them: {now}")

    def is_settled(self, world: World) -> bool:
        return all(
            process.expelled or not process.alive or (process.request is None and not process.leaving)
            for process in world.processes
        )


def in_order(found: re.Match[str]) -> str:
    return ", ".join(sorted(re.findall(LISTED, found[0])))


def has_left(process: Process, epoch: int) -> bool:
    """Whether it may have closed its connections of this epoch: it has reported."""
    now = process.state.view.epoch
    return process.expelled or now > epoch or (now == epoch and process.leaving and process.request is None)


def put(world: World, index: int, process: Process) -> World:
    processes = (*world.processes[:index], process, *world.processes[index + 1 :])
    return world._replace(processes=processes)


SMALL = (
    Scenario(2, crashes=1, losses=2),
    Scenario(2, crashes=1, losses=1, durable=True, suspicions=1),
    Scenario(2, crashes=1, joiner=True),
    Scenario(3, crashes=1),
    Scenario(3, unwanted=True),
    Scenario(3, 1, crashes=1),
    Scenario(3, 1, partitions=1, suspicions=1),
    Scenario(3, 1, crashes=1, suspicions=1),
)
MEDIUM = (
    Scenario(3, crashes=1, losses=1, durable=True),
    Scenario(3, crashes=1, joiner=True),
    Scenario(4, crashes=1, unit=2, at_once=True),
)
LARGE = (
    Scenario(4, 2, partitions=1, joiner=True, at_once=True),
    Scenario(3, 1, crashes=2, partitions=1, suspicions=1, durable=True, at_once=True),
    Scenario(4, 2, partitions=1, suspicions=1, at_once=True),
    Scenario(4, crashes=2, at_once=True),
    Scenario(3, 1, crashes=1, partitions=1, joiner=True, at_once=True),
    Scenario(4, 2, crashes=1, partitions=1, losses=1, at_once=True),
    Scenario(4, 2, crashes=1, partitions=1, suspicions=1, unit=2, at_once=True),
    Scenario(4, 2, crashes=2, partitions=1, joiner=True, at_once=True),
    Scenario(4, 2, crashes=2, partitions=1, losses=1, joiner=True, at_once=True),
)
"""Seconds each, and half an hour the last two: python tests/unit/test_membership_protocol.py"""


@pytest.mark.parametrize(
    "scenario", [*SMALL, *(pytest.param(each, marks=pytest.mark.slow) for each in MEDIUM)], ids=str
)
def test_every_order_of_events(scenario: Scenario) -> None:
    assert Search(scenario).run() > 100


def test_a_unit_is_in_or_out() -> None:
    """Whoever of it is lost, and those who wait come by units."""
    view = View(0, tuple(map(Member, NAMES)), unit=2)
    waiting = tuple(Member(f"joiner {number}") for number in range(3))
    said = {"W": Report(lost=("X",), open=True), "Z": Report(waiting=waiting, open=True)}
    log = "".join(report.line(name) for name, report in said.items())
    assert protocol.successor(view, log) is None  # Y has said nothing yet, and will be in
    after = protocol.successor(view, log + Report(open=True).line("Y"))
    assert after is not None and after.names == ("Y", "Z", "joiner 0", "joiner 1") and after.lost == ("W", "X")
    assert View.load(after.dump()) == after
    _, effects = protocol.step(State("W", view), Answer(log_key(0), log))
    assert isinstance(effects[0], Expelled)


def test_lines_of_processes_that_are_not_in_the_view_do_not_count() -> None:
    view = View(3, (Member("W"), Member("X")), step=5)
    stranger = Report(step=9, lost=("X",), alone=True, waiting=(JOINER,)).line("Y")
    assert protocol.read(view, stranger).reports == {}  # or a member would believe that another one has left
    log = Report(6).line("W") + stranger
    assert protocol.successor(view, log) is None
    assert protocol.successor(view, log + Report(6).line("X")) == View(4, view.members, step=6)


@pytest.mark.parametrize(
    "scenario", [Scenario(3, 1, crashes=1), Scenario(2, crashes=1, losses=1, joiner=True)], ids=str
)
def test_one_of_each_class_is_searched(scenario: Scenario) -> None:
    """A search of all worlds finds the same classes, and all worlds of a class are followed by the same classes."""
    every, one = Search(scenario), Search(scenario)
    todo, seen = [every.start], {every.start}
    futures: dict[bytes, set[tuple[bytes, bool]]] = {}
    while todo:
        world = todo.pop()
        future = {(one.key(following)[1], costs) for following, costs in every.after(world)}
        assert futures.setdefault(one.key(world)[1], future) == future
        for following, _ in every.after(world):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    assert len(futures) == one.run() < len(seen)


# seeded bugs: each is found


def asks_only_itself(state: State, event: Any) -> Any:
    """A member does not wait for the others: who is not here yet is lost."""
    if isinstance(event, Look):
        event = Look(frozenset(state.view.names) - {state.me})
    return protocol.step(state, event)


def leaves_out_the_others_reports(state: State, event: Any) -> Any:
    """A member's own step is the verdict."""
    after, effects = protocol.step(state, event)
    if not (effects and isinstance(effects[0], Entered) and state.report):
        return after, effects
    view = replace(effects[0].view, step=max(state.view.step, state.report.step))
    return protocol.obey(after, view)


def does_not_read_the_others_lines(state: State, event: Any) -> Any:
    """A member takes what it knew, and its own line, for the whole log."""
    if isinstance(event, Answer) and isinstance(state.request, Append):
        event = replace(event, value=state.log + state.request.text)
    return protocol.step(state, event)


def enters_without_being_named(state: State, event: Any) -> Any:
    """A member that was given up goes on all the same."""
    after, effects = protocol.step(state, event)
    return after, tuple(Entered(effect.view) if isinstance(effect, Expelled) else effect for effect in effects)


def forgets_the_step_of_the_log(state: State, event: Any) -> Any:
    """A durable commit that came before the end of the round is not in the view."""
    if isinstance(event, Answer) and event.value.partition("\n")[0].isdecimal() and state.report:
        event = replace(event, value=event.value.partition("\n")[2])
    return protocol.step(state, event)


def commits_when_the_round_is_over(state: State, event: Any) -> Any:
    """A step is written into a log that has its successor."""
    if isinstance(event, Answer) and state.committing and protocol.successor(state.view, event.value):
        return protocol._commit(replace(state, log=event.value))
    return protocol.step(state, event)


def loses_who_has_reported(state: State, event: Any) -> Any:
    """Closed connections count for an end although the member has said that it goes on."""
    if isinstance(event, Look):
        event = Look(event.lost | event.silent)
    return protocol.step(state, event)


def asks_once(state: State, event: Any) -> Any:
    """A request without an answer counts as carried out."""
    after, effects = protocol.step(state, event)
    return (replace(after, request=None), ()) if isinstance(event, NoAnswer) else (after, effects)


def waits_when_given_up(state: State, event: Any) -> Any:
    """A member whose lines do not count any more waits for the end of the round."""
    after, effects = protocol.step(state, event)
    if effects and isinstance(effects[0], Expelled) and not protocol.successor(state.view, event.value):
        return replace(state, log=event.value, request=None), ()
    return after, effects


MUTANTS = {
    asks_only_itself: Scenario(3),
    leaves_out_the_others_reports: Scenario(3, crashes=1),
    does_not_read_the_others_lines: Scenario(2, crashes=1, suspicions=1),
    enters_without_being_named: Scenario(2, crashes=1, suspicions=1),
    forgets_the_step_of_the_log: Scenario(2, crashes=1, durable=True, suspicions=1),
    commits_when_the_round_is_over: Scenario(2, crashes=1, durable=True, suspicions=1),
    loses_who_has_reported: Scenario(3, 1, crashes=1),
    asks_once: Scenario(2, crashes=1, losses=2),
    waits_when_given_up: Scenario(3, 1, crashes=1, suspicions=1),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_seeded_bug_is_found(mutant: Any) -> None:
    Search(MUTANTS[mutant]).run()  # where there is none, there is nothing to find
    with pytest.raises(Broken):
        Search(MUTANTS[mutant], mutant).run()


def main() -> None:
    for scenario in LARGE:
        print(scenario, flush=True)
        print(Search(scenario).run(10**8), "worlds", flush=True)


if __name__ == "__main__":
    main()
