"""How the ranks of a group meet: those of one host share a memfd, those of others learn each other's addresses.

1. Every rank listens at a Unix socket and tells the store who and where it is, rank 0 with a fresh secret. Rank 0 makes
   the roster of that, which it publishes if there are several hosts.
2. On each host the lowest rank is the leader. It connects to the others and hands them the roster. Both sides prove
   that they know the secret (HMAC-SHA-256 over the other's nonce), and the kernel tells both that the peer is the same
   user. Being able to connect is what proves that they share a host.
3. A rank answers with a pidfd of itself, its process's arena if it has one, and whether it can access all others'
   memory; when all have, the leader sends everybody of its host a memfd, all pidfds and arenas, and whether all can.
4. If there are several hosts, every rank listens for the others (`links`) and tells the store where.

A rank that cannot go on says so in the store, so that the others need not wait for it. The end of a process is seen by
those that are connected with it, and by the others of its machine that wait for it (`groups.arrivals`).

A pidfd becomes readable when its process ends, whoever holds it. That is how a dead peer is found out: unlike an open
socket it is not kept alive by forked children (DataLoader workers), and it works across pid namespaces.

The socket's address is abstract, and the memfd has no name: nothing is left in any file system, however processes end.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.descriptors import above_streams, duplicate, make_above_streams
from ringreduce.common.failures import (
    CollectiveTimeout,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TopologyError,
)
from ringreduce.common.system import WANTS, explained
from ringreduce.coordination.endpoint import NONCE, Config, Endpoint, Location, PreparedEndpoint, door_at
from ringreduce.coordination.process import own_pidfd
from ringreduce.groups.arrivals import WHO, passed
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.waiting import LEST
from ringreduce.network.local import check_user, close_all, proof, receive, require_room, send, shared_memory, written
from ringreduce.network.secret import group_secret

if TYPE_CHECKING:
    from ringreduce._C import OpenMemory
    from ringreduce.network.listener import Door
    from ringreduce.network.sockets import Address

_DIGEST = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"!i?{_DIGEST}s")  # rank, whether it can access all ranks' memory, proof
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253 (SCM_MAX_FD)
_BEFORE_STORE = 0.01
"""Seconds that a rank waits for its leader before it asks the store, where only those of other hosts find theirs."""
_STRANGER_SECONDS = 5.0
"""For who connects to say who it is."""


class _Member(NamedTuple):
    """What the ranks of its host learn of a rank. The descriptors are owned by whoever receives them."""

    rank: int
    near: bool
    """Whether it can access all ranks' memory."""
    arena: int
    """-1: it has none."""
    pidfd: int = -1

    def descriptors(self) -> list[int]:
        return [fd for fd in (self.pidfd, self.arena) if fd >= 0]


@dataclass
class Meeting:
    """What a rank brings home. The caller owns the descriptors and the door."""

    memfd: int
    """Shared by the ranks of this host, with room for the regions of all."""
    pidfds: list[int]
    """Per rank of the group; -1 for this rank itself and for those on other hosts."""
    arenas: list[int]
    """The same of their processes' arenas; -1 also where there is none."""
    names: list[tuple[str, int]]
    """Per rank: (host, pid)."""
    cores: frozenset[int]
    """The numbers of the cores that some rank of this host may use."""
    decision: str
    """What rank 0's `decide` said."""
    threads: list[int]
    """Per rank: under which thread's id its memory is open; empty unless every rank can access every other's."""
    hosts: list[list[int]]
    """The ranks of each host, in order; hosts by their lowest rank."""
    labels: list[str]
    """What files call each host: RINGREDUCE_HOST_ID, or else its hostname, which several may have."""
    secret: bytes
    """The group's, for connections between hosts."""
    door: Door | None
    """Where this rank listens for those on other hosts, not open yet; None if all are on one."""
    doors: list[list[Address]]
    """Per rank: the addresses of its door; none if all are on one host."""
    exchange: Exchange
    """How this group's ranks tell each other more."""

    def close_descriptors(self) -> None:
        """Lets go of what is for a group to take over, if none will."""
        close_all(fd for fd in (self.memfd, *self.pidfds, *self.arenas) if fd >= 0)

    def close(self) -> None:
        """Lets go of the door too."""
        self.close_descriptors()
        if self.door:
            self.door.close()


Decide = Callable[[list[frozenset[int]], bool, list[list[int]], list[str]], str]
Roster = dict[str, Any]
"""What rank 0 tells all: see `_roster`."""


def meet(
    exchange: Exchange,
    segment_bytes: Callable[[str], int],
    config: Config,
    decide: Decide,
    memory: OpenMemory | None = None,
    location: Location = Location(),
    arena: int = -1,
) -> Meeting:
    """Joins this rank with the others of its group; returns when all of its host are there, and all others known.

    `config` must be equal on all ranks. `decide` is called on rank 0 alone, when all are known, with the cores that
    each rank may use, whether rank 0 can access all ranks' memory, and the ranks and the label of each host; what it
    says is told to all, and by it `segment_bytes` says how much memory to share. `memory` is this rank's, if others
    may read it. `arena` is the descriptor of its process's arena, which stays the caller's; -1: none. Where `exchange`
    has the endpoints of all ranks beforehand, `decide` is called on the first rank of each host.

    Raises `CollectiveTimeout` naming the ranks that did not come in time, `InvalidArgument` if configurations differ or
    `location` cannot be, `TopologyError` if all have to be on one host and are not, `CollectiveMismatch` if another
    rank makes a group of other ranks, `PeerLost` if another rank has raised one of these for itself, or has died.
    """
    rank = exchange.rank
    try:
        with contextlib.closing(exchange.before.prepared or PreparedEndpoint(location, config, memory)) as ready:
            me = _Announced(exchange, ready)
            exchange.arrive(ready.endpoint)
            roster, leader = _find(me, location, decide)
            passed("roster: known")
            here = next(host for host in roster["hosts"] if rank in host)
            for r, who in enumerate(roster["who"]):
                exchange.know(r, who)
            if rank != 0:
                exchange.watched = [0, *(here if rank == here[0] else here[:1])]
            own = _Member(rank, bool(roster["memory"]) and _can_access_all(roster["memory"]), arena)
            if leader:
                memfd, members = _join(me, leader, here, own)
            else:
                memfd, members = _lead(me, roster, here, segment_bytes(str(roster["decision"])), own)
            try:
                door, doors = _addresses(me, location) if len(roster["hosts"]) > 1 else (None, [])
            except BaseException:
                close_all([memfd, *(fd for member in members for fd in member.descriptors())])
                raise
    except OSError as error:  # no descriptors are left, say
        failed = SystemFailure(f"making the group: {explained(error)}", rank)
        exchange.give_up(failed)
        raise failed from None
    except BaseException as error:
        exchange.give_up(error)
        raise
    return _meeting(exchange, location, roster, memfd, members, door, doors)


class _Announced(NamedTuple):
    """This rank, once the others can know where its leader finds it."""

    exchange: Exchange
    ready: PreparedEndpoint

    @property
    def rank(self) -> int:
        return self.exchange.rank


def _hosts(ranks: Sequence[Endpoint]) -> list[list[int]]:
    machines: dict[str, list[int]] = {}
    for r, other in enumerate(ranks):
        machines.setdefault(str(other.get("machine")), []).append(r)  # those that want another transport have none
    return list(machines.values())


def _roster(exchange: Exchange, ranks: Sequence[Endpoint], location: Location, decide: Decide) -> Roster:
    """What all are told, by what each has told."""
    for r, other in enumerate(ranks):
        exchange.know(r, other["who"])
    exchange.check_configs(ranks)
    hosts = _hosts(ranks)
    if location.transport == "shared_memory" and len(hosts) > 1:
        one, another = exchange.describe(0), exchange.describe(hosts[1][0])
        raise TopologyError(
            f"{one} and {another} are on different hosts: ranks on several hosts (or in separate network "
            "namespaces) cannot share memory; make the group with ringreduce.Options(transport='auto'), or "
            "RINGREDUCE_TRANSPORT=auto",
            hosts[1][0],
        )
    labels = [str(ranks[host[0]].get("label")) for host in hosts]
    keys = [other.get("memory") for other in ranks] if len(hosts) == 1 < len(ranks) else []
    memory = [key for key in keys if key] if all(keys) else []
    cores = [frozenset(other.get("cores", ())) for other in ranks]
    return {
        "who": [other["who"] for other in ranks],
        "ids": [other.get("id") for other in ranks],
        "hosts": hosts,
        "labels": labels,
        "cores": [sorted(frozenset().union(*(cores[r] for r in host))) for host in hosts],
        "memory": memory,
        "sockets": [other.get("socket") for other in ranks],
        "secret": ranks[0]["secret"],
        "decision": decide(cores, bool(memory) and _can_access_all(memory), hosts, labels),
    }


def _meeting(
    exchange: Exchange,
    location: Location,
    roster: Roster,
    memfd: int,
    members: list[_Member],
    door: Door | None,
    doors: list[list[Address]],
) -> Meeting:
    """What a rank knows when all of its host have joined it; closes what it has of itself."""
    pidfds, arenas = [-1] * exchange.size, [-1] * exchange.size
    for member in members:
        if member.rank == exchange.rank:
            close_all(member.descriptors())
        else:
            pidfds[member.rank], arenas[member.rank] = member.pidfd, member.arena
    return Meeting(
        memfd=memfd,
        pidfds=pidfds,
        arenas=arenas,
        names=[(str(host), int(pid)) for host, pid, *_ in roster["who"]],
        cores=frozenset(roster["cores"][next(at for at, host in enumerate(roster["hosts"]) if exchange.rank in host)]),
        decision=str(roster["decision"]),
        threads=[int(key[0]) for key in roster["memory"]] if all(member.near for member in members) else [],
        hosts=roster["hosts"],
        labels=roster["labels"],
        secret=group_secret(bytes.fromhex(roster["secret"]), location.secret_file),
        door=door,
        doors=doors,
        exchange=exchange,
    )


class _Leader(NamedTuple):
    """Of this rank's host, connected with it."""

    connection: socket.socket
    secret: bytes
    nonce: bytes
    roster: Roster


def _find(me: _Announced, location: Location, decide: Decide) -> tuple[Roster, _Leader | None]:
    """The roster, and the leader of this rank's host; None if it is this rank."""
    exchange = me.exchange
    leader_by_endpoints = next((host[0] for host in _hosts(exchange.endpoints) if me.rank in host), None)
    if me.rank == (leader_by_endpoints or 0):
        roster = exchange.decide(lambda ranks: _roster(exchange, ranks, location, decide), exchange.collect(WHO))
        if len(roster["hosts"]) > 1 and not exchange.endpoints:
            exchange.publish("roster", roster)
        return roster, None
    came: list[_Leader] = []
    read: Roster = {}

    def leader_came(pause: float) -> bool:
        me.ready.listener.settimeout(pause)
        try:
            connection = above_streams(me.ready.listener.accept()[0])
        except (TimeoutError, BlockingIOError):
            pass
        else:
            came.extend(_greet(connection, me))
        if not (came or read or exchange.endpoints) and (roster := exchange.roster("roster")):
            read.update(roster)
            exchange.know(0, read["who"][0])
            leader = next(host for host in read["hosts"] if me.rank in host)[0]
            exchange.know(leader, read["who"][leader])
            exchange.watched = [0, leader]
        return bool(came) or me.rank in (host[0] for host in read.get("hosts", ()))

    if leader_by_endpoints is None:
        exchange.wait_for_rank_0()
        exchange.wait(leader_came, first=_BEFORE_STORE)
    else:
        leader = leader_by_endpoints
        exchange.watched = [leader]
        exchange.wait(leader_came, lambda: [leader], exchange.deadline + LEST, first=_BEFORE_STORE)
    return (came[0].roster, came[0]) if came else (read, None)


def _greet(connection: socket.socket, me: _Announced) -> list[_Leader]:
    """Who connected, if it is a rank of this group; a stranger gets nothing."""
    fds: list[int] = []
    try:
        check_user(connection)
        connection.settimeout(_STRANGER_SECONDS)
        message, fds = receive(connection, NONCE + _DIGEST, 1)
        if len(message) != NONCE + _DIGEST or len(fds) != 1 or not me.exchange.has_told(WHO, 0):
            raise ConnectionError("not a rank of this group")
        nonce, its_proof = message[:NONCE], message[NONCE:]
        secret = bytes.fromhex(me.exchange.told(WHO, 0)["secret"])  # rank 0 has told it when others hear of it
        if not hmac.compare_digest(its_proof, proof(secret, b"leader", me.ready.nonce, me.rank)):
            raise ConnectionError("not a rank of this group")
        roster = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
        if not me.exchange.counts_in(roster):
            raise ConnectionError("not a rank of this attempt")
        return [_Leader(connection, secret, nonce, roster)]
    except OSError:
        connection.close()
        return []
    finally:
        close_all(fds)


def _join(me: _Announced, leader: _Leader, here: list[int], own: _Member) -> tuple[int, list[_Member]]:
    """What a rank that is not its host's leader does there."""
    exchange, fds = me.exchange, array.array("i")
    with leader.connection as connection:
        try:
            hello = _HELLO.pack(own.rank, own.near, proof(leader.secret, b"member", leader.nonce, own.rank))
            # Later it would be too late: the leader hands out descriptors and goes on, and would not hear of it.
            require_room(1 + 2 * len(here), connection.fileno())
            pidfd = own_pidfd()
            try:
                send(connection, hello, [pidfd] if own.arena < 0 else [pidfd, own.arena], exchange.deadline)
            finally:
                os.close(pidfd)
            passed("host: introduced")
            connection.settimeout(max(exchange.deadline + LEST - time.monotonic(), LEST))
            message = b""  # a byte for each rank: 1 if it can access all memory, and 2 if it has an arena
            while len(fds) < 1 + len(here) + sum(byte > 1 for byte in message):
                message, some = receive(connection, len(here), _FDS_PER_MESSAGE)
                if len(message) != len(here) or not some:
                    raise ConnectionError("it closed the connection")
                fds.extend(some)
        except TimeoutError:
            close_all(fds)
            raise CollectiveTimeout(
                f"making the group: {exchange.describe(here[0])} did not answer in time", here[0]
            ) from None
        except OSError as error:
            close_all(fds)
            raise _lost(exchange, here[0], error) from None
    passed("host: joined")
    memfd, *rest = fds
    pidfds, arenas = rest[: len(here)], iter(rest[len(here) :])
    return memfd, [
        _Member(r, bool(byte & 1), pidfd=pidfd, arena=next(arenas) if byte > 1 else -1)
        for r, byte, pidfd in zip(here, message, pidfds, strict=True)
    ]


def _lead(
    me: _Announced, roster: Roster, here: list[int], segment_bytes: int, own: _Member
) -> tuple[int, list[_Member]]:
    """The leader's part: makes the memfd, and hands it to the ranks `here` with what they have sent of themselves."""
    exchange = me.exchange
    passed("host: leads")
    memfd, members = -1, dict[int, _Member]()
    with contextlib.ExitStack() as connections:
        try:
            memfd = shared_memory(segment_bytes)
            members[own.rank] = own._replace(pidfd=own_pidfd(), arena=-1)
            if own.arena >= 0:
                members[own.rank] = members[own.rank]._replace(arena=duplicate(own.arena))
            secret, text = bytes.fromhex(roster["secret"]), written(json.dumps(roster))
            connections.callback(os.close, text)
            guests = {r: connections.enter_context(_invite(me, roster, r, text)) for r in here[1:]}
            passed("host: invited")
            events = connections.enter_context(make_above_streams(selectors.DefaultSelector))
            for r, guest in guests.items():
                events.register(guest, selectors.EVENT_READ, r)

            def all_came(pause: float) -> bool:
                for key, _ in events.select(pause) if events.get_map() else ():
                    members[key.data] = _admit(me, key.data, guests[key.data], secret)
                    events.unregister(guests[key.data])
                    passed("host: admitted")
                return len(members) == len(here)

            exchange.wait(all_came, lambda: [r for r in here if r not in members])
            ordered = [members[r] for r in here]
            message = bytes(member.near + 2 * (member.arena >= 0) for member in ordered)
            fds = [memfd, *(member.pidfd for member in ordered), *(m.arena for m in ordered if m.arena >= 0)]
            for r, guest in guests.items():
                try:
                    for start in range(0, len(fds), _FDS_PER_MESSAGE):
                        send(guest, message, fds[start : start + _FDS_PER_MESSAGE], exchange.deadline)
                except OSError as error:
                    raise _lost(exchange, r, error) from None
                passed("host: handed out")
            return memfd, ordered
        except BaseException as error:
            if isinstance(error, RingReduceError):
                exchange.give_up(error)  # before the connections close, so that their other ends find the reason
            close_all(fd for member in members.values() for fd in member.descriptors())
            if memfd >= 0:
                os.close(memfd)
            raise


def _invite(me: _Announced, roster: Roster, rank: int, text: int) -> socket.socket:
    """Connects with a rank of this host, and hands it the roster, which is in `text`."""
    address, nonce = (bytes.fromhex(text) for text in roster["sockets"][rank])
    connection = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.connect(address)
        check_user(connection)
        mine = me.ready.nonce + proof(bytes.fromhex(roster["secret"]), b"leader", nonce, rank)
        send(connection, mine, [text], me.exchange.deadline)
    except OSError as error:
        connection.close()
        if error.errno in WANTS:
            raise
        _look_for_reason(me.exchange)
        home = roster["who"][me.rank][0]
        raise SystemFailure(
            f"joining {me.exchange.describe(rank)}, which should be on this host, {home} (as RINGREDUCE_HOST_ID says, "
            f"if it is set): {error}",
            rank,
        ) from None
    return connection


def _admit(me: _Announced, rank: int, guest: socket.socket, secret: bytes) -> _Member:
    """What a rank has answered."""
    fds: list[int] = []
    try:
        message, fds = receive(guest, _HELLO.size, 2)
        if not message:
            raise ConnectionError("it closed the connection")
        claimed, near, its_proof = _HELLO.unpack(message)
        right = hmac.compare_digest(its_proof, proof(secret, b"member", me.ready.nonce, rank))
        if len(fds) not in (1, 2) or claimed != rank or not right:
            raise ConnectionError("it is not a rank of this group")
        return _Member(rank, near, pidfd=fds[0], arena=fds[1] if len(fds) == 2 else -1)
    except (OSError, struct.error) as error:
        close_all(fds)
        raise _lost(me.exchange, rank, error) from None


def _look_for_reason(exchange: Exchange) -> None:
    """Raises why a rank of this host is not to be reached, if it says so or has ended."""
    for _ in range(20):  # its sockets close before either shows, and a look may take long
        exchange.raise_if_lost()
        time.sleep(0.01)


def _lost(exchange: Exchange, rank: int, error: Exception) -> Exception:
    """For a rank of this host, the connection with which has failed; `error` itself if this process has run out of
    something."""
    if isinstance(error, OSError) and error.errno in WANTS:
        return error
    _look_for_reason(exchange)
    return PeerLost(f"making the group: {exchange.describe(rank)} is out of reach: {error}", rank)


def _addresses(me: _Announced, location: Location) -> tuple[Door, list[list[Address]]]:
    """This rank's door for other hosts, which is the caller's from now on, and where the doors of all ranks are."""
    from ringreduce.network.sockets import Address

    door = me.ready.door or door_at(location)
    me.ready.door = None
    doors = [endpoint["door"] for endpoint in me.exchange.endpoints]
    if not doors or None in doors:
        try:
            doors = me.exchange("doors", door.addresses)
        except BaseException:
            door.close()
            raise
    return door, [[Address(*address) for address in addresses] for addresses in doors]


def _can_access_all(keys: list[list[int]]) -> bool:
    from ringreduce import _C  # here, as it needs torch

    return all(_C.can_access(*key) for key in keys)
