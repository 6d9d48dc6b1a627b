"""Where processes wait to join a changing group.

`JoinQueue` consists of keys in a store that all processes can reach, such as the launcher's:

    waiting        the number of processes that have come
    joiner/N       the name and address of the Nth process that came; empty: it no longer waits
    invited/NAME   the view that lets this process in
    looked         when a member last looked for joiners, renewed every half second at most
    members now    the latest view
    left/NAME      set if this member has left

`JoinWatcher` looks for a member who waits there, in a thread.

Calls raise the store's error if the store is gone. A waiting process makes them through `Patient`, which repeats them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from ringreduce.common import system
from ringreduce.common.failures import CollectiveTimeout, SystemFailure
from ringreduce.coordination.endpoint import member_has_ended
from ringreduce.coordination.protocol import Member, View
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.coordination.wait import Pauses, every, persist, wait_for
from ringreduce.coordination.watch import is_closed

OVER_AFTER = 1.0
"""A waiting process believes that all members are gone if two looks, so many seconds apart, say so."""
LOOK_AGAIN = 0.01
"""Seconds between two looks of `JoinWatcher.wait`."""
FORGOTTEN_AFTER = 10.0
"""Seconds after which members no longer ask the store who has taken a number, if no process has said so. It may have
died."""
LOOK_FOR_JOINERS, LONGEST_PAUSE = 0.05, 0.5
"""Seconds from the end of one look for waiting processes to the next: in short steps, and at most."""
AFTER_FAILURE, LONGEST_AFTER_FAILURES = 2.0, 300.0
"""The same after a look that has failed, and at most. It doubles with each failure of a store of torch, because torch
writes a page to standard error for each."""
SAY_SO = 0.5
"""Seconds after which members tell the waiting processes again that they look. etcd keeps every value it ever had."""
SILENT = 1.0
"""If a look has taken longer than this, in seconds, nobody is let in until it ends: they could not be told."""
PAUSES = Pauses(1 / 100, 0.005, 0.025)
"""Between two looks of a waiting process for its invitation."""
ASK_AGAIN = 0.5
"""Seconds after which a waiting process repeats a request that has failed."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class Patient:
    """Makes the requests of a waiting process. Repeats a request for `patience` seconds while it fails."""

    def __init__(self, patience: float) -> None:
        self._patience, self._lost = patience, 0.0

    def clock(self) -> float:
        """The time in seconds, without the time in which the store was out of reach."""
        return time.monotonic() - self._lost

    def __call__(
        self, request: Callable[Arguments, Answer], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Answer:
        """Calls `request`, which may be carried out several times. Raises `SystemFailure` if it fails for too long."""
        began, lost = time.monotonic(), False

        def failed(error: Exception, waited: float) -> None:
            nonlocal lost
            closed, lost = is_closed(error), True
            if closed or waited > self._patience:
                what = "has closed the connection" if closed else f"has been out of reach for {waited:.0f} s"
                why = str(error).partition("\n")[0]  # torch may append a trace
                raise SystemFailure(f"start: the store {what} while this process waited to be let in: {why}") from None
            log.info("the store is out of reach of this process, which waits to be let in: %s", error)

        answer = persist(lambda: request(*arguments, **named), min(ASK_AGAIN, self._patience / 10), failed)
        self._lost += lost * (time.monotonic() - began)
        return answer


class JoinQueue:
    """Where processes wait to be let in: keys in a store, see above."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._nameless: dict[int, float] = {}
        """The numbers whose processes have not said their names yet, and when this process saw each of them first."""
        self._waiting: dict[int, Member] = {}
        """The waiting processes by their numbers."""
        self._seen = 0
        """The latest number that this process knows of."""
        self._said = 0.0
        """When this process has last said that it looks."""

    # for members

    def waiting(self, but: Container[str]) -> tuple[Member, ...]:
        """The processes that wait, without those that have ended and those whose names are in `but`.

        Only one thread may call it at a time.
        """
        if (began := time.monotonic()) > self._said + SAY_SO:
            self._store.set("looked", str(time.time_ns()))
            self._said = began
        latest = self._store.add("waiting", 0)
        now = time.monotonic()  # no number was taken later, and no name is read earlier: see `come`
        self._nameless.update(dict.fromkeys(range(self._seen + 1, latest + 1), now))
        self._seen = latest
        for number, seen in list(self._nameless.items()):
            said = self._store.value(f"joiner/{number}")
            if said:
                self._waiting[number] = Member(*json.loads(said))
            if said is not None:
                del self._nameless[number]
            elif now > seen + FORGOTTEN_AFTER:
                self._forget(number)
        for number, member in list(self._waiting.items()):
            if member.name in but or member_has_ended(member):
                self._forget(number)
        return tuple(dict.fromkeys(self._waiting.values()))  # a process may have two numbers: see `come`

    def _forget(self, number: int) -> None:
        self._store.set(f"joiner/{number}", "")
        self._nameless.pop(number, None)
        self._waiting.pop(number, None)

    def invite(self, members: list[Member], view: View) -> None:
        """Tells waiting processes that they are in `view`. Every member does this, since any may die before it does.

        Does not wait until the store has it.
        """
        if members:
            _in_background(self._invite, members, view)

    def _invite(self, members: list[Member], view: View) -> None:
        try:
            for member in members:
                self._store.set(f"invited/{member.name}", view.dump())
        except (RuntimeError, OSError) as error:
            log.info("cannot invite %s: the store is out of reach: %s", [member.name for member in members], error)

    def members_are(self, view: View) -> None:
        """Publishes the latest view, so that a waiting process can find out whether any member is left to let it in.

        Does not wait until the store has it.
        """
        _in_background(self.publish, view)

    def publish(self, view: View) -> None:
        """The same, and waits until the store has it or cannot be reached."""
        with contextlib.suppress(RuntimeError, OSError):
            now = None
            while now != view.dump():
                now = (self._store.value("members now") or b"").decode()
                if now and View.load(now).epoch >= view.epoch:  # a later view has overtaken this one
                    return
                now = self._store.compare_set("members now", now, view.dump()).decode()

    def leave(self, name: str) -> None:
        """Says that the member `name` has left."""
        self._store.set(f"left/{name}", "")

    # for waiting processes

    def come(self, me: Member, ask: Patient) -> int:
        """Takes a number, and says who has it. Returns the number.

        If that took long, members may have forgotten it, and this takes another one. If the store carries out a request
        without answering, there is a number without a name, which members forget.
        """
        while True:
            began = time.monotonic()
            number = ask(self._store.add, "waiting", 1)
            ask(self._store.set, f"joiner/{number}", json.dumps([me.name, me.address]))
            if time.monotonic() < began + FORGOTTEN_AFTER:
                return number
            ask(self._store.set, f"joiner/{number}", "")

    def wait(self, name: str, number: int, timeout: float, ask: Patient) -> View | None:
        """Waits until this process is let in, and returns the view that contains it; None: all members are gone.

        `name`: this process's. `number`: what `come` has returned.

        Raises `CollectiveTimeout` if no member has looked for joiners for `timeout` seconds, not counting the time in
        which this process could not reach the store; and what `ask` raises.
        """
        store, invited = self._store, f"invited/{name}"
        looked = check = ask.clock()
        look, over = None, False

        def invitation() -> bytes | None:
            """Empty if there will be none."""
            nonlocal looked, check, look, over
            if (text := ask(store.value, invited)) is not None:
                return text
            now = ask.clock()
            if now > check + OVER_AFTER:
                check = now
                before, over = over, ask(self.all_gone, name)
                if over and before:
                    return b""
                if (latest := ask(store.value, "looked")) != look:
                    look, looked = latest, now
            if now > looked + timeout:
                ask(store.set, f"joiner/{number}", "")
                raise CollectiveTimeout(f"start: no member has looked who waits to be let in for {timeout:.0f} s")
            return None

        text = wait_for(invitation, PAUSES)
        return View.load(text.decode()) if text else None

    def latest(self) -> View | None:
        """The latest view that the store knows of."""
        said = self._store.value("members now")
        return View.load(said.decode()) if said else None

    def all_gone(self, me: str) -> bool:
        """Whether every member of the latest view has left, or has ended on this machine.

        The end of a process on another machine cannot be seen from here. `me`: the name of this process, which may
        itself be in that view, but cannot go on alone.
        """
        view = self.latest()
        return view is not None and all(
            member.name == me or self.has_left(member.name) or member_has_ended(member) for member in view.members
        )

    def ended_well(self) -> bool:
        """Whether a member of the latest view has left. If all are gone and none has left, all have died."""
        view = self.latest()
        return view is not None and any(map(self.has_left, view.names))

    def has_left(self, name: str) -> bool:
        """Whether the process of this name was a member and has left."""
        return self._store.check([f"left/{name}"])


@dataclass
class _Seen:
    """What a `JoinWatcher` and its thread share. Neither takes a lock: each field is read and written in one step."""

    but: frozenset[str]
    asked: float = 0.0
    over: bool = False
    wakes: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Gets an item to end the thread's pause."""
    # written by the thread
    waiting: tuple[Member, ...] = ()
    began: float = float("inf")
    """When the look under way began; infinity if none is under way."""
    pauses_long: bool = False
    """Whether the next call of `found` ends the thread's pause."""


class JoinWatcher:
    """Looks in a thread who waits to be let in, so that no member ever waits for the store.

    The thread begins at the first call of `found`. It looks every LOOK_FOR_JOINERS seconds, and less often when `found`
    has not been called for long or the store cannot be reached. It ends with `stop`, when nobody holds this object any
    more, or when a `TCPStore` has closed its connection.
    """

    def __init__(self, waiting: JoinQueue, members: Iterable[str]) -> None:
        """`members`: the names of those who are in."""
        self._queue, self._seen, self._looks = waiting, _Seen(frozenset(members)), False

    def __del__(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the thread. Does not wait for it. Takes no lock, which a forked process could never get."""
        self._seen.over = True
        self._seen.wakes.put(None)

    def pass_over(self, names: Iterable[str]) -> None:
        """`names`: of processes that are members, or were. They wait no longer."""
        self._seen.but |= set(names)

    def found(self) -> tuple[Member, ...]:
        """Those who waited at the latest look. Does not wait."""
        seen = self._seen
        seen.asked = now = time.monotonic()
        if not self._looks:
            _in_background(_look_out, self._queue, seen)
            self._looks = True  # not if no thread could be started: then the next call tries again
        elif seen.pauses_long:
            seen.pauses_long = False
            seen.wakes.put(None)
        if not seen.waiting or now > seen.began + SILENT:
            return ()
        return tuple(member for member in seen.waiting if member.name not in seen.but)

    def wait(self, admitted: Callable[[tuple[Member, ...]], tuple[Member, ...]], patience: float) -> tuple[Member, ...]:
        """Those of the living that `admitted` lets in. Waits `patience` seconds for the first."""

        def found() -> tuple[Member, ...] | None:
            return admitted(tuple(member for member in self.found() if not member_has_ended(member))) or None

        return wait_for(found, every(LOOK_AGAIN), time.monotonic() + patience) or ()


def _in_background(function: Callable[..., None], *arguments: object) -> None:
    system.start(threading.Thread(target=function, args=arguments, daemon=True, name=f"ringreduce {function.__name__}"))


def _look_out(joins: JoinQueue, seen: _Seen) -> None:
    """The thread of a `JoinWatcher`. Does not hold the `JoinWatcher` itself, whose end ends it."""
    after_failure = AFTER_FAILURE
    while not seen.over:
        waiting: tuple[Member, ...] = ()
        seen.began = time.monotonic()
        try:
            waiting = joins.waiting(seen.but)
            # In a long step nobody can be let in, so there is no hurry.
            pause = min(max((time.monotonic() - seen.asked) / 8, LOOK_FOR_JOINERS), LONGEST_PAUSE)
            seen.pauses_long, after_failure = pause > LOOK_FOR_JOINERS, AFTER_FAILURE
        except (RuntimeError, OSError) as error:
            log.info("nobody can join: the store is out of reach: %s", error)
            if is_closed(error):
                seen.over = True
            pause, seen.pauses_long = after_failure, False
            if not isinstance(error, OSError):  # etcd raises these; it prints nothing, and may come back soon
                after_failure = min(2 * after_failure, LONGEST_AFTER_FAILURES)
        seen.waiting, seen.began = waiting, float("inf")
        if seen.over:
            return
        with contextlib.suppress(queue.Empty):
            seen.wakes.get(timeout=pause)
