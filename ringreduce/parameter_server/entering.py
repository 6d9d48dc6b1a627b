"""Entering a parameter server as a worker: connecting to every server, on this host and on others."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, PeerLost
from ringreduce.parameter_server.client.failover import FailoverConnector
from ringreduce.parameter_server.client.key_value import KeyValue
from ringreduce.parameter_server.client.membership import Membership
from ringreduce.parameter_server.client.questions import Joined, Questions
from ringreduce.parameter_server.doors import Reached, Refused, ask, called, connect, connect_again, reach
from ringreduce.parameter_server.entry import Entry
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.store import Views, new_dialer, place_of
from ringreduce.parameter_server.views import Replica, View

_TAKING_OVER = 10.0
"""A worker that joins waits this many seconds for a backup to take over."""
_AGAIN = 0.005
"""Seconds between two attempts to join whoever serves."""


def enter(entry: Entry, local: ServerProcess | None) -> KeyValue:
    """Connects a worker to every server. `local` has the servers of its process, if there are any."""
    client = _C.ParameterClient(entry.worker, entry.servers, _window(entry))
    if local is not None:
        client.host(local.server)
    views = Views(entry.store) if entry.has_far_backups else None
    joined: list[Joined] = []
    with contextlib.ExitStack() as undo:
        reached = {} if views is not None else _reach_all(entry, undo)
        for server in range(entry.servers):
            place = place_of(entry.store, server, entry.founders)
            name = called(server, entry.process(place))
            try:
                if views is not None:
                    joined.append(_enter_viewed(entry, views, client, server, undo))
                elif place in reached:
                    joined.append(_enter_far(entry, client, server, Replica(place, 0), reached[place]))
                else:
                    joined.append(_enter_near(entry, client, server))
            except TimeoutError:
                raise CollectiveTimeout(f"{name} did not let this worker in in time", server) from None
            except OSError as error:
                raise PeerLost(f"joining {name}: {error}", server) from None
            undo.callback(joined[-1].connection.close)
        failover = None if views is None else FailoverConnector(entry, views, client, [each.turn for each in joined])
        undo.pop_all()

    def reach_near(server: int, address: str, timeout: float) -> socket.socket:
        return connect_again(bytes.fromhex(address), entry.secret, entry.hello() | {"of": server}, timeout)

    loads = [0] * entry.servers
    membership = Membership(
        entry.store, entry.worker, entry.group, client, local, entry.block_bytes, entry.window, loads
    )
    questions = Questions(entry.worker, client, joined, reach_near, failover)
    return KeyValue(membership, questions, entry.timeout)


def _window(entry: Entry) -> int:
    """Returns the bytes of the worker's window: no more than any server accepts that may be reached by TCP."""
    places = [entry.process(process) for process in range(entry.founders)]
    far = [its for its in places if entry.has_far_backups or its["machine"] != entry.machine]
    entry.window = min([entry.window, *(int(its["window"]) for its in far)]) // 64 * 64  # as the client has it
    return entry.window


def _reach_all(entry: Entry, undo: contextlib.ExitStack) -> dict[int, Reached]:
    """Connections to all processes on other hosts."""
    places = [entry.process(process) for process in range(entry.founders)]
    far = {its["number"]: its for its in places if its["machine"] != entry.machine}
    if not far:
        return {}
    number, look = new_dialer(entry.store), entry.check_founding
    return reach(entry.options, entry.secret, far, number, entry.deadline, undo, look)


def _enter_near(entry: Entry, client: Any, server: int) -> Joined:
    """Joins a server on this host.

    If its process has ended or does not serve it any more, waits for the process that does.
    """
    until, began = time.monotonic() + _TAKING_OVER, place_of(entry.store, server, entry.founders)
    while True:
        its = entry.process(place_of(entry.store, server, entry.founders))
        try:
            return _let_in(entry, client, server, its)
        except (TimeoutError, Refused):
            raise
        except OSError:
            others = entry.backups or entry.servers > entry.founders or its["number"] != began
            if not others or time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(_AGAIN)


def _let_in(entry: Entry, client: Any, server: int, its: dict[str, Any]) -> Joined:
    """Joins a server in the process described by `its`."""
    hello = entry.hello() | {"servers": entry.servers, "lane": server, "window_bytes": client.window_bytes}
    left = max(0.1, entry.deadline - time.monotonic())
    connection, answer, (values, bell, pidfd) = connect(
        bytes.fromhex(its["address"]), entry.secret, hello | {"of": server}, client, left
    )
    turn = int(answer["turn"])
    name = called(server, its, turn)
    client.attach(
        server=server, values=values, bell=bell, pidfd=pidfd, capacity=int(answer["capacity"]), name=name, turn=turn
    )
    return Joined(connection, name, turn)


def _enter_far(entry: Entry, client: Any, server: int, replica: Replica, reached: Reached) -> Joined:
    reached.control.settimeout(max(0.1, entry.deadline - time.monotonic()))
    ask(reached.control, entry.hello_to(server, replica.number))
    name = called(server, entry.process(replica.process), replica.number)
    client.attach_far(server, name, replica.number)
    for descriptor, path in reached.take():
        client.connect(server, descriptor, path, replica.number)
    return Joined(reached.control, name, replica.number)


def _enter_viewed(entry: Entry, views: Views, client: Any, server: int, undo: contextlib.ExitStack) -> Joined:
    """Joins whoever serves the blocks of a server, if backups are reached by TCP. Starts again if the view changes."""
    until = time.monotonic() + _TAKING_OVER
    while True:
        view = views.of(server)
        assert view is not None  # since the founders have made it
        one = view.server
        its = entry.process(one.process)

        def look(seen: View = view) -> None:
            if views.of(server) != seen:
                raise PeerLost(f"{its['name']} does not serve server {server} any more", server)  # noqa: B023

        try:
            if one.number == 0 and its["machine"] == entry.machine:
                return _let_in(entry, client, server, its)
            number, processes = views.new_dialer(), {one.process: its}
            reached = reach(entry.options, entry.secret, processes, number, entry.deadline, undo, look)
            return _enter_far(entry, client, server, one, reached[one.process])
        except (TimeoutError, Refused):
            raise
        except (OSError, PeerLost):
            if time.monotonic() > min(until, entry.deadline):
                raise
            time.sleep(_AGAIN)
