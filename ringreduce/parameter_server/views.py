"""Who serves the blocks of a server, and who has their backup, where that is reached by TCP: a view in the store.

A view is changed by compare-and-set alone, so of two that do not hear each other, and both want to go on, the first one
does (csrc/parameter_server/server_far_backups.cpp). Workers see by a count that some view has changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce.membership.directory import Bounded

VISITORS = 1 << 20
"""Numbers of those who come to doors between hosts begin here: below are processes with servers."""
_CHANGES = "changes of views"


class Replica(NamedTuple):
    """A server, or its backup: all that have served the same blocks, or were to, have numbers."""

    process: int
    number: int


@dataclass(frozen=True)
class View:
    number: int
    """Of changes before it."""
    server: Replica
    backup: Replica | None = None
    """That goes on if the server cannot be reached."""

    def alone(self, one: Replica) -> View:
        """The next view, in which one of them goes on without the other."""
        return View(self.number + 1, one)

    def swapped(self) -> View:
        """The next view after the server has left its blocks to the backup, which does not serve yet."""
        assert self.backup is not None
        return View(self.number + 1, self.backup, self.server)

    def with_backup(self, process: int) -> View:
        return View(self.number + 1, self.server, Replica(process, self.number + 1))

    def text(self) -> str:
        return json.dumps([self.number, self.server, self.backup])

    @staticmethod
    def of(text: str) -> View:
        number, server, backup = json.loads(text)
        return View(int(number), Replica(*map(int, server)), Replica(*map(int, backup)) if backup else None)


def beside(store: Any) -> Any:
    """The same store of torch over a connection of its own, since others may be waiting in the one that is given."""
    return store.clone() if hasattr(store, "clone") else store


class Views:
    """Those in the store, by server. All requests end: they raise what the store raises, or `ConnectionError`."""

    def __init__(self, store: Any) -> None:
        self._store = Bounded(beside(store))

    def of(self, server: int) -> View | None:
        found = self._store.value(_key(server))
        return View.of(found.decode()) if found else None

    def change(self, server: int, before: View | None, after: View) -> View:
        """Sets `after` if `before` is there; returns what is there then. It may be asked again if it has raised."""
        found = self._store.compare_set(_key(server), before.text() if before else "", after.text())
        if found == after.text():
            self._store.add(_CHANGES, 1)
        return View.of(found)

    def changes(self) -> int:
        return self._store.add(_CHANGES, 0)

    def process(self, number: int) -> dict[str, Any]:
        """What a process with servers says of itself. Raises `ConnectionError` if there is none."""
        found = self._store.value(f"server/{number}")
        if found is None:
            raise ConnectionError(f"there is no process {number}")
        its: dict[str, Any] = json.loads(found)
        return its

    def visitor(self) -> int:
        return visitor(self._store)


def visitor(store: Any) -> int:
    """A number for a visit at the door of another process, which no other visitor has."""
    return VISITORS + int(store.add("visits", 1))


def _key(server: int) -> str:
    return f"view/{server}"
