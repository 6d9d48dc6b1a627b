"""The ranks of one host share a memfd: rank 0 makes it and hands it over a Unix socket.

1. Every rank tells the store who it is. Rank 0 publishes the roster, with a fresh secret and its socket's address.
2. Every other rank connects. Both sides prove that they know the secret (HMAC-SHA-256 over the other's nonce), and the
   kernel tells both that the peer is the same user. Being able to connect is what proves that they share a host.
3. The rank sends a pidfd of itself, and whether it can access all others' memory; when all have, rank 0 sends
   everybody the memfd, all pidfds, and whether all can.

A pidfd becomes readable when its process ends, whoever holds it. That is how a dead peer is found out: unlike an open
socket it is not kept alive by forked children (DataLoader workers), and it works across pid namespaces.

The socket's address is abstract, and the memfd has no name: nothing is left in any file system, however processes end.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure, TopologyError

_NONCE = 32
_DIGEST = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"!i?{_NONCE}s{_DIGEST}s")  # rank, whether it can access all ranks' memory, nonce, proof
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253 (SCM_MAX_FD)


@dataclass
class Meeting:
    """What a rank brings home. The caller owns the descriptors."""

    memfd: int
    pidfds: list[int]
    """Per rank of the group; -1 for this rank itself."""
    names: list[tuple[str, int]]
    """Per rank: (host, pid)."""
    cores: frozenset[int]
    """The numbers of the cores that some rank may use."""
    decision: str
    """What rank 0's `decide` said."""
    threads: list[int]
    """Per rank: under which thread's id its memory is open; empty unless every rank can access every other's."""


def meet(
    store: Store,
    rank: int,
    size: int,
    segment_bytes: Callable[[str], int],
    config: str,
    timeout: float,
    decide: Callable[[list[frozenset[int]], bool], str],
    memory: tuple[int, int, int] | None = None,
) -> Meeting:
    """Joins this rank with the others of its group; returns when all are there.

    `config` must be equal on all ranks. `decide` is called on rank 0 alone, when all are known, with the cores that
    each rank may use and whether rank 0 can access all ranks' memory; what it says is told to all, and by it
    `segment_bytes` says how much memory to share. `memory` is the key of this rank's `OpenMemory`. Raises
    `CollectiveTimeout` naming the ranks that did not come within `timeout` seconds, `InvalidArgument` if configurations
    differ, `TopologyError` if the ranks are not on one host.
    """
    deadline = time.monotonic() + timeout
    # A group may be made again under the same store prefix: count how often this rank has been here.
    generation = store.add(f"ringreduce/generation/{rank}", 1)
    prefix = f"ringreduce/{generation}"
    me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine(), "config": config}
    me |= {"cores": sorted(os.sched_getaffinity(0)), "memory": memory}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        if rank == 0:
            listener.bind("")  # the kernel picks a free abstract address
            listener.listen(size)
        store.set(f"{prefix}/rank/{rank}", json.dumps(me))
        if rank == 0:
            ranks = [json.loads(get(store, f"{prefix}/rank/{r}", f"rank {r}", deadline)) for r in range(size)]
            address = listener.getsockname()
            roster = {"ranks": ranks, "secret": secrets.token_hex(32), "address": address.hex()}
            near = _can_access_all(ranks)
            roster["decision"] = decide([frozenset(other.get("cores", ())) for other in ranks], near)
            store.set(f"{prefix}/roster", json.dumps(roster))
        else:
            roster = json.loads(get(store, f"{prefix}/roster", "rank 0, which waits for all ranks,", deadline))
            near = _can_access_all(roster["ranks"])
        _check(roster["ranks"])
        names = [(str(r["host"]), int(r["pid"])) for r in roster["ranks"]]
        secret = bytes.fromhex(roster["secret"])
        if rank == 0:
            bytes_shared = segment_bytes(str(roster["decision"]))
            memfd, pidfds, near = _serve(listener, secret, names, bytes_shared, deadline, near)
        else:
            memfd, pidfds, near = _join(bytes.fromhex(roster["address"]), secret, rank, names, deadline, near)
    os.close(pidfds[rank])
    pidfds[rank] = -1
    threads = [int(other["memory"][0]) for other in roster["ranks"]] if near else []
    return Meeting(memfd, pidfds, names, _cores(roster["ranks"]), str(roster["decision"]), threads)


def _machine() -> str:
    """Equal for processes that can reach each other's abstract Unix sockets: same kernel, same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _cores(ranks: list[dict[str, Any]]) -> frozenset[int]:
    return frozenset(int(core) for other in ranks for core in other["cores"])


def _can_access_all(ranks: list[dict[str, Any]]) -> bool:
    return all(other.get("memory") is not None and _C.can_access(*other["memory"]) for other in ranks)


def get(store: Store, key: str, whom: str, deadline: float) -> str:
    """What the store has under `key`; waits for it, for `whom`, until `deadline`, then raises `CollectiveTimeout`."""
    # A store that is asked to wait keeps its lock, so ask it briefly and often: ranks may be threads that share one.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"making the group: {whom} did not come in time")
        time.sleep(0.002)
    return str(store.get(key).decode())


def _check(ranks: list[dict[str, Any]]) -> None:
    agree_on_config(ranks)
    for r, other in enumerate(ranks):
        if other["machine"] != ranks[0]["machine"]:
            raise TopologyError(
                f"rank 0 is on {ranks[0]['host']} and rank {r} on {other['host']}: ranks on several hosts (or in "
                "separate network namespaces) cannot share memory; make the group with "
                "ringreduce.Options(transport='gloo'), or RINGREDUCE_TRANSPORT=gloo",
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
    names: list[tuple[str, int]],
    segment_bytes: int,
    deadline: float,
    near: bool,
) -> tuple[int, list[int], bool]:
    memfd = os.memfd_create("ringreduce", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memfd, segment_bytes)
    except OSError as error:
        os.close(memfd)
        raise SystemFailure(
            f"cannot make {segment_bytes} bytes of shared memory, most of them unused address space "
            f"(RINGREDUCE_ARENA_BYTES lowers it): {error.strerror}"
        ) from None
    pidfds = {0: _own_pidfd()}
    members: dict[int, socket.socket] = {}
    try:
        while len(members) < len(names) - 1:
            missing = [r for r in range(1, len(names)) if r not in members]
            listener.settimeout(_left(deadline, f"rank {missing[0]}"))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise CollectiveTimeout(
                    f"making the group: ranks {missing} did not connect in time", missing[0]
                ) from None
            try:
                rank, pidfd, its_near = _admit(connection, secret, deadline)
                if rank not in missing:
                    raise ConnectionError(f"a process claims to be rank {rank}")
            except OSError:  # a stranger: it gets nothing, and the ranks come on other connections
                connection.close()
                continue
            members[rank], pidfds[rank] = connection, pidfd
            near = near and its_near
        ordered = [pidfds[r] for r in range(len(names))]
        for rank, connection in members.items():
            try:
                for start in range(0, len(names) + 1, _FDS_PER_MESSAGE):
                    socket.send_fds(connection, [bytes([near])], [memfd, *ordered][start : start + _FDS_PER_MESSAGE])
            except OSError:
                host, pid = names[rank]
                raise PeerLost(f"making the group: rank {rank} ({host}, pid {pid}) died or left", rank) from None
        return memfd, ordered, near
    except BaseException:
        _close((memfd, *pidfds.values()))
        raise
    finally:
        for connection in members.values():
            connection.close()


def _admit(connection: socket.socket, secret: bytes, deadline: float) -> tuple[int, int, bool]:
    """Checks who connected; returns its rank, its pidfd, and whether it can access all ranks' memory."""
    _check_user(connection)
    connection.settimeout(min(5.0, _left(deadline, "a connecting rank")))
    nonce = secrets.token_bytes(_NONCE)
    connection.send(nonce)
    message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        rank, near, theirs, proof = _HELLO.unpack(message)
        if len(fds) != 1 or not hmac.compare_digest(proof, _proof(secret, b"member", nonce, rank)):
            raise ConnectionError("not a rank of this group")
        connection.send(_proof(secret, b"leader", theirs, rank))
    except (OSError, struct.error) as error:
        _close(fds)
        raise ConnectionError(str(error)) from None
    return rank, fds[0], near


def _join(
    address: bytes, secret: bytes, rank: int, names: list[tuple[str, int]], deadline: float, near: bool
) -> tuple[int, list[int], bool]:
    fds = array.array("i")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(_left(deadline, "rank 0"))
            connection.connect(address)
            _check_user(connection)
            nonce = secrets.token_bytes(_NONCE)
            message = _HELLO.pack(rank, near, nonce, _proof(secret, b"member", connection.recv(_NONCE), rank))
            pidfd = _own_pidfd()
            try:
                socket.send_fds(connection, [message], [pidfd])
            finally:
                os.close(pidfd)
            if not hmac.compare_digest(connection.recv(_DIGEST), _proof(secret, b"leader", nonce, rank)):
                raise ConnectionError("what answered at rank 0's address is not rank 0")
            while len(fds) < len(names) + 1:
                message, some, _, _ = socket.recv_fds(connection, 16, _FDS_PER_MESSAGE)
                if not some:
                    raise ConnectionError("rank 0 closed the connection")
                fds.extend(some)
        except TimeoutError:
            _close(fds)
            raise CollectiveTimeout("making the group: rank 0 did not answer in time", 0) from None
        except OSError as error:
            _close(fds)
            raise SystemFailure(f"joining the group at rank 0 ({names[0][0]}, pid {names[0][1]}): {error}", 0) from None
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0], list(fds[1:]), message == b"\1"


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
