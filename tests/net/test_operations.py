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
from net.network import Network, unavailable
from net.ranks import Rank, run

import ringreduce

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}"),
]

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
        stats, topology = ringreduce.stats()["0"], ringreduce.topology()
        return {"stats": stats, "links": stats.links, "refused": stats.refused, "topology": topology}


def test_stats_and_topology() -> None:
    with Network(hosts=2) as network:
        values = run(network, 2, counted)
    for rank, value in enumerate(values):
        assert value["stats"]["all_reduce"].bytes == 400_000
        links = value["links"]
        assert links and set(links) <= {2 * (1 - rank // 2), 2 * (1 - rank // 2) + 1}
        for peer, link in links.items():
            other = values[peer]["links"][rank]
            assert link.frames_out > 0 and link.bytes_out > 0
            assert len(link.paths) == len(other.paths) == 1
            assert link.paths[0].endswith(" via eth0")
        assert sum(link.bytes_out for link in links.values()) > 100_000
        assert value["refused"] == {}
        topology = value["topology"]
        assert [host.ranks for host in topology.hosts] == [(0, 1), (2, 3)]
        assert dict(topology.links) == {peer: link.paths for peer, link in links.items()}
        assert f"link to rank {min(links)}: {links[min(links)].paths[0]}" in str(topology)
        assert "ranks 2, 3" in str(topology)


def doctor(network: Network, *arguments: str, interfaces: str = "") -> tuple[int, str]:
    """What rank 0 of one on each host prints; the store is at host 0."""
    started = []
    for host in range(network.hosts):
        environ = os.environ | {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
        environ |= {"RANK": str(host), "WORLD_SIZE": str(network.hosts)}
        environ |= {"RINGREDUCE_SOCKET_IFNAME": interfaces}
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
    assert all(0.01 < value < 0.09 for row in rates for value in row), out


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
    assert code == 2
    assert "rank 0 cannot connect with rank 1" in out and "in time" in out
    assert f"{network.address(1, 1)}:" in out and "no answer" in out, out
