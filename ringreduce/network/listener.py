"""TCP connections between ranks on different hosts, made so that both ends know who the other is.

    door = Door(interfaces)                      # listens from here on; door.addresses go to the peers, by the store
    door.open(rank, "group", secret, peers, deliver)
    door.connect([1, 2], deadline)               # on one side or on both; returns when connections are delivered
    door.close()

Of two ranks one connects, the comer, and the other's door lets it in:

    door  -> comer   CHALLENGE  a nonce
    comer -> door    HELLO      both ranks, the number of this connection, a nonce; and a proof
    door  -> comer   ANSWER     welcome, and a proof; or why not
    comer -> door    JOIN       "connection 2 of 4", and a proof
    door  -> comer   READY      all 4 are here

A proof is an HMAC-SHA-256, by the group's secret, of the sender's role, the group's name, the door's nonce and the
HELLO, which has the protocol's version too. So one that was overheard proves nothing later, in the other direction or
on another connection; and the door proves nothing to a stranger. After READY the connection carries no more of this
protocol and belongs to whom it is delivered. Nothing is encrypted: who can change packets on their way can take over
a connection.

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
import hashlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ringreduce.common.failures import Aborted, CollectiveTimeout, PeerLost, SystemFailure
from ringreduce.common.ranks import call_ranks
from ringreduce.network.interfaces import Interface, local_interfaces
from ringreduce.network.sockets import Address, endpoint, listen, reason, round_trip, set_options, sockaddr

log = logging.getLogger(__name__)

VERSION = 1
MOST_STRANGERS = 128
"""Connections that have not proved anything yet, at once."""
CROWD_SECONDS = 0.25
"""When there are so many, the oldest is dropped if it is older than this. A rank takes less unless its host is busy,
and comes again."""
HANDSHAKE_SECONDS = 5.0
"""For a stranger to prove who it is."""
PARTY_SECONDS = 60.0
"""For the other connections of a peer, once it has proved who it is."""
CONNECT_SECONDS = 10.0
"""For one attempt of TCP to connect."""
LOOK_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""For further interfaces, once a peer has been reached over one."""
MOST_CONNECTIONS = 1024

_NO_ANSWER = "no answer"

_MAGIC = b"ringrdc\n"
_NONCE = 32
_SESSION = 16
_CHALLENGE = struct.Struct(f"!8sH{_NONCE}s")  # magic, version, nonce
_HELLO = struct.Struct(f"!8sHIII{_SESSION}s{_NONCE}s")  # magic, version, from, to, number, session, nonce
_JOIN = struct.Struct("!II")  # which connection of the session this is, and of how many
_DIGEST = hashlib.sha256().digest_size
_WELCOME, _READY = b"W", b"R"

# Why a door refuses: the word it counts under, what it answers, and what the other side makes of the answer.
_ANSWERS = {
    "version": (b"V", "it speaks another version of the protocol: ranks have different versions of ringreduce"),
    "proof": (b"P", "it refused this rank's proof: the ranks have different secrets, or it is of another group"),
    "rank": (b"N", "it does not wait for this rank"),
}
_SAID = {code: text for code, text in _ANSWERS.values()}

_Result = TypeVar("_Result")


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


class Refused(Exception):
    """What is at the other end is not, or does not take this for, the rank it should be. Trying again is in vain."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class _Path:
    """One way to a door: from an address of this host, or from any, to one of its addresses."""

    rail: tuple[str, str]
    """The interfaces at both ends; "" if it is left to the kernel."""
    source: tuple[str, int] | tuple[str, int, int, int] | None
    target: tuple[str, int] | tuple[str, int, int, int]

    def __str__(self) -> str:
        source = f" from {self.source[0]} ({self.rail[0]})" if self.source else ""
        return f"{endpoint(*self.target[:2])} ({self.rail[1]}){source}"


@dataclass
class _Connection:
    """A connection whose ends have proved who they are; `hello` and `nonce` are what further proofs are about."""

    socket: socket.socket
    path: _Path
    hello: bytes
    nonce: bytes


@dataclass
class _Party:
    """The connections of one session that have come to the door so far, by their place."""

    sockets: dict[int, tuple[socket.socket, str]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Door:
    """Where this rank's peers come in, and from where it goes to theirs. Its methods may be called from any thread.

    Listens on the addresses of `interfaces` alone, at the first free one of `ports`, or at one that the kernel picks.
    Raises `SystemFailure` if none can be bound. Connections use all pairs of interfaces, here and there, that have a
    subnet in common; if none, the first that is reached. `named` says that the user named these interfaces: then
    connections are bound to their addresses, and if they are several each is used, with that of the peer that has its
    name or place in the order. Without `ports` it does not listen, and serves to go to others.
    """

    def __init__(self, interfaces: Sequence[Interface], named: bool = False, ports: Sequence[int] = (0,)) -> None:
        self._interfaces, self._named = list(interfaces), named
        self._listeners: list[tuple[socket.socket, Interface]] = []
        self.addresses: list[Address] = []
        failures = []
        for interface in interfaces if ports else ():
            for address in interface.addresses:
                try:
                    listener = listen(address, interface, ports)
                except OSError as error:
                    failures.append(f"{address.ip} ({interface.name}): {reason(error)}")
                    continue
                self._listeners.append((listener, interface))
                self.addresses.append(Address(interface.name, str(address), listener.getsockname()[1]))
        if ports and not self._listeners:
            raise SystemFailure(f"cannot listen for other hosts: {'; '.join(failures) or 'no interface is given'}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._strangers: dict[asyncio.Task[None], float] = {}
        self._parties: defaultdict[tuple[int, bytes], _Party] = defaultdict(_Party)
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
        self._rank, self._group, self._secret = rank, hashlib.sha256(group.encode()).digest(), secret
        self._peers, self._any = dict(peers or {}), peers is None
        self._deliver: Callable[[int, int, str], object] | None = deliver
        self._connections, self._dead_after, self._ranks = connections, dead_after, ranks
        started = concurrent.futures.Future[None]()

        def serve() -> None:
            serving = self._serve(started)
            try:
                asyncio.run(serving)
            except BaseException as error:  # no descriptors are left for the loop, say
                if started.done():
                    raise
                serving.close()
                started.set_exception(error)

        self._thread = threading.Thread(target=serve, name="ringreduce-door", daemon=True)
        self._thread.start()
        try:
            started.result()
        except OSError as error:
            raise SystemFailure(f"cannot listen for other hosts: {reason(error)}") from None

    def connect(
        self,
        peers: Iterable[int],
        deadline: float,
        patience: float = 0.0,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Returns when the connections with all these peers are delivered, whichever side made them.

        The peers need not call it. Where they do as well, `patience` saves half of the work: seconds in which a lower
        rank may come before this one goes to it. `deadline` is a time of `time.monotonic`. `look` is called every
        `LOOK_SECONDS`, and may raise. Raises `CollectiveTimeout`,
        `PeerLost` if all of the peer's addresses refuse, or `SystemFailure` if trying on is in vain otherwise; all list
        the peer's addresses and what is wrong with each.
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
        for task in listening:
            task.cancel()

    async def _accept(self, listener: socket.socket, interface: Interface) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors are left, say
                log.warning("cannot accept a connection: %s", reason(error))
                await asyncio.sleep(0.1)
                continue
            await self._make_room()
            task = asyncio.create_task(self._receive(connection, interface))
            self._strangers[task] = time.monotonic()
            task.add_done_callback(lambda task: self._strangers.pop(task, None))
            await asyncio.sleep(0)  # those that are here already have their turn

    async def _make_room(self) -> None:
        while len(self._strangers) >= MOST_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            patience = since + CROWD_SECONDS - time.monotonic()
            if patience > 0:
                await asyncio.wait(list(self._strangers), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._strangers.pop(oldest, None)
                self.counts["crowd"] += 1
                oldest.cancel()

    async def _receive(self, connection: socket.socket, interface: Interface) -> None:
        """The life of a connection that came to the door, until it is delivered or refused."""
        with connection:  # which closes nothing once it is delivered
            try:
                connection.setblocking(False)
                peer, session, admitted = await asyncio.wait_for(self._admit(connection, interface), HANDSHAKE_SECONDS)
                self._strangers.pop(_this_task(), None)
                self.counts["accepted"] += 1
                if self._stop.is_set():  # else the door waits for this one's party: see `_go_to` for `wait_for`
                    return
                with contextlib.suppress(OSError):  # it may have found another way, or be gone: it was no stranger
                    await asyncio.wait_for(self._join(peer, session, admitted), PARTY_SECONDS)
            except Refused as refused:
                self.counts[refused.reason] += 1
                log.info("refused a connection on %s: %s", interface.name, refused.reason)
            except asyncio.TimeoutError:
                self.counts["slow"] += 1
            except OSError:
                self.counts["left"] += 1

    async def _admit(self, connection: socket.socket, interface: Interface) -> tuple[int, bytes, _Connection]:
        """Has a stranger prove who it is."""
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(_NONCE)
        await loop.sock_sendall(connection, _CHALLENGE.pack(_MAGIC, VERSION, nonce))
        hello = await _read(connection, len(_MAGIC))
        if hello != _MAGIC:
            raise Refused("garbage")
        hello += await _read(connection, _HELLO.size - len(_MAGIC))
        proof = await _read(connection, _DIGEST)
        _, version, peer, to, _, session, _ = _HELLO.unpack(hello)
        try:
            if version != VERSION:
                raise Refused("version")
            if not hmac.compare_digest(proof, self._proof(b"comes", hello, nonce)):
                raise Refused("proof")
            if to != self._rank or not (self._any or peer in self._peers):
                raise Refused("rank")
        except Refused as refused:
            await loop.sock_sendall(connection, _ANSWERS[refused.reason][0])
            raise
        await loop.sock_sendall(connection, _WELCOME + self._proof(b"answers", hello, nonce))
        path = _Path((interface.name, ""), None, connection.getpeername())
        return peer, session, _Connection(connection, path, hello, nonce)

    async def _join(self, peer: int, session: bytes, admitted: _Connection) -> None:
        """Waits for the other connections of the same session; the last one that comes has all delivered."""
        join = await _read(admitted.socket, _JOIN.size)
        proof = await _read(admitted.socket, _DIGEST)
        place, total = _JOIN.unpack(join)
        if not hmac.compare_digest(proof, self._proof(b"joins" + join, admitted.hello, admitted.nonce)):
            raise Refused("proof")
        party = self._parties[peer, session]
        if not place < total <= MOST_CONNECTIONS or place in party.sockets:
            raise Refused("garbage")
        party.sockets[place] = admitted.socket, admitted.path.rail[0]
        try:
            if len(party.sockets) < total:
                await party.complete.wait()
                return
            async with self._settled(peer):
                if self._linked[peer].done():
                    raise Refused("twice")
                for other, _ in party.sockets.values():
                    await asyncio.get_running_loop().sock_sendall(other, _READY)
                self._hand_over(peer, [party.sockets[place] for place in range(total)])
        finally:
            self._parties.pop((peer, session), None)
            party.complete.set()  # all are delivered, or all go

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
                description = f"{endpoint(*here[:2])} -> {endpoint(*there[:2])} via {interface}"
                self._deliver(peer, connection.detach(), description)
        except Exception as error:
            linked.set_exception(error)
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
        paths = self._paths(self._peers[peer].addresses)
        tried = {path: _NO_ANSWER for path in paths}
        hopeless: set[_Path] = set()
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

    async def _attempt(self, peer: int, paths: list[_Path], tried: dict[_Path, str], hopeless: set[_Path]) -> bool:
        """Whether the connections with a peer are made and delivered. What went wrong is in `tried`."""
        numbers, session = itertools.count(), secrets.token_bytes(_SESSION)
        approaches: list[asyncio.Task[_Connection]] = []
        wanted = self._rails(self._peers[peer].addresses)
        work: set[tuple[str, str]] = set()

        async def approach(path: _Path) -> _Connection:
            try:
                made = await self._approach(path, peer, next(numbers), session)
                work.add(path.rail)
                return made
            except (Refused, OSError) as error:
                tried[path] = reason(error)
                if isinstance(error, Refused | ConnectionRefusedError):
                    hopeless.add(path)
                raise

        def start(path: _Path) -> asyncio.Task[_Connection]:
            approaches.append(asyncio.create_task(approach(path)))
            return approaches[-1]

        try:
            found = await self._reach({start(path): path for path in paths}, wanted)
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
                if isinstance(made, _Connection):
                    made.socket.close()  # which does nothing if it is delivered

    async def _reach(
        self, tasks: dict[asyncio.Task[_Connection], _Path], wanted: list[tuple[str, str]]
    ) -> list[_Connection]:
        """One connection for each pair of interfaces to be used, of those that `tasks` make; none if none does."""
        reached: dict[tuple[str, str], _Connection] = {}
        until: float | None = None
        while tasks and not (reached and set(reached).issuperset(set(wanted) & {path.rail for path in tasks.values()})):
            left = None if until is None else max(0.0, until - time.monotonic())
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                path = tasks.pop(task)
                if task.exception() is None:
                    reached.setdefault(path.rail, task.result())
            if reached and until is None:
                until = time.monotonic() + GRACE_SECONDS
        use = _spread([rail for rail in wanted if rail in reached]) or list(reached)[:1]
        return [reached[rail] for rail in use]

    async def _join_all(self, peer: int, connections: list[_Connection], tried: dict[_Path, str]) -> bool:
        """Tells the peer's door that these are all, waits until it has them, and delivers them."""
        loop = asyncio.get_running_loop()
        async with self._settled(peer):
            if self._linked[peer].done():
                return False
            for place, one in enumerate(connections):
                tried[one.path] = "it proved who it is, but did not go on"
                join = _JOIN.pack(place, len(connections))
                await loop.sock_sendall(one.socket, join + self._proof(b"joins" + join, one.hello, one.nonce))
            for one in connections:
                if await _read(one.socket, 1) != _READY:
                    return False
            if self._linked[peer].done():
                return False
            self._hand_over(peer, [(one.socket, self._interface_of(one)) for one in connections])
            return True

    async def _approach(self, path: _Path, peer: int, number: int, session: bytes) -> _Connection:
        """Connects, and has both sides prove who they are. Raises `Refused` or `OSError`."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_INET6 if len(path.target) == 4 else socket.AF_INET)
        try:
            connection.setblocking(False)
            if path.source:
                connection.bind(path.source)
            await _within(CONNECT_SECONDS, loop.sock_connect(connection, path.target))
            self.reached.add(peer)
            return await _within(HANDSHAKE_SECONDS, self._introduce(connection, path, peer, number, session))
        except BaseException:
            connection.close()
            raise

    async def _introduce(
        self, connection: socket.socket, path: _Path, peer: int, number: int, session: bytes
    ) -> _Connection:
        loop = asyncio.get_running_loop()
        magic, version, nonce = _CHALLENGE.unpack(await _read(connection, _CHALLENGE.size))
        if magic != _MAGIC:
            raise Refused("garbage", "what answers is not a rank")
        if version != VERSION:
            raise Refused("version", _ANSWERS["version"][1])
        mine = secrets.token_bytes(_NONCE)
        hello = _HELLO.pack(_MAGIC, VERSION, self._rank, peer, number, session, mine)
        await loop.sock_sendall(connection, hello + self._proof(b"comes", hello, nonce))
        answer = await _read(connection, 1)
        if answer != _WELCOME:
            raise Refused("answer", _SAID.get(answer, "it sent something else than expected"))
        if not hmac.compare_digest(await _read(connection, _DIGEST), self._proof(b"answers", hello, nonce)):
            raise Refused("proof", "its proof is wrong: it does not know the group's secret")
        return _Connection(connection, path, hello, nonce)

    def _proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, b"%d:%b" % (len(role), role) + self._group + hello + nonce, "sha256")

    def _paths(self, addresses: Sequence[Address]) -> list[_Path]:
        """From all addresses of the same subnet; if there is none, from each named interface or as the kernel likes."""
        paths = []
        for there in addresses:
            alike = [
                (interface, here)
                for interface in self._interfaces
                for here in interface.addresses
                if here.version == there.ip.version and here.ip.is_link_local == there.ip.ip.is_link_local
            ]
            near = [(interface, here) for interface, here in alike if here.network == there.ip.network]
            if not near and not self._named and alike:
                paths.append(_Path(("", there.interface), None, sockaddr(there.ip, there.port)))
                continue
            first = {interface.name: (interface, here) for interface, here in reversed(alike)}
            for interface, here in near or first.values():
                source, target = sockaddr(here, 0, interface.index), sockaddr(there.ip, there.port, interface.index)
                paths.append(_Path((interface.name, there.interface), source, target))
        return paths

    def _rails(self, addresses: Sequence[Address]) -> list[tuple[str, str]]:
        """The pairs of interfaces, here and there, that are to be used if they work; like with like first."""
        theirs = list(dict.fromkeys(address.interface for address in addresses))
        ours = [interface.name for interface in self._interfaces]
        alike = [(name, name) for name in ours if name in theirs]
        rest = zip(*([name for name in side if (name, name) not in alike] for side in (ours, theirs)), strict=False)
        matched = [*alike, *rest]
        shared = {
            (interface.name, there.interface)
            for interface in self._interfaces
            for there in addresses
            if any(here.network == there.ip.network and not here.ip.is_link_local for here in interface.addresses)
        }
        together = self._named and len(ours) > 1
        return [rail for rail in matched if together or rail in shared] + sorted(shared - set(matched))

    def _interface_of(self, connection: _Connection) -> str:
        here = connection.socket.getsockname()[0]
        if connection.path.rail[0]:
            return connection.path.rail[0]
        some = (i.name for i in local_interfaces() if any(here == str(address.ip) for address in i.addresses))
        return next(some, "an unknown interface")

    def _name(self, peer: int) -> str:
        other = self._peers[peer]
        return self._call(peer, f"{other.host}, pid {other.pid}")

    def _call(self, rank: int, process: str = "") -> str:
        return call_ranks([rank], self._ranks or range(rank + 1), process)


def _spread(rails: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those of which both interfaces are used by earlier ones."""
    use: list[tuple[str, str]] = []
    for here, there in rails:
        if here not in {rail[0] for rail in use} or there not in {rail[1] for rail in use}:
            use.append((here, there))
    return use


async def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, so that nothing of what follows is taken."""
    data = b""
    while len(data) < size:
        some = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not some:
            raise ConnectionResetError("it closed the connection")
        data += some
    return data


async def _within(seconds: float, what: Awaitable[_Result]) -> _Result:
    try:
        return await asyncio.wait_for(what, seconds)
    except asyncio.TimeoutError:
        raise OSError(f"no answer in {seconds:g} s") from None


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


# Forked children (DataLoader workers) must not keep a dead rank's port open: who connects there should be refused.
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _close_in_child() -> None:
    for door in _doors:
        door._close_sockets()


os.register_at_fork(after_in_child=_close_in_child)
