"""How the ranks of a group meet: those of one host share a memfd, those of others learn each other's addresses.

1. Every rank tells the store who and where it is. Rank 0 publishes the roster, with a fresh secret.
2. On each host the lowest rank is the leader, and the others connect to its Unix socket. Both sides prove that they
   know the secret (HMAC-SHA-256 over the other's nonce), and the kernel tells both that the peer is the same user.
   Being able to connect is what proves that they share a host.
3. The rank sends a pidfd of itself, its process's arena if it has one, and whether it can access all others' memory;
   when all have, the leader sends everybody of its host a memfd, all pidfds and arenas, and whether all can.
4. If there are several hosts, every rank listens for the others (`links`) and tells the store where.

A rank that cannot go on says so in the store, so that the others need not wait for it.

A pidfd becomes readable when its process ends, whoever holds it. That is how a dead peer is found out: unlike an open
socket it is not kept alive by forked children (DataLoader workers), and it works across pid namespaces.

The socket's address is abstract, and the memfd has no name: nothing is left in any file system, however processes end.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ringreduce.common.failures import (
    CollectiveTimeout,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TopologyError,
)
from ringreduce.rendezvous.interfaces import Filter, local_interfaces
from ringreduce.rendezvous.links import Address, Door, parse_ports
from ringreduce.rendezvous.secret import group_secret
from ringreduce.rendezvous.store import Store, generation, get

_NONCE = 32
_DIGEST = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"!i?{_NONCE}s{_DIGEST}s")  # rank, whether it can access all ranks' memory, nonce, proof
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253 (SCM_MAX_FD)
_LOOK_SECONDS = 0.1
"""How often a leader looks whether another rank has given up."""
_LEST_SECONDS = 1.0
"""How much longer the others wait than rank 0, which can tell them whom it has missed."""


@dataclass(frozen=True)
class Place:
    """Where a rank counts itself to be, and how it is reached from elsewhere. What the options say of it."""

    transport: str = "auto"
    """'auto': ranks that can share memory are on one host; 'shared_memory': all have to be; 'tcp': each is alone."""
    host_id: str = ""
    """RINGREDUCE_HOST_ID: ranks with the same are on one host, whatever else says so; '': as the kernel says."""
    interfaces: str = ""
    """RINGREDUCE_SOCKET_IFNAME: see `interfaces.Filter`."""
    secret_file: str = ""
    """RINGREDUCE_SECRET_FILE: see `secret.group_secret`."""
    ports: str = ""
    """RINGREDUCE_PORTS: see `links.parse_ports`."""


@dataclass(frozen=True)
class _Member:
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
    store: Store
    prefix: str
    """Of keys in the store that are this meeting's alone."""

    def close_descriptors(self) -> None:
        """Lets go of what is for a group to take over, if none will."""
        _close(fd for fd in (self.memfd, *self.pidfds, *self.arenas) if fd >= 0)

    def close(self) -> None:
        """Lets go of the door too."""
        self.close_descriptors()
        if self.door:
            self.door.close()


def meet(
    store: Store,
    rank: int,
    size: int,
    segment_bytes: Callable[[str], int],
    config: str,
    timeout: float,
    decide: Callable[[list[frozenset[int]], bool, list[list[int]], list[str]], str],
    memory: tuple[int, int, int] | None = None,
    place: Place = Place(),
    arena: int = -1,
) -> Meeting:
    """Joins this rank with the others of its group; returns when all of its host are there, and all others known.

    `config` must be equal on all ranks. `decide` is called on rank 0 alone, when all are known, with the cores that
    each rank may use, whether rank 0 can access all ranks' memory, and the ranks and the label of each host; what it
    says is told to all, and by it `segment_bytes` says how much memory to share. `memory` is the key of this rank's
    `OpenMemory`. `arena` is the descriptor of its process's arena, which stays the caller's; -1: none.
    Raises `CollectiveTimeout` naming the ranks that did not come within `timeout` seconds, `InvalidArgument` if
    configurations differ or `place` cannot be, `TopologyError` if all have to be on one host and are not, `PeerLost` if
    another rank has raised one of these for itself.
    """
    deadline = time.monotonic() + timeout
    prefix = f"ringreduce/{generation(store, rank)}"
    try:
        return _meet(store, prefix, rank, size, segment_bytes, config, deadline, decide, memory, place, arena)
    except RingReduceError as error:
        _give_up(store, prefix, rank, error)
        raise


def _meet(
    store: Store,
    prefix: str,
    rank: int,
    size: int,
    segment_bytes: Callable[[str], int],
    config: str,
    deadline: float,
    decide: Callable[[list[frozenset[int]], bool, list[list[int]], list[str]], str],
    memory: tuple[int, int, int] | None,
    place: Place,
    arena: int,
) -> Meeting:
    def look() -> None:
        _raise_if_given_up(store, prefix)

    group_secret(b"", place.secret_file)  # what is wrong with these should not wait for several hosts to show
    parse_ports(place.ports)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel picks a free abstract address
        listener.listen(size)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine(place, rank), "config": config}
        me |= {"label": place.host_id or socket.gethostname()}
        me |= {"cores": sorted(os.sched_getaffinity(0)), "memory": memory, "address": listener.getsockname().hex()}
        store.set(f"{prefix}/rank/{rank}", json.dumps(me))
        if rank == 0:
            ranks = [json.loads(get(store, f"{prefix}/rank/{r}", f"rank {r}", deadline, look)) for r in range(size)]
            hosts = _hosts(ranks)
            near = len(hosts) == 1 and _can_access_all(ranks)
            labels = _labels(ranks, hosts)
            decision = decide([frozenset(other.get("cores", ())) for other in ranks], near, hosts, labels)
            roster = {"ranks": ranks, "secret": secrets.token_hex(32), "decision": decision}
            store.set(f"{prefix}/roster", json.dumps(roster))
        else:
            roster = json.loads(
                get(store, f"{prefix}/roster", "rank 0, which waits for all ranks,", deadline + _LEST_SECONDS, look)
            )
            ranks, hosts = roster["ranks"], _hosts(roster["ranks"])
            near = len(hosts) == 1 and _can_access_all(ranks)
        agree_on_config(ranks)
        if place.transport == "shared_memory":
            _be_on_one_host(ranks, hosts)
        names = [(str(r["host"]), int(r["pid"])) for r in ranks]
        secret, decision = bytes.fromhex(str(roster["secret"])), str(roster["decision"])
        here = next(host for host in hosts if rank in host)
        if rank == here[0]:
            own = _Member(rank, near, arena)
            memfd, members = _serve(listener, secret, here, names, segment_bytes(decision), deadline, own, look)
        else:
            address = bytes.fromhex(ranks[here[0]]["address"])
            memfd, members = _join(address, secret, here, names, deadline, _Member(rank, near, arena))
    near = all(member.near for member in members)
    pidfds, arenas = [-1] * size, [-1] * size
    for member in members:
        pidfds[member.rank], arenas[member.rank] = member.pidfd, member.arena
    _close(fd for fd in (pidfds[rank], arenas[rank]) if fd >= 0)
    pidfds[rank] = arenas[rank] = -1
    try:
        door, doors = (
            _tell_addresses(store, prefix, rank, size, place, deadline, look) if len(hosts) > 1 else (None, [])
        )
    except BaseException:
        _close((memfd, *(fd for fd in pidfds + arenas if fd >= 0)))
        raise
    return Meeting(
        memfd=memfd,
        pidfds=pidfds,
        arenas=arenas,
        names=names,
        cores=frozenset(int(core) for r in here for core in ranks[r]["cores"]),
        decision=decision,
        threads=[int(other["memory"][0]) for other in ranks] if near else [],
        hosts=hosts,
        labels=_labels(ranks, hosts),
        secret=group_secret(secret, place.secret_file),
        door=door,
        doors=doors,
        store=store,
        prefix=prefix,
    )


def _give_up(store: Store, prefix: str, rank: int, error: RingReduceError) -> None:
    """Tells the others that this rank does not come, and why. The first to say so is heard."""
    late = isinstance(error, CollectiveTimeout)
    why = str(error) if late else f"making the group: rank {rank} ({socket.gethostname()}, pid {os.getpid()}): {error}"
    with contextlib.suppress(Exception):  # the store may be gone, and what counts is the error
        if not store.check([f"{prefix}/given up"]):
            store.set(f"{prefix}/given up", json.dumps([late, why, error.culprit if error.culprit >= 0 else rank]))


def _raise_if_given_up(store: Store, prefix: str) -> None:
    """Raises what keeps another rank from coming: `CollectiveTimeout` if it waited in vain, else `PeerLost`."""
    if store.check([f"{prefix}/given up"]):
        late, why, culprit = json.loads(store.get(f"{prefix}/given up"))
        raise (CollectiveTimeout if late else PeerLost)(str(why), int(culprit))


def _machine(place: Place, rank: int) -> str:
    """Equal for ranks that are on one host."""
    if place.transport == "tcp":
        return f"rank {rank}"
    if place.host_id:
        return f"RINGREDUCE_HOST_ID={place.host_id}"
    # Those can reach each other's abstract Unix sockets that have the same kernel and the same network namespace.
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _hosts(ranks: list[dict[str, Any]]) -> list[list[int]]:
    hosts: dict[str, list[int]] = {}
    for r, other in enumerate(ranks):
        hosts.setdefault(str(other.get("machine")), []).append(r)  # those that want another transport have none
    return list(hosts.values())


def _labels(ranks: list[dict[str, Any]], hosts: list[list[int]]) -> list[str]:
    return [str(ranks[host[0]].get("label")) for host in hosts]


def _tell_addresses(
    store: Store, prefix: str, rank: int, size: int, place: Place, deadline: float, look: Callable[[], None]
) -> tuple[Door, list[list[Address]]]:
    """Opens a door for other hosts; returns it and where the doors of all ranks are."""
    wanted = Filter.parse(place.interfaces)
    door = Door(wanted.choose(local_interfaces()), named=wanted.names_some, ports=parse_ports(place.ports))
    try:
        store.set(f"{prefix}/door/{rank}", json.dumps(door.addresses))
        if rank == 0:  # so that each rank asks the store once, not once per rank
            doors = [json.loads(get(store, f"{prefix}/door/{r}", f"rank {r}", deadline, look)) for r in range(size)]
            store.set(f"{prefix}/doors", json.dumps(doors))
        else:
            whom = "rank 0, which waits for all addresses,"
            doors = json.loads(get(store, f"{prefix}/doors", whom, deadline + _LEST_SECONDS, look))
    except BaseException:
        door.close()
        raise
    return door, [[Address(*address) for address in addresses] for addresses in doors]


def _can_access_all(ranks: list[dict[str, Any]]) -> bool:
    from ringreduce import _C  # here, as it needs torch

    return all(other.get("memory") is not None and _C.can_access(*other["memory"]) for other in ranks)


def _be_on_one_host(ranks: list[dict[str, Any]], hosts: list[list[int]]) -> None:
    if len(hosts) > 1:
        r = hosts[1][0]
        raise TopologyError(
            f"rank 0 is on {ranks[0]['host']} and rank {r} on {ranks[r]['host']}: ranks on several hosts (or in "
            "separate network namespaces) cannot share memory; make the group with "
            "ringreduce.Options(transport='auto'), or RINGREDUCE_TRANSPORT=auto",
            r,
        )


def agree_on_config(ranks: list[dict[str, Any]]) -> None:
    """Raises `InvalidArgument` if two ranks have different `config`s."""
    for r, other in enumerate(ranks):
        if other["config"] != ranks[0]["config"]:
            raise InvalidArgument(
                f"options differ between ranks: rank 0 has {ranks[0]['config']}, rank {r} has {other['config']}; "
                "give all ranks the same ringreduce.Options and RINGREDUCE_* variables",
                r,
            )


def _own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SystemFailure(f"pidfd_open: {error.strerror}; ringreduce needs Linux 5.3 or newer") from None


def _serve(
    listener: socket.socket,
    secret: bytes,
    here: list[int],
    names: list[tuple[str, int]],
    segment_bytes: int,
    deadline: float,
    own: _Member,
    look: Callable[[], None],
) -> tuple[int, list[_Member]]:
    """The leader's part: makes the memfd, and hands it to the ranks `here` with what they have sent of themselves.

    While it waits it calls `look`, which raises if that is in vain.
    """
    memfd = os.memfd_create("ringreduce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memfd, segment_bytes)
        # A rank that made it smaller would end all others, by SIGBUS.
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(memfd)
        raise SystemFailure(f"cannot make {segment_bytes} bytes of shared memory: {error.strerror}") from None
    members = {own.rank: replace(own, pidfd=_own_pidfd(), arena=os.dup(own.arena) if own.arena >= 0 else -1)}
    connections: dict[int, socket.socket] = {}
    try:
        while missing := [r for r in here if r not in members]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectiveTimeout(f"making the group: ranks {missing} did not connect in time", missing[0])
            look()
            listener.settimeout(min(left, _LOOK_SECONDS))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            try:
                member = _admit(connection, secret, deadline)
                if member.rank not in missing:
                    _close(member.descriptors())
                    raise ConnectionError(f"a process claims to be rank {member.rank}")
            except OSError:  # a stranger: it gets nothing, and the ranks come on other connections
                connection.close()
                continue
            connections[member.rank], members[member.rank] = connection, member
        ordered = [members[r] for r in here]
        message = bytes(member.near + 2 * (member.arena >= 0) for member in ordered)
        fds = [memfd, *(member.pidfd for member in ordered), *(m.arena for m in ordered if m.arena >= 0)]
        for rank, connection in connections.items():
            try:
                for start in range(0, len(fds), _FDS_PER_MESSAGE):
                    _send(connection, message, fds[start : start + _FDS_PER_MESSAGE], deadline)
            except OSError:
                host, pid = names[rank]
                raise PeerLost(f"making the group: rank {rank} ({host}, pid {pid}) died or left", rank) from None
        return memfd, ordered
    except BaseException:
        _close((memfd, *(fd for member in members.values() for fd in member.descriptors())))
        raise
    finally:
        for connection in connections.values():
            connection.close()


def _admit(connection: socket.socket, secret: bytes, deadline: float) -> _Member:
    """Checks who connected."""
    _check_user(connection)
    connection.settimeout(min(5.0, _left(deadline, "a connecting rank")))
    nonce = secrets.token_bytes(_NONCE)
    connection.send(nonce)
    message, fds = _receive(connection, _HELLO.size, 2)
    try:
        rank, near, theirs, proof = _HELLO.unpack(message)
        if len(fds) not in (1, 2) or not hmac.compare_digest(proof, _proof(secret, b"member", nonce, rank)):
            raise ConnectionError("not a rank of this group")
        connection.send(_proof(secret, b"leader", theirs, rank))
    except (OSError, struct.error) as error:
        _close(fds)
        raise ConnectionError(str(error)) from None
    return _Member(rank, near, pidfd=fds[0], arena=fds[1] if len(fds) == 2 else -1)


def _join(
    address: bytes,
    secret: bytes,
    here: list[int],
    names: list[tuple[str, int]],
    deadline: float,
    own: _Member,
) -> tuple[int, list[_Member]]:
    """The other ranks' part."""
    leader, rank = here[0], own.rank
    fds = array.array("i")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(_left(deadline, f"rank {leader}"))
            connection.connect(address)
            _check_user(connection)
            nonce = secrets.token_bytes(_NONCE)
            message = _HELLO.pack(rank, own.near, nonce, _proof(secret, b"member", connection.recv(_NONCE), rank))
            pidfd = _own_pidfd()
            try:
                _send(connection, message, [pidfd] if own.arena < 0 else [pidfd, own.arena], deadline)
            finally:
                os.close(pidfd)
            if not hmac.compare_digest(connection.recv(_DIGEST), _proof(secret, b"leader", nonce, rank)):
                raise ConnectionError(f"what answered at rank {leader}'s address is not rank {leader}")
            message = b""  # a byte for each rank: 1 if it can access all memory, and 2 if it has an arena
            while len(fds) < 1 + len(here) + sum(byte > 1 for byte in message):
                message, some = _receive(connection, len(here), _FDS_PER_MESSAGE)
                if len(message) != len(here) or not some:
                    raise ConnectionError(f"rank {leader} closed the connection")
                fds.extend(some)
        except TimeoutError:
            _close(fds)
            raise CollectiveTimeout(f"making the group: rank {leader} did not answer in time", leader) from None
        except OSError as error:
            _close(fds)
            host, pid = names[leader]
            raise SystemFailure(
                f"joining the group at rank {leader} ({host}, pid {pid}), which should be on this host, "
                f"{names[rank][0]} (as RINGREDUCE_HOST_ID says, if it is set): {error}",
                leader,
            ) from None
    memfd, *rest = fds
    pidfds, arenas = rest[: len(here)], iter(rest[len(here) :])
    return memfd, [
        _Member(r, bool(byte & 1), pidfd=pidfd, arena=next(arenas) if byte > 1 else -1)
        for r, byte, pidfd in zip(here, message, pidfds, strict=True)
    ]


def _send(connection: socket.socket, message: bytes, fds: list[int], deadline: float) -> None:
    """Sends descriptors, however many are on their way already.

    The kernel lets a user have as many under way as a process may have open, and large groups send more.
    """
    while True:
        try:
            socket.send_fds(connection, [message], fds)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(0.001)  # until others have received theirs


def _receive(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """A message and its descriptors, which no program that another thread starts meanwhile inherits."""
    fds = array.array("i")
    room = socket.CMSG_LEN(most * fds.itemsize)
    message, ancillary, _, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)  # recv_fds() ignores flags
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


def _proof(secret: bytes, role: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.digest(secret, role + nonce + rank.to_bytes(4, "big"), "sha256")


def _check_user(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"a process of user {uid} connected; this one runs as user {os.geteuid()}")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _left(deadline: float, whom: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise CollectiveTimeout(f"making the group: {whom} did not come in time")
    return left
