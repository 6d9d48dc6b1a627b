"""What is said of a group over several hosts, and links that one side alone needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from net.network import Network
from net.ranks import Rank, run

import ringreduce

ROOT = Path(__file__).resolve().parents[2]


def send_up_and_down(me: Rank, sender: int) -> tuple[int, list[int]]:
    """Of ranks 0 to 5 on as many hosts, `sender` sends to one that is in no call and has no link to it."""
    receiver = (sender + 3) % 6
    with me.join():
        before = list(ringreduce.stats()["0"].links)
        value = torch.full((1000,), float(me.rank))
        if me.rank == sender:
            assert receiver not in before
            me.store.wait(["looked"])
            dist.isend(value, receiver).wait()
            me.store.set("sent", "1")
        elif me.rank == receiver:
            assert sender not in before
            me.store.set("looked", "1")
            me.store.wait(["sent"])
            dist.recv(value, sender)
            assert (value == sender).all()
        dist.barrier()
    return me.rank, before


@pytest.mark.parametrize("sender", [1, 4], ids=["the lower rank", "the higher rank"])
def test_one_rank_alone_makes_the_link(sender: int) -> None:
    with Network(hosts=6) as network:
        run(network, 1, send_up_and_down, sender)


def counted(me: Rank) -> dict[str, Any]:
    with me.join():
        dist.all_reduce(torch.ones(100_000))
        # The all_reduce may leave a link idle. A message each way does not.
        away = [peer for peer in range(4) if peer // 2 != me.rank // 2]
        sent = [dist.isend(torch.ones(1000), peer) for peer in away]
        for peer in away:
            dist.recv(torch.empty(1000), peer)
        for work in sent:
            work.wait()
        stats, topology = ringreduce.stats()["0"], ringreduce.topology()
        return {"stats": stats, "links": stats.links, "refused": stats.refused, "topology": topology}


def test_stats_and_topology() -> None:
    with Network(hosts=2) as network:
        values = run(network, 2, counted)
    for rank, value in enumerate(values):
        assert value["stats"]["all_reduce"].bytes == 400_000
        links = value["links"]
        assert set(links) == {2 * (1 - rank // 2), 2 * (1 - rank // 2) + 1}
        for peer, link in links.items():
            other = values[peer]["links"][rank]
            assert link.frames_in > 0 and link.bytes_in > 4000
            assert 0 <= link.round_trip < 1 and link.resent >= 0  # 0: the kernel has not measured it yet
            assert len(link.paths) == len(other.paths) == 1
            assert link.paths[0].endswith(" via eth0")
        assert sum(link.bytes_out for link in links.values()) > 100_000
        assert value["refused"].keys() <= {"left"}  # as may be, of two ways tried at once, the one that lost
        topology = value["topology"]
        assert [host.ranks for host in topology.hosts] == [(0, 1), (2, 3)]
        assert dict(topology.links) == {peer: link.paths for peer, link in links.items()}
        assert f"link to rank {min(links)}: {links[min(links)].paths[0]}" in str(topology)
        assert "ranks 2, 3" in str(topology)
        wire = value["stats"].wire
        assert wire == values[0]["stats"].wire
        assert wire.latency < 0.01 and wire.latency_from == "measured: the longest of 1 hops"
        assert wire.bandwidth_from == "assumed"  # veth says 10 Gbit/s whatever it is
        assert f"between hosts: {wire}; rings go" in str(topology)


def doctor(network: Network, *arguments: str, interfaces: str = "") -> tuple[int, str]:
    """What rank 0 of one on each host prints; the store is at host 0. Hosts have ids, since all have one hostname."""
    started = []
    for host in range(network.hosts):
        environ = os.environ | {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
        environ |= {"RANK": str(host), "WORLD_SIZE": str(network.hosts)}
        environ |= {"RINGREDUCE_SOCKET_IFNAME": interfaces, "RINGREDUCE_HOST_ID": f"host {host}"}
        command = [sys.executable, "-m", "ringreduce", "doctor", "--peers", *arguments]
        started.append(
            network.popen(
                host, command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started[1:]] == [0] * (network.hosts - 1), outputs
    return started[0].returncode, outputs[0]


def float_like(row: list[str]) -> bool:
    """A row of a matrix: a host's number, and a figure for each of the two others."""
    return row[0].isdigit() and all(cell.replace(".", "").isdigit() for cell in row[1:])


def test_the_doctor_measures_the_network() -> None:
    with Network(hosts=3, rate="80mbit", delay=0.004) as network:
        code, out = doctor(network)
    assert code == 0, out
    rows = [line.split() for line in out.splitlines() if line.startswith((" 0", " 1", " 2"))]
    cells = [[float(cell) for cell in row[1:]] for row in rows if len(row) == 3 and float_like(row)]
    latencies, rates = cells[:3], cells[3:]
    assert len(rates) == 3
    assert all(value >= 4000 for row in latencies for value in row), out
    assert all(0.004 < value < 0.2 for row in rates for value in row), out


def test_the_doctor_names_a_way_that_does_not_work() -> None:
    with Network(hosts=2, interfaces=2) as network:
        for family in (4, 6):  # frames to nobody: what host 1 has on eth1 does not answer
            there = network.address(1, 1, family)
            line = f"ip neigh replace {there} lladdr 02:00:00:00:ff:ff dev eth1 nud permanent"
            assert network.popen(0, line.split()).wait() == 0
        code, out = doctor(network)
    assert code == 0, out  # eth0 works
    assert "what does not work" in out
    one, other = network.address(0, 1), network.address(1, 1)
    assert re.search(rf"({one}|{other}):\d+ \(eth1\) from ({one}|{other}) \(eth1\): no answer", out), out


def test_the_doctor_says_which_hosts_do_not_connect() -> None:
    with Network(hosts=2, interfaces=2) as network:
        for family in (4, 6):
            there = network.address(1, 1, family)
            line = f"ip neigh replace {there} lladdr 02:00:00:00:ff:ff dev eth1 nud permanent"
            assert network.popen(0, line.split()).wait() == 0
        code, out = doctor(network, "--timeout", "3", interfaces="eth1")  # the store is reached over eth0
    assert code == 1
    assert "rank 0 cannot connect with rank 1" in out and "in time" in out
    assert f"{network.address(1, 1)}:" in out and "no answer" in out, out


def slow_down(network: Network, host: int, peer: int) -> None:
    """What one host sends to one other goes at 20 Mbit/s, the rest at 200."""
    for line in (
        "qdisc replace dev eth0 root handle 1: htb default 1 r2q 100",
        "class add dev eth0 parent 1: classid 1:1 htb rate 200mbit",
        "class add dev eth0 parent 1: classid 1:2 htb rate 20mbit",
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {network.address(peer)} flowid 1:2",
    ):
        assert network.popen(host, ["tc", *line.split()]).wait() == 0, line


def sent_in_a_ring(me: Rank, file: str) -> tuple[Any, Any, dict[int, int]]:
    """What is said of the network, and the bytes sent to each rank in an all_reduce of 8 MB. Rank 0 has the file."""
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.host}"
    own = file if me.rank == 0 else "/nowhere"
    with me.join(options=ringreduce.Options(hosts_file=own, socket_ifname="10.0.0.0/8")):
        dist.all_reduce(torch.ones(2_000_000))
        stats = ringreduce.stats()["0"]
        dist.barrier()
        return ringreduce.topology(), stats.wire, {peer: link.bytes_out for peer, link in stats.links.items()}


def test_rings_follow_what_the_doctor_wrote(tmp_path: Path) -> None:
    """0 - 1 and 2 - 3 are slow: a ring in the order of the ranks has two slow hops, 0, 2, 1, 3 and its reverse none."""
    file = tmp_path / "hosts.json"
    with Network(hosts=4) as network:
        for host in range(4):
            slow_down(network, host, host ^ 1)
        code, out = doctor(network, "--write", str(file), interfaces="10.0.0.0/8")
        assert code == 0 and f"written to {file}" in out, out
        values = run(network, 1, sent_in_a_ring, str(file))
    order = [host.ranks[0] for host in values[0][0].hosts]
    assert order in ([0, 2, 1, 3], [0, 3, 1, 2])
    for rank, (topology, wire, sent) in enumerate(values):
        assert (topology.hosts, wire) == (values[0][0].hosts, values[0][1])
        assert 5e6 < wire.bandwidth < 4e7  # of 2.5e6 and 2.5e7
        assert str(file) in wire.bandwidth_from and str(file) in str(topology)
        following = order[(order.index(rank) + 1) % 4]
        assert sent[following] > 10e6
        assert sum(sent.values()) - sent[following] < 1e6, (rank, order, sent)


def one_middle_call(me: Rank) -> tuple[Any, dict[int, int], float]:
    """What is said of the network, the bytes sent to each rank in an all_reduce of 64 KB, and TCP's round trip."""
    with me.join():
        dist.all_reduce(torch.ones(16384))  # links that are not there yet are made
        dist.barrier()
        before = ringreduce.stats()["0"].links
        dist.all_reduce(torch.ones(16384))
        dist.barrier()
        stats = ringreduce.stats()["0"]
        sent = {peer: link.bytes_out - before[peer].bytes_out for peer, link in stats.links.items()}
        return stats.wire, sent, min(link.round_trip for link in stats.links.values())


def test_a_delay_is_measured_and_makes_plans_of_one_delay() -> None:
    with Network(hosts=4) as network:
        near = run(network, 1, one_middle_call)
    with Network(hosts=4, delay=0.005) as network:
        far = run(network, 1, one_middle_call)
    for wire, sent, round_trip in far:
        assert wire == far[0][0] and round_trip > 0.009
        assert wire.latency_from == "measured: the longest of 4 hops"
        assert 0.004 < wire.latency < 0.02
        assert len(sent) == 3 and min(sent.values()) >= 65536  # one_shot: everything to all
    for wire, sent, _ in near:
        assert wire.latency < 0.001
        assert sum(sent.values()) < 2 * 65536  # in parts: in this network bytes cost more than delays
