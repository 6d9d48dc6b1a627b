"""`Entry`: what a process that joins knows about a parameter server, and how founders see who has come and ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError, DistStoreError

from ringreduce import errors
from ringreduce.config import Options
from ringreduce.coordination.process import Who, has_ended, identity, process_began
from ringreduce.coordination.store import get, once
from ringreduce.coordination.wait import CHECK_BY_RANK, CHECK_PROCESSES
from ringreduce.errors import CollectiveTimeout, PeerLost, RingReduceError, SystemFailure
from ringreduce.parameter_server import doors
from ringreduce.parameter_server.doors import called
from ringreduce.parameter_server.store import Views

STORE_GONE = (DistNetworkError, DistStoreError)
"""What a torch store raises when the process that has it has ended, or does not answer."""


class Stale(Exception):
    """Earlier processes, which have ended, have begun this incarnation. Whoever finds that out founds the next one."""


class Founder(NamedTuple):
    """A founder that has come."""

    who: Who
    at: float  # when it came, in seconds of `time.time()`

    @property
    def is_earlier(self) -> bool:
        """Whether it came before this process began."""
        return self.at < process_began()


@dataclass
class Entry:
    """What a founder or a worker needs in order to join. `deadline` is a time of the monotonic clock."""

    name: str
    group: str
    window: int
    block_bytes: int
    deadline: float
    timeout: float
    options: Options
    store: Any = None  # the store, under a prefix of this incarnation of the parameter server
    attempt: int = 0  # the number of this incarnation; the same store can be used for several, one after the other
    worker: int = -1  # the number of this worker; for a founder, that of its process
    founders: int = 0
    servers: int = 0
    backups: int = 0
    has_far_backups: bool = False  # whether backups are reached by TCP
    secret: bytes = b""
    _came: dict[int, Founder] = field(default_factory=dict)
    """The founders that have come, as far as this one has looked."""
    _look_again: float = 0.0  # when to look again whether founders have ended

    def anew(self) -> Entry:
        """Returns what is known before an incarnation is chosen."""
        return replace(self, store=None, attempt=0, secret=b"", has_far_backups=False, _came={}, _look_again=0.0)

    @property
    def machine(self) -> str:
        return doors.machine(self.options)

    @functools.cached_property
    def machines(self) -> list[str]:
        """The host of each founder (`doors.machine`). Waits until all have told the store."""
        return [self._wait(f"machine/{process}", process) for process in range(self.founders)]

    def process(self, process: int) -> dict[str, Any]:
        """Returns what a process with servers has told the store about itself. Waits for it."""
        place: dict[str, Any] = json.loads(self._wait(f"server/{process}", process))
        return place | {"number": process, "name": called(process, place)}

    def _wait(self, key: str, process: int) -> str:
        try:
            return get(self.store, key, f"server {process}", self.deadline, self.check_founding)
        except CollectiveTimeout as error:
            error.culprit = process
            raise

    def claim(self) -> bool:
        """Takes this founder's rank in this incarnation; returns False if it has been taken before. From now on the
        other founders watch this process."""
        mine = json.dumps({"who": identity(), "at": time.time(), "claim": secrets.token_hex(4)})
        return once(self.store, f"rank {self.worker}", mine) == mine

    def is_mine(self) -> bool:
        """Whether this process has taken its rank in this incarnation."""
        key = f"rank {self.worker}"
        return self.store.check([key]) and Who(*json.loads(self.store.get(key))["who"]) == identity()

    def wait_until_founded(self) -> None:
        """Returns when all founders have entered. Raises as `check_founding`, and `CollectiveTimeout`."""
        self.store.set(f"entered/{self.worker}", "")
        if self.store.add("entered", 1) == self.founders:
            once(self.store, "founded", str(self.servers))
        try:
            get(self.store, "founded", "a server", self.deadline, self.check_founding)
        except CollectiveTimeout:
            late = [rank for rank in range(self.founders) if not self.store.check([f"entered/{rank}"])]
            if late:
                names = ", ".join(map(self._called, late))
                raise CollectiveTimeout(
                    f"founding the parameter server: {names} did not come in time", late[0]
                ) from None
        self.check_founding()

    def check_founding(self) -> None:
        """Raises the error with which a founder has given up this incarnation, or `PeerLost` if one has ended before
        all have entered; `Stale` if that was an earlier process. A process sees the ends of those on its machine."""
        self.raise_if_given_up()
        if time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + max(CHECK_PROCESSES, CHECK_BY_RANK * self.founders)
        self._look_who_came()
        ended = self._ended()
        if ended is not None and not self.is_over():  # otherwise it has ended since then
            if self._came[ended].is_earlier:
                raise Stale
            raise PeerLost(f"founding the parameter server: {self._called(ended)} died", ended)
        self.raise_if_given_up()

    def is_over(self) -> bool:
        """Whether all founders have entered this incarnation, or one has given it up."""
        return bool(self.store.check(["founded"]))

    def is_for_earlier_ones(self) -> bool:
        """Whether an incarnation that was given up tells this process nothing: it was started after that, or the
        founder that gave up has waited in vain and may try again."""
        kind, _, culprit, when = json.loads(self.store.get("founded"))
        return bool(kind == CollectiveTimeout.__name__ or culprit < 0 or process_began() > when)

    def raise_if_given_up(self) -> None:
        """Raises the error with which a founder has given up this incarnation, or `Stale` (for earlier processes)."""
        if self.is_over() and not (founded := self.store.get("founded").decode()).isdigit():
            kind, text, culprit, _ = json.loads(founded)
            if kind == PeerLost.__name__ and culprit < 0:
                self._look_who_came()
                if any(founder.is_earlier for founder in self._came.values()):
                    raise Stale
            raise getattr(errors, kind)(text, culprit)

    def is_stale(self) -> bool:
        """Whether a founder came before this process began, and has ended."""
        with contextlib.suppress(*STORE_GONE):
            self._look_who_came()
        ended = self._ended()
        return ended is not None and self._came[ended].is_earlier

    def _look_who_came(self) -> None:
        for rank in range(self.founders):
            if rank not in self._came and self.store.check([f"rank {rank}"]):
                came = json.loads(self.store.get(f"rank {rank}"))
                self._came[rank] = Founder(Who(*came["who"]), came["at"])

    def _ended(self) -> int | None:
        """Returns a founder whose process has ended, as far as this process has looked and can see."""
        here = identity().pids
        ended = [rank for rank, (who, _) in self._came.items() if who.pids == here and has_ended(who)]
        return min(ended, key=lambda rank: self._came[rank].at, default=None)

    def _called(self, rank: int) -> str:
        who = self._came[rank].who if rank in self._came else None
        return f"server {rank} ({who.host}, pid {who.pid})" if who else f"server {rank}"

    def give_up(self, error: BaseException) -> None:
        """Lets the other founders raise what keeps this one from going on. No effect if all have entered."""
        if isinstance(error, RingReduceError) and (error.culprit >= 0 or isinstance(error, PeerLost)):
            kind, text, culprit = type(error), str(error), error.culprit
        else:
            kind = type(error) if isinstance(error, RingReduceError) else PeerLost
            culprit = self.worker
            text = f"rank {self.worker} has given up: {str(error) or type(error).__name__}"
        with contextlib.suppress(Exception):  # the store may have ended
            once(self.store, "founded", json.dumps([kind.__name__, text, culprit, time.time()]))

    def without_store(self, error: Exception) -> RingReduceError:
        """Returns what a founder raises when the store has failed with `error`, which another founder may have had."""
        ended = self._ended()
        if ended is not None:
            return PeerLost(f"founding the parameter server: {self._called(ended)} died", ended)
        return SystemFailure(f"founding the parameter server: its store cannot be asked any more: {error}")

    def hello(self) -> dict[str, Any]:
        """Returns what a worker tells a server about itself."""
        return {"worker": self.worker, "host": socket.gethostname(), "pid": os.getpid(), "group": self.group}

    def hello_to(self, server: int, replica: int) -> dict[str, Any]:
        """Returns the same for a server or backup that is reached by TCP."""
        return self.hello() | {"of": server, "replica": replica, "window": self.window}

    def dial(self, views: Views, process: int, deadline: float, look: Callable[[], None]) -> doors.Reached:
        """Connects to the door of a process by TCP. Raises as `doors.reach`, and what the store raises."""
        with contextlib.ExitStack() as undo:
            processes, number = {process: views.process(process)}, views.new_dialer()
            found = doors.reach(self.options, self.secret, processes, number, deadline, undo, look)[process]
            undo.pop_all()
        return found
