"""`Pending` and `Snapshot`: what a program waits for after a push or after it has begun a snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ringreduce.errors import CollectiveTimeout, InvalidArgument, SystemFailure
from ringreduce.parameter_server.pulls import Pulls
from ringreduce.parameter_server.snapshots import INDEX

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import KeyValue


@dataclass(slots=True)
class Pending:
    """A push under way: what `push` and `push_pull` return."""

    store: KeyValue
    calls: dict[str, ParameterCall]
    pulls: Pulls | None = None
    """The pull of a `push_pull`."""

    def start(self, timeout: timedelta | float | None = None) -> None:
        """Begins the pull of a `push_pull(start=False)`, whose output may change from here on.

        Does nothing for a push alone, or if the pull has begun. `timeout` is as for `wait`.
        """
        self.store._questions.check_process()
        if self.pulls is not None:
            self.pulls.begin(self.store._until(timeout))

    def wait(self, timeout: timedelta | float | None = None) -> list[str]:
        """Waits until the servers have applied every push and, after `push_pull`, the new values are in the output.
        Returns the keys whose push came late and was dropped.

        `timeout` is in seconds (default: that of `join`). Raises `ServerLost`, `UpdateFailed`, or `CollectiveTimeout`,
        which names the worker or server that is waited for; after a timeout, `wait` can be called again. Raises
        `InvalidArgument` if the output of a `push_pull` got other memory meanwhile; the next `wait` then waits for the
        push alone.
        """
        deadline = self.store._until(timeout)
        if self.pulls is None:
            return self._finish(deadline)
        try:
            self.pulls.begin(deadline)  # now, so that values from other hosts come while pushes are under way
            late = self._finish(deadline)
            self.pulls.wait(deadline)
        except BaseException as error:
            self.pulls.cancel()
            if isinstance(error, InvalidArgument):
                self.pulls = None
            raise
        self.pulls = None
        return late

    def _finish(self, deadline: float) -> list[str]:
        return [key for key, call in self.calls.items() if self.store._finish(key, call, deadline)]


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is being written: what `KeyValue.snapshot` returns."""

    store: KeyValue
    path: Path
    """The folder of the complete snapshot."""
    folder: str
    """The folder until it is complete."""

    def done(self) -> bool:
        """Returns whether it is complete. Raises `SystemFailure` if a server could not write its part, and
        `ServerLost`."""
        question, deadline = {"ask": "snapshot state", "folder": self.folder}, self.store._deadline(None)
        try:
            states = [self.store._questions.ask(server, question, deadline) for server in range(self.store.servers)]
        except InvalidArgument:  # a server knows its latest snapshots only, and a backup only those it has begun itself
            if (self.path / INDEX).exists():
                return True
            raise SystemFailure(
                f"the snapshot {self.folder} stays incomplete: a server has ended while it wrote its part, or has "
                "written many others since; begin another one"
            ) from None
        for server, state in enumerate(states):
            if state["fault"]:
                raise SystemFailure(f"the snapshot {self.folder} of server {server}: {state['fault']}", server)
        return all(state["done"] for state in states)

    def wait(self, timeout: timedelta | float | None = None) -> Path:
        """Waits until it is complete; returns its folder. `timeout` is in seconds (default: that of `join`). Raises
        `CollectiveTimeout`, and otherwise as `done`."""
        deadline = self.store._until(timeout)
        while not self.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"the snapshot {self.folder} was not written in time; the servers go on with it"
                )
            time.sleep(0.01)
        return self.path
