"""TCP connections between ranks on different hosts, made so that both ends know who the other is.

    door = Door(interfaces)                      # listens from here on; door.addresses go to the peers, by the store
    door.open(rank, "group", secret, peers, deliver)
    door.connect([1, 2], deadline)               # on one side or on both; returns when connections are delivered
    door.close()

Of two ranks one connects, the dialer, and the other's door lets it in (`handshake`). All connections between two ranks
are delivered together; from then on they belong to whom they are delivered.

Two ranks that connect to each other at the same time get one link. The door of the lower rank does not say READY while
a JOIN of its own is unanswered, and a rank that is linked says neither READY nor JOIN any more. The higher rank never
waits in this way, so the two cannot wait for each other.

One thread with an asyncio loop does all of it. Standard library only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from ringreduce.common import system
from ringreduce.common.descriptors import above_streams, make_above_streams
from ringreduce.common.failures import Aborted, CollectiveTimeout, PeerLost, SystemFailure
from ringreduce.common.ranks import call_ranks
from ringreduce.network.handshake import SESSION, Connection, Handshake, Refused, say_ready, within
from ringreduce.network.interfaces import Interface
from ringreduce.network.paths import Path, Rail, first_made, interface_of, paths_to, rails_to
from ringreduce.network.sockets import Address, host_and_port, listen_at, reason, round_trip, set_options

log = logging.getLogger(__name__)

MOST_UNPROVEN = 128
"""Connections that have not proved anything yet, at once."""
CROWD_SECONDS = 0.25
"""When there are so many, the oldest is dropped if it is older than this. A rank takes less unless its host is busy,
and comes again."""
HANDSHAKE_SECONDS = 5.0
"""For a dialer to prove who it is."""
SET_SECONDS = 60.0
"""For the other connections of a peer, once it has proved who it is."""
CONNECT_SECONDS = 10.0
"""For one attempt of TCP to connect."""
LOOK_SECONDS = 0.25
MOST_CONNECTIONS = 1024

_NO_ANSWER = "no answer"


class Peer(NamedTuple):
    """Another rank: its host's name, its process, and where its door listens."""

    host: str
    pid: int
    addresses: Sequence[Address]


class Contact(NamedTuple):
    """What was noticed while the connections with a peer were made."""

    round_trip: float
    """Seconds: the shortest that TCP saw, from kernel to kernel, so it does not matter how busy the ranks are."""
    interfaces: tuple[str, ...]
    """This host's, that the connections use."""


@dataclass
class _ConnectionSet:
    """The connections of one session that have come to the door so far, by their index."""

    sockets: dict[int, tuple[socket.socket, str]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Door:
    """Where this rank's peers come in, and from where it goes to theirs. Its methods may be called from any thread.

    Listens on the addresses of `interfaces` alone, at the first free one of `ports`, or at one that the kernel picks.
    Raises `SystemFailure` if none can be bound. Connections use all pairs of interfaces, here and there, that have a
    subnet in common; if none, the first that is reached. `named` says that the user named these interfaces: then
    connections are bound to their addresses, and if they are several each is used, with that of the peer that has its
    name or position in the order. Without `ports` it does not listen, and serves to go to others.
    """

    def __init__(self, interfaces: Sequence[Interface], named: bool = False, ports: Sequence[int] = (0,)) -> None:
        self._interfaces, self._named = list(interfaces), named
        self._listeners = listen_at(interfaces, ports) if ports else []
        self.addresses = [address for _, address in self._listeners]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._unproven: dict[asyncio.Task[None], float] = {}
        self._sets: defaultdict[tuple[int, bytes], _ConnectionSet] = defaultdict(_ConnectionSet)
        self._closed = False
        self._closing = threading.Lock()
        """Held while a connect is handed to the loop, and while that is told to stop, so that it ends each connect."""
        self.counts = Counter(accepted=0)
        """Connections "accepted", those that proved who they are, and those refused by reason.

        "garbage": not this protocol; "version"; "proof": another secret, or a proof that was overheard; "rank": a rank
        that is not waited for; "twice": a peer that got in by another way; "slow"; "crowd": the oldest of too many;
        "left": gone in the middle, as may be, too, a peer that got in by another way.
        """
        self.missed: dict[int, dict[str, str]] = {}
        """The ways to a peer that is linked which this rank has tried in vain, and why they failed."""
        self.contacts: dict[int, Contact] = {}
        """With the peers that are linked."""
        self.reached: set[int] = set()
        """Peers whose machine has let a connection in, whether or not the door there is open yet."""
        _doors.add(self)

    def open(
        self,
        rank: int,
        group: str,
        secret: bytes,
        peers: Mapping[int, Peer] | None,
        deliver: Callable[[int, int, str], object],
        connections: int = 1,
        dead_after: float = 10.0,
        ranks: Sequence[int] = (),
    ) -> None:
        """From here on `peers` are let in; if it is None, whoever knows the secret.

        `deliver(peer, fd, description)` is called once for each connection, all of a peer's together, in the door's
        thread; fd is connected and non-blocking, and belongs to the callee. `connections` is how many this rank makes
        for each pair of interfaces. After `dead_after` seconds without a sign of life a connection breaks.
        `ranks`: the global ranks of the group, by which messages call them; none: they are the same.
        """
        self._rank, self._handshake = rank, Handshake(rank, group, secret)
        self._peers, self._any = dict(peers or {}), peers is None
        self._deliver: Callable[[int, int, str], object] | None = deliver
        self._connections, self._dead_after, self._ranks = connections, dead_after, ranks
        started = concurrent.futures.Future[None]()

        def serve() -> None:
            serving = self._serve(started)
            try:
                with contextlib.closing(make_above_streams(asyncio.new_event_loop)) as loop:
                    loop.run_until_complete(serving)
            except BaseException as error:  # no descriptors are left for the loop, say
                if started.done():
                    raise
                serving.close()
                started.set_exception(error)

        thread = threading.Thread(target=serve, name="ringreduce-door", daemon=True)
        system.start(thread)
        self._thread = thread  # which close() waits for
        try:
            started.result()
        except OSError as error:
            raise SystemFailure(f"cannot listen for other hosts: {reason(error)}") from None
        except RuntimeError as error:  # asyncio's: this thread has an event loop already
            if "gevent" not in sys.modules:
                raise
            raise SystemFailure(
                f"cannot listen for other hosts: {error}: gevent has made one thread of all; several groups between "
                "hosts need threads of the kernel: gevent.monkey.patch_all(thread=False)"
            ) from None

    def connect(
        self, peers: Iterable[int], deadline: float, patience: float = 0.0, look: Callable[[], None] | None = None
    ) -> None:
        """Returns when the connections with all these peers are delivered, whichever side made them.

        The peers need not call it. Where they do as well, `patience` saves half of the work: seconds in which a lower
        rank may come before this one goes to it. `deadline` is a time of `time.monotonic`. `look` is called every
        `LOOK_SECONDS`, and may raise. Raises `CollectiveTimeout`, `PeerLost` if all of the peer's addresses refuse, or
        `SystemFailure` if trying on is in vain otherwise; all list the addresses and what is wrong with each.
        """
        with self._closing:
            if self._loop is None or self._closed:
                raise Aborted("the door is not open")
            future = asyncio.run_coroutine_threadsafe(self._connect(sorted(set(peers)), deadline, patience), self._loop)
        try:
            while look and not concurrent.futures.wait([future], LOOK_SECONDS).done:
                look()
            future.result()
        except concurrent.futures.CancelledError:
            raise Aborted("the door was closed while it connected") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Lets nobody in any more; delivered connections stay. Idempotent."""
        with self._closing:
            self._closed = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()
        self._close_sockets()
        self._deliver = None  # which may keep alive what keeps this alive

    def _close_sockets(self) -> None:
        for listener, _ in self._listeners:
            listener.close()

    # In the door's thread from here on.

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._linked: defaultdict[int, asyncio.Future[None]] = defaultdict(self._loop.create_future)
        self._going: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._settling: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        listening = [asyncio.create_task(self._accept(*listener)) for listener in self._listeners]
        started.set_result(None)
        await self._stop.wait()
        ending = {*listening, *asyncio.all_tasks()} - {asyncio.current_task()}
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._linked.clear()  # an error's frames hold who has called, and with it the group

    async def _accept(self, listener: socket.socket, address: Address) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection = above_streams((await loop.sock_accept(listener))[0])
            except OSError as error:  # no descriptors are left, say
                log.warning("cannot accept a connection: %s", reason(error))
                await asyncio.sleep(0.1)
                continue
            await self._make_room()
            task = asyncio.create_task(self._receive(connection, address.interface))
            self._unproven[task] = time.monotonic()
            task.add_done_callback(lambda task: self._unproven.pop(task, None))
            await asyncio.sleep(0)  # those that are here already have their turn

    async def _make_room(self) -> None:
        while len(self._unproven) >= MOST_UNPROVEN:
            oldest, since = next(iter(self._unproven.items()))
            patience = since + CROWD_SECONDS - time.monotonic()
            if patience > 0:
                await asyncio.wait(list(self._unproven), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._unproven.pop(oldest, None)
                self.counts["crowd"] += 1
                oldest.cancel()

    async def _receive(self, connection: socket.socket, interface: str) -> None:
        """The life of a connection that came to the door, until it is delivered or refused."""
        with connection:  # which closes nothing once it is delivered
            try:
                connection.setblocking(False)
                path = Path((interface, ""), None, connection.getpeername())
                admission = self._handshake.admit(connection, path, lambda peer: self._any or peer in self._peers)
                peer, session, admitted = await asyncio.wait_for(admission, HANDSHAKE_SECONDS)
                self._unproven.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
                self.counts["accepted"] += 1
                # Else the door would wait for the rest of this one's set: see `_go_to` for `wait_for`.
                if self._stop.is_set():
                    return
                with contextlib.suppress(OSError):  # it may have found another way, or be gone
                    await asyncio.wait_for(self._join(peer, session, admitted), SET_SECONDS)
            except Refused as refused:
                self.counts[refused.reason] += 1
                log.info("refused a connection on %s: %s", interface, refused.reason)
            except asyncio.TimeoutError:
                self.counts["slow"] += 1
            except OSError:
                self.counts["left"] += 1

    async def _join(self, peer: int, session: bytes, admitted: Connection) -> None:
        """Waits for the other connections of the same session; the last one that comes has all delivered."""
        index, total = await self._handshake.joined(admitted)
        gathered = self._sets[peer, session]
        if not index < total <= MOST_CONNECTIONS or index in gathered.sockets:
            raise Refused("garbage")
        gathered.sockets[index] = admitted.socket, admitted.path.rail[0]
        try:
            if len(gathered.sockets) < total:
                await gathered.complete.wait()
                return
            async with self._settled(peer):
                if self._linked[peer].done():
                    raise Refused("twice")
                for other, _ in gathered.sockets.values():
                    await say_ready(other)
                self._hand_over(peer, [gathered.sockets[index] for index in range(total)])
        finally:
            self._sets.pop((peer, session), None)
            gathered.complete.set()  # all are delivered, or all go

    def _settled(self, peer: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Held by the lower of two ranks alone, from its JOIN to the answer, and while it lets the other in."""
        return self._settling[peer] if self._rank < peer else contextlib.nullcontext()

    def _hand_over(self, peer: int, connected: list[tuple[socket.socket, str]]) -> None:
        """Delivers the connections of a peer; what goes wrong with that is for those who wait in `connect`."""
        linked = self._linked[peer]
        try:
            if self._deliver is None:
                raise Aborted("the door is closed")
            self.contacts[peer] = Contact(
                min(round_trip(connection) for connection, _ in connected),
                tuple(dict.fromkeys(interface for _, interface in connected)),
            )
            for connection, interface in connected:
                set_options(connection, self._dead_after)
                here, there = connection.getsockname(), connection.getpeername()
                description = f"{host_and_port(*here[:2])} -> {host_and_port(*there[:2])} via {interface}"
                self._deliver(peer, connection.detach(), description)
        except Exception as error:
            lost = isinstance(error, OSError) and error.errno == errno.ENOTCONN  # since the peer was ready
            says = f"{self._call(self._rank)} cannot connect with {self._call(peer)}, which has closed the connection"
            linked.set_exception(PeerLost(says, peer) if lost else error)
            linked.exception()  # so that asyncio does not complain if nobody waits
        else:
            linked.set_result(None)

    async def _connect(self, peers: list[int], deadline: float, patience: float) -> None:
        tasks = [asyncio.create_task(self._link(peer, deadline, patience)) for peer in peers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _link(self, peer: int, deadline: float, patience: float) -> None:
        linked = self._linked[peer]
        if peer < self._rank and patience > 0:
            await asyncio.wait([linked], timeout=min(patience, max(0.0, deadline - time.monotonic()) / 2))
        async with self._going[peer]:
            if not linked.done():
                await self._go_to(peer, deadline)
        linked.result()

    async def _go_to(self, peer: int, deadline: float) -> None:
        """Connects with a peer by all of its addresses at once, again and again while it may help.

        Returns when it is linked, also if it has come here meanwhile.
        """
        linked = self._linked[peer]
        paths = paths_to(self._peers[peer].addresses, self._interfaces, self._named)
        tried = {path: _NO_ANSWER for path in paths}
        hopeless: set[Path] = set()
        going = True  # a task that waits for another (`wait_for`, up to 3.11) may not notice that it is cancelled

        async def attempts() -> None:
            pause = 0.05
            while going and len(hopeless) < len(paths):
                if await self._attempt(peer, [path for path in paths if path not in hopeless], tried, hopeless):
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)

        trying = asyncio.create_task(attempts())
        try:
            left = max(0.0, deadline - time.monotonic())
            await asyncio.wait([trying, linked], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            late = not trying.done()
            if not late:
                trying.result()
        finally:
            going = False
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
        if not linked.done():
            ways = "; ".join(f"{path}: {why}" for path, why in tried.items()) or "no address of a kind this host has"
            refused = ", ".join(f"{number} ({why})" for why, number in self.counts.items() if why != "accepted")
            # It listened when it published its addresses.
            lost = bool(tried) and set(tried.values()) == {os.strerror(errno.ECONNREFUSED)}
            how = " in time" if late else ", which died or left" if lost else ""
            raise (CollectiveTimeout if late else PeerLost if lost else SystemFailure)(
                f"{self._call(self._rank)} cannot connect with {self._name(peer)}{how}: {ways}; this "
                f"host uses {', '.join(map(str, self._interfaces))}, where it listens at "
                f"{', '.join(map(str, self.addresses))} and has refused {refused or 'nobody'}",
                peer,
            )

    async def _attempt(self, peer: int, paths: list[Path], tried: dict[Path, str], hopeless: set[Path]) -> bool:
        """Whether the connections with a peer are made and delivered. What went wrong is in `tried`."""
        numbers, session = itertools.count(), secrets.token_bytes(SESSION)
        approaches: list[asyncio.Task[Connection]] = []
        wanted = rails_to(self._peers[peer].addresses, self._interfaces, self._named)
        work: set[Rail] = set()

        async def approach(path: Path) -> Connection:
            try:
                made = await self._approach(path, peer, next(numbers), session)
                work.add(path.rail)
                return made
            except (Refused, OSError) as error:
                tried[path] = reason(error)
                if isinstance(error, Refused | ConnectionRefusedError):
                    hopeless.add(path)
                raise

        def start(path: Path) -> asyncio.Task[Connection]:
            approaches.append(asyncio.create_task(approach(path)))
            return approaches[-1]

        try:
            found = await first_made({start(path): path for path in paths}, wanted)
            if not found:
                return False
            more = [start(one.path) for one in found for _ in range(self._connections - 1)]
            if not await self._join_all(peer, found + [await task for task in more], tried):
                return False
            self.missed[peer] = {
                str(path): why
                for path, why in tried.items()
                if path.rail not in work and (path.rail in wanted or why != _NO_ANSWER)
            }
            return True
        except (Refused, OSError):
            return False
        finally:
            for task in approaches:
                task.cancel()
            for made in await asyncio.gather(*approaches, return_exceptions=True):
                if isinstance(made, Connection):
                    made.socket.close()  # which does nothing if it is delivered

    async def _join_all(self, peer: int, connections: list[Connection], tried: dict[Path, str]) -> bool:
        """Tells the peer's door that these are all, waits until it has them, and delivers them."""
        async with self._settled(peer):
            if self._linked[peer].done():
                return False
            for index, one in enumerate(connections):
                tried[one.path] = "it proved who it is, but did not go on"
                await self._handshake.joins(one, index, len(connections))
            for one in connections:
                if not await self._handshake.is_ready(one):
                    return False
            if self._linked[peer].done():
                return False
            self._hand_over(peer, [(one.socket, interface_of(one.socket, one.path)) for one in connections])
            return True

    async def _approach(self, path: Path, peer: int, number: int, session: bytes) -> Connection:
        """Connects, and has both sides prove who they are. Raises `Refused` or `OSError`."""
        loop = asyncio.get_running_loop()
        connection = above_streams(socket.socket(socket.AF_INET6 if len(path.target) == 4 else socket.AF_INET))
        try:
            connection.setblocking(False)
            if path.source:
                connection.bind(path.source)
            await within(CONNECT_SECONDS, loop.sock_connect(connection, path.target))
            self.reached.add(peer)
            return await within(HANDSHAKE_SECONDS, self._handshake.introduce(connection, path, peer, number, session))
        except BaseException:
            connection.close()
            raise

    def _name(self, peer: int) -> str:
        other = self._peers[peer]
        return self._call(peer, f"{other.host}, pid {other.pid}")

    def _call(self, rank: int, process: str = "") -> str:
        return call_ranks([rank], self._ranks or range(rank + 1), process)


# Forked children (DataLoader workers) must not keep a dead rank's port open: who connects there should be refused.
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _close_in_child() -> None:
    for door in _doors:
        door._close_sockets()


os.register_at_fork(after_in_child=_close_in_child)
