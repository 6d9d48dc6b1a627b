"""Who serves the blocks of a server, and who has their backup, where that is reached by TCP: a view in the store.

A view is changed by compare-and-set alone, so of two that do not hear each other, and both want to go on, the first one
does (csrc/parameter_server/server_far_backups.cpp). Workers see by a count that some view has changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple


class Replica(NamedTuple):
    """A server, or its backup: all that have served the same blocks, or were to, have numbers."""

    process: int
    number: int


@dataclass(frozen=True)
class View:
    number: int  # greater than those of the views before it
    server: Replica
    backup: Replica | None = None  # goes on if the server cannot be reached

    def alone(self, one: Replica) -> View:
        """The next view, in which one of them goes on without the other."""
        return View(self.number + 1, one)

    def swapped(self) -> View:
        """The next view after the server has left its blocks to the backup, which does not serve yet."""
        assert self.backup is not None
        return View(self.number + 1, self.backup, self.server)

    def with_backup(self, process: int, number: int) -> View:
        """The next view, if its number is to be this one, after the server has got a backup in the process."""
        return View(number, self.server, Replica(process, number))

    def text(self) -> str:
        return json.dumps([self.number, self.server, self.backup])

    @staticmethod
    def of(text: str) -> View:
        number, server, backup = json.loads(text)
        return View(int(number), Replica(*map(int, server)), Replica(*map(int, backup)) if backup else None)


@dataclass(frozen=True)
class Standing:
    """What one replica knows of its server's view, and what it may ask the store for. Pure: `Replication` carries it
    out, and tests/unit/test_succession.py searches what can come of it."""

    me: Replica
    view: View
    """The latest that it has seen or made. The store may have a later one only if this one names two replicas, or a
    backup that the server has not put there yet."""
    offered: int = 0  # the number of the latest backup that it has asked a process for

    @property
    def leads(self) -> bool:
        """Whether the server is this one."""
        return self.view.server == self.me

    @property
    def has_backup(self) -> bool:
        return self.leads and self.view.backup is not None

    def as_heir(self) -> Standing:
        """When the server has left its blocks to this one, it has said so in the view before."""
        return replace(self, view=self.view.swapped()) if self.me == self.view.backup else self

    def asks_for_backup(self, process: int) -> tuple[Standing, View]:
        """The view to ask for when a backup in the process has everything. No two backups have one number, so an
        earlier one's request cannot speak for a later one in the same process."""
        number = max(self.offered, self.view.number) + 1
        return replace(self, offered=number), self.view.with_backup(process, number)

    def gives_way_to(self, asked: View, since: int) -> bool:
        """Whether a new backup, with which its server would ask for that view, takes this one's place in the process.
        The server has known the present view since number `since`. If this one knows a later view, that server may have
        been replaced without knowing it."""
        return asked.server == self.view.server or self.view.number <= since

    def backup_counts(self, asked: View) -> bool | None:
        """Whether a backup counts, when this one has asked for that view. None: the backup did before the answer came,
        and has won since, so this one is replaced."""
        return True if self.view == asked else False if self.leads else None

    def goes_on_without(self, other: Replica) -> bool | None:
        """Whether it goes on when it does not hear the other one. None: the view names both, so it has to ask for
        `view.alone(me)`, and then look again: the server may have left its blocks to this one just before."""
        named = self.view.server, self.view.backup
        if self.me not in named:
            return False
        return None if other in named else True
