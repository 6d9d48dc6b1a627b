"""Processes whose standard streams are closed, as those of daemons are: what C libraries print must go nowhere.

Of eight ranks each has another subset of the three streams closed.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import mmap
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bodies.parameter_server as parameter_server
import pytest
import torch
import torch.distributed as dist
from bodies import elastic
from bodies.closed_streams import RANKS, TEXT, Streams, call, closed_for, read
from distributed.harness import Rank, run
from frameworks.launch import DEADLINE, environment, killed
from processes import free_ports

import ringreduce.parameter_server as ps
from ringreduce.common.descriptors import above_streams, duplicate, make_above_streams
from ringreduce.coordination.etcd import Etcd


def with_closed_streams(me: Rank, function: Callable[..., None], *args: Any) -> None:
    streams = Streams(closed_for(me.rank))
    function(me, streams, *args)
    streams.print()


# what descriptors are made with


def make_each(me: Rank, streams: Streams) -> None:
    memory = above_streams(os.memfd_create("test"))
    os.ftruncate(memory, mmap.PAGESIZE)
    mapped = make_above_streams(lambda: mmap.mmap(memory, mmap.PAGESIZE))
    other = duplicate(memory)
    one, two = map(above_streams, socket.socketpair())
    waiting = socket.socket()
    waiting.settimeout(2.5)
    waiting = above_streams(waiting)
    selector = make_above_streams(selectors.DefaultSelector)
    loop = make_above_streams(asyncio.new_event_loop)
    streams.print()
    assert waiting.gettimeout() == 2.5 and waiting.family == socket.AF_INET
    assert not os.get_inheritable(other) and not os.get_inheritable(one.fileno())
    assert mapped[:] == bytes(mmap.PAGESIZE) and os.pread(other, 8, 0) == bytes(8)
    one.send(b"text")
    assert two.recv(9) == b"text"
    selector.register(two, selectors.EVENT_READ)
    assert selector.select(0) == []
    loop.run_until_complete(asyncio.sleep(0))
    for each in (mapped, one, two, waiting, selector, loop):
        each.close()


def test_descriptors_are_made_above_the_streams() -> None:
    run(with_closed_streams, RANKS, make_each)


# what ranks do


def make_groups(me: Rank, streams: Streams, ranks_of_a_host: int) -> None:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // ranks_of_a_host}"
    with me.join():
        call(me.rank, streams)
        read(streams)


@pytest.mark.parametrize("ranks_of_a_host", [RANKS, 4])
def test_groups_and_loaders(ranks_of_a_host: int) -> None:
    run(with_closed_streams, RANKS, make_groups, ranks_of_a_host)


def push(me: Rank, streams: Streams, ranks_of_a_host: int, backups: int, folder: Path) -> None:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // ranks_of_a_host}"
    with parameter_server.join(me, backups=backups) as kv:
        streams.print()
        w = torch.zeros(20_000)
        kv.init("w", w, update=ps.optimizer(torch.optim.SGD, lr=1.0), mode=ps.sync(average=False))
        for step in range(1, 6):
            kv.push_pull("w", torch.full((20_000,), -1.0), out=w).wait()
            streams.print()
            assert (w == RANKS * step).all()
        kv.barrier()
        if me.rank == 0:
            kv.snapshot(folder / "saved").wait()
            streams.print()
            (index,) = (folder / "saved").glob("*.json")
            assert json.loads(index.read_text())["weight_map"]
        kv.barrier()
        kv.pull("w", out=w.zero_())
        assert (w == RANKS * 5).all()


@pytest.mark.parametrize(("ranks_of_a_host", "backups"), [(RANKS, 1), (4, 0), (4, 1)])
def test_parameter_servers(ranks_of_a_host: int, backups: int, tmp_path: Path) -> None:
    run(with_closed_streams, RANKS, push, ranks_of_a_host, backups, tmp_path)


def attempt(me: Rank, streams: Streams) -> None:
    world = elastic.start(me, RANKS)
    total = torch.zeros(1000)

    def step() -> None:
        dist.all_reduce(total.fill_(1))
        streams.print()

    for _ in range(3):
        world.attempt(step)
        assert (total == RANKS).all()
    dist.barrier()
    world.leave()


def test_worlds() -> None:
    run(with_closed_streams, RANKS, attempt)


class Answers(http.server.BaseHTTPRequestHandler):
    """Those of an etcd without a key. It closes each connection."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps({}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """It says nothing."""


class AnswersOverOne(Answers):
    """It keeps connections."""

    protocol_version = "HTTP/1.1"


def ask_etcd(me: Rank, streams: Streams, ports: list[int]) -> None:
    for port in ports:
        etcd = Etcd(f"etcd://127.0.0.1:{port}/job")
        for _ in range(3):
            assert etcd.get("a") == ""
            streams.print()


def test_etcd() -> None:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Answers, AnswersOverOne)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        run(with_closed_streams, RANKS, ask_etcd, [server.server_port for server in servers])
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


# ways to start


def start(*command: str, closed: list[int], **variables: str) -> subprocess.Popen[bytes]:
    """As a shell does: `command <&- >&- 2>&-`."""
    closing = "".join(f" {fd}>&-" for fd in closed)
    shell = ["bash", "-c", f'exec "$@"{closing}', "bash", *command]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(shell, env=environment() | variables, stdin=nothing, stdout=nothing, stderr=nothing)


def ended(*processes: subprocess.Popen[bytes]) -> None:
    with killed(processes):
        for process in processes:
            assert process.wait(DEADLINE) == 0


RANK = (sys.executable, "-m", "bodies.closed_streams")
KEEP = (sys.executable, "-m", "ringreduce", "keep")


def said(folder: Path, ranks: int) -> list[str]:
    return [(folder / str(rank)).read_text() for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "keeper"), [("env", ()), ("file", KEEP)])
def test_ranks_that_a_shell_starts(store: str, keeper: tuple[str, ...], tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(RANKS)}
    command = (*keeper, *RANK, store, str(tmp_path))
    ended(*(start(*command, closed=closed_for(rank), RANK=str(rank), **meeting) for rank in range(RANKS)))
    assert said(tmp_path, RANKS) == ["right"] * RANKS


@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended(start(*command, *RANK[1:], "env", str(tmp_path), closed=[0, 1, 2]))
    assert said(tmp_path, 2) == ["right"] * 2


def print_and_add(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
    """For the servers, whose command has opened /dev/null for the streams that were closed."""
    for fd in range(3):
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
    for fd in (1, 2):
        os.write(fd, TEXT)
    value.add_(push)


def push_to_servers(me: Rank, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ps.join(store, role="worker", workers=1, timeout=60.0, window=4 << 20, block_bytes=4096) as kv:
        w = torch.zeros(20_000)
        kv.init("w", w, update=ps.function("print_and_add"), mode=ps.asynchronous())
        for step in range(5):
            kv.push_pull("w", torch.ones(20_000), out=w).wait()
            assert (w == step + 1).all()


@pytest.mark.slow
def test_servers_of_their_own() -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--size", str(RANKS), "--memory", "16M"]
    words += ["--functions", "distributed.test_closed_streams:print_and_add"]
    command = (sys.executable, "-m", "ringreduce", "serve", *words, "--rank")
    servers = [start(*command, str(rank), closed=closed_for(rank)) for rank in range(RANKS)]
    try:
        run(push_to_servers, 1, port)
    finally:
        ended(*servers)
