"""The network of namespaces that other tests stand on, and ranks in it: they are what they claim to be."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from net.network import Network
from net.ranks import Rank, RankFailed, Ranks, run
from net.warden import processes_in
from processes import until

import ringreduce

MB = 10**6
SOON = 20.0
"""Seconds for what should be over at once."""


class Stream:
    """A TCP connection from one host to another, with both ends here."""

    def __init__(self, network: Network, sender: int, receiver: int, interface: int = 0, family: int = 4) -> None:
        self.address = network.address(receiver, interface, family)
        self.kind = socket.AF_INET if family == 4 else socket.AF_INET6
        listener = network.call(receiver, self._listen)
        self.out = network.call(sender, socket.create_connection, listener.getsockname()[:2], SOON)
        self.into, _ = listener.accept()
        self.into.settimeout(SOON)
        listener.close()

    def _listen(self) -> socket.socket:
        listener = socket.create_server((self.address, 0), family=self.kind)
        listener.settimeout(SOON)
        return listener

    def move(self, size: int) -> float:
        """Sends and receives that many bytes; returns the seconds it took."""
        start = time.monotonic()
        sender = threading.Thread(target=self.out.sendall, args=(bytes(size),))
        sender.start()
        left = size
        while left:
            left -= len(self.into.recv(min(left, 1 << 20)))
        sender.join()
        return time.monotonic() - start

    def arrives(self, within: float) -> bool:
        """Whether the next byte comes."""
        self.into.settimeout(within)
        try:
            return bool(self.into.recv(1))
        except TimeoutError:
            return False
        finally:
            self.into.settimeout(SOON)


@pytest.fixture(params=[{}, {"delay": 0.002}], ids=["direct", "delayed"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Three hosts with two interfaces each."""
    with Network(hosts=3, interfaces=2, **request.param) as made:
        yield made


@pytest.mark.parametrize("family", [4, 6])
def test_all_hosts_reach_each_other_on_all_interfaces(network: Network, family: int) -> None:
    for interface in range(2):
        for sender, receiver in ((0, 1), (1, 2), (2, 0)):
            assert Stream(network, sender, receiver, interface, family).move(1000) > 0


def test_counters_count_what_a_host_sends(network: Network) -> None:
    streams = [Stream(network, 0, 1, interface) for interface in range(2)]
    before = [network.bytes_out(host) for host in range(3)]
    for stream in streams:
        stream.move(MB)
    sent = [network.bytes_out(host) - start for host, start in enumerate(before)]
    assert 2 * MB < sent[0] < 2.2 * MB
    assert 0 < sent[1] < 0.5 * MB  # acknowledgements
    assert sent[2] < 10_000


def test_a_cable_out_stops_traffic_and_one_in_lets_it_on(network: Network) -> None:
    stream, other = Stream(network, 0, 1, 0), Stream(network, 0, 1, 1)
    for host in (0, 1):
        network.set_link(host, False)
        stream.out.send(b"1")
        assert not stream.arrives(within=0.3)
        assert other.move(1000) > 0
        assert carrier(network, host) == "0\n"
        network.set_link(host, True)
        assert stream.arrives(within=SOON)
        assert carrier(network, host) == "1\n"


def carrier(network: Network, host: int) -> str:
    """As the host itself sees it."""
    return network.popen(host, ["cat", "/sys/class/net/eth0/carrier"], stdout=subprocess.PIPE, text=True).communicate()[
        0
    ]


def test_a_flap_ends_with_the_link_up(network: Network) -> None:
    stream = Stream(network, 0, 1)
    flap = threading.Thread(target=network.flap, args=(1, 0.5))
    flap.start()
    assert stream.move(MB) > 0
    flap.join()
    assert carrier(network, 1) == "1\n"


@pytest.mark.parametrize("delay", [None, 0.002], ids=["direct", "delayed"])
def test_no_host_sends_faster_than_the_rate(delay: float | None) -> None:
    with Network(hosts=2, rate="80mbit", delay=delay) as network:
        stream = Stream(network, 0, 1)
        stream.move(100_000)  # what the token bucket had saved
        assert stream.move(4 * MB) > 0.9 * 4 * MB / (80e6 / 8)
        network.set_rate(0, "160mbit")
        stream.move(100_000)
        assert stream.move(4 * MB) > 0.9 * 4 * MB / (160e6 / 8)


def test_nothing_arrives_before_the_delay() -> None:
    with Network(hosts=2, delay=0.05) as network:
        there = Stream(network, 0, 1)
        start = time.monotonic()
        there.out.send(b"1")
        there.into.recv(1)
        assert time.monotonic() - start >= 0.05


def test_losses_are_as_many_as_said_and_the_same_again_with_the_same_seed() -> None:
    first, again, other = (arrivals(seed) for seed in (1, 1, 2))
    assert 600 < len(first) < 800
    assert first == again
    assert first != other


def arrivals(seed: int) -> list[int]:
    """Which of 1000 datagrams arrive if 30% are lost."""
    with Network(hosts=2, loss=0.3, seed=seed) as network:
        if network.carrier == "netem":
            pytest.skip("netem draws its losses itself")
        receiver = network.call(1, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind((network.address(1), 0))
        receiver.settimeout(0.5)
        sender = network.call(0, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        found = []
        for number in range(1000):
            sender.sendto(number.to_bytes(2, "big"), receiver.getsockname())
            if number % 50 == 49:  # no more at once than a socket holds
                found += list(received(receiver, number))
        return found


def received(receiver: socket.socket, last: int) -> Iterator[int]:
    """The numbers of datagrams that have come; waits for more than is there unless the last has come."""
    try:
        while (number := int.from_bytes(receiver.recv(2), "big")) != last:
            yield number
        yield last
    except TimeoutError:
        return


def test_what_runs_on_hosts_ends_with_the_network() -> None:
    with Network(hosts=1) as network:
        sleeps = network.popen(0, ["sh", "-c", "sleep 1000 & sleep 1000"])
        inside = {os.stat(network.path(0)).st_ino}
        until(lambda: len(processes_in(inside)) >= 3)
    assert sleeps.returncode == -signal.SIGKILL
    assert not processes_in(inside)


OWNER = """
import json, os, sys, time
from net.network import Network
with Network(hosts=2, delay=0.001) as network:
    network.popen(1, ["sh", "-c", "sleep 1000 & sleep 1000"])
    inodes = [os.stat(network.path(host)).st_ino for host in range(2)]
    print(json.dumps([inodes, [network._warden.pid, network._switch.pid]]), flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_behind_when_the_owner_is_killed() -> None:
    interfaces = socket.if_nameindex()
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    inodes, keepers = json.loads(owner.stdout.readline())
    until(lambda: len(processes_in(set(inodes))) >= 3)
    owner.kill()
    owner.wait()
    until(lambda: not processes_in(set(inodes)))
    until(lambda: not any(map(alive, keepers)))
    assert socket.if_nameindex() == interfaces


def alive(pid: int) -> bool:
    """Whether it runs; an ended process that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- ranks ---------------------------------------------------------------------------------------------------------


def reduce(me: Rank) -> tuple[int, int, str | None, float]:
    with me.join(options=ringreduce.Options(transport="gloo")):
        tensor = torch.full((100_000,), float(10**me.rank))
        dist.all_reduce(tensor)
    assert (tensor == tensor[0]).all()
    return me.host, me.local_rank, os.environ["LOCAL_WORLD_SIZE"], tensor[0].item()


def test_ranks_of_hosts_reduce_over_gloo() -> None:
    with Network(hosts=2) as network:
        before = network.bytes_out(0)
        values = run(network, 2, reduce)
        assert network.bytes_out(0) - before > 400_000
    assert values == [(host, local, "2", 1111.0) for host in range(2) for local in range(2)]


def stay(me: Rank) -> None:
    me.meet("here")
    me.report(os.stat("/proc/self/ns/net").st_ino)
    if me.rank == 0:
        raise ValueError("rank 0 has had enough")
    time.sleep(1000)


def test_ranks_can_be_killed_and_what_they_raise_is_known() -> None:
    with Network(hosts=2) as network, Ranks(network, [0, 1, 0], stay, timeout=10) as ranks:
        namespaces = ranks.reports()
        assert [namespaces[rank] == os.stat(network.path(0)).st_ino for rank in range(3)] == [True, False, True]
        ranks.signal(1, signal.SIGKILL)
        raised, died = ranks.outcomes(but=[2])
        assert isinstance(raised, ValueError)
        assert "rank 1 died, with exit code -9" in str(died)


def test_a_rank_that_raises_fails_the_run() -> None:
    with Network(hosts=2) as network, pytest.raises(RankFailed, match=r"in stay(.|\n)*had enough"):
        run(network, 1, stay)
