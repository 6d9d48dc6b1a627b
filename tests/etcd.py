"""Servers of etcd on this machine, where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processes import free_ports

from ringreduce.coordination.etcd import Etcd

installed = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed: apt-get install etcd-server")


@contextlib.contextmanager
def servers(count: int, folder: Path, tls: Sequence[str] = ()) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A cluster of so many: its address, and the servers' processes. `tls`: options of servers that ask for TLS."""
    ports = free_ports(2 * count)
    scheme = "https" if tls else "http"
    clients = [f"{scheme}://127.0.0.1:{port}" for port in ports[:count]]
    peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
    cluster = ",".join(f"s{i}={peer}" for i, peer in enumerate(peers))
    processes = []
    with contextlib.ExitStack() as stack:
        for i in range(count):
            command = ["etcd", "--name", f"s{i}", "--data-dir", str(folder / f"s{i}"), "--initial-cluster", cluster]
            command += ["--initial-advertise-peer-urls", peers[i], "--listen-peer-urls", peers[i]]
            command += ["--advertise-client-urls", clients[i], "--listen-client-urls", clients[i]]
            command += ["--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", *tls]
            log = stack.enter_context(open(folder / f"s{i}.log", "wb"))
            processes.append(subprocess.Popen([each for each in command if each], stdout=log, stderr=log))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        address = f"etcd{'s' if tls else ''}://" + ",".join(each.partition("://")[2] for each in clients) + "/job"
        deadline = time.monotonic() + 30
        while True:
            try:
                Etcd(address).get("")
                break
            except ConnectionError:
                assert time.monotonic() < deadline, (folder / "s0.log").read_text()
                time.sleep(0.1)
        yield address, processes
