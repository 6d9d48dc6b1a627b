"""A thread in every process with servers that gives servers backups and moves them to other processes.

Every process decides for its own servers. A server alone serves its blocks, so its process may choose the backup
without asking others. The launcher's store has a list of the processes. If backups are reached by TCP, it also has the
views (`replication`). On one host, only the end of a process counts as the loss of its servers, and the store records
the place of each server merely for workers that join.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time

from ringreduce.common import system
from ringreduce.coordination.wait import every, wait_for
from ringreduce.errors import Aborted, CollectiveTimeout, RingReduceError
from ringreduce.parameter_server.doors import lives
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.server.replication import Replication
from ringreduce.parameter_server.store import Directory
from ringreduce.parameter_server.views import View

_LOOK = 0.5
"""Seconds between two looks, unless something has happened."""
_SOON = 0.002
"""Seconds between two looks while a server has ended and its backup has not taken over."""
_PATIENCE = 5.0
"""Seconds within which another process must make a backup."""

log = logging.getLogger(__name__)


class ReplicaManager:
    """Gives the servers of this process backups, replaces lost ones, and gives servers to other processes."""

    def __init__(self, local: ServerProcess, directory: Directory, number: int, backups: int) -> None:
        self._local, self._directory, self._number, self._backups = local, directory, number, backups
        self._poked, self._closing = threading.Event(), False
        self._served = local.serving()  # the servers that the store has been told are here
        self._looking = threading.Lock()
        self._wishes: list[tuple[int, int, int]] = []
        """Wishes for a server: the process, how many servers it has, and the server that it wants (-1: any)."""
        self._wanted_by: dict[int, int] = {}
        """By number, for backups here: a process that would like to serve it. It becomes the next backup."""
        self._backup_at: dict[int, int] = {}  # by server: the process of the backup that this process had made
        self._in_vain: set[int] = set()  # processes that did not take a backup when they were last asked
        self._alone: set[int] = set()  # servers without a backup about which this has been logged
        local.on_change = self._poked.set
        if local.replication is not None:
            local.replication.on_change = self._poked.set
        directory.processes()  # learns them now, since the store may end
        self._thread = threading.Thread(target=self._run, name="ringreduce manager", daemon=True)
        system.start(self._thread)

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
            except Exception:  # the thread must go on, or lost backups are not replaced
                log.exception("looking after the servers of process %d", os.getpid())
                soon = False

    def _look(self) -> bool:
        """Does what is to be done now; returns whether it has to be called again soon."""
        soon = not self._have_left()
        self._tell_store()
        while self._wishes and not soon:
            self._grant(*self._wishes.pop())
        for number, shard in list(self._local.shards.items()):
            if shard.server.has_ended:
                if shard.server.failed_alone:
                    self._local.failed = number
                self._local.drop(number, shard)
            elif shard.server.is_heir:
                if not (self._backups and self._have_backup(number)) and not self._closing:
                    self._local.serve_alone(number)
                soon = True
            elif not shard.server.serves:
                soon |= self._local.replication is None and self._local.is_followed_by_nobody(number)
                soon |= shard.takes_over_quietly
            elif self._backups and self._local.lacks_backup(shard):
                self._have_backup(number)
        return soon

    def _tell_store(self) -> None:
        """Tells the store about servers that have come to this process, and logs takeovers."""
        if self._local.replication is not None:
            return
        serving = self._local.serving()
        for number, shard in serving.items():
            if self._served.get(number) is not shard:  # a server that left and returned is another shard
                if not shard.takes_over_quietly and shard.has_workers():
                    here = f"in this process (pid {os.getpid()})"
                    log.warning("server %d has ended: its backup, %s, takes over", number, here)
                self._directory.put(number, self._number)
        self._served = serving

    def hear_wish(self, process: int, has: int, number: int) -> None:
        if number >= 0 and number not in self._local.serving():
            self._wanted_by[number] = process
            return
        self._wishes.append((process, has, number))
        self._poked.set()

    def _grant(self, process: int, has: int, wanted: int) -> None:
        """Gives a server to another process, unless that would then have more servers than this one."""
        mine = sorted(self._local.serving())
        if self._local.replication is not None:
            if wanted in mine and not self._local.shards[wanted].is_saving():
                is_next = self._local.replication.backup_of(self._local.shards[wanted]) == process
                # If that process is the backup already, the server is only here on its way, and is not counted as ours.
                if len(mine) > has + (not is_next):
                    self._local.hand_over(wanted)
                    self._poked.set()
            return
        if len(mine) <= has + 1:
            return
        # Servers with their backup there come first. A server with keys that Python updates cannot move.
        for number in sorted(mine, key=lambda each: (self._backup_at.get(each) == process, each), reverse=True):
            if not self._local.shards[number].is_saving() and self._have_backup(number, process):
                self._local.hand_over(number)
                self._poked.set()
                return

    def _have_left(self) -> bool:
        """Whether no server waits any more for its backup to serve in its place."""
        return all([self._local.has_left(*each) for each in list(self._local.leaving)])

    def take_share(self, servers: int, deadline: float) -> None:
        """Asks for servers until no process serves two more than this one. After `deadline`, goes on with those that it
        has, and raises `CollectiveTimeout` if it has none and backups are on one host."""
        if self._local.replication is not None:
            return self._take_share_between_hosts(self._local.replication, servers, deadline)
        while True:
            counts = collections.Counter(self._directory.process_of(server) for server in range(servers))
            mine, (richest, most) = counts[self._number], counts.most_common(1)[0]
            if most <= mine + 1:
                return
            if time.monotonic() > deadline:
                why = f"process {richest} did not give one of its {most} servers to this one in time"
                if not self._local.serving():
                    raise CollectiveTimeout(f"{why}: it may have ended, been stopped, or serve what cannot move")
                log.warning("%s; it goes on with those that it has: %s", why, sorted(self._local.serving()))
                return
            with contextlib.suppress(OSError):  # that process has ended, and others will serve what it did
                address = bytes.fromhex(self._directory.processes()[richest]["address"])
                self._local.wish_for_server(self._number, address, _PATIENCE)
            wait_for(lambda: len(self._local.serving()) > mine, every(_SOON), time.monotonic() + _LOOK)  # noqa: B023
            wait_for(lambda: self._served == self._local.serving(), every(_SOON), deadline)  # until the store knows

    def _take_share_between_hosts(self, replication: Replication, servers: int, deadline: float) -> None:
        """The same if backups are reached by TCP. A server has only one backup there, so it comes in two steps: its
        backup serves it with this process as the new backup, and then leaves it to this process. Does not raise."""
        while time.monotonic() < deadline:
            views = {server: view for server in range(servers) if (view := replication.views.of(server))}
            counts = collections.Counter(view.server.process for view in views.values())
            # Leaves out servers of which both copies would be on this host in between.
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
            self._take(replication, server, views[server], counts[self._number], deadline)

    def _take(self, replication: Replication, number: int, view: View, has: int, deadline: float) -> None:
        """Moves server `number` here. Returns when it is served here or elsewhere, or after `deadline`."""
        assert view.backup is not None
        way = (view.server.process, view.backup.process, self._number)
        while number not in self._local.serving() and view.server.process in way and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # that process has ended, as the next view will show
                processes = self._directory.processes()
                if view.server.process == way[0] and view.backup is not None and view.backup.process != self._number:
                    replication.wish_for(number, processes[view.backup.process], has, _PATIENCE)
                if view.server.process != self._number:
                    replication.wish_for(number, processes[view.server.process], has, _PATIENCE)
            wait_for(lambda: number in self._local.serving(), every(_SOON), time.monotonic() + _LOOK)
            view = replication.views.of(number) or view

    def give_away(self, timeout: float) -> bool:
        """Gives all servers of this process to others, and takes no backups any more. Returns False if something is
        still served here after `timeout` seconds. Processes leave one by one: two could give servers to each other."""
        deadline = time.monotonic() + timeout
        here = self._directory.processes()[self._number]["machine"]
        if not self._directory.begin_to_leave(self._number, lambda its: lives(its, here), deadline):
            return False
        self._local.is_leaving = True
        with self._looking:
            for number, shard in self._local.serving().items():
                wait_for(lambda: not shard.is_saving(), every(_SOON), deadline)  # noqa: B023
                while self._local.shards.get(number) is shard and not shard.is_saving() and time.monotonic() < deadline:
                    if shard.server.has_backup:
                        self._local.hand_over(number)
                        wait_for(self._have_left, every(_SOON), deadline)
                    elif not self._local.lacks_backup(shard):  # it is being decided who goes on
                        time.sleep(_SOON)
                    elif not self._have_backup(number):
                        break
                if self._local.shards.get(number) is shard or self._local.leaving:
                    self._local.is_leaving = False
                    self._directory.stay(self._number)
                    return False
        return True

    def _have_backup(self, number: int, process: int | None = None) -> bool:
        """Makes a backup of a server in `process`, or in the next one that takes it. Returns whether it has one."""
        server = self._local.shards[number].server
        if process is not None and self._backup_at.get(number) == process and server.has_backup:
            return True
        first = [self._wanted_by.pop(number)] if number in self._wanted_by else []
        for other in first + self._candidates() if process is None else [process]:
            if self._closing:
                return False
            try:
                self._local.have_backup(number, self._directory.processes()[other], _PATIENCE)
                self._alone.discard(number)
                self._in_vain.discard(other)
                self._backup_at[number] = other
                return True
            except OSError:  # that process has ended, or takes no backups
                self._in_vain.add(other)
            except Aborted:
                raise
            except RingReduceError as error:
                self._say(number, str(error))
                return False
        self._say(number, "there is no other process for one")
        return False

    def _candidates(self) -> list[int]:
        """Returns the processes that may get a backup: those on other hosts first, then the next ones by number.
        Processes that took none before come last."""
        processes = self._directory.processes()
        machine = processes[self._number]["machine"]
        is_near = {p: its["machine"] == machine for p, its in processes.items() if p != self._number}
        others = [p for p in is_near if is_near[p] or self._local.replication is not None]
        ring = 1 + max(processes)
        return sorted(others, key=lambda p: (p in self._in_vain, is_near[p], (p - self._number) % ring))

    def _say(self, number: int, why: str) -> None:
        """Logs once that a server has no backup."""
        if number not in self._alone and self._local.shards[number].has_workers():
            self._alone.add(number)
            log.warning("server %d, in process %d, has no backup: %s", number, os.getpid(), why)
