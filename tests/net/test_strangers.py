"""Who comes to the door of a running group without being one of its ranks is refused and counted, and its collectives
go on with right results.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bodies.collectives import COLLECTIVES, all_reduce
from bodies.faults import error_of
from net.network import Network
from net.ranks import Rank, Ranks, until_told

import ringreduce
from ringreduce.errors import CollectiveTimeout, PeerLost, SystemFailure
from ringreduce.groups.lookup import backend_of
from ringreduce.network import listener, sockets
from ringreduce.network.interfaces import local_interfaces

Door = tuple[str, int]
IPV4 = ringreduce.Options(socket_ifname="10.77.0.0/16")
"""With addresses of both kinds a rank may come to a door twice, and stay once."""


def serve(me: Rank) -> tuple[int, dict[str, int]]:
    """Makes calls until told; returns how many, and what its door has counted."""
    with me.join(timeout=20, options=IPV4):
        (door,) = listener._doors
        me.report([(str(address.ip.ip), address.port) for address in door.addresses])

        def calls(call: int) -> None:
            all_reduce(me, 2000 + 50_000 * (call % 2), call)
            COLLECTIVES["all_to_all_single"](me, 100, call)

        made = len(until_told(me, calls))
        return made, door.counts


def besieged(network: Network, attack: Callable[[Door], object], seconds: float = 0.5) -> list[Counter[str]]:
    """Has `attack` called on host 2 for rank 1's door while ranks 0 and 1 make calls; returns what doors counted."""
    with Ranks(network, [0, 1], serve) as ranks:
        (door,) = ranks.reports()[1]
        network.call(2, attack, door)
        time.sleep(seconds)
        ranks.tell("enough")
        results = ranks.results()
    for made, _ in results:
        assert made > 10
    return [Counter(counts) for _, counts in results]


def connect(door: Door) -> socket.socket:
    return socket.create_connection(door, 10)


def scan(door: Door) -> None:
    """As a port scanner does: every port of some, this one among them; connects, and looks what it says."""
    for port in [*range(door[1] - 20, door[1]), *range(door[1], door[1] + 20)]:
        try:
            with connect((door[0], port)) as connection:
                connection.recv(8)
        except ConnectionRefusedError:
            continue


def say_random_bytes(door: Door) -> None:
    draw = random.Random(1)
    for length in (1, 8, 9, 100, 1000, 100_000) * 5:
        with connect(door) as connection:
            say(connection, draw.randbytes(length))


def speak_http(door: Door) -> None:
    with connect(door) as connection:
        say(connection, b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")


def say(connection: socket.socket, words: bytes) -> None:
    """And hears the answer to its end, unless the door shuts before."""
    with contextlib.suppress(OSError):
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def come_a_thousand_times(door: Door) -> None:
    """And stay, without a word."""
    here = [connect(door) for _ in range(1000)]
    time.sleep(1.0)
    for connection in here:
        connection.close()


def say_hello_and_stop(door: Door) -> None:
    here = []
    for length in range(1, 120, 7):
        here.append(connect(door))
        here[-1].sendall(b"ringrdc\n\0\1".ljust(200, b"x")[:length])
    time.sleep(listener.HANDSHAKE_SECONDS + 0.5)
    for connection in here:
        connection.close()


def claim_to_be_rank_0(door: Door) -> None:
    """With the whole protocol, but another secret."""
    there = [sockets.Address("eth0", f"{door[0]}/24", door[1])]
    stranger = listener.Door(local_interfaces()[-1:])
    stranger.open(0, "0/1", b"a guess", {1: listener.Peer("there", 1, there)}, lambda *_: None)
    try:
        with pytest.raises(SystemFailure, match="refused this rank's proof"):
            stranger.connect([1], time.monotonic() + 10)
    finally:
        stranger.close()


ATTACKS: dict[str, tuple[Callable[[Door], None], str]] = {
    "port scanner": (scan, "left"),
    "random bytes": (say_random_bytes, "garbage"),
    "http": (speak_http, "garbage"),
    "1000 connections": (come_a_thousand_times, "crowd"),
    "slow": (say_hello_and_stop, "slow"),
    "another secret": (claim_to_be_rank_0, "proof"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_strangers_are_refused_and_counted(network: Network, attack: str) -> None:
    come, counted = ATTACKS[attack]
    mine, theirs = besieged(network, come)
    assert theirs[counted] > 0, theirs
    assert theirs["accepted"] == 1  # rank 0
    assert set(mine) == {"accepted"}


def test_without_strangers_nobody_is_refused(network: Network) -> None:
    for counts in besieged(network, lambda door: None):
        assert set(counts) == {"accepted"}


def serve_while_linking(me: Rank) -> int:
    """Whose links are all made while strangers come."""
    with me.join(timeout=20, options=IPV4):
        (door,) = listener._doors
        me.report([(str(address.ip.ip), address.port) for address in door.addresses])
        me.hear()
        for call in range(3):
            COLLECTIVES["all_to_all_single"](me, 1000, call)
            all_reduce(me, 1000, call)
        return len(backend_of(None).links())


def test_ranks_get_in_through_a_crowd(network: Network) -> None:
    with Ranks(network, [0] * 5 + [1] * 5, serve_while_linking) as ranks:
        doors: Sequence[Any] = ranks.reports()
        crowd = [network.call(2, connect, door[0]) for door in doors[5:] for _ in range(200)]
        ranks.tell("go")
        assert ranks.results() == [5] * 10
        for connection in crowd:
            connection.close()


def join_with_secret(me: Rank, folder: str) -> Any:
    """Rank 2 has another secret than the others."""
    os.environ["RINGREDUCE_SECRET_FILE"] = f"{folder}/{'other' if me.rank == 2 else 'secret'}"
    error = error_of(lambda: me.join(timeout=2).__enter__())
    os.environ["RINGREDUCE_SECRET_FILE"] = f"{folder}/secret"
    with me.join("afterwards"):
        all_reduce(me, 1000, 0)
    return error


def test_a_rank_with_another_secret_does_not_get_in(network: Network, tmp_path: Path) -> None:
    for name in ("secret", "other"):
        (tmp_path / name).write_text(f"{name}, which is long enough to be one")
        (tmp_path / name).chmod(0o600)
    with Ranks(network, [0, 1, 2], join_with_secret, str(tmp_path)) as ranks:
        found = ranks.results()
        for rank, (kind, message, culprit, _) in enumerate(found):
            assert kind in (SystemFailure, CollectiveTimeout, PeerLost), message  # the last: it gave up before
            assert culprit == 2 or rank == 2, message
        assert any("different secrets" in message or "(proof)" in message for _, message, *_ in found), found
