"""What the processes of a parameter server tell each other through a store of torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from ringreduce.common.descriptors import make_above_streams
from ringreduce.coordination.store import Bounded
from ringreduce.coordination.wait import every, wait_for
from ringreduce.parameter_server.views import View

DIALERS = 1 << 20
"""Numbers of those that dial doors on other hosts begin here. Smaller numbers are those of processes with servers."""
_CHANGES = "changes of views"
_NO_STORE = (RuntimeError, ConnectionError)
"""What a torch store raises when it has ended, and when it does not answer."""


def beside(store: Any) -> Any:
    """The same store over a connection of its own, since others may be waiting in the one that is given."""
    return make_above_streams(store.clone) if hasattr(store, "clone") else store


def new_dialer(store: Any) -> int:
    """Returns a number for dialing the door of another process, which no other dialer has."""
    return DIALERS + int(store.add("visits", 1))


def process_of(store: Any, server: int, founders: int) -> int:
    """Returns the process that serves `server`, as far as the store knows."""
    key = f"place of server/{server}"
    return int(store.get(key)) if store.check([key]) else server % founders


class Views:
    """The views in the store, by server. All requests end: they raise what the store raises, or `ConnectionError`."""

    def __init__(self, store: Any) -> None:
        self._store = Bounded(beside(store))

    def of(self, server: int) -> View | None:
        found = self._store.value(f"view/{server}")
        return View.of(found.decode()) if found else None

    def change(self, server: int, before: View | None, after: View) -> View:
        """Sets `after` if `before` is there; returns what is there then. It may be asked again if it has raised."""
        found = self._store.compare_set(f"view/{server}", before.text() if before else "", after.text())
        if found == after.text():
            self._store.add(_CHANGES, 1)
        return View.of(found)

    def changes(self) -> int:
        return self._store.add(_CHANGES, 0)

    def process(self, number: int) -> dict[str, Any]:
        """Returns what a process with servers has told the store. Raises `ConnectionError` if there is none."""
        found = self._store.value(f"server/{number}")
        if found is None:
            raise ConnectionError(f"there is no process {number}")
        its: dict[str, Any] = json.loads(found)
        return its

    def new_dialer(self) -> int:
        return new_dialer(self._store)


class Directory:
    """What the store knows about processes, which are numbered, founders first, and about servers. Methods use what
    they know if the store has ended or does not answer."""

    def __init__(self, store: Any, founders: int, views: Views | None = None) -> None:
        """`views` says where servers are, if backups are reached by TCP."""
        self._store, self._founders, self._views = Bounded(store), founders, views
        self._known: dict[int, dict[str, Any]] = {}

    def processes(self) -> dict[int, dict[str, Any]]:
        """Returns all processes, including those that have ended; without the store, those that are known."""
        with contextlib.suppress(*_NO_STORE):
            for number in range(self._founders + int(self._store.add("later processes", 0))):
                if number not in self._known and self._store.check([f"server/{number}"]):
                    self._known[number] = json.loads(self._store.get(f"server/{number}"))
        return dict(self._known)

    def process_of(self, server: int) -> int:
        view = None if self._views is None else self._views.of(server)
        return process_of(self._store, server, self._founders) if view is None else view.server.process

    def put(self, server: int, process: int) -> None:
        """Records that `process` serves `server`. Returns when the store has it, so no later record is overwritten."""
        with contextlib.suppress(*_NO_STORE):
            self._store.set(f"place of server/{server}", str(process))
            self._store.check([f"place of server/{server}"])  # a torch store answers check(), but not set()

    def begin_to_leave(self, process: int, is_there: Callable[[dict[str, Any]], bool], deadline: float) -> bool:
        """Waits until it is this process's turn to leave; returns False after `deadline`. The turn lasts until the
        process ends. Without the store it is its turn at once: two that leave together then take nothing from each
        other, but others can take their servers."""

        def is_my_turn() -> bool:
            first = self._store.compare_set("leaves", "", str(process))
            if first != str(process) and not is_there(self.processes()[int(first)]):
                self._store.compare_set("leaves", first, "")
            return first == str(process)

        with contextlib.suppress(*_NO_STORE):
            return bool(wait_for(is_my_turn, every(0.01), deadline))
        return True

    def stay(self, process: int) -> None:
        """Ends the process's turn to leave."""
        with contextlib.suppress(*_NO_STORE):
            self._store.compare_set("leaves", str(process), "")
