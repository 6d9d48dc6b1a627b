"""What sees to it that servers have backups, and that they go where there is room: a thread in every server's process.

Every server decides for itself. It is the only one that serves its blocks, so it may choose its backup without asking
anybody. The launcher's store knows the processes that there are. Where backups are reached by TCP it has the views
(`succession`); on one host only the end of a process counts as its loss, and the store merely knows, for workers that
join, where each server is.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ringreduce.errors import Aborted, CollectiveTimeout, RingReduceError
from ringreduce.membership.directory import Bounded
from ringreduce.parameter_server.host import Host
from ringreduce.parameter_server.views import View, Views

_LOOK = 0.5
"""Seconds between looks when nothing is known to have happened."""
_SOON = 0.002
"""While a server's end is known here, and its backup has not taken over yet."""
_PATIENCE = 5.0
"""Seconds for another process to make a backup."""
_NO_STORE = (RuntimeError, ConnectionError)
"""What a store of torch raises when it has ended, and when it does not answer."""

log = logging.getLogger(__name__)


def place_of(store: Any, server: int, founders: int) -> int:
    """The process that serves it, or did when the store was last told."""
    key = _place(server)
    return int(store.get(key)) if store.check([key]) else server % founders


def _place(server: int) -> str:
    return f"place of server/{server}"


class Directory:
    """What the store knows of processes and servers. Processes are numbered: first the founders.

    A store that has ended, or does not answer in time, changes nothing of what servers do.
    """

    def __init__(self, store: Any, founders: int, views: Views | None = None) -> None:
        """`views`: where servers are, if backups are reached by TCP."""
        self._store, self._founders, self._views = Bounded(store), founders, views
        self._known: dict[int, dict[str, Any]] = {}

    def processes(self) -> dict[int, dict[str, Any]]:
        """All that there have been. What is known already, if the store has ended."""
        with contextlib.suppress(*_NO_STORE):
            for number in range(self._founders + int(self._store.add("later processes", 0))):
                if number not in self._known and self._store.check([f"server/{number}"]):
                    self._known[number] = json.loads(self._store.get(f"server/{number}"))
        return dict(self._known)

    def place_of(self, server: int) -> int:
        view = None if self._views is None else self._views.of(server)
        return place_of(self._store, server, self._founders) if view is None else view.server.process

    def put(self, server: int, process: int) -> None:
        """Returns when the store has it: what the next process puts comes after this."""
        with contextlib.suppress(*_NO_STORE):
            self._store.set(_place(server), str(process))
            self._store.check([_place(server)])  # a store of torch answers this, and a set it does not

    def begin_to_leave(self, process: int, is_there: Callable[[dict[str, Any]], bool], deadline: float) -> bool:
        """Whether it is this process's turn to leave, before the time is over. It is until the process has ended.

        Without the store it is at once: two that leave together take nothing from each other then, and others may.
        """
        with contextlib.suppress(*_NO_STORE):
            while (first := self._store.compare_set("leaves", "", str(process))) != str(process):
                if time.monotonic() > deadline:
                    return False
                if not is_there(self.processes()[int(first)]):
                    self._store.compare_set("leaves", first, "")
                time.sleep(0.01)
        return True

    def stay(self, process: int) -> None:
        with contextlib.suppress(*_NO_STORE):
            self._store.compare_set("leaves", str(process), "")


class Keeper:
    """Makes backups of what is served in this process, new ones when they are lost, and gives servers to others."""

    def __init__(self, host: Host, directory: Directory, number: int, backups: int) -> None:
        self._host, self._directory, self._number, self._backups = host, directory, number, backups
        self._poked, self._closing = threading.Event(), False
        self._served = host.serving()
        """Of which the store has been told that they are here."""
        self._looking = threading.Lock()
        self._wishes: list[tuple[int, int, int]] = []
        """Processes that would like to serve one more, how many they do, and which one, if it is not -1."""
        self._wanted_by: dict[int, int] = {}
        """Of servers with their backups here: the process that is to be the next backup, and would like to serve."""
        self._backup_at: dict[int, int] = {}
        """Of servers: the process with the backup, if this process had it made."""
        self._in_vain: set[int] = set()
        """Processes that took no backup when they were asked last."""
        host.on_wish = self._hear_wish
        self._alone: set[int] = set()
        """Servers without a backup, of which it has been said."""
        host.on_change = self._poked.set
        if host.succession is not None:
            host.succession.on_change = self._poked.set
        directory.processes()  # which are needed when the store has ended
        self._thread = threading.Thread(target=self._run, name="ringreduce keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._poked.set()
        self._thread.join()

    def _run(self) -> None:
        soon = False
        while not self._closing:
            self._poked.wait(_SOON if soon else _LOOK)
            self._poked.clear()
            try:
                if not soon:  # no requests to the store while a backup takes over
                    self._directory.processes()  # newcomers
                with self._looking:
                    soon = not self._closing and self._look()
            except Aborted:  # a server has been stopped
                soon = False
            except Exception:  # whatever it is, there must be backups afterwards
                log.exception("looking after the servers of process %d", os.getpid())
                soon = False

    def _look(self) -> bool:
        """Returns whether it has to be called again soon."""
        soon = not self._have_left()
        self._tell_store()
        while self._wishes and not soon:
            self._grant(*self._wishes.pop())
        for number, shard in list(self._host.shards.items()):
            if shard.server.has_ended:
                self._host.drop(number, shard)
            elif shard.server.is_heir:
                if not (self._backups and self._have_backup(number)) and not self._closing:
                    self._host.serve_alone(number)
                soon = True
            elif not shard.server.serves:
                soon |= self._host.succession is None and self._host.is_followed_by_nobody(number)
                soon |= shard.takes_over_quietly
            elif self._backups and self._host.lacks_backup(shard):
                self._have_backup(number)
        return soon

    def _tell_store(self) -> None:
        """Which servers are here that were not."""
        if self._host.succession is not None:
            return
        serving = self._host.serving()
        for number, shard in serving.items():
            if self._served.get(number) is not shard:  # one that went away and came back is another one
                if not shard.takes_over_quietly and shard.has_workers():
                    what = f"server {number} has ended: its backup, in this process (pid {os.getpid()}), takes over"
                    log.warning("%s", what)
                self._directory.put(number, self._number)
        self._served = serving

    def _hear_wish(self, process: int, has: int, number: int) -> None:
        if number >= 0 and number not in self._host.serving():
            self._wanted_by[number] = process
            return
        self._wishes.append((process, has, number))
        self._poked.set()

    def _grant(self, process: int, has: int, wanted: int) -> None:
        """Has the other process serve one of those here, if it has fewer even then."""
        mine = sorted(self._host.serving())
        if self._host.succession is not None:
            if wanted in mine and not self._host.shards[wanted].is_saving():
                is_next = self._host.succession.backup_of(self._host.shards[wanted]) == process
                if len(mine) > has + (not is_next):  # what is here on its way to that process it may have in any case
                    self._host.hand_over(wanted)
                    self._poked.set()
            return
        if len(mine) <= has + 1:
            return
        # First one that has its backup there. Some may not move: those with keys that Python updates.
        for number in sorted(mine, key=lambda each: (self._backup_at.get(each) == process, each), reverse=True):
            if not self._host.shards[number].is_saving() and self._have_backup(number, process):
                self._host.hand_over(number)
                self._poked.set()
                return

    def _have_left(self) -> bool:
        """Whether no server waits any more for its backup to go on in its place."""
        return all([self._host.has_left(*each) for each in list(self._host.leaving)])

    def take_share(self, servers: int, deadline: float) -> None:
        """Returns when no process serves two more than this one, or keeps what it has when the time is over. Raises
        `CollectiveTimeout` if that is nothing."""
        while True:
            counts = collections.Counter(self._directory.place_of(server) for server in range(servers))
            mine, (richest, most) = counts[self._number], counts.most_common(1)[0]
            if most <= mine + 1:
                return
            if time.monotonic() > deadline:
                why = f"process {richest} did not give one of its {most} servers to this one in time"
                if not self._host.serving():
                    raise CollectiveTimeout(f"{why}: it may have ended, been stopped, or serve what cannot move")
                log.warning("%s; it goes on with those that it has: %s", why, sorted(self._host.serving()))
                return
            with contextlib.suppress(OSError):  # it has ended, and others will say that they serve what it did
                address = bytes.fromhex(self._directory.processes()[richest]["address"])
                self._host.wish_for_server(self._number, address, _PATIENCE)
            until = time.monotonic() + _LOOK
            while len(self._host.serving()) <= mine and time.monotonic() < until:
                time.sleep(_SOON)
            while self._served != self._host.serving() and time.monotonic() < deadline:
                time.sleep(_SOON)  # until the store knows

    def take_share_between_hosts(self, servers: int, deadline: float) -> None:
        """The same where a server has its only backup in another process, which serves it on its way here: with this
        process as its backup, and then this one takes over. It may keep what it has."""
        succession = self._host.succession
        assert succession is not None
        while time.monotonic() < deadline:
            views = {server: view for server in range(servers) if (view := succession.views.of(server))}
            counts = collections.Counter(view.server.process for view in views.values())
            # Not if all copies would be on this host meanwhile.
            machines = {number: its["machine"] for number, its in self._directory.processes().items()}
            here = [number for number in machines if machines[number] == machines[self._number]]
            may = [
                (counts[view.server.process], server)
                for server, view in views.items()
                if view.backup is not None and (view.backup.process == self._number or view.backup.process not in here)
            ]
            most, server = max(may, default=(0, 0))
            if most <= counts[self._number] + 1:
                return
            self._take(server, views[server], counts[self._number], deadline)

    def _take(self, number: int, view: View, has: int, deadline: float) -> None:
        """Returns when server `number` is served here, or the time is over, or others have moved it elsewhere."""
        succession, began = self._host.succession, view
        assert succession is not None and began.backup is not None
        way = (began.server.process, began.backup.process, self._number)
        while number not in self._host.serving() and view.server.process in way and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # it has ended, and the next view says so
                if view.server.process == way[0] and view.backup is not None and view.backup.process != self._number:
                    succession.wish_for(number, view.backup.process, has, _PATIENCE)
                if view.server.process != self._number:
                    succession.wish_for(number, view.server.process, has, _PATIENCE)
            until = time.monotonic() + _LOOK
            while time.monotonic() < until and number not in self._host.serving():
                time.sleep(_SOON)
            view = succession.views.of(number) or view

    def give_away(self, timeout: float) -> bool:
        """Has other processes serve what this one does, and takes no backups any more.

        Returns whether nothing is served here then: not if there is no other process that stays.

        One process leaves at a time, since two could give to each other.
        """
        deadline = time.monotonic() + timeout
        if not self._directory.begin_to_leave(self._number, self._host.is_there, deadline):
            return False
        self._host.is_leaving = True
        with self._looking:
            for number, shard in self._host.serving().items():
                while shard.is_saving() and time.monotonic() < deadline:
                    time.sleep(_SOON)
                while self._host.shards.get(number) is shard and not shard.is_saving() and time.monotonic() < deadline:
                    if shard.server.has_backup:
                        self._host.hand_over(number)
                        while not self._have_left() and time.monotonic() < deadline:
                            time.sleep(_SOON)
                    elif not self._host.lacks_backup(shard):  # it is being decided who goes on
                        time.sleep(_SOON)
                    elif not self._have_backup(number):
                        break
                if self._host.shards.get(number) is shard or self._host.leaving:
                    self._host.is_leaving = False
                    self._directory.stay(self._number)
                    return False
        return True

    def _have_backup(self, number: int, process: int | None = None) -> bool:
        """On this process, or the next one that takes it."""
        server = self._host.shards[number].server
        if process is not None and self._backup_at.get(number) == process and server.has_backup:
            return True
        wanted_by = self._wanted_by.pop(number, None)
        first = [] if wanted_by is None else [wanted_by]
        for other in first + self._candidates() if process is None else [process]:
            if self._closing:
                return False
            try:
                self._host.have_backup(number, other, self._directory.processes()[other], _PATIENCE)
                self._alone.discard(number)
                self._in_vain.discard(other)
                self._backup_at[number] = other
                return True
            except OSError:  # it has ended, or takes none
                self._in_vain.add(other)
            except Aborted:
                raise
            except RingReduceError as error:
                self._say(number, str(error))
                return False
        self._say(number, "there is no other process for one")
        return False

    def _candidates(self) -> list[int]:
        """The next process on another host before the others, and those last that took none before."""
        processes = self._directory.processes()
        machine = processes[self._number]["machine"]
        is_near = {p: its["machine"] == machine for p, its in processes.items() if p != self._number}
        others = [p for p in is_near if is_near[p] or self._host.succession is not None]
        ring = 1 + max(processes)
        return sorted(others, key=lambda p: (p in self._in_vain, is_near[p], (p - self._number) % ring))

    def _say(self, number: int, why: str) -> None:
        if number not in self._alone and self._host.shards[number].has_workers():
            self._alone.add(number)
            log.warning("server %d, in process %d, has no backup: %s", number, os.getpid(), why)
