"""`Entry`: what a process that joins knows about a parameter server, and how founders see who has come and ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError

from ringreduce import errors
from ringreduce.config import Options
from ringreduce.coordination.endpoint import machine
from ringreduce.coordination.founding import Founder, Founding
from ringreduce.coordination.process import has_ended, identity, process_began
from ringreduce.coordination.store import get, once
from ringreduce.coordination.wait import CHECK_BY_RANK, CHECK_PROCESSES
from ringreduce.errors import CollectiveTimeout, PeerLost, RingReduceError, SystemFailure
from ringreduce.groups.ready import location_of
from ringreduce.parameter_server import doors
from ringreduce.parameter_server.store import Views
from ringreduce.parameter_server.updates import Function

STORE_GONE = (DistNetworkError, DistStoreError)
"""What a torch store raises when the process that has it has ended, or does not answer."""


class Stale(Exception):
    """Earlier processes, which have ended, have begun this incarnation. Whoever finds that out founds the next one."""


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
    functions: dict[str, Function]
    memory: Any = None  # of a founder; not checked yet, as `listen`
    listen: Any = False
    attempt: int = 0  # the number of this incarnation; the same store can be used for several, one after the other
    store: Any = None  # the store, under a prefix of this incarnation of the parameter server
    worker: int = -1  # the number of this worker; for a founder, that of its process
    founders: int = 0
    servers: int = 0
    backups: int = 0
    has_far_backups: bool = False  # whether backups are reached by TCP
    secret: bytes = b""
    _came: dict[int, Founder] = field(default_factory=dict)
    """The founders that have come, as far as this one has looked."""
    _look_again: float = 0.0  # when to look again whether founders have ended

    def begin(self, founding: Founding, attempt: int) -> None:
        """Chooses an incarnation."""
        self.founding, self.attempt = founding, attempt
        self.store = PrefixStore(f"attempt {attempt}", founding.store)

    @property
    def machine(self) -> str:
        return machine(location_of(self.options), str(identity()))

    @functools.cached_property
    def machines(self) -> list[str]:
        """The host of each founder (`machine`). Waits until all have told the store."""
        return [self._wait(f"machine/{process}", process) for process in range(self.founders)]

    @functools.cached_property
    def views(self) -> Views | None:
        """The views in the store, if backups are reached by TCP."""
        return Views(self.store) if self.has_far_backups else None

    def process(self, process: int) -> dict[str, Any]:
        """Returns what a process with servers has told the store about itself. Waits for it."""
        return dict(json.loads(self._wait(f"server/{process}", process)))

    def _wait(self, key: str, process: int) -> str:
        try:
            return get(self.store, key, f"server {process}", self.deadline, self.check_founding)
        except CollectiveTimeout as error:
            error.culprit = process
            raise

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

    def tells_this_process(self) -> bool:
        """Whether a founder has given up this incarnation since this process began, with an error that is for this one
        too. It is not if that founder has waited in vain, and so may try again, or has met what earlier ones left."""
        if not self.is_over() or (founded := self.store.get("founded")).isdigit():
            return False
        kind, _, culprit, when = json.loads(founded)
        return bool(kind != CollectiveTimeout.__name__ and culprit >= 0 and process_began() <= when)

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
        """Whether a founder came before this process began, and has ended without an error that this one is told."""
        with contextlib.suppress(*STORE_GONE):
            if self.tells_this_process():
                return False
            self._look_who_came()
        ended = self._ended()
        return ended is not None and self._came[ended].is_earlier

    def _look_who_came(self) -> None:
        for rank in range(self.founders):
            if rank not in self._came and (founder := self.founding.founder(self.attempt, rank)):
                self._came[rank] = founder

    def _ended(self) -> int | None:
        """Returns a founder whose process has ended, as far as this process has looked and can see."""
        ended = [rank for rank, founder in self._came.items() if has_ended(founder.who)]
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

    def dial(self, its: dict[str, Any], deadline: float, look: Callable[[], None]) -> doors.Reached:
        """Connects to the door of a process by TCP, where there are views. `its`: what the process has told the store.
        Raises as `doors.reach`, and what the store raises."""
        assert self.views is not None
        process, number = its["number"], self.views.new_dialer()
        with contextlib.ExitStack() as undo:
            found = doors.reach(self.options, self.secret, {process: its}, number, deadline, undo, look)[process]
            undo.pop_all()
        return found

    def meet(
        self, reached: doors.Reached, client: Any, server: int, name: str, replica: int, attach: Callable[..., None]
    ) -> None:
        """Makes this worker known to a server or backup that is reached by TCP, then `attach(server, name, replica)`
        makes that known to the client, which gets the connections. Closes them if this fails."""
        with contextlib.ExitStack() as undo:
            undo.callback(reached.close)
            doors.ask(reached.control, self.hello() | {"of": server, "replica": replica, "window": self.window})
            attach(server, name, replica)
            for descriptor, path in reached.take():
                client.connect(server, descriptor, path, replica)
            undo.pop_all()
