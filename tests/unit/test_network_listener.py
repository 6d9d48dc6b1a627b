"""Doors: ranks find each other over every kind of address, strangers do not get in, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import limited, no_descriptors, until

from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure
from ringreduce.network import handshake, paths, sockets
from ringreduce.network import listener as listener_module
from ringreduce.network.handshake import Handshake
from ringreduce.network.interfaces import Interface, local_interfaces
from ringreduce.network.listener import Door, Peer
from ringreduce.network.secret import group_secret
from ringreduce.network.sockets import Address

SECRET = b"s" * 32
SOON = 20.0  # seconds in which what must happen happens, on any machine


def interface(name: str, *addresses: str) -> Interface:
    return Interface(name, socket.if_nametoindex("lo"), tuple(map(ip_interface, addresses)), loopback=True)


LO = interface("lo", "127.0.0.1/8")


class Member:
    """A rank that is a door in this process."""

    def __init__(self, rank: int, *interfaces: Interface, named: bool = False) -> None:
        self.rank, self.door = rank, Door(interfaces or [LO], named)
        self.links: dict[int, list[socket.socket]] = {}
        self.said: dict[int, list[str]] = {}

    def open(self, members: list[Member], **other: Any) -> None:
        peers = {m.rank: Peer(f"host{m.rank}", 100 + m.rank, m.door.addresses) for m in members if m is not self}
        given = {"group": "g", "secret": SECRET, "peers": peers, "deliver": self.deliver} | other
        self.door.open(self.rank, **given)

    def deliver(self, peer: int, fd: int, description: str) -> None:
        assert not os.get_blocking(fd)  # which `connect` would tell
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        self.links.setdefault(peer, []).append(connection)
        self.said.setdefault(peer, []).append(description)

    def connect(self, *peers: int, seconds: float = SOON, patience: float = 0.0) -> None:
        self.door.connect(peers, time.monotonic() + seconds, patience)

    def close(self) -> None:
        self.door.close()
        for connection in [c for some in self.links.values() for c in some]:
            connection.close()


Make = Callable[..., Member]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def member(*args: Any, **named: Any) -> Member:
            one = Member(*args, **named)
            stack.callback(one.close)
            return one

        yield member


@pytest.fixture
def pair(make: Make) -> tuple[Member, Member]:
    """Ranks 0 and 1, not open yet."""
    return make(0), make(1)


def open_all(*members: Member, **other: Any) -> None:
    for member in members:
        member.open(list(members), **other)


def connect_all(*members: Member) -> None:
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [pool.submit(m.connect, *(o.rank for o in members if o is not m)) for m in members]
        for call in calls:
            call.result()


def check_links(one: Member, other: Member, count: int) -> None:
    """All are there, each end with its own other end, and nothing but what is sent comes."""
    ends = ((one, other.rank), (other, one.rank))
    until(lambda: all(len(member.links.get(peer, ())) == count for member, peer in ends))  # a side has them later
    ours, theirs = one.links[other.rank], other.links[one.rank]
    for n, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine.getsockname(), mine.getpeername()) == (its.getpeername(), its.getsockname())
        for sender, receiver in ((mine, its), (its, mine)):
            assert not receiver.getblocking()
            with pytest.raises(BlockingIOError):
                receiver.recv(1)
            sender.sendall(bytes([n]))
            receiver.settimeout(SOON)
            assert receiver.recv(2) == bytes([n])
            receiver.setblocking(False)


def refused(member: Member, reason: str) -> int:
    return member.door.counts.get(reason, 0)


# ranks among themselves

HOSTS: dict[str, tuple[list[Interface], list[Interface], int, str]] = {
    "IPv4": ([LO], [LO], 3, "127.0.0.1:"),
    "IPv6": ([interface("lo", "::1/128")], [interface("lo", "::1/128")], 3, "[::1]:"),
    "both": ([interface("lo", "127.0.0.1/8", "::1/128")], [interface("lo", "::1/128", "127.0.0.1/8")], 3, ""),
    "mixed": ([interface("lo", "127.0.0.1/8", "::1/128")], [interface("lo", "::1/128")], 3, "[::1]:"),
    "different subnets": ([interface("a", "127.0.1.1/24")], [interface("b", "127.0.2.1/24")], 3, "127.0."),
    "two subnets in common": (
        [interface("a", "127.0.1.1/24"), interface("b", "127.0.2.1/24")],
        [interface("x", "127.0.2.2/24"), interface("y", "127.0.1.2/24")],
        6,
        "127.0.",
    ),
    "one of two in common": (
        [interface("a", "127.0.1.1/24"), interface("b", "127.0.2.1/24")],
        [interface("a", "127.0.3.2/24"), interface("b", "127.0.2.2/24")],
        3,
        "127.0.2.",
    ),
    "two in one subnet": (
        [interface("a", "127.0.1.1/24"), interface("b", "127.0.1.2/24")],
        [interface("a", "127.0.1.3/24"), interface("b", "127.0.1.4/24")],
        6,
        "127.0.1.",
    ),
    "one and two in one subnet": (
        [interface("a", "127.0.1.1/24")],
        [interface("a", "127.0.1.3/24"), interface("b", "127.0.1.4/24")],
        6,
        "127.0.1.",
    ),
}


@pytest.mark.parametrize("hosts", HOSTS)
def test_addresses(make: Make, hosts: str) -> None:
    here, there, count, beginning = HOSTS[hosts]
    one, other = make(0, *here), make(1, *there)
    open_all(one, other, connections=3)
    connect_all(one, other)
    check_links(one, other, count)
    for member, peer in ((one, 1), (other, 0)):
        for said, connection in zip(member.said[peer], member.links[peer], strict=True):
            assert said.startswith(beginning)
            assert str(connection.getsockname()[1]) in said and f":{connection.getpeername()[1]} via " in said
            # where no subnet is shared and none is named, the kernel picks the address here
            assert said.rpartition(" ")[2] in {"lo", *(i.name for i in (here, there)[member.rank])}


def test_named_interfaces_are_used_together_although_no_subnet_is_shared(make: Make) -> None:
    here = [interface("a", "127.0.1.1/24"), interface("b", "127.0.2.1/24")]
    there = [interface("b", "127.0.3.1/24"), interface("c", "127.0.4.1/24")]
    one, other = make(0, *here, named=True), make(1, *there, named=True)
    open_all(one, other)
    connect_all(one, other)
    check_links(one, other, 2)
    ways = {(c.getsockname()[0], c.getpeername()[0]) for c in one.links[1]}
    assert ways == {("127.0.2.1", "127.0.3.1"), ("127.0.1.1", "127.0.4.1")}


def test_link_local_addresses(make: Make) -> None:
    locals_ = [
        Interface(i.name, i.index, tuple(a for a in i.addresses if a.version == 6 and a.ip.is_link_local))
        for i in local_interfaces()
        if i.up
    ]
    locals_ = [i for i in locals_ if i.addresses]
    if not locals_:
        pytest.skip("no interface has an IPv6 link-local address")
    one, other = make(0, *locals_[:1]), make(1, *locals_[:1])
    open_all(one, other)
    connect_all(one, other)
    check_links(one, other, 1)
    assert one.said[1][0].startswith("[fe80:")


def test_a_dead_interface_is_left_out(make: Make) -> None:
    one = make(0, interface("a", "127.0.1.1/24"), interface("b", "127.0.2.1/24"))
    other = make(1, interface("a", "127.0.1.2/24"), interface("b", "127.0.2.2/24"))
    other.door._listeners[0][0].close()
    del other.door._listeners[0]
    open_all(one, other, connections=2)
    one.connect(1)  # where the other would come too, it might come from the address at which it does not listen
    check_links(one, other, 2)
    assert all(" via b" in said for said in one.said[1])


def test_an_interface_that_does_not_answer_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "GRACE_SECONDS", 0.2)
    one = make(0, interface("a", "127.0.1.1/24"), interface("b", "127.0.2.1/24"))
    other = make(1, interface("b", "127.0.2.2/24"))
    with socket.create_server(("127.0.1.2", 0)) as silent:
        other.door.addresses.append(Address("a", "127.0.1.2/24", silent.getsockname()[1]))
        open_all(one, other)
        connect_all(one, other)
    check_links(one, other, 1)


def test_many_ranks_and_links_on_demand(make: Make) -> None:
    members = [make(rank) for rank in range(8)]
    open_all(*members)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda m: m.connect((m.rank + 1) % 8, (m.rank - 1) % 8), members))
        list(pool.map(lambda m: m.connect(*(o for o in range(8) if o != m.rank)), members))
        list(pool.map(lambda m: m.connect(*(o for o in range(8) if o != m.rank)), members))  # they are there already
    for one in members:
        for other in members[: one.rank]:
            check_links(one, other, 1)


@pytest.mark.parametrize("goes", [0, 1])
def test_one_side_makes_the_link(pair: tuple[Member, Member], goes: int) -> None:
    """The other is in no call, and finds it made."""
    open_all(*pair, connections=2)
    pair[goes].connect(1 - goes)
    until(lambda: goes in pair[1 - goes].links)
    check_links(*pair, 2)
    pair[1 - goes].connect(goes)
    check_links(*pair, 2)
    assert pair[goes].door.counts == {"accepted": 0}  # only one has gone to the other


def test_a_peer_that_closes_right_after_it_was_ready_is_lost(pair: tuple[Member, Member]) -> None:
    """Its connection is reset before it is delivered: then it has no address any more."""
    open_all(*pair)

    async def hand_over() -> None:
        with socket.socket() as reset:
            pair[0].door._hand_over(1, [(reset, "lo")])

    asyncio.run_coroutine_threadsafe(hand_over(), pair[0].door._loop).result()  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match="rank 0 cannot connect with rank 1, which has closed the connection") as error:
        pair[0].connect(1)
    assert error.value.culprit == 1


def test_ranks_that_go_to_each_other_at_once_get_one_link(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have proved themselves at the other's door before either says JOIN: every round is the race."""
    met = threading.Barrier(2)
    join_all = Door._join_all

    async def together(self: Door, *args: Any) -> bool:
        await asyncio.get_running_loop().run_in_executor(None, met.wait, SOON)
        return await join_all(self, *args)

    monkeypatch.setattr(Door, "_join_all", together)
    for _ in range(20):
        pair = make(0), make(1)
        open_all(*pair, connections=2)
        connect_all(*pair)
        check_links(*pair, 2)
        assert [member.door.counts["accepted"] for member in pair] == [2, 2]
        for member in pair:
            member.close()


def test_many_ranks_that_all_go_to_each_other(make: Make) -> None:
    members = [make(rank) for rank in range(8)]
    open_all(*members, connections=2)
    connect_all(*members)
    for one in members:
        for other in members[: one.rank]:
            check_links(one, other, 2)


def test_the_lower_rank_gives_way_while_it_has_not_said_join(pair: tuple[Member, Member]) -> None:
    """Nothing answers where it goes, and the other, which has better luck, is let in."""
    one, other = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        true = other.door.addresses[0]
        other.door.addresses[0] = true._replace(port=silent.getsockname()[1])
        open_all(*pair)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(one.connect, 1)
            with silent.accept()[0]:  # it is on its way
                other.connect(0)
                call.result()
    check_links(*pair, 1)


def test_patience_leaves_it_to_the_lower_rank_for_a_while(pair: tuple[Member, Member]) -> None:
    open_all(*pair)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pair[1].connect, 0, patience=SOON)
        pair[0].connect(1)
        call.result()
    check_links(*pair, 1)
    assert pair[0].door.counts == {"accepted": 0}


def test_patience_ends(pair: tuple[Member, Member]) -> None:
    open_all(*pair)
    pair[1].connect(0, patience=0.1)
    until(lambda: 1 in pair[0].links)
    check_links(*pair, 1)


def test_ways_that_failed_beside_the_link(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "GRACE_SECONDS", 0.2)
    names = ("a", "b", "c")
    one = make(0, *(interface(name, f"127.0.{n}.1/24") for n, name in enumerate(names, 1)))
    other = make(1, interface("b", "127.0.2.2/24"))
    with socket.create_server(("127.0.1.2", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.3.2", 0))
        other.door.addresses.append(Address("a", "127.0.1.2/24", silent.getsockname()[1]))
        other.door.addresses.append(Address("c", "127.0.3.2/24", closed.getsockname()[1]))
        open_all(one, other)
        one.connect(1)
    assert one.door.missed[1] == {
        f"127.0.1.2:{silent_port(other, 'a')} (a) from 127.0.1.1 (a)": "no answer",
        f"127.0.3.2:{silent_port(other, 'c')} (c) from 127.0.3.1 (c)": "Connection refused",
    }
    assert other.door.missed == {}


def silent_port(member: Member, name: str) -> int:
    return next(address.port for address in member.door.addresses if address.interface == name)


def test_options_of_connections(pair: tuple[Member, Member]) -> None:
    open_all(*pair, dead_after=8.0)
    connect_all(*pair)
    for member in pair:
        connection = member.links[1 - member.rank][0]

        def tcp(option: int, connection: socket.socket = connection) -> int:
            return connection.getsockopt(socket.IPPROTO_TCP, option)

        assert tcp(socket.TCP_NODELAY) and connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert tcp(socket.TCP_KEEPIDLE) + tcp(socket.TCP_KEEPINTVL) * tcp(socket.TCP_KEEPCNT) == 8
        assert tcp(socket.TCP_USER_TIMEOUT) == 8000


def test_64_processes_without_torch(tmp_path: Path) -> None:
    program = Path(__file__).with_name("slim_ranks.py")
    path = os.pathsep.join([str(program.parents[2]), *sys.path])
    command = [sys.executable, str(program), str(tmp_path), "64"]
    environ = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_a_forked_child_does_not_keep_the_port(pair: tuple[Member, Member]) -> None:
    open_all(*pair)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(int(SOON))
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        pair[1].close()
        with pytest.raises(PeerLost, match="Connection refused"):
            pair[0].connect(1)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


# strangers, by hand


class Stranger:
    """Speaks the protocol, or not, at a door."""

    def __init__(self, member: Member) -> None:
        self.socket = socket.create_connection(("127.0.0.1", member.door.addresses[0].port), SOON)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (some := self.socket.recv(size - len(data))):
            data += some
        return data

    def challenge(self) -> bytes:
        return self.read(handshake.CHALLENGE.size)

    def ended(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(1) == b""
        return True

    def introduce(
        self,
        secret: bytes = SECRET,
        role: bytes = b"comes",
        group: str = "g",
        version: int = handshake.VERSION,
        **other: Any,
    ) -> bytes:
        """Sends a HELLO; returns what comes back, at most a byte."""
        _, _, nonce = handshake.CHALLENGE.unpack(self.challenge())
        said = {"rank": 0, "to": 1, "number": 0, "session": b"s" * 16, "nonce": secrets.token_bytes(32)} | other
        self.hello = handshake.HELLO.pack(handshake.MAGIC, version, *said.values())
        self.nonce = nonce
        self.socket.sendall(self.hello + prover(secret, group)._proof(role, self.hello, nonce))
        return self.read(1)


def prover(secret: bytes = SECRET, group: str = "g") -> Handshake:
    """What makes proofs."""
    return Handshake(1, group, secret)


def still_works(pair: tuple[Member, Member]) -> None:
    connect_all(*pair)
    check_links(*pair, 1)


def test_the_right_words_open_the_door(pair: tuple[Member, Member]) -> None:
    """The control of those that follow."""
    open_all(*pair)
    with Stranger(pair[1]) as stranger:
        assert stranger.introduce() == handshake.WELCOME
        assert stranger.read(32) == prover()._proof(b"answers", stranger.hello, stranger.nonce)
        join = handshake.JOIN.pack(0, 1)
        stranger.socket.sendall(join + prover()._proof(b"joins" + join, stranger.hello, stranger.nonce))
        assert stranger.read(1) == handshake.READY
        until(lambda: 0 in pair[1].links)
    assert pair[1].door.counts == {"accepted": 1}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"secret": b"t" * 32}, "proof"),
        ({"group": "another"}, "proof"),
        ({"role": b"answers"}, "proof"),
        ({"role": b"joins"}, "proof"),
        ({"version": handshake.VERSION + 1}, "version"),
        ({"to": 0}, "rank"),
        ({"to": 2}, "rank"),
        ({"rank": 1}, "rank"),  # itself
        ({"rank": 2}, "rank"),
        ({"rank": 2**32 - 1}, "rank"),
    ],
    ids=str,
)
def test_wrong_words(pair: tuple[Member, Member], wrong: dict[str, Any], reason: str) -> None:
    open_all(*pair)
    with Stranger(pair[1]) as stranger:
        assert stranger.introduce(**wrong) == handshake.ANSWERS[reason][0]
        assert stranger.ended()
    assert pair[1].door.counts == {"accepted": 0, reason: 1}
    still_works(pair)


@pytest.mark.parametrize("at", ["hello", "nonce", "session", "proof"])
def test_a_proof_is_about_every_word(pair: tuple[Member, Member], at: str) -> None:
    open_all(*pair)
    place = {"hello": 20, "session": 25, "nonce": 50, "proof": handshake.HELLO.size + 5}[at]
    with Stranger(pair[1]) as stranger:
        _, _, nonce = handshake.CHALLENGE.unpack(stranger.challenge())
        hello = handshake.HELLO.pack(handshake.MAGIC, handshake.VERSION, 0, 1, 0, b"s" * 16, b"n" * 32)
        words = bytearray(hello + prover()._proof(b"comes", hello, nonce))
        words[place] ^= 1
        stranger.socket.sendall(words)
        assert stranger.read(1) == handshake.ANSWERS["proof"][0]
    still_works(pair)


@pytest.mark.parametrize("join", [struct.pack("!II", 1, 1), struct.pack("!II", 0, 2**32 - 1), struct.pack("!II", 0, 0)])
def test_a_join_that_cannot_be(pair: tuple[Member, Member], join: bytes) -> None:
    open_all(*pair)
    with Stranger(pair[1]) as stranger:
        assert stranger.introduce() == handshake.WELCOME
        stranger.read(32)
        stranger.socket.sendall(join + prover()._proof(b"joins" + join, stranger.hello, stranger.nonce))
        assert stranger.ended()
    still_works(pair)


def test_what_was_overheard_proves_nothing(make: Make) -> None:
    """A true rank's words, taken down on the way, are said again to the same door."""
    one, other = make(0), make(1)
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        true = other.door.addresses[0]
        other.door.addresses[0] = true._replace(port=between.getsockname()[1])
        open_all(one, other)

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(("127.0.0.1", true.port)) as far:

                def back() -> None:
                    with contextlib.suppress(OSError):
                        while data := far.recv(4096):
                            near.sendall(data)

                thread = threading.Thread(target=back)
                thread.start()
                while len(heard) < handshake.HELLO.size + 32 + handshake.JOIN.size + 32 and (data := near.recv(4096)):
                    heard.extend(data)
                    far.sendall(data)
                until(lambda: 0 in other.links)
                far.shutdown(socket.SHUT_WR)
                near.shutdown(socket.SHUT_RD)
                other.links[0][0].shutdown(socket.SHUT_RDWR)
                thread.join()

        thread = threading.Thread(target=relay)
        thread.start()
        one.connect(1)
        thread.join()
    other.door.addresses[0] = true
    assert other.door.counts == {"accepted": 1}
    with Stranger(other) as stranger:
        stranger.challenge()
        stranger.socket.sendall(heard)
        assert stranger.read(1) == handshake.ANSWERS["proof"][0]
    until(lambda: refused(other, "proof") == 1)
    assert other.door.counts["accepted"] == 1


def false_door(answer: Callable[[socket.socket], None]) -> tuple[socket.socket, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


def challenge(connection: socket.socket, version: int = handshake.VERSION, magic: bytes = handshake.MAGIC) -> bytes:
    connection.sendall(handshake.CHALLENGE.pack(magic, version, b"n" * 32))
    return connection.recv(handshake.HELLO.size + 32, socket.MSG_WAITALL)


def welcome(proof: Callable[[bytes], bytes]) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(handshake.WELCOME + proof(challenge(connection)))


FALSE_DOORS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "another secret": (
        welcome(lambda words: prover(b"t" * 32)._proof(b"answers", words[:-32], b"n" * 32)),
        "its proof is wrong: it does not know the group's secret",
    ),
    "a mirror": (welcome(lambda words: words[-32:]), "its proof is wrong"),
    "another protocol": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + 100 * b"x"), "what answers is not a rank"),
    "another version": (lambda c: [challenge(c, version=handshake.VERSION + 1)], "another version of the protocol"),
    "an unknown answer": (lambda c: [challenge(c), c.sendall(b"?")], "something else than expected"),
    "a refused proof": (lambda c: [challenge(c), c.sendall(b"P")], "refused this rank's proof: .* different secrets"),
}


@pytest.mark.parametrize("what", FALSE_DOORS)
def test_false_doors_are_seen_through(make: Make, what: str) -> None:
    answer, said = FALSE_DOORS[what]
    one, other = make(0), make(1)
    listener, thread = false_door(answer)
    other.door.addresses[0] = other.door.addresses[0]._replace(port=listener.getsockname()[1])
    one.open([one, other])
    with pytest.raises(
        SystemFailure, match=rf"rank 0 cannot connect with rank 1 \(host1, pid 101\): .*{said}"
    ) as raised:
        one.connect(1)
    assert raised.value.culprit == 1 and not one.links
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_false_door_beside_the_true_one(make: Make) -> None:
    one, other = make(0), make(1)
    listener, thread = false_door(FALSE_DOORS["another secret"][0])
    other.door.addresses.insert(0, Address("lo", "127.0.0.1/8", listener.getsockname()[1]))
    open_all(one, other)
    connect_all(one, other)
    check_links(one, other, 1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_different_secrets_on_both_sides(pair: tuple[Member, Member]) -> None:
    pair[0].open(list(pair), secret=b"t" * 32)
    pair[1].open(list(pair))
    with pytest.raises(SystemFailure, match=r"different secrets.* and has refused nobody"):
        pair[0].connect(1)
    with pytest.raises(
        SystemFailure,
        match=r"rank 1 cannot connect with rank 0 \(host0, pid 100\): 127\.0\.0\.1:\d+ \(lo\) from 127\.0\.0\.1 \(lo\)"
        r": .*different secrets.*; this host uses lo \(127\.0\.0\.1/8\), where it listens at 127\.0\.0\.1:\d+ "
        r"\(lo\) and has refused 1 \(proof\)",
    ) as raised:
        pair[1].connect(0)
    assert raised.value.culprit == 0


def test_a_scanner(pair: tuple[Member, Member]) -> None:
    open_all(*pair)
    for _ in range(50):
        with Stranger(pair[1]):
            pass
    until(lambda: refused(pair[1], "left") == 50)
    still_works(pair)


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 8, secrets.token_bytes(10_000), handshake.MAGIC[::-1]]
)
def test_garbage(pair: tuple[Member, Member], words: bytes) -> None:
    open_all(*pair)
    with Stranger(pair[1]) as stranger:
        stranger.socket.sendall(words)
        stranger.challenge()
        assert stranger.ended()
    assert pair[1].door.counts == {"accepted": 0, "garbage": 1}
    still_works(pair)


@pytest.mark.parametrize("words", [b"", handshake.MAGIC, handshake.MAGIC + b"x" * 60])
def test_a_slow_handshake(pair: tuple[Member, Member], words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    open_all(*pair)
    with monkeypatch.context() as patch:
        patch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.1)
        with Stranger(pair[1]) as stranger:
            stranger.challenge()
            for byte in words:  # it lives, but that does not buy time
                stranger.socket.sendall(bytes([byte]))
            assert stranger.ended()
    assert pair[1].door.counts == {"accepted": 0, "slow": 1}
    still_works(pair)


def test_a_thousand_open_connections(pair: tuple[Member, Member]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_all(*pair)
    with limited(resource.RLIMIT_NOFILE, max(soft, min(hard, 4096))):
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(Stranger(pair[1])) for _ in range(1000)]
            still_works(pair)
            until(lambda: refused(pair[1], "crowd") >= 1000 - listener_module.MOST_UNPROVEN)
            assert len(pair[1].door._unproven) <= listener_module.MOST_UNPROVEN
            assert crowd[0].challenge() and crowd[0].ended()  # the oldest went first
        until(lambda: not pair[1].door._unproven)


def test_no_descriptors_left(pair: tuple[Member, Member]) -> None:
    """The door cannot accept for a while, and then can."""
    open_all(*pair)
    with socket.socket() as late, no_descriptors(256):
        late.connect(("127.0.0.1", pair[1].door.addresses[0].port))
        time.sleep(0.2)
    still_works(pair)


@pytest.mark.parametrize("joins", [0, 1])
def test_a_peer_that_dies_in_the_middle_and_comes_again(pair: tuple[Member, Member], joins: int) -> None:
    open_all(*pair)
    for session in (b"1" * 16, b"2" * 16):
        with Stranger(pair[1]) as stranger:
            assert stranger.introduce(session=session) == handshake.WELCOME
            stranger.read(32)
            join = handshake.JOIN.pack(0, 2)
            stranger.socket.sendall(joins * (join + prover()._proof(b"joins" + join, stranger.hello, stranger.nonce)))
    assert not pair[1].links
    still_works(pair)


def test_a_peer_is_linked_once(pair: tuple[Member, Member]) -> None:
    open_all(*pair)
    connect_all(*pair)
    with Stranger(pair[1]) as stranger:
        assert stranger.introduce() == handshake.WELCOME
        stranger.read(32)
        join = handshake.JOIN.pack(0, 1)
        stranger.socket.sendall(join + prover()._proof(b"joins" + join, stranger.hello, stranger.nonce))
        assert stranger.ended()
    until(lambda: refused(pair[1], "twice") == 1)
    check_links(*pair, 1)


# what is said when it does not work


def test_nobody_listens(pair: tuple[Member, Member]) -> None:
    one, other = pair
    other.door.addresses.append(Address("ib0", "::1/128", 1))
    one.open([one, other])
    other.close()
    with pytest.raises(PeerLost) as raised:
        one.connect(1)
    port = other.door.addresses[0].port
    assert str(raised.value) == (
        "rank 0 cannot connect with rank 1 (host1, pid 101), which died or left: "
        f"127.0.0.1:{port} (lo) from 127.0.0.1 (lo): Connection refused; this host uses lo (127.0.0.1/8), where it "
        f"listens at 127.0.0.1:{one.door.addresses[0].port} (lo) and has refused nobody"
    )
    assert raised.value.culprit == 1


def test_no_address_of_the_same_kind(make: Make) -> None:
    one, other = make(0), make(1, interface("lo", "::1/128"))
    open_all(one, other)
    with pytest.raises(SystemFailure, match=r"\(host1, pid 101\): no address of a kind this host has"):
        one.connect(1)


def test_some_answer_nothing(make: Make) -> None:
    one, other = make(0, interface("lo", "127.0.0.1/8", "::1/128")), make(1)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = silent.getsockname()[1], closed.getsockname()[1]
        other.door.addresses[:] = [Address(f"eth{n}", "127.0.0.1/8", port) for n, port in enumerate(ports)]
        one.open([one, other])
        with pytest.raises(CollectiveTimeout) as raised:
            one.connect(1, seconds=0.5)
    said = str(raised.value)
    assert said.startswith("rank 0 cannot connect with rank 1 (host1, pid 101) in time: ")
    assert f"127.0.0.1:{ports[0]} (eth0) from 127.0.0.1 (lo): no answer" in said
    assert f"127.0.0.1:{ports[1]} (eth1) from 127.0.0.1 (lo): Connection refused" in said
    assert raised.value.culprit == 1


def test_a_peer_that_comes_late_is_waited_for(pair: tuple[Member, Member]) -> None:
    """Its door listens from the beginning, so that the others need not try again."""
    one, other = pair
    one.open([one, other])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(one.connect, 1)
        time.sleep(0.2)
        assert not call.done()
        other.open([one, other])
        call.result()
    other.connect(0)  # which is linked, or about to be
    check_links(one, other, 1)


def test_closing_ends_those_who_wait(pair: tuple[Member, Member]) -> None:
    pair[1].open(list(pair))  # the other listens, but does not answer
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pair[1].connect, 0)
        time.sleep(0.1)
        pair[1].door.close()
        with pytest.raises(Aborted, match="closed"):
            call.result()
    with pytest.raises(Aborted):
        pair[1].connect(0)
    pair[1].door.close()


def test_what_goes_wrong_with_delivering_is_told(pair: tuple[Member, Member]) -> None:
    def deliver(peer: int, fd: int, description: str) -> None:
        os.close(fd)
        raise ValueError("no room")

    pair[0].open(list(pair))
    pair[1].open(list(pair), deliver=deliver)
    pair[0].connect(1)
    with pytest.raises(ValueError, match="no room"):
        pair[1].connect(0)


def test_ports(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        one = Member(0)
        one.close()
        one.door = Door([LO], ports=range(first, first + 50))
        port = one.door.addresses[0].port
        assert first < port < first + 50
        other = make(1)
        open_all(one, other)
        connect_all(one, other)
        with pytest.raises(
            SystemFailure, match=rf"127\.0\.0\.1 \(lo\): Address already in use \(the last of ports {first} to {port}\)"
        ):
            Door([LO], ports=range(first, port + 1))
        one.door.close()
        Door([LO], ports=[port]).close()  # free again, although its connections live
        check_links(one, other, 1)
        one.close()


@pytest.mark.parametrize(
    ("text", "ports"), [("", (0,)), ("20000-20002", (20000, 20001, 20002)), ("1-1", (1,)), ("65535", (65535,))]
)
def test_ranges_of_ports(text: str, ports: tuple[int, ...]) -> None:
    assert tuple(sockets.parse_ports(text)) == ports


@pytest.mark.parametrize("text", ["0-1", "2-1", "1-65536", "-5", "5-", "a-b", "1-2-3", "1,2"])
def test_what_is_no_range_of_ports(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"RINGREDUCE_PORTS='{text}' is no range of ports; write such as"):
        sockets.parse_ports(text)


def test_no_address_can_be_bound() -> None:
    with pytest.raises(SystemFailure, match=r"cannot listen .*: 203\.0\.113\.7 \(eth7\): Cannot assign"):
        Door([interface("eth7", "203.0.113.7/24")])


# the secret


def test_the_secret_is_of_the_store_and_the_file(tmp_path: Path) -> None:
    one, other, open_to_all, short = (tmp_path / name for name in ("one", "other", "open", "short"))
    for path, text in ((one, "x" * 20), (other, "y" * 20), (open_to_all, "x" * 20), (short, " secret\n")):
        path.write_text(text)
        path.chmod(0o600)
    made = [group_secret(store, file) for store in (b"1", b"2") for file in ("", str(one), str(other))]
    assert len(set(made)) == 6 and {len(secret) for secret in made} == {32}
    other.write_text("\n" + "x" * 20 + "\n")
    assert group_secret(b"1", str(other)) == group_secret(b"1", str(one))

    for mode in (0o640, 0o604, 0o660):
        open_to_all.chmod(mode)
        with pytest.raises(InvalidArgument, match=f"RINGREDUCE_SECRET_FILE='.*open' .*mode {mode:o}.* 'chmod 600"):
            group_secret(b"1", str(open_to_all))
    with pytest.raises(InvalidArgument, match="holds 6 bytes; 16 or more"):
        group_secret(b"1", str(short))
    with pytest.raises(InvalidArgument, match=r"RINGREDUCE_SECRET_FILE='.*none': No such file"):
        group_secret(b"1", str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="Is a directory"):
        group_secret(b"1", str(tmp_path))


def test_a_door_that_cannot_be_opened(make: Make) -> None:
    """The loop in its thread needs descriptors of its own."""
    one = make(0)
    refused = pytest.raises(SystemFailure, match="cannot listen for other hosts: Too many open files")
    with no_descriptors(max(map(int, os.listdir("/proc/self/fd"))) + 1), refused:
        one.open([one])


def test_a_door_that_is_closed_while_another_thread_begins_to_connect(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(0), make(1)
    one.open([one, other])
    schedule, closer = asyncio.run_coroutine_threadsafe, threading.Thread(target=one.door.close)

    def late(*given: Any) -> Any:
        closer.start()
        time.sleep(0.3)
        return schedule(*given)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with pytest.raises(Aborted):
        one.door.connect([1], time.monotonic() + SOON, look=lambda: None)
    closer.join(SOON)
    assert not closer.is_alive()


def test_where_all_threads_are_one_as_under_gevent_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greenlet(threading.Thread):
        def start(self) -> None:
            self.run()

        def join(self, timeout: float | None = None) -> None:
            pass

    async def opens_another() -> None:
        with contextlib.closing(Door([LO])) as door:
            door.open(0, "g", SECRET, {}, lambda *_: None)

    monkeypatch.setattr(listener_module, "threading", SimpleNamespace(**vars(threading) | {"Thread": Greenlet}))
    with pytest.raises(RuntimeError, match="another loop is running"):
        asyncio.run(opens_another())
    monkeypatch.setitem(sys.modules, "gevent", object())
    with pytest.raises(SystemFailure, match=r"monkey\.patch_all\(thread=False\)"):
        asyncio.run(opens_another())
