"""Backups that are reached by TCP: making one, and who goes on when a server and its backup do not hear each other."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringreduce.common import system
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, PeerLost, RingReduceError, SystemFailure
from ringreduce.parameter_server import doors
from ringreduce.parameter_server.server.shard import Shard
from ringreduce.parameter_server.store import Views
from ringreduce.parameter_server.views import Replica, Standing, View

_AGAIN = 0.2
"""Seconds until a store that could not be reached is asked again."""
_LOOK = 0.002
"""Seconds between looks whether a backup has all that its server is."""

Its = dict[str, Any]
"""What a process has told the store about itself."""

log = logging.getLogger(__name__)


@dataclass
class _Link:
    """Between a server here and its backup."""

    counts: bool = False
    is_broken: bool = False


class Replication:
    """The part of the servers and backups in this process. Thread-safe. A server sends its whole state to its new
    backup, and then the log. When the backup has that, the server puts it in the view. From then on each of the two may
    go on without the other once it has changed the view. Before, the server goes on in any case."""

    def __init__(self, process: int, views: Views, dial: Callable[[Its, float, Callable[[], None]], doors.Reached]):
        """`dial` connects to the door of a process until a deadline, calling now and then what may raise."""
        self.process, self.views, self._dial = process, views, dial
        self._changing = threading.Lock()
        self._known: dict[Shard, Standing] = {}
        self._closing = False
        self._silences: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.on_change: Callable[[], None] = lambda: None  # called when somebody goes on
        # When somebody is silent, it may be too late to start a thread.
        system.start(threading.Thread(target=self._run, name="ringreduce replication", daemon=True))

    def close(self) -> None:
        self._closing = True
        self._silences.put(None)

    def begin(self, number: int, shard: Shard) -> None:
        """A server that begins here."""
        me = Replica(self.process, 0)
        self._known[shard] = Standing(me, self.views.change(number, None, View(0, me)))

    def forget(self, shard: Shard) -> None:
        self._known.pop(shard, None)

    def replica(self, shard: Shard) -> int:
        """What number this one has; 0 if it began here."""
        known = self._known.get(shard)
        return 0 if known is None else known.me.number

    def is_settled(self, shard: Shard) -> bool:
        """Whether this server has no backup, and none of which it is not decided whether it goes on."""
        return shard in self._known and self._known[shard].leads and not self._known[shard].has_backup

    def lead(self, number: int, shard: Shard, its: Its, timeout: float) -> None:
        """Makes a backup of server `number` in a process; returns when it counts. Raises `OSError` if it does not work,
        and `InvalidArgument` if there can be none. `timeout` is not for what has to be sent."""
        with self._changing:
            known = self._standing(shard)
            if not known.leads:
                raise ConnectionError(f"server {number} has been replaced")
            self._known[shard], after = known.asks_for_backup(its["number"])
        assert after.backup is not None
        backup, link = after.backup, _Link()
        with contextlib.closing(self._go_to(its, timeout)) as reached:
            hello: dict[str, Any] = {"backup": True, "of": number, "capacity": shard.server.capacity}
            hello |= {"view": after.text(), "since": known.view.number}
            answer, _ = doors.ask(reached.control, hello)
            shard.server.lead_far(self._later(self._break_off, shard, number, backup, link), str(answer["name"]))
            try:
                for descriptor, path in reached.take():
                    shard.server.connect_partner(descriptor, path)
            except BaseException:  # the server would wait for what a backup without a connection confirms
                shard.server.abandon_backup()
                raise
        self._wait_for(lambda: shard.server.backup_follows or link.is_broken)
        with self._changing:
            found = self._known.get(shard) if link.is_broken else self._change(shard, number, known.view, after)
            if found is None:  # so the backup may count
                raise Aborted(f"server {number} has been stopped")
            counts = found.backup_counts(after)
            link.counts = counts is True
            if counts:
                return shard.server.count_backup()
            if counts is None:
                shard.server.stop()
                self._say(number, was_backup=False, goes_on=False)
            else:
                shard.server.abandon_backup()
        raise ConnectionError(f"process {its['number']} was lost before it was the backup of server {number}")

    def wish_for(self, number: int, its: Its, has: int, timeout: float) -> None:
        """Tells a process that this one, which serves `has`, would like to serve server `number`. Its server leaves it
        to its backup; its backup takes this process for the next one. Raises `OSError` if that process has ended."""
        with contextlib.closing(self._go_to(its, timeout)) as reached:
            doors.ask(reached.control, {"wish": True, "of": number, "process": self.process, "has": has})

    def _go_to(self, its: Its, timeout: float) -> doors.Reached:
        try:
            reached = self._dial(its, time.monotonic() + timeout, self._check_open)
        except Aborted:
            raise
        except (PeerLost, CollectiveTimeout, SystemFailure, RuntimeError) as error:  # the last of a store
            raise ConnectionError(str(error)) from None
        reached.control.settimeout(timeout)
        return reached

    def backup_of(self, shard: Shard) -> int | None:
        """The process with the backup of what is served here."""
        backup = self._known[shard].view.backup
        return None if backup is None else backup.process

    def _standing(self, shard: Shard) -> Standing:
        """A designated primary counts as the server already."""
        if shard.server.is_heir:
            self._known[shard] = self._known[shard].as_heir()
        return self._known[shard]

    def serve_alone(self, number: int, shard: Shard) -> None:
        """Lets a designated primary serve that can have no backup."""
        with self._changing:
            known = self._standing(shard)
            if known.has_backup:
                found = self._change(shard, number, known.view, known.view.alone(known.me))
                if found is not None and found.leads:
                    shard.server.serve_alone()

    def hand_over(self, number: int, shard: Shard) -> bool:
        """Lets a server here leave its blocks to its backup, the designated primary. False: that has been lost."""
        server = shard.server
        in_the_end: Callable[[], None] | None = server.unfreeze
        try:
            until = server.freeze()
            self._wait_for(lambda: not server.has_backup or server.confirmed >= until)
            with self._changing:
                known = self._known[shard]
                if server.has_backup and known.has_backup:
                    try:
                        found = self._change(shard, number, known.view, known.view.swapped())
                        if found is not None and found.view == known.view.swapped():
                            server.leave_to_backup()
                            in_the_end = None
                    except MemoryError:  # the store may have the new view: only the backup can serve, which takes over
                        in_the_end = server.stop
                        raise
        except InvalidArgument:
            pass  # it has no backup any more
        finally:
            if in_the_end is not None:
                in_the_end()
        return in_the_end is None

    def follow(self, number: int, shard: Shard, view: str, since: int, earlier: Shard | None) -> None:
        """Makes `shard` the backup that `view` names. Raises `InvalidArgument` if an earlier one here knows better."""
        its, known = View.of(view), None if earlier is None else self._known.get(earlier)
        if known is not None and not known.gives_way_to(its, since):
            raise InvalidArgument(f"server {number} has been replaced by one that this process knows")
        assert its.backup is not None
        self._known[shard] = Standing(its.backup, its)
        shard.follow_far(self._later(self._decide, shard, number, its.server))

    def _check_open(self) -> None:
        if self._closing:
            raise Aborted("this process's servers are being closed")

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._check_open()
            time.sleep(_LOOK)

    def _later(self, decide: Callable[..., None], *arguments: object) -> Callable[[str], None]:
        """What a server's thread, which must not wait, calls with a reason: this object's thread decides."""
        return lambda why: self._silences.put(functools.partial(decide, *arguments, why))

    def _run(self) -> None:
        while (decision := self._silences.get()) is not None:
            try:
                decision()
            except Exception:
                log.exception("deciding who goes on, in process %d", os.getpid())

    def _break_off(self, shard: Shard, number: int, backup: Replica, link: _Link, why: str) -> None:
        """A server does not hear its backup."""
        with self._changing:
            link.is_broken = True
            counts = link.counts
        if counts:
            self._decide(shard, number, backup, why)

    def _decide(self, shard: Shard, number: int, other: Replica, why: str) -> None:
        """Whether this one goes on without the other, which it does not hear."""
        with self._changing:
            known = self._known.get(shard)
            if known is None or known.goes_on_without(other):  # it does already, and may have another backup
                return
            leaves, was_backup = shard.server.leaves, known.me == known.view.backup
            while (goes_on := known.goes_on_without(other)) is None:
                known = self._change(shard, number, known.view, known.view.alone(known.me))
                if known is None:
                    return
            with contextlib.suppress(RingReduceError):  # it has been stopped
                shard.server.decided(goes_on)
        if shard.has_workers() if goes_on else not leaves:  # otherwise the other one has left, as all have
            self._say(number, was_backup, goes_on, why)
        self.on_change()

    def _change(self, shard: Shard, number: int, before: View, after: View) -> Standing | None:
        """Returns what is known after a request to change the view; None if this, or the server, is closed before.
        Repeats it while the store cannot be reached, since it cannot know what its last request did."""
        warned = False
        while not self._closing and shard in self._known:
            try:
                found = self.views.change(number, before, after)
                if shard in self._known:
                    self._known[shard] = replace(self._known[shard], view=found)
                return self._known.get(shard)
            except Exception as error:  # of whatever kind of store
                if not warned:
                    log.warning("who serves server %d cannot be decided without the store: %s", number, error)
                warned = True
                time.sleep(_AGAIN)
        return None

    @staticmethod
    def _say(number: int, was_backup: bool, goes_on: bool, why: str = "") -> None:
        here = f"in this process (pid {os.getpid()})"
        if goes_on and was_backup:
            log.warning("server %d has ended or cannot be reached: its backup, %s, takes over (%s)", number, here, why)
        elif goes_on:
            text = "the backup of server %d has ended or cannot be reached: it goes on, and gets another (%s)"
            log.warning(text, number, why)
        elif was_backup:
            log.warning("server %d goes on without its backup %s", number, here)
        else:
            log.warning("server %d, %s, has been replaced by its backup, and serves no more", number, here)
