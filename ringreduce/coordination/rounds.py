"""Carries out the membership protocol for one process, against a directory and with a clock. `protocol` decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ringreduce.common.failures import Expelled, SystemFailure
from ringreduce.coordination import protocol
from ringreduce.coordination.protocol import (
    Answer,
    Commit,
    Committed,
    Effect,
    Entered,
    Leave,
    Look,
    Report,
    State,
    View,
)
from ringreduce.coordination.store import Directory
from ringreduce.coordination.wait import Pauses, persist, wait_for

PAUSES = Pauses(1 / 8, 0.0002, 0.02)
"""Between two looks at the directory."""
PATIENCE = 60.0
"""Seconds for which a directory may be out of reach, by default."""
LONG = 1.0
"""If a round took longer than this, in seconds, the others may have left the new view already when this process enters
it. So it looks once more."""

log = logging.getLogger(__name__)


class Membership:
    """This process's membership in a changing group. Only one thread may use it at a time."""

    def __init__(
        self,
        directory: Directory,
        me: str,
        view: View,
        patience: float = PATIENCE,
        advice: str = "start it anew to join again",
    ) -> None:
        """`view`: the first view, or the one that let this process in; the same on all its members.

        `me`: this process's name in it. `patience`: the seconds for which the directory may be out of reach before
        calls raise `SystemFailure`. `advice`: what `Expelled` says can be done.
        """
        self.directory, self.patience, self._advice = directory, patience, advice
        self._state = State(me, view)
        self._expelled = ""
        """Why this process was expelled."""

    @property
    def view(self) -> View:
        return self._state.view

    @property
    def rank(self) -> int:
        """This process's position in the view. Raises `Expelled` if the others went on without it."""
        if self._state.me not in self.view.names:
            raise Expelled(self._expelled)
        return self.view.names.index(self._state.me)

    def leave(
        self,
        report: Report,
        lost: Callable[[], Iterable[str]] = tuple,
        silent_after: float = float("inf"),
        silent: Callable[[], Iterable[str]] = tuple,
    ) -> View:
        """Leaves the present view and returns the next one.

        Waits until every member of the present view has called this, is lost, or has been silent for too long:
        `lost()` names the members that are known to have ended. `silent()` names those that this process has lost
        sight of; they are lost unless they have called this. Both functions are called again and again. `silent_after`
        seconds after this call, the members that have not called yet are given up.

        Raises `Expelled` if the others went on without this process, and `SystemFailure` if the directory could not be
        reached for `patience` seconds.
        """
        began = time.monotonic()
        me = self.view.names[self.rank]
        others = tuple(name for name in (*report.lost, *lost()) if name != me)

        def look() -> Effect | None:
            late = self.view.names if time.monotonic() - began > silent_after else ()
            return self._carry_out(Look(frozenset(lost()), frozenset((*silent(), *late))))

        done: Effect | None = self._carry_out(Leave(replace(report, lost=others, silent=(*report.silent, *silent()))))
        if done is None:
            done = wait_for(look, PAUSES, at_once=False)
        while isinstance(done, Entered) and time.monotonic() - began > LONG and (later := self._carry_out(Look())):
            done = later
        if isinstance(done, Entered):
            return done.view
        raise Expelled(self._expelled)

    def commit(self, step: int) -> bool:
        """Makes `step` durable, so that it survives the death of every member that knows of it.

        Returns False if the others have gone on to another view without it; then `leave` returns that view. Raises
        `SystemFailure` as `leave` does.
        """
        before = self._state
        if isinstance(self._carry_out(Commit(step)), Committed):
            return True
        self._state = before  # the next view is entered by `leave`
        return False

    def resign(self, step: int) -> None:
        """Tells the others to go on without this process, and does not wait for them. `step`: its latest commit.

        Does nothing if the others have gone on without it already. Raises the directory's error if it cannot be
        reached.
        """
        me = self._state.me
        line = Report(step, lost=(me,)).line(me)
        view: View | None = self.view
        while view and me in view.names:
            # If this process had reported before, the round may have ended already with this process in the next view.
            view = protocol.successor(view, self.directory.append(protocol.log_key(view.epoch), line))

    def _why(self, view: View, log: str) -> str:
        """Why the log of the view's epoch expels this process."""
        me = self._state.me
        cause = protocol.read(view, log).causes[me]
        it = "it" if cause.named == me else f"{cause.named} of its unit"
        if cause.by == cause.named:
            why = f"{it} had left"
        elif cause.silent:
            why = f"{it} had not reported when {cause.by} gave it up"
        else:
            why = f"{cause.by} excluded {it}, or took its process for dead"
        return f"the other members went on without {me} in epoch {view.epoch + 1}: {why}; {self._advice}"

    def _carry_out(self, event: protocol.Event) -> Effect | None:
        """Gives `event` to the protocol and carries out its requests. Returns its decision; None if it has none yet."""
        self._state, effects = protocol.step(self._state, event)
        while effects:
            effect = effects[0]
            if not isinstance(effect, protocol.Request):
                return effect
            view, answer = self.view, Answer(effect.key, self._ask(effect))
            self._state, effects = protocol.step(self._state, answer)
            if effects and isinstance(effects[0], protocol.Expelled):
                self._expelled = self._why(view, answer.value)
        return None

    def _ask(self, request: protocol.Request) -> str:
        """The directory's answer. Repeats the request while the directory is out of reach.

        The protocol is not told of that: after `NoAnswer` it would make the same request again.
        """

        def ask() -> str:
            if isinstance(request, protocol.Ask):
                return self.directory.get(request.key)
            if isinstance(request, protocol.Append):
                return self.directory.append(request.key, request.text)
            return self.directory.compare_set(request.key, request.expected, request.desired)

        def failed(error: Exception, waited: float) -> None:
            if waited > self.patience:
                raise SystemFailure(
                    f"who is in the group cannot be decided: its directory has been out of reach for {waited:.0f} s: "
                    f"{error}"
                ) from None
            log.info("the directory of the group's members is out of reach: %s", error)

        return persist(ask, min(0.05, self.patience / 10), failed)
