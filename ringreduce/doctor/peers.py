"""What the network between the hosts of a job can do: `ringreduce doctor --peers`, which a launcher runs on every rank.

`survey` asks, on all ranks; `render` draws what rank 0 gets from it. The lowest rank of each host speaks for its host:

1. The speakers connect, all with all, as the ranks of a group do: same interfaces, same ports, same proofs.
2. Pairs of them measure the time of a small message there and back, then how fast bytes go there, then back, over all
   of their connections at once. In each round a host is in one pair, so that no two measurements share an end.

No collectives and no plans: what is measured is TCP on the paths that groups use.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from ringreduce.common.descriptors import make_above_streams
from ringreduce.common.failures import CollectiveTimeout, RingReduceError
from ringreduce.coordination.endpoint import Location
from ringreduce.coordination.store import Store, get
from ringreduce.groups.between_hosts import PATIENCE
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.meet import Meeting, meet
from ringreduce.network.listener import Peer
from ringreduce.network.local import exactly
from ringreduce.topology.hosts_file import HostsFile
from ringreduce.tuning.decision import now

MEET_SECONDS = 60.0
"""For all ranks to come."""
STALL_SECONDS = 10.0
"""Without a byte, after which a pair gives up."""
LATE_SECONDS = 120.0
"""That rank 0 waits for what another speaker has measured."""
ROUND_TRIPS, LATENCY_SECONDS = 200, 0.5
"""Of small messages: so many, or as many as there are in this time, but at least `LEAST_ROUND_TRIPS`."""
LEAST_ROUND_TRIPS = 5
LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 26
"""Sent to measure the bandwidth: doubled until it takes `BANDWIDTH_SECONDS`."""
BANDWIDTH_SECONDS = 0.25
BLOCK = 1 << 18

_COMMAND = struct.Struct("!cQ")
_PING, _TAKE, _GIVE, _END = b"p", b"t", b"g", b"e"


@dataclass(frozen=True)
class Host:
    """One of the job's: its name, and the ranks on it."""

    name: str
    ranks: list[int]
    label: str = ""
    """What a file calls it."""


@dataclass(frozen=True)
class Pair:
    """What was found between two hosts, given by their numbers."""

    lower: int
    higher: int
    error: str = ""
    """Why there is no link, or what went wrong on it; "" if all is well."""
    paths: tuple[str, ...] = ()
    """Of each connection, from the lower host."""
    missed: tuple[str, ...] = ()
    """Ways that were tried in vain although others work: which, and why."""
    latency: float = 0.0
    """Seconds: half of the median round trip of a small message."""
    there: float = 0.0
    """Bytes a second from the lower host to the higher one."""
    back: float = 0.0


@dataclass(frozen=True)
class Survey:
    """What rank 0 knows at the end."""

    hosts: tuple[Host, ...]
    pairs: tuple[Pair, ...]

    @property
    def ok(self) -> bool:
        """Whether all hosts reach each other."""
        return not any(pair.error for pair in self.pairs)

    def for_file(self) -> HostsFile:
        """What groups read. Between hosts that could not be measured nothing can go."""
        size = len(self.hosts)
        latency, bandwidth = ([[0.0] * size for _ in range(size)] for _ in range(2))
        for pair in self.pairs:
            if not pair.error:
                latency[pair.lower][pair.higher] = latency[pair.higher][pair.lower] = pair.latency
                bandwidth[pair.lower][pair.higher], bandwidth[pair.higher][pair.lower] = pair.there, pair.back
        labels = tuple(host.label for host in self.hosts)
        return HostsFile(now(), labels, tuple(map(tuple, latency)), tuple(map(tuple, bandwidth)))


def survey(
    store: Store, rank: int, size: int, place: Location, seconds: float, connections: int = 1, dead_after: float = 10.0
) -> Survey | None:
    """Called on all ranks of a job; only rank 0 gets the answer.

    `seconds` is how long two hosts may take to connect. Raises what `groups.meet` raises: a rank did not come, say.
    """
    meeting = meet(Exchange(store, rank, size, MEET_SECONDS), lambda _: 4096, {}, lambda *_: "", location=place)
    meeting.close_descriptors()
    hosts = tuple(
        Host(meeting.names[ranks[0]][0], ranks, label)
        for ranks, label in zip(meeting.hosts, meeting.labels, strict=True)
    )
    pairs: tuple[Pair, ...] = ()
    if meeting.door is not None:
        speakers = [host.ranks[0] for host in hosts]
        try:
            if rank in speakers:
                _Speaker(store, meeting, rank, speakers, seconds, connections, dead_after).speak()
            if rank == 0:
                pairs = tuple(_collect(store, speakers))
        finally:
            meeting.door.close()
    store.add("doctor/done", 1)
    if rank:
        return None
    until = time.monotonic() + STALL_SECONDS  # the store may be this process's, and others not through with it
    while store.add("doctor/done", 0) < size and time.monotonic() < until:
        time.sleep(0.01)
    return Survey(hosts, pairs)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of `count` hosts, in rounds in which nobody is twice: all but one host move on around a table."""
    places = list(range(count + count % 2))
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in facing if max(pair) < count]
        places[1:] = [places[-1], *places[1:-1]]


class _Speaker:
    """The rank that probes for its host."""

    def __init__(
        self,
        store: Store,
        meeting: Meeting,
        rank: int,
        speakers: list[int],
        seconds: float,
        connections: int,
        dead_after: float,
    ) -> None:
        assert meeting.door is not None
        self._store, self._rank, self._speakers, self._seconds = store, rank, speakers, seconds
        self._host, self._door = speakers.index(rank), meeting.door
        self._sockets: dict[int, list[socket.socket]] = {}
        self._paths: dict[int, list[str]] = {}
        peers = {r: Peer(*meeting.names[r], meeting.doors[r]) for r in speakers if r != rank}
        self._door.open(rank, "doctor", meeting.secret, peers, self._deliver, connections, dead_after)

    def _deliver(self, peer: int, fd: int, path: str) -> None:
        connection = socket.socket(fileno=fd)
        connection.settimeout(STALL_SECONDS)
        self._sockets.setdefault(peer, []).append(connection)
        self._paths.setdefault(peer, []).append(path)

    def speak(self) -> None:
        """Connects with all, measures, and tells the store."""
        try:
            others = [speaker for speaker in self._speakers if speaker != self._rank]
            with ThreadPoolExecutor(len(others)) as pool:
                errors = dict(zip(others, pool.map(self._connect, others), strict=True))
            ways = self._door.missed
            missed = {peer: [f"{way}: {why}" for way, why in ways.get(peer, {}).items()] for peer in others}
            self._store.set(f"doctor/connected/{self._rank}", json.dumps([errors, missed]))
            failed = _failed(self._store, self._speakers, self._seconds)
            measured = [
                asdict(pair)
                for pairs in rounds(len(self._speakers))
                for lower, higher in pairs
                if self._host in (lower, higher) and (lower, higher) not in failed
                for pair in [self._measure(lower, higher)]
                if self._host == lower
            ]
            self._store.set(f"doctor/measured/{self._rank}", json.dumps(measured))
        finally:
            for connection in (connection for some in self._sockets.values() for connection in some):
                connection.close()

    def _connect(self, peer: int) -> str:
        try:
            self._door.connect([peer], time.monotonic() + self._seconds, PATIENCE)
        except RingReduceError as error:
            return str(error)
        return ""

    def _measure(self, lower: int, higher: int) -> Pair:
        peer = self._speakers[higher if self._host == lower else lower]
        sockets, paths = self._sockets[peer], tuple(self._paths[peer])
        try:
            if self._host == higher:
                _obey(sockets)
                return Pair(lower, higher)
            latency = _latency(sockets[0])
            there = _bandwidth(lambda size: _have_taken(sockets, size), latency)
            back = _bandwidth(lambda size: _have_given(sockets, size), latency)
            sockets[0].sendall(_COMMAND.pack(_END, 0))
            return Pair(lower, higher, paths=paths, latency=latency, there=there, back=back)
        except OSError as error:
            return Pair(lower, higher, f"while it was measured: {error} ({'; '.join(paths)})", paths)


def _failed(store: Store, speakers: Sequence[int], seconds: float) -> set[tuple[int, int]]:
    """The pairs of hosts that either of both could not connect. Waits until all have tried."""
    return {
        (min(here, there), max(here, there))
        for here, speaker in enumerate(speakers)
        for peer, error in _connected(store, speaker, seconds)[0].items()
        if error
        for there in [speakers.index(peer)]
    }


def _connected(store: Store, speaker: int, seconds: float) -> tuple[dict[int, str], dict[int, list[str]]]:
    """What a speaker says of its links: by peer, why there is none ("": there is), and ways that failed."""
    until = time.monotonic() + seconds + LATE_SECONDS
    errors, missed = json.loads(get(store, f"doctor/connected/{speaker}", f"rank {speaker}", until))
    return {int(peer): error for peer, error in errors.items()}, {int(peer): ways for peer, ways in missed.items()}


def _collect(store: Store, speakers: Sequence[int]) -> Iterator[Pair]:
    """Rank 0's: a pair for any two hosts."""
    connected = [_connected(store, speaker, 0.0) for speaker in speakers]
    measured: dict[tuple[int, int], Pair] = {}
    late: dict[int, str] = {}
    for here, speaker in enumerate(speakers):
        try:
            text = get(store, f"doctor/measured/{speaker}", f"rank {speaker}", time.monotonic() + LATE_SECONDS)
        except CollectiveTimeout:
            late[here] = f"rank {speaker} did not say in time what it has measured"
            continue
        for fields in json.loads(text):
            pair = Pair(**{**fields, "paths": tuple(fields["paths"]), "missed": ()})
            measured[pair.lower, pair.higher] = pair
    for lower, one in enumerate(speakers):
        for higher in range(lower + 1, len(speakers)):
            other = speakers[higher]
            said = [connected[lower][0][other], connected[higher][0][one]]
            missed = (*connected[lower][1][other], *connected[higher][1][one])
            error = "; ".join(dict.fromkeys(filter(None, said))) or late.get(lower, "")
            found = measured.get((lower, higher), Pair(lower, higher, error))
            yield replace(found, missed=missed)


# Measuring: the lower host commands, the higher one obeys. Commands go over the first connection, bytes over all.


def _obey(sockets: Sequence[socket.socket]) -> None:
    while True:
        command = exactly(sockets[0], _COMMAND.size)
        kind, size = _COMMAND.unpack(command)
        if kind == _PING:
            sockets[0].sendall(command)
        elif kind == _TAKE:
            _receive(sockets, size)
            sockets[0].sendall(command)
        elif kind == _GIVE:
            _send(sockets, size)
        else:
            return


def _latency(connection: socket.socket) -> float:
    times: list[float] = []
    until = time.monotonic() + LATENCY_SECONDS
    while len(times) < LEAST_ROUND_TRIPS or (len(times) < ROUND_TRIPS and time.monotonic() < until):
        start = time.perf_counter()
        connection.sendall(_COMMAND.pack(_PING, 0))
        exactly(connection, _COMMAND.size)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


def _bandwidth(move: Callable[[int], None], latency: float) -> float:
    """Bytes a second; the first and smaller transfers only let TCP find its pace."""
    size = LEAST_BYTES
    while True:
        start = time.perf_counter()
        move(size)
        taken = time.perf_counter() - start
        if taken >= BANDWIDTH_SECONDS or size >= MOST_BYTES:
            return size / max(taken - 2 * latency, taken / 10)
        size *= 2


def _have_taken(sockets: Sequence[socket.socket], size: int) -> None:
    sockets[0].sendall(_COMMAND.pack(_TAKE, size))
    _send(sockets, size)
    exactly(sockets[0], _COMMAND.size)


def _have_given(sockets: Sequence[socket.socket], size: int) -> None:
    sockets[0].sendall(_COMMAND.pack(_GIVE, size))
    _receive(sockets, size)


def _send(sockets: Sequence[socket.socket], size: int) -> None:
    """Each connection takes the next bytes when it can, so that a faster one takes more."""
    block = memoryview(bytes(BLOCK))
    for connection in _ready(sockets, selectors.EVENT_WRITE):
        size -= connection.send(block[:size])
        if not size:
            return


def _receive(sockets: Sequence[socket.socket], size: int) -> None:
    block = memoryview(bytearray(BLOCK))
    for connection in _ready(sockets, selectors.EVENT_READ):
        got = connection.recv_into(block[:size])
        if not got:
            raise ConnectionResetError("the other host closed the connection")
        size -= got
        if not size:
            return


def _ready(sockets: Sequence[socket.socket], event: int) -> Iterator[socket.socket]:
    with make_above_streams(selectors.DefaultSelector) as selector:
        for connection in sockets:
            selector.register(connection, event)
        while ready := selector.select(STALL_SECONDS):
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                yield key.fileobj
    raise TimeoutError(f"nothing moved for {STALL_SECONDS:g} s")
