"""What plans between hosts are chosen by: a file of what was measured, or what ranks notice while they connect."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringreduce.config import Options, resolve
from ringreduce.coordination.endpoint import Location
from ringreduce.doctor.peers import Host, Pair, Survey
from ringreduce.errors import InvalidArgument
from ringreduce.groups import between_hosts
from ringreduce.groups.between_hosts import Links, Noticed, Wire, wire_of
from ringreduce.groups.decision import Decision, decide
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.meet import meet
from ringreduce.network import interfaces
from ringreduce.topology import hosts_file
from ringreduce.topology.hosts_file import HostsFile

FOUR: between_hosts.Hosts = ((0,), (1,), (2,), (3,))

SLOW = HostsFile(
    "2026-11-21 03:17 UTC",
    ("a", "b", "c", "d"),
    ((0, 1e-3, 2e-4, 4e-4), (1e-3, 0, 3e-4, 2e-4), (2e-4, 3e-4, 0, 1e-3), (4e-4, 2e-4, 1e-3, 0)),
    ((0, 1e6, 9e7, 8e7), (1e6, 0, 9e7, 9e7), (9e7, 7e7, 0, 1e6), (9e7, 9e7, 1e6, 0)),
)
"""Between a and b, and between c and d, little goes, and that takes long."""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    path = str(tmp_path / "hosts.json")
    hosts_file.save(SLOW, path)
    return path


# the file


def test_a_file_is_read_as_it_was_written(slow: str) -> None:
    assert hosts_file.load(slow) == SLOW
    assert os.listdir(os.path.dirname(slow)) == ["hosts.json"]


def test_a_file_may_have_more_hosts_than_the_job_and_another_order(slow: str) -> None:
    latency, bandwidth = hosts_file.load(slow).of(["d", "a"])
    assert latency == ((0, 4e-4), (4e-4, 0)) and bandwidth == ((0, 9e7), (8e7, 0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "its format is 2; this version reads 1"),
        ({"hosts": []}, "its hosts are []"),
        ({"hosts": ["a", "b", "c", "a"]}, "expected different names"),
        ({"hosts": ["a", "b", "c", 4]}, "expected different names"),
        ({"hosts": ["a"]}, "latency does not have a row and a column for each of its 1 hosts"),
        ({"bandwidth": [[0, 1]] * 4}, "bandwidth does not have a row and a column for each of its 4 hosts"),
        ({"bandwidth": [[0, 1, -1, 1]] * 4}, "bandwidth, row 0, column 2 is -1; it must be a number, at least 0"),
        ({"latency": [[0, "1", 1, 1]] * 4}, "latency, row 0, column 1 is '1'"),
        ({"latency": [[0, math.inf, 1, 1]] * 4}, "latency, row 0, column 1 is inf"),
        ({"latency": None}, "it is not what `ringreduce doctor --peers --write` writes"),
        (None, "it is not what `ringreduce doctor --peers --write` writes"),
    ],
)
def test_bad_content_is_named_and_told_to_all(slow: str, change: dict[str, Any] | None, says: str) -> None:
    text = Path(slow).read_text()
    Path(slow).write_text(text[: len(text) // 2] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(ValueError) as error:
        hosts_file.load(slow)
    assert says in str(error.value)
    told = decided(slow)
    assert told.error.startswith(f"RINGREDUCE_HOSTS_FILE={slow!r}: ") and says in told.error


def test_a_file_that_is_not_there() -> None:
    assert "RINGREDUCE_HOSTS_FILE='/nowhere/hosts.json': No such file" in decided("/nowhere/hosts.json").error


def test_hosts_with_one_name_are_not_written(tmp_path: Path) -> None:
    same = HostsFile("", ("a", "a"), ((0, 1), (1, 0)), ((0, 1), (1, 0)))
    with pytest.raises(ValueError, match="several hosts of the job are called 'a'; give each a RINGREDUCE_HOST_ID"):
        hosts_file.save(same, str(tmp_path / "hosts.json"))
    assert not any(tmp_path.iterdir())


def test_what_the_doctor_found_becomes_a_file(tmp_path: Path) -> None:
    found = Survey(
        (Host("x", [0, 1], "a"), Host("y", [2], "b"), Host("z", [3], "c")),
        (Pair(0, 1, latency=1e-3, there=5.0, back=6.0), Pair(0, 2, "no link"), Pair(1, 2, latency=2e-3, there=7.0)),
    )
    path = str(tmp_path / "hosts.json")
    hosts_file.save(found.for_file(), path)
    loaded = hosts_file.load(path)
    assert loaded.hosts == ("a", "b", "c")
    assert loaded.latency == ((0, 1e-3, 0), (1e-3, 0, 2e-3), (0, 2e-3, 0))
    assert loaded.bandwidth == ((0, 5, 0), (6, 0, 7), (0, 0, 0))


def test_the_option() -> None:
    assert resolve(None, {"RINGREDUCE_HOSTS_FILE": "f"})[0].hosts_file == "f"
    with pytest.raises(InvalidArgument, match="hosts_file is 7; it must be the path of a file"):
        resolve(Options(hosts_file=7), {})  # type: ignore[arg-type]


# what is made of it


def decided(file: str, labels: str = "abcd") -> Decision:
    """What rank 0 tells the others; one rank a host."""
    options, _ = resolve(Options(hosts_file=file), {})
    ranks = [[rank] for rank in range(len(labels))]
    text = decide(list(range(len(labels))), options, [frozenset({0})] * len(labels), False, ranks, [*labels])
    return Decision.load(text)


def test_rings_avoid_slow_links(slow: str) -> None:
    told = decided(slow)
    assert told.hosts == ((0,), (3,), (1,), (2,))
    assert told.wire is not None and not told.error
    assert told.wire[:2] == (4e-4, 8e7)  # from a to d; the other way round c would send b less
    assert told.wire.latency_from == f"{slow}, 2026-11-21 03:17 UTC: the slowest hop of the ring"
    assert decided(slow, "cbad").hosts == ((0,), (2,), (3,), (1,))  # the same, as this job counts


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ("abcx", "it does not have host 'x', only 'a', 'b', 'c', 'd'"),
        ("abca", "several hosts of the job are called 'a'"),
    ],
)
def test_other_hosts_than_the_files_keep_their_order(
    slow: str, labels: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        told = decided(slow, labels)
    assert (told.hosts, told.wire, told.error) == (FOUR, None, "")
    (warning,) = caplog.messages
    assert warning.startswith(f"{slow} does not serve this job") and says in warning


def test_hosts_that_no_ring_joins_keep_their_order(slow: str, caplog: pytest.LogCaptureFixture) -> None:
    alone = tuple(tuple(0.0 if 1 in (row, column) else 1e6 for column in range(4)) for row in range(4))
    hosts_file.save(HostsFile(SLOW.date, SLOW.hosts, SLOW.latency, alone), slow)
    assert decided(slow).hosts == FOUR
    assert "no ring reaches all hosts" in caplog.text


# without a file


def test_the_longest_hop_counts_as_its_quieter_end_saw_it() -> None:
    noticed = {
        0: Noticed([(1, 1.1e-3), (2, 9e-3)], None),
        1: Noticed([(0, 1.9e-3), (2, 2.1e-3)], None),
        2: Noticed([(0, 1.2e-3), (1, 1.8e-3)], None),
    }
    wire = wire_of(noticed)
    assert (wire.latency, wire.latency_from) == (1e-3, "measured: the longest of 3 hops")
    assert wire_of({1: noticed[1]}).latency_from == "measured: the longest of 2 hops"  # the others are late
    assert wire_of({}) == wire_of({0: Noticed([], None)}) == Wire()


@pytest.mark.parametrize(
    ("round_trip", "latency"),
    [(0.0, 5e-5), (3e-5, 5e-5), (6e-5, 5e-5), (1e-4, 1e-4), (4e-4, 2e-4), (0.0103, 5e-3), (0.15, 0.1), (1.6, 1.0)],
)
def test_latencies_are_round(round_trip: float, latency: float) -> None:
    assert wire_of({0: Noticed([(1, round_trip)], None)}).latency == latency


def test_the_slowest_host_counts_if_all_are_known() -> None:
    def of(*speeds: float | None) -> Wire:
        return wire_of({rank: Noticed([(rank ^ 1, 4e-5)], speed) for rank, speed in enumerate(speeds)})

    assert of(2.5e9, 1.25e8)[1::2] == (1.25e8, "the slowest host's interfaces")
    assert of(2.5e9, None)[1::2] == (Wire().bandwidth, "assumed")


def test_a_long_line_is_not_taken_for_a_fast_one() -> None:
    wire = wire_of({0: Noticed([(1, 0.04)], 1.25e9), 1: Noticed([(0, 0.04)], 1.25e9)})
    assert wire.latency == 0.02
    assert 1e7 < wire.bandwidth < 1e8 and wire.bandwidth_from == "assumed of a line of this length"


# the speed of interfaces


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys/class/net with what `add` puts there; the kernel gives everything index 7."""
    monkeypatch.setattr(interfaces, "NET", tmp_path)
    monkeypatch.setattr(socket, "if_nametoindex", lambda _: 7)
    return tmp_path


def add(net: Path, name: str, speed: str, *others: str, index: int = 7) -> None:
    for other in ("", *others):
        (net / name / other).mkdir()
    (net / name / "ifindex").write_text(f"{index}\n")
    (net / name / "speed").write_text(f"{speed}\n")


def test_speeds_are_those_of_hardware(net: Path) -> None:
    add(net, "eth0", "25000", "device")
    add(net, "veth1", "10000")
    add(net, "tap0", "10")
    add(net, "virtio0", "-1", "device")
    add(net, "old0", "65535000", "device")
    add(net, "bond0", "50000", "bonding", "lower_eth0", "lower_eth1")
    add(net, "vlan5", "25000", "lower_eth0")
    add(net, "br0", "10000", "lower_veth1")
    add(net, "br1", "10000", "lower_eth0", "lower_veth1")
    add(net, "eth9", "25000", "device", index=3)  # of another namespace
    assert interfaces.speed_of("eth0") == interfaces.speed_of("vlan5") == 25e9 / 8
    assert interfaces.speed_of("bond0") == 50e9 / 8
    for name in ("veth1", "tap0", "virtio0", "old0", "br0", "br1", "eth9", "nowhere0", "an unknown interface"):
        assert interfaces.speed_of(name) is None, name


# rank 0 tells


class Sink:
    """A group that gets links and lets them go."""

    def add_link(self, peer: int, fd: int, path: str) -> None:
        os.close(fd)


def learned(ids: str, wire: Wire | None, absent: str = "") -> list[Wire]:
    """What the ranks hold for the network that are on hosts with these ids; those on `absent` ones stop after they have
    met. Ranks are threads."""
    store = HashStore()
    size = len(ids)

    def one(rank: int) -> Wire:
        exchange = Exchange(store, rank, size, 30.0)
        meeting = meet(exchange, lambda _: 4096, {}, lambda *_: "", location=Location(host_id=ids[rank]))
        order = tuple(map(tuple, meeting.hosts))
        links = Links(meeting, "group", rank, order, wire, 1, 10.0)
        try:
            links.open(Sink())
            if ids[rank] not in absent:
                links.learn(4.0)
            return links.wire
        finally:
            store.add("done", 1)
            while store.add("done", 0) < size:
                pass
            links.close()
            for fd in (meeting.memfd, *(fd for fd in meeting.pidfds if fd >= 0)):
                os.close(fd)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_all_ranks_hold_the_same() -> None:
    wires = learned("ABCAB", None)
    assert len(set(wires)) == 1
    assert wires[0].latency < 0.1 and wires[0].latency_from == "measured: the longest of 3 hops"


def test_what_a_file_says_is_not_measured() -> None:
    wire = Wire(1e-3, 1e8, "a file", "a file")
    assert learned("ABC", wire) == [wire] * 3


def test_a_host_that_is_late_is_not_waited_for_long() -> None:
    first, second, _, third = learned("ABCA", None, absent="C")
    assert first == second == third
    assert first.latency_from.startswith("measured")
