"""A worker's thread that connects it to backups, where these are reached by TCP.

The thread reads the views in the store (`views`) and connects to a backup as soon as a view names it, so that calls can
go on there when the server ends. If the server ends before that, the thread looks for whoever serves afterwards.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

from ringreduce.common import system
from ringreduce.errors import Aborted, RingReduceError
from ringreduce.parameter_server.doors import called
from ringreduce.parameter_server.entry import Entry
from ringreduce.parameter_server.store import Views
from ringreduce.parameter_server.views import Replica

_LOOK = 0.25
"""Seconds between two looks at the views."""
_PATIENCE = 10.0
"""Seconds for connecting to one replica."""
_LOOKS = 4
"""A server is lost after this many looks in a row that found nobody who serves its blocks."""


class FailoverConnector:
    """Connects a worker to backups. Its thread runs until `close`."""

    def __init__(self, entry: Entry, views: Views, client: Any, replicas: list[int]) -> None:
        """`replicas` has, for each server, the number of the replica that `client` is attached to."""
        self._entry, self._views, self._client = entry, views, client
        self._met = set(enumerate(replicas))  # (server, replica) of those that the worker has been connected to
        self._lock = threading.Lock()
        self._controls: dict[tuple[int, int], tuple[socket.socket, str]] = {}
        """By server and replica: connection for control messages and name of those that have not been asked yet."""
        self._looks = [0] * len(replicas)
        self._changes = -1
        self._closing, self._pid = threading.Event(), os.getpid()
        client.seek()
        self._look()
        self._thread = threading.Thread(target=self._run, name="ringreduce failover", daemon=True)
        system.start(self._thread)

    def take(self, server: int, replica: int) -> tuple[socket.socket, str] | None:
        """Removes and returns a replica's connection for control messages, and its name. None: there is none."""
        with self._lock:
            return self._controls.pop((server, replica), None)

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has no such thread
            self._closing.set()
            self._thread.join()
        for connection, _ in self._controls.values():
            connection.close()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK):
            with contextlib.suppress(Exception):  # whatever the store raises: it may be reachable again later
                self._look()

    def _look(self) -> None:
        changes = self._views.changes()
        for server in range(len(self._looks)):
            asks = self._client.asks(server)
            if asks and (len(asks) < 2 or asks[0] < 0 or changes != self._changes):
                self._attend(server, asks)
        self._changes = changes

    def _attend(self, server: int, asks: list[int]) -> None:
        view = self._views.of(server)
        if view is None:
            return
        for one in (view.server, view.backup):
            if one is not None and (server, one.number) not in self._met and self._meet(server, one):
                self._looks[server] = 0
                return
        with self._lock:  # closes connections to replicas that have ended
            for key in [each for each in self._controls if each[0] == server and each[1] not in asks]:
                self._controls.pop(key)[0].close()
        self._looks[server] = self._looks[server] + 1 if asks[0] < 0 else 0
        if self._looks[server] >= _LOOKS:
            self._client.give_up(server, "nobody has its blocks that this worker can reach")

    def _meet(self, server: int, one: Replica) -> bool:
        """Connects to a replica, which is asked when the one before it has ended. Returns whether it worked."""
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError, RingReduceError):
            its = self._views.process(one.process)
            found = self._entry.dial(its, deadline, self._check_open)
            found.control.settimeout(_PATIENCE)

            def attach(server: int, name: str, replica: int) -> None:
                found.control.settimeout(self._entry.timeout)
                with self._lock:
                    self._controls[server, replica] = found.control, name
                self._client.attach_far_backup(server, name, replica)

            self._entry.meet(found, self._client, server, called(server, its, one.number), one.number, attach)
            self._met.add((server, one.number))
            return True
        return False

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Aborted("this worker has left")
