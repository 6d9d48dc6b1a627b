"""Every order of events among the replicas of a server whose backups are reached by TCP, and its workers: processes
that die, a host that is cut off and comes back, connections that break, requests to the store that are carried out
without an answer, new backups, and servers that leave.

What decides is the `Standing` that production runs. A model of the rest stands for these functions:

- `take`, `carry_out`: Server::take, decide and carry_out, with Leader::write_down and Unconfirmed::next. A server whose
  backup has been given everything carries out what the backup has confirmed. Before that, or without a backup, it
  carries out everything.
- `answer`: Server::answer and release_held. A push is answered when the backup has carried it out as well. A
  request that comes again is answered again and has no second effect, as Shard::on(Request) has it.
- `lead`: Replication.lead, ServerProcess._follow_far, Server::lead and Leader. A backup that
  was in the process before is stopped.
- `follow`: FarLog::deliver, Server::repeat_all and Follower. A backup passes
  over updates of a block that it has not got (keep_decided). Receiving a record and carrying it out are one step here:
  nobody sees a backup in between, and decided() carries out what is left.
- `of_link`: a confirmation that the server hears, with its turn after that, and FarPartner::progress with on_silence.
- `lose`: Server::end and Follower::repeat_lose, of a worker whose connection has broken.
- `silence`, `served`: Replication._break_off, _decide, lead, hand_over, serve_alone and _change.
- `decided`: Server::decided, with take_over, go_on_alone, give_up and be_replaced.
- `hand_over`, `left`: ReplicaManager.give_away, Replication.hand_over, Server::freeze and leave_to_backup.
- `meet`, `turn`, `give_up`: FailoverConnector, and take_lost and turn_to_far_backup.

In every world that can be reached:

- what a server has carried out, and so may show, is the beginning of what every later server has, and a server that is
  replaced carries out nothing that its successor has not;
- no push is applied twice;
- a push that was answered is applied, and a pull shows all that was answered before it came;
- a replica that the view names does not end by itself;
- a worker is told that the server is lost only if both processes of a pair have died, or the only one of a server
  without a backup, or if the worker was cut off from the one that goes on;
- all requests of workers can still end, once requests to the store are answered and nothing is cut off.

One server is searched. Another one has replicas in the same processes, so it sees the same deaths and cuts. Nothing
else that happens to it changes what this one may do: they share a lock, so one may wait for the other's request to the
store. So each of several servers goes through worlds that are searched here, with at most as many deaths and cuts.
`Group` has several servers, with that lock, and is searched where it is small.

The workers push and pull over TCP, in `asynchronous`. What a worker reads in the memory of a server on its own host may
be older when that host is cut off (docs/parameter_server.md), and is not searched.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import never_settles

from ringreduce.parameter_server.views import Replica, Standing, View


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how often. Process i is on host i, and begins the server if it is 0, its backup if it is 1.
    The store is on a host of its own."""

    processes: int = 2
    workers: tuple[tuple[str, int], ...] = (("push", 9), ("push", 9))
    """What each one asks, in order, with a blank between: push or pull. And its host."""
    crashes: int = 0
    unanswered: int = 0
    """Requests to the store that are carried out without an answer. A request that gets lost changes nothing, since it
    is made again."""
    cuts: int = 0
    """Times that one of the hosts is cut off from all others."""
    breaks: int = 0
    """Connections between a server and its backup that break, with what is under way."""
    leaves: int = 0
    """Servers that leave their blocks to their backups, with a process that takes no backups from then on."""
    moves: int = 0
    """The same of a process that stays, and takes backups."""
    backups: int = 1
    """Times that a server tries to get a new one."""
    prompt: bool = True
    """A worker meets replicas, and notices that they have ended, as soon as it can."""


Request = tuple[int, int]
"""A worker, and which one of its requests."""


class Rep(NamedTuple):
    """A replica: its `Server` in C++, and what Python does for it."""

    known: Standing
    log: tuple[tuple[Request, int], ...] = ()
    """What has been decided, each with its position in the log; 0: the present backup, if any, got it as state."""
    done: int = 0
    """So many of these have been carried out."""
    value: tuple[Request, ...] = ()
    """The pushes that have been applied."""
    has_state: bool = True
    has_block: bool = True
    serves: bool = False
    is_heir: bool = False
    frozen: bool = False
    leaves: bool = False
    hands_over: bool = False
    """`Replication.hand_over` is under way."""
    gone: frozenset[int] = frozenset()
    """Workers that have been given up, since they were out of reach."""
    asked: tuple[tuple[Request, tuple[int, ...]], ...] = ()
    """Requests that came over this one's connections, and how many each worker had got answered then."""
    asks: tuple[str, View | Replica] | None = None
    """What it asks the store for, and why, while it holds the lock. If it decides: without whom it would go on."""
    silent: tuple[Replica, ...] = ()
    """Those that it has noticed to be silent, and not decided about."""


class Link(NamedTuple):
    """A server's log to its backup."""

    flight: tuple[tuple[Any, ...], ...] = ()
    written: int = 0
    taken: int = 0
    confirmed: int = 0
    given: int = 0
    """The position when all had been given; 0: not yet."""
    counts: bool = False
    broken: bool = False
    here: bool = True
    """The server has it, and has not noticed that it is broken."""
    there: bool = True
    """The same of the backup."""
    kept: bool = True
    """The server has this backup, even if it does not hear it."""


class Worker(NamedTuple):
    number: int = 0
    """Requests that have been answered."""
    connected: tuple[Replica, ...] = ()
    """The first one is asked."""
    met: frozenset[Replica] = frozenset()
    lost: bool = False


class World(NamedTuple):
    view: View
    reps: tuple[tuple[Replica, Rep], ...]
    links: tuple[tuple[tuple[Replica, Replica], Link], ...]
    workers: tuple[Worker, ...]
    late: frozenset[tuple[View, View]]
    """Requests of those that have ended, which the store may still carry out."""
    dead: frozenset[int]
    leaving: frozenset[int]
    shown: tuple[Request, ...]
    may_be_lost: bool
    cut: int
    """The host that is cut off; -1: none."""
    crashes: int
    unanswered: int
    cuts: int
    breaks: int
    leaves: int
    moves: int
    backups: int


class Broken(AssertionError):
    """An invariant does not hold."""


class Draft:
    """A world that is being changed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reps, self.links = dict(world.reps), dict(world.links)
        self.workers = list(world.workers)
        self.view, self.late, self.shown = world.view, world.late, world.shown
        self.change: dict[str, Any] = {}

    def put(self, me: Replica, **change: Any) -> None:
        self.reps[me] = self.reps[me]._replace(**change)

    def link(self, pair: tuple[Replica, Replica], **change: Any) -> None:
        self.links[pair] = self.links[pair]._replace(**change)

    def backup(self, me: Replica) -> tuple[tuple[Replica, Replica], Link] | None:
        return next(((pair, link) for pair, link in self.links.items() if pair[0] == me and link.kept), None)

    def followed(self, me: Replica) -> tuple[Replica, Replica] | None:
        return next((pair for pair, link in self.links.items() if pair[1] == me), None)

    def end(self, me: Replica) -> None:
        """Of a replica: its connections break, and what it has asked the store for may still be done."""
        rep = self.reps.pop(me)
        if rep.asks is not None:
            self.late |= {(rep.known.view, wanted(rep))}
        for pair in list(self.links):
            if pair[0] == me:
                self.link(pair, broken=True, here=False, kept=False)
            elif pair[1] == me:
                self.link(pair, broken=True, there=False)

    def freeze(self) -> World:
        late = frozenset(each for each in self.late if each[0].number > self.view.number or each[0] == self.view)
        links = []
        for pair, link in self.links.items():
            if link.kept or pair[1] in self.reps:
                links.append((pair, link if link.there else link._replace(flight=())))
        return self.world._replace(
            view=self.view,
            reps=tuple(sorted(self.reps.items())),
            links=tuple(sorted(links)),
            workers=tuple(self.workers),
            late=late,
            shown=self.shown,
            **self.change,
        )


def wanted(rep: Rep) -> View:
    """The view that it asks for."""
    assert rep.asks is not None
    why, after = rep.asks
    return rep.known.view.alone(rep.known.me) if why == "decide" else after  # type: ignore[return-value]


Events = Iterator[tuple[World, bool]]
"""The worlds that may follow, each with whether it takes something that need not happen."""


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """It would look through all worlds again and again, none of which is part of a circle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Search:
    """All worlds that can be reached. Seeded bugs are subclasses."""

    standing: type[Standing] = Standing

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.requests = [asks.split() for asks, _ in scenario.workers]
        server, backup = Replica(0, 0), Replica(1, 1)
        view = View(0, server).with_backup(1, 1)
        reps = (
            (server, Rep(self.standing(server, view, 1), serves=True)),
            (backup, Rep(self.standing(backup, view))),
        )
        link = Link(written=2, taken=2, confirmed=2, given=2, counts=True)
        worker = Worker(0, (server, backup), frozenset({server, backup}))
        if not scenario.prompt:
            worker = Worker(0, (server,), frozenset({server}))
        self.start = World(
            view, reps, (((server, backup), link),), (worker,) * len(scenario.workers), frozenset(), frozenset(),
            frozenset(), (), False, -1, scenario.crashes, scenario.unanswered, scenario.cuts, scenario.breaks,
            scenario.leaves, scenario.moves, scenario.backups,
        )  # fmt: skip

    @without_collector()
    def run(self, most: int = 10**6) -> int:
        """Returns how many worlds there are. Raises `Broken`."""
        number: dict[Any, int] = {self.start: 0}
        settled = bytearray([False])
        before, after = array("l"), array("l")
        todo = collections.deque([self.start])
        while todo:
            world = todo.popleft()  # so that what is wrong is found by few steps
            here = number[world]
            settled[here] = self.is_settled(world)
            for following, costs in self.after(world):
                there = number.setdefault(following, len(number))
                if there == len(settled):
                    assert there < most, "the search is too large for a test"
                    settled.append(False)
                    todo.append(following)
                if not costs:
                    before.append(here)
                    after.append(there)
        never = never_settles(settled, before, after)
        if never:
            raise Broken(f"in {never} of {len(number)} worlds a request never ends")
        return len(number)

    def is_over(self, world: World, worker: int) -> bool:
        its = world.workers[worker]
        return its.lost or its.number == len(self.requests[worker])

    def is_settled(self, world: World) -> bool:
        """No worker waits, and nothing is to be decided."""
        return all(self.is_over(world, worker) for worker in range(len(world.workers))) and (
            not any(rep.asks or rep.silent or rep.is_heir or rep.hands_over for _, rep in world.reps)
        )

    # what may happen

    def after(self, world: World) -> Events:
        yield from self.alone(world)
        if world.crashes:
            for process in range(self.scenario.processes):
                if process not in world.dead:
                    yield self.crash(world, process), True
        if world.cut >= 0:
            yield self.set_cut(world, -1), False
        elif world.cuts:
            for host in range(self.scenario.processes):
                yield self.set_cut(world, host), True

    def set_cut(self, world: World, host: int) -> World:
        return self.done(Draft(world._replace(cut=host, cuts=world.cuts - (host >= 0))))

    def alone(self, world: World) -> Events:
        """What no other server sees."""
        for me, rep in world.reps:
            yield from self.of_server(world, me, rep)
            yield from self.of_python(world, me, rep)
        for pair, link in world.links:
            yield from self.of_link(world, pair, link)
        for worker in range(len(world.workers)):
            yield from self.of_worker(world, worker)
        for before, after in world.late:
            if world.view == before:
                draft = Draft(world)
                draft.view, draft.late = after, world.late - {(before, after)}
                if after.server not in draft.reps and after.backup not in draft.reps:
                    draft.change["may_be_lost"] = True  # as when that one had ended a little later
                yield self.done(draft), True

    def reaches(self, world: World, one: int, other: int) -> bool:
        return one == other or world.cut not in (one, other)

    def crash(self, world: World, process: int) -> World:
        draft = Draft(world._replace(dead=world.dead | {process}, crashes=world.crashes - 1))
        copies = {world.view.server, world.view.backup}
        for (server, backup), link in world.links:  # a pair in which the one that dies hears the other
            if link.counts and server.process == process and link.here and server in copies:
                copies.add(backup)
            hears = backup.process == process and link.there and not draft.reps[backup].is_heir  # which may serve alone
            if link.counts and hears and backup in copies:
                copies.add(server)
        for me, _ in world.reps:
            if me.process == process:
                draft.end(me)
        if not any(copy in draft.reps for copy in copies):
            draft.change["may_be_lost"] = True
        return self.done(draft)

    def of_server(self, world: World, me: Replica, rep: Rep) -> Events:
        draft = Draft(world)
        backup = draft.backup(me)
        if rep.serves and not rep.frozen and (backup is None or backup[1].here):  # Server::may_take
            for w, worker in enumerate(world.workers):
                if me in worker.met and me not in worker.connected and w not in rep.gone and not self.is_over(world, w):
                    yield self.lose(world, me, w), False
                if worker.connected[:1] == (me,) and self.is_near(world, w, me) and not self.is_over(world, w):
                    request = (w, worker.number)
                    if all(each != request for each, _ in rep.asked):
                        yield self.take(world, me, request), False
        for request, floor in rep.asked:
            if self.may_answer(world, me, rep, request):
                yield self.answer(world, me, rep, request, floor), False
        if rep.serves and rep.asks is None and backup is None and (rep.is_heir or not rep.frozen):
            yield from self.lead(world, me, rep)

    def of_link(self, world: World, pair: tuple[Replica, Replica], link: Link) -> Events:
        leader, follower = pair
        near = self.reaches(world, leader.process, follower.process)
        if link.here and not link.given:
            draft = Draft(world)
            record = ("block", draft.reps[leader].value)
            draft.link(pair, flight=(*link.flight, record), written=link.written + 1, given=link.written + 1)
            yield self.done(draft), False
        if near and link.there and link.flight:
            yield self.follow(world, pair, link), False
        if near and link.here and link.taken > link.confirmed:
            draft = Draft(world)
            draft.link(pair, confirmed=link.taken)
            self.carry_out(draft, leader)
            yield self.done(draft), False
        if link.broken or not near:
            for end, other, is_open in ((leader, follower, link.here), (follower, leader, link.there)):
                if is_open:
                    draft = Draft(world)
                    draft.link(pair, broken=True, **{"here" if end == leader else "there": False})
                    draft.put(end, silent=(*draft.reps[end].silent, other))
                    yield self.done(draft), not link.broken
        elif world.breaks:
            draft = Draft(world._replace(breaks=world.breaks - 1))
            draft.link(pair, broken=True)
            yield self.done(draft), True

    # the data

    def take(self, world: World, me: Replica, request: Request) -> World:
        draft = Draft(world)
        rep, backup = draft.reps[me], draft.backup(me)
        asked = (*rep.asked, (request, tuple(worker.number for worker in world.workers)))
        log = rep.log
        if all(each != request for each, _ in log):
            position = 0
            if backup is not None:
                pair, link = backup
                position = link.written + 1
                draft.link(pair, flight=(*link.flight, ("request", request)), written=position)
            log = (*log, (request, position))
        draft.put(me, asked=tuple(sorted(asked)), log=log)
        self.carry_out(draft, me)
        return self.done(draft)

    def lose(self, world: World, me: Replica, worker: int) -> World:
        """Server::end and Follower::repeat_lose, of a worker whose connection has broken."""
        draft = Draft(world)
        draft.put(me, gone=draft.reps[me].gone | {worker})
        if (backup := draft.backup(me)) is not None:
            pair, link = backup
            draft.link(pair, flight=(*link.flight, ("lose", worker)), written=link.written + 1)
        return self.done(draft)

    def is_kept(self, link: Link, position: int) -> bool:
        """Whether a server may carry out what it has written down there."""
        return not link.given or (link.here and link.confirmed >= position)

    def carry_out(self, draft: Draft, me: Replica) -> None:
        rep, backup = draft.reps[me], draft.backup(me)
        done, value = rep.done, rep.value
        while done < len(rep.log):
            request, position = rep.log[done]
            if backup is not None and not self.is_kept(backup[1], position):
                break
            value, done = self.applied(value, request), done + 1
        draft.put(me, done=done, value=value)
        if value != rep.value and rep.serves and not rep.is_heir:
            self.show(draft, value)
            winner = draft.reps.get(draft.view.server)
            if me not in (draft.view.server, draft.view.backup) and winner and not set(value) <= set(winner.value):
                raise Broken(f"{me} is replaced, and carries out {value}; the server has {winner.value}")

    def applied(self, value: tuple[Request, ...], request: Request) -> tuple[Request, ...]:
        worker, number = request
        return (*value, request) if self.requests[worker][number] == "push" else value

    def show(self, draft: Draft, value: tuple[Request, ...]) -> None:
        """A server that does not know yet that it is replaced may be behind."""
        shorter, longer = sorted((value, draft.shown), key=len)
        if longer[: len(shorter)] != shorter:
            raise Broken(f"a server has {value}, and {draft.shown} may have been seen")
        if len(set(value)) != len(value):
            raise Broken(f"a push was applied twice: {value}")
        draft.shown = longer

    def may_answer(self, world: World, me: Replica, rep: Rep, request: Request) -> bool:
        worker = world.workers[request[0]]
        if worker.connected[:1] != (me,) or worker.number != request[1] or not self.is_near(world, request[0], me):
            return False
        index = next(index for index, (each, _) in enumerate(rep.log) if each == request)
        if not rep.serves or rep.is_heir or index >= rep.done:
            return False
        backup = Draft(world).backup(me)
        if backup is None or self.requests[request[0]][request[1]] == "pull":
            return True
        return backup[1].here and backup[1].confirmed >= rep.log[index][1]

    def answer(self, world: World, me: Replica, rep: Rep, request: Request, floor: tuple[int, ...]) -> World:
        draft = Draft(world)
        worker, number = request
        for other, answered in enumerate(floor):
            for each in range(answered):
                if self.requests[other][each] == "push" and (other, each) not in rep.value:
                    raise Broken(f"{me} has {rep.value}; worker {other} had an answer to its request {each}")
        if self.requests[worker][number] == "push" and request not in rep.value:
            raise Broken(f"{me} has {rep.value}, and answers {request}")
        draft.put(me, asked=tuple(each for each in rep.asked if each[0] != request))
        draft.workers[worker] = draft.workers[worker]._replace(number=number + 1)
        return self.done(draft)

    def lead(self, world: World, me: Replica, rep: Rep) -> Events:
        """A backup in another process."""
        known = rep.known.as_heir() if rep.is_heir else rep.known
        if not known.leads or (known.has_backup and not rep.is_heir) or not world.backups:
            return
        for process in range(self.scenario.processes):
            if process in {me.process} | world.dead | world.leaving:
                continue
            if world.cut == me.process or not self.reaches(world, me.process, process):
                continue
            draft = Draft(world._replace(backups=world.backups - 1))
            there = [one for one, its in world.reps if one.process == process and not its.leaves]
            asks, after = known.asks_for_backup(process)
            assert after.backup is not None
            if any(
                self.says_that_it_serves(draft, one) or not draft.reps[one].known.gives_way_to(after, known.view.number)
                for one in there
            ):
                continue
            for one in there:
                self.resign(draft, one)
            draft.reps[after.backup] = Rep(self.standing(after.backup, after), has_state=False, has_block=False)
            draft.put(me, known=asks, log=tuple((request, 0) for request, _ in rep.log))
            self.carry_out(draft, me)  # what an earlier backup had to have first
            state = ("state", tuple(request for request, _ in rep.log), rep.gone)
            draft.links[me, after.backup] = Link((state,), 1)
            yield self.done(draft), False

    def says_that_it_serves(self, draft: Draft, me: Replica) -> bool:
        backup = draft.backup(me)
        return draft.reps[me].serves and not draft.reps[me].is_heir and (backup is None or backup[1].here)

    def follow(self, world: World, pair: tuple[Replica, Replica], link: Link) -> World:
        draft = Draft(world)
        (kind, *rest), *flight = link.flight
        draft.link(pair, flight=tuple(flight), taken=link.taken + 1)
        me, rep = pair[1], draft.reps[pair[1]]
        if kind == "state":
            log = tuple((request, 0) for request in rest[0])
            draft.put(me, has_state=True, log=log, done=len(log), gone=rest[1])
        elif kind == "block":
            draft.put(me, has_block=True, value=rest[0])
        elif kind == "lose":
            draft.put(me, gone=rep.gone | {rest[0]})
            return self.done(self.drop(draft, rest[0], me))
        elif kind == "inherit":
            draft.put(me, is_heir=True, serves=True, frozen=True)
        else:
            request = rest[0]
            value = self.applied(rep.value, request) if self.repeats(rep) else rep.value
            draft.put(me, log=(*rep.log, (request, 0)), done=rep.done + 1, value=value)
        return self.done(draft)

    def repeats(self, rep: Rep) -> bool:
        """Whether a backup carries out an update."""
        return rep.has_block

    # who goes on

    def of_python(self, world: World, me: Replica, rep: Rep) -> Events:
        if rep.asks is not None:
            if world.cut != me.process:
                yield self.served(world, me, rep), False
                if world.unanswered and world.view == rep.known.view:
                    draft = Draft(world._replace(unanswered=world.unanswered - 1))
                    draft.view = wanted(rep)
                    yield self.done(draft), True
            return
        for other in rep.silent:
            draft = Draft(world)
            draft.put(me, silent=tuple(each for each in rep.silent if each != other))
            self.silence(draft, me, other)
            yield self.done(draft), False
        backup = Draft(world).backup(me)
        if backup is not None and self.has_all(backup[1]) and not backup[1].counts:
            after = rep.known.view.with_backup(backup[0][1].process, backup[0][1].number)
            yield self.ask(world, me, "lead", after), False
        if rep.is_heir and backup is None:
            known = rep.known.as_heir()
            if known.has_backup:
                draft = Draft(world)
                draft.put(me, known=known, asks=("serve alone", known.view.alone(me)))
                yield self.done(draft), False
        yield from self.hand_over(world, me, rep, backup)

    def has_all(self, link: Link) -> bool:
        """Server::backup_follows."""
        return 0 < link.given <= link.confirmed

    def ask(self, world: World, me: Replica, why: str, after: View) -> World:
        draft = Draft(world)
        draft.put(me, asks=(why, after))
        return self.done(draft)

    def hand_over(self, world: World, me: Replica, rep: Rep, backup: Any) -> Events:
        draft = Draft(world)
        counts = backup is not None and backup[1].counts and backup[1].here
        if rep.hands_over:
            if not counts or not rep.known.has_backup:
                draft.put(me, hands_over=False, frozen=False)
                yield self.done(draft), False
            elif self.may_leave(backup[1]):
                yield self.ask(world, me, "hand over", rep.known.view.swapped()), False
        elif counts and rep.serves and not rep.frozen:
            if me.process in world.leaving:
                draft.put(me, hands_over=True, frozen=True)
                yield self.done(draft), False
            for kind, left in (("leaves", world.leaves), ("moves", world.moves)):
                if left and me.process not in world.leaving:
                    fewer = Draft(world._replace(**{kind: left - 1}))
                    if kind == "leaves":
                        fewer.change["leaving"] = world.leaving | {me.process}
                    fewer.put(me, hands_over=True, frozen=True)
                    yield self.done(fewer), True

    def may_leave(self, link: Link) -> bool:
        return link.confirmed == link.written

    def silence(self, draft: Draft, me: Replica, other: Replica) -> None:
        """Somebody does not hear the other one."""
        rep, backup = draft.reps[me], draft.backup(me)
        if backup is not None and backup[0][1] == other and not backup[1].counts:
            self.abandon(draft, me)
        elif not rep.known.goes_on_without(other):
            self.decide(draft, me, other)

    def decide(self, draft: Draft, me: Replica, other: Replica) -> None:
        goes_on = draft.reps[me].known.goes_on_without(other)
        draft.put(me, asks=("decide", other) if goes_on is None else None)
        if goes_on is not None:
            self.decided(draft, me, goes_on)

    def served(self, world: World, me: Replica, rep: Rep) -> World:
        """The store carries out the request, and it is answered."""
        draft = Draft(world)
        assert rep.asks is not None
        after, (why, other) = wanted(rep), rep.asks
        if draft.view == rep.known.view:
            draft.view = after
        known = replace(rep.known, view=draft.view)
        draft.put(me, known=known, asks=None)
        if why == "decide":
            self.decide(draft, me, other)  # type: ignore[arg-type]
        elif why == "lead":
            self.led(draft, me, known.backup_counts(after))
        elif why == "serve alone":
            if known.leads and rep.is_heir:
                self.take_over(draft, me)
        else:
            self.left(draft, me, known.view == after)
        return self.done(draft)

    def led(self, draft: Draft, me: Replica, counts: bool | None) -> None:
        backup = draft.backup(me)
        if counts and backup is not None:
            draft.link(backup[0], counts=True)
            if draft.reps[me].is_heir:
                self.take_over(draft, me)
        elif counts is None:
            self.resign(draft, me)
        else:
            self.abandon(draft, me)

    def left(self, draft: Draft, me: Replica, has_left: bool) -> None:
        backup = draft.backup(me)
        draft.put(me, hands_over=False)
        if not has_left:
            draft.put(me, frozen=False)
        elif backup is not None and backup[1].here:
            pair, link = backup
            draft.link(pair, flight=(*link.flight, ("inherit",)), written=link.written + 1)
            draft.put(me, leaves=True)

    def abandon(self, draft: Draft, me: Replica) -> None:
        backup = draft.backup(me)
        if backup is not None and not backup[1].counts:
            self.go_on_alone(draft, me)

    def go_on_alone(self, draft: Draft, me: Replica) -> None:
        backup = draft.backup(me)
        if backup is not None:
            draft.link(backup[0], broken=True, here=False, kept=False)
        draft.put(me, log=tuple((request, 0) for request, _ in draft.reps[me].log))
        if not draft.reps[me].is_heir:
            self.carry_out(draft, me)

    def decided(self, draft: Draft, me: Replica, goes_on: bool) -> None:
        rep, backup, followed = draft.reps[me], draft.backup(me), draft.followed(me)
        if backup is None or rep.is_heir:
            if followed is None or draft.links[followed].there:
                return
            if goes_on:
                self.take_over(draft, me)
            else:
                self.resign(draft, me)
        elif not backup[1].here:
            if not goes_on:
                return self.resign(draft, me)
            draft.put(me, frozen=False, leaves=False, hands_over=False)
            self.go_on_alone(draft, me)

    def resign(self, draft: Draft, me: Replica) -> None:
        if me in (draft.view.server, draft.view.backup):
            raise Broken(f"{me} ends, and the view names it: {draft.view}")
        draft.end(me)

    def take_over(self, draft: Draft, me: Replica) -> None:
        followed = draft.followed(me)
        if followed is not None:
            link = draft.links.pop(followed)
            if link.kept:
                draft.links[followed] = link._replace(broken=True, there=False)
        draft.put(me, serves=True, is_heir=False, frozen=False)
        rep = draft.reps[me]
        if not (rep.has_state and rep.has_block):
            raise Broken(f"{me} takes over, and has not got everything")
        if len(rep.value) < len(draft.shown):
            raise Broken(f"{me} takes over with {rep.value}, and {draft.shown} may have been seen")
        self.show(draft, rep.value)
        self.carry_out(draft, me)

    # the workers

    def is_near(self, world: World, worker: int, one: Replica) -> bool:
        return self.reaches(world, self.scenario.workers[worker][1], one.process)

    def done(self, draft: Draft) -> World:
        if self.scenario.prompt:
            world = draft.freeze()
            for w in range(len(world.workers)):
                while following := [*self.turn(world, w), *self.meet(world, w)]:
                    world = following[0]
            return world
        return draft.freeze()

    def of_worker(self, world: World, w: int) -> Events:
        if self.is_over(world, w):
            return
        if not self.scenario.prompt:
            for following in (*self.turn(world, w), *self.meet(world, w)):
                yield following, False
        for one in world.workers[w].connected:
            if not self.is_near(world, w, one):
                yield self.done(self.drop(Draft(world), w, one)), True
        if not world.workers[w].connected and world.cut < 0:
            yield from self.give_up(world, w)

    def give_up(self, world: World, w: int) -> Events:
        """Nobody is found, and nobody is on the way."""
        reps = dict(world.reps)
        named = [one for one in (world.view.server, world.view.backup) if one in reps]
        if all(one in world.workers[w].met or w in reps[one].gone for one in named):
            if not named and not world.may_be_lost:
                raise Broken(f"worker {w} is told that the server is lost, and not all have died: {world.view}")
            draft = Draft(world)
            draft.workers[w] = draft.workers[w]._replace(lost=True)
            yield self.done(draft), False

    def turn(self, world: World, w: int) -> Iterator[World]:
        """From those that have ended."""
        reps = dict(world.reps)
        for one in world.workers[w].connected:
            if one not in reps:
                yield self.drop(Draft(world), w, one).freeze()

    def drop(self, draft: Draft, w: int, one: Replica) -> Draft:
        """The connection of a worker to a replica, to which it never comes back."""
        worker = draft.workers[w]
        draft.workers[w] = worker._replace(connected=tuple(each for each in worker.connected if each != one))
        return draft

    def meet(self, world: World, w: int) -> Iterator[World]:
        worker, reps = world.workers[w], dict(world.reps)
        if self.is_over(world, w) or world.cut == self.scenario.workers[w][1]:
            return
        for one in (world.view.server, world.view.backup):
            if one in reps and one not in worker.met and self.is_near(world, w, one) and w not in reps[one].gone:
                draft = Draft(world)
                draft.workers[w] = worker._replace(connected=(*worker.connected, one), met=worker.met | {one})
                yield draft.freeze()
                return


class Group(Search):
    """Servers of the same processes, each of which begins one and has the backup of the one before. A world is one of
    each server. In a process, one server after the other asks the store."""

    def __init__(self, scenario: Scenario, servers: int) -> None:
        super().__init__(scenario)
        self.searches = [Search(replace(scenario, workers=self.seen_from(server))) for server in range(servers)]
        self.start: Any = tuple(search.start for search in self.searches)
        self.following: list[dict[World, list[tuple[World, bool]]]] = [{} for _ in self.searches]
        """By server, what `Search.alone` gives for its world, which is part of many worlds here."""

    def local(self, process: int, server: int) -> int:
        """Each server counts processes from its own on."""
        return process if process < 0 else (process - server) % self.scenario.processes

    def seen_from(self, server: int) -> tuple[tuple[str, int], ...]:
        hosts = self.scenario.processes
        return tuple((asks, self.local(at, server) if at < hosts else at) for asks, at in self.scenario.workers)

    def after(self, worlds: Any) -> Iterator[Any]:
        asking = [self.asking(world, server) for server, world in enumerate(worlds)]
        for server, search in enumerate(self.searches):
            others = set().union(*asking[:server], *asking[server + 1 :])
            known = self.following[server]
            if worlds[server] not in known:
                known[worlds[server]] = list(search.alone(worlds[server]))
            for following, costs in known[worlds[server]]:
                if others.isdisjoint(self.asking(following, server)):
                    yield (*worlds[:server], following, *worlds[server + 1 :]), costs
        processes = range(self.scenario.processes)
        if worlds[0].crashes:
            for process in set(processes) - worlds[0].dead:
                yield self.all(worlds, Search.crash, process), True
        if worlds[0].cut >= 0:
            yield self.all(worlds, Search.set_cut, -1), False
        elif worlds[0].cuts:
            for host in processes:
                yield self.all(worlds, Search.set_cut, host), True

    def all(self, worlds: Any, what: Callable[[Search, World, int], World], process: int) -> Any:
        """What happens to a process, for each of the servers."""
        each = enumerate(zip(self.searches, worlds, strict=True))
        return tuple(what(search, world, self.local(process, server)) for server, (search, world) in each)

    def asking(self, world: World, server: int) -> set[int]:
        """The processes in which one of the replicas of this server asks the store."""
        return {(me.process + server) % self.scenario.processes for me, rep in world.reps if rep.asks}

    def is_settled(self, worlds: Any) -> bool:
        return all(search.is_settled(world) for search, world in zip(self.searches, worlds, strict=True))


TWO, ONE = (("push pull", 9), ("push", 9)), (("push", 9),)
SMALL = (
    Scenario(3, ONE, crashes=1, breaks=1),
    Scenario(3, ONE, crashes=1, moves=1),
    Scenario(3, ONE, crashes=2, leaves=1),
    Scenario(2, ONE, crashes=1, breaks=1, unanswered=1),
    Scenario(2, ONE, crashes=1, breaks=1, leaves=1),
    Scenario(2, (("push", 0),), crashes=1, cuts=1),
)
MEDIUM = (
    Scenario(3, TWO, crashes=2, backups=2),
    Scenario(3, TWO, moves=1),
    Scenario(3, ONE, crashes=1, breaks=1, moves=1),
    Scenario(2, ONE, crashes=1, breaks=2, unanswered=1, backups=2),
)
LARGE = (
    Scenario(3, TWO, crashes=2, breaks=1),
    Scenario(3, TWO, crashes=2, unanswered=1),
    Scenario(2, (("push pull", 0), ("push", 1)), crashes=2, cuts=1),
    Scenario(3, ONE, crashes=2, breaks=1, unanswered=1, moves=1),
    Scenario(3, ONE, crashes=2, cuts=1, leaves=1),
    Scenario(3, ONE, crashes=1, breaks=1, moves=1, prompt=False),
)
"""Minutes each: python tests/unit/test_succession.py"""


@pytest.mark.parametrize(
    "scenario", [*SMALL, *(pytest.param(each, marks=pytest.mark.slow) for each in MEDIUM)], ids=str
)
def test_every_order_of_events(scenario: Scenario) -> None:
    assert Search(scenario).run() > 100


@pytest.mark.parametrize("workers", [ONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=("one", "two"))
def test_two_servers_that_wait_for_each_others_requests_to_the_store(workers: Any) -> None:
    assert Group(Scenario(2, workers, crashes=2), servers=2).run() > 100


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(10, 150))
def test_long_walks_of_three_servers_in_four_processes(seed: int, steps: int) -> None:
    """Then nothing more goes wrong, and everything ends."""
    workers = (("push pull push", 9), ("push push pull", 1), ("push pull", 2))
    scenario = Scenario(4, workers, 3, 2, 2, 2, 1, 2, backups=4, prompt=False)
    group, chance = Group(scenario, servers=3), random.Random(seed)
    worlds = group.start
    for step in range(steps + 2000):
        after = [following for following, costs in group.after(worlds) if step < steps or not costs]
        if not after:
            break
        worlds = chance.choice(after)
    assert group.is_settled(worlds), worlds


# seeded bugs: each is found, and so are those that production had before it was searched


class CarriesOutWhatIsNotConfirmed(Search):
    def is_kept(self, link: Link, position: int) -> bool:
        return True


class CountsABackupThatHasOnlyTheState(Search):
    def has_all(self, link: Link) -> bool:
        return link.confirmed >= 1


class RepeatsWhatAGivenBlockHas(Search):
    """A backup carries out updates of a block that it gets later, with them in it."""

    def repeats(self, rep: Rep) -> bool:
        return True

    def follow(self, world: World, pair: tuple[Replica, Replica], link: Link) -> World:
        kind, *rest = link.flight[0]
        if kind == "block":
            had = dict(world.reps)[pair[1]].value
            link = link._replace(flight=((kind, (*rest[0], *had)), *link.flight[1:]))
        return super().follow(world, pair, link)


class ABackupServesWithoutAsking(Search):
    class standing(Standing):
        def goes_on_without(self, other: Replica) -> bool | None:
            return True if self.me == self.view.backup else super().goes_on_without(other)

    def silence(self, draft: Draft, me: Replica, other: Replica) -> None:
        if draft.reps[me].known.me == draft.reps[me].known.view.backup:
            return self.decide(draft, me, other)
        super().silence(draft, me, other)


class ALoserGoesOn(Search):
    def decided(self, draft: Draft, me: Replica, goes_on: bool) -> None:
        super().decided(draft, me, True)


class DoesNotLookAgain(Search):
    """A backup gives up when the view is not what it knew, although the server has just made it the heir."""

    def decide(self, draft: Draft, me: Replica, other: Replica) -> None:
        known, asked = draft.reps[me].known, dict(draft.world.reps)[me].asks
        if asked is not None and known.goes_on_without(other) is None:
            draft.put(me, asks=None)
            return self.decided(draft, me, False)
        super().decide(draft, me, other)


class LeavesAtOnce(Search):
    """A server that leaves its blocks ends before its heir serves."""

    def left(self, draft: Draft, me: Replica, has_left: bool) -> None:
        super().left(draft, me, has_left)
        if has_left:
            self.resign(draft, me)


class AnHeirServesAtOnce(Search):
    """Without a backup of its own, and without having asked to be alone."""

    def follow(self, world: World, pair: tuple[Replica, Replica], link: Link) -> World:
        after = super().follow(world, pair, link)
        draft = Draft(after)
        if pair[1] in draft.reps and draft.reps[pair[1]].is_heir:
            self.take_over(draft, pair[1])
        return self.done(draft)


class ForgetsItsBackupWhenItHasLostToIt(Search):
    """A server whose request was carried out without an answer takes its backup for none, which has won meanwhile."""

    def led(self, draft: Draft, me: Replica, counts: bool | None) -> None:
        super().led(draft, me, counts or False)


class AsksAlthoughItIsReplaced(Search):
    class standing(Standing):
        def goes_on_without(self, other: Replica) -> bool | None:
            return True if self.view.server == self.me and self.view.backup is None else None


class HeedsAnOldSilence(Search):
    """An heir that has got a backup of its own decides without whom it has inherited from, and forgets the backup."""

    def silence(self, draft: Draft, me: Replica, other: Replica) -> None:
        if draft.reps[me].known.goes_on_without(other) and draft.reps[me].known.has_backup:
            draft.put(me, asks=("decide", other))
        else:
            super().silence(draft, me, other)


class ANewBackupTakesAnyPlace(Search):
    """Also that of a server, or its backup, which the one that asks has lost to without knowing it."""

    class standing(Standing):
        def gives_way_to(self, asked: View, since: int) -> bool:
            return True


class GivesTheSameNumberAgain(Search):
    class standing(Standing):
        def asks_for_backup(self, process: int) -> tuple[Standing, View]:
            return self, self.view.with_backup(process, self.view.number + 1)


MUTANTS = {
    CarriesOutWhatIsNotConfirmed: Scenario(3, ONE, crashes=1),
    CountsABackupThatHasOnlyTheState: Scenario(3, ONE, crashes=2),
    RepeatsWhatAGivenBlockHas: Scenario(3, ONE, crashes=2),
    ABackupServesWithoutAsking: Scenario(2, TWO, breaks=1),
    ALoserGoesOn: Scenario(2, TWO, breaks=1),
    DoesNotLookAgain: Scenario(2, ONE, crashes=1, leaves=1),
    LeavesAtOnce: Scenario(2, ONE, crashes=1, leaves=1),
    AnHeirServesAtOnce: Scenario(2, TWO, breaks=1, leaves=1),
    ForgetsItsBackupWhenItHasLostToIt: Scenario(2, ONE, breaks=2, unanswered=1),
    AsksAlthoughItIsReplaced: Scenario(2, ONE, breaks=1, leaves=1),
    HeedsAnOldSilence: Scenario(3, ONE, crashes=2, moves=1),
    ANewBackupTakesAnyPlace: Scenario(3, (), breaks=1, moves=1, backups=2),
    GivesTheSameNumberAgain: Scenario(2, ONE, crashes=1, breaks=2, unanswered=1, backups=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_seeded_bug_is_found(mutant: type[Search]) -> None:
    with pytest.raises(Broken):
        mutant(MUTANTS[mutant]).run()


def allows(more: Scenario, less: Scenario) -> bool:
    """Whether all that may happen in `less` may happen in `more`, which has the same workers and processes."""
    same = replace(less, **{name: getattr(more, name) for name in COUNTED}) == more
    return same and all(getattr(more, name) >= getattr(less, name) for name in COUNTED)


COUNTED = ("crashes", "unanswered", "cuts", "breaks", "leaves", "moves", "backups")


def of_mutants() -> list[Scenario]:
    """Without those that another one, or a search above, goes through as well."""
    of_them = sorted(set(MUTANTS.values()), key=str)
    return [
        less
        for less in of_them
        if not any(allows(more, less) for more in (*SMALL, *MEDIUM, *(each for each in of_them if each != less)))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", of_mutants(), ids=str)
def test_where_there_is_none_nothing_is_found(scenario: Scenario) -> None:
    Search(scenario).run()


def main() -> None:
    searches = [Group(Scenario(2, TWO, crashes=2), servers=2), *map(Search, (*SMALL, *MEDIUM, *LARGE))]
    for search in searches:
        began = time.monotonic()
        worlds = search.run(10**8)
        seconds = time.monotonic() - began
        print(f"{worlds} worlds in {seconds:.0f} s: {type(search).__name__} of {search.scenario}", flush=True)


if __name__ == "__main__":
    main()
