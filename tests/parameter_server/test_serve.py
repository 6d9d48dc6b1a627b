"""`ringreduce serve`: servers in processes of their own, started before or after their workers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bodies.parameter_server as one_host
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, run
from frameworks.launch import Command, environment, killed
from processes import deadline, free_ports, until
from torch._C._distributed_c10d import HashStore

import ringreduce.parameter_server as ps
from ringreduce import cli
from ringreduce.errors import CollectiveTimeout, ServerLost, SystemFailure
from ringreduce.parameter_server.server import snapshots
from ringreduce.parameter_server.snapshot_files import INDEX, file_of


def halve(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
    """For the servers: --functions test_serve:halve."""
    value.mul_(0.5).add_(push)


def start(*words: str, launcher: tuple[str, ...] = (), **options: Any) -> Any:
    """A subprocess.Popen, or what is as good and begins sooner."""
    if not (launcher or options):
        return Command("serve", *words)
    command = [sys.executable, "-m", *(launcher or ("ringreduce",)), "serve", *words]
    here = environment()
    here["PYTHONPATH"] += f":{Path(__file__).parent}"
    return subprocess.Popen(command, env=here, **options)


def trains(me: Rank, port: int) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ps.join(store, role="worker", workers=me.size, timeout=60.0) as kv:
        w = torch.linspace(-1, 1, one_host.COUNT)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=0.01), mode=ps.sync(average=False))
        assert kv.servers == 2
        for step in range(one_host.STEPS):
            # Workers of one group are added up by number, which is the order of joining here: these have no other.
            kv.push_pull("w", one_host.gradient(0, step, one_host.COUNT), out=w).wait()
        half = torch.ones(10)
        kv.init("half", half, update=ps.function("halve"), mode=ps.asynchronous())
        kv.barrier()
        if me.rank == 0:
            kv.push_pull("half", torch.ones(10), out=half).wait()
            assert half.tolist() == [1.5] * 10
        return [w.numpy().copy()]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "launcher"), [("servers", "torchrun"), ("workers", "plain")])
def test_servers_of_their_own(first: str, launcher: str) -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--memory", "16M", "--functions", "test_serve:halve"]

    def servers() -> list[Any]:
        if launcher == "plain":
            return [start(*words, "--rank", str(rank), "--size", "2") for rank in (1, 0)]
        torchrun = (
            "torch.distributed.run",
            "--nproc-per-node=2",
            f"--master-port={free_ports(1)[0]}",
            "-m",
            "ringreduce",
        )
        return [start(*words, launcher=torchrun)]

    started = servers() if first == "servers" else []
    with killed(started):
        with Ranks(trains, 2, port) as ranks:
            if first == "workers":
                time.sleep(0.5)
                started = servers()
            values = ranks.results()
        for server in started:
            assert server.wait(deadline()) == 0
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, one_host.COUNT))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, foreach=False)
    for step in range(one_host.STEPS):
        parameter.grad = 2 * one_host.gradient(0, step, one_host.COUNT)
        optimizer.step()
    assert [each[0].tobytes() for each in values] == [parameter.detach().numpy().tobytes()] * 2


def survives(me: Rank, port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    kv = ps.join(store, role="worker", timeout=60.0)
    w = torch.zeros(10)
    kv.init("w", w)
    me.report("ready")
    with pytest.raises(ServerLost) as raised:
        while True:
            kv.push_pull("w", w, out=w).wait()
    kv.calls.close()
    return str(raised.value)


def test_a_killed_server_is_named() -> None:
    (port,) = free_ports(1)
    server = start("--store", f"127.0.0.1:{port}", "--memory", "16M", "--forever")
    with killed([server]), Ranks(survives, 1, port) as ranks:
        ranks.reports()
        server.send_signal(signal.SIGKILL)
        (said,) = ranks.results()
    assert said.startswith("server 0 (") and f"pid {server.pid}" in said


def pushes(me: Rank, port: int, steps: int) -> list[float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    kv = ps.join(store, role="worker", timeout=60.0)
    kv.init("w", torch.zeros(100_000), update=ps.reduce("sum"), mode=ps.asynchronous())
    table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0, 0))
    ids = torch.arange(1000)
    for _ in range(steps):
        kv.wait(kv.push("w", torch.ones(100_000)), table.push(ids, torch.ones(1000, 4)))
    me.report("pushed")
    with pytest.raises(ServerLost):
        while True:
            kv.pull("w", torch.empty(100_000))
            table.pull(ids)
            time.sleep(0.01)
    kv.calls.close()
    return [float(steps)]


@pytest.mark.slow
def test_servers_write_snapshots_by_time_and_at_their_end(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--memory", "32M", "--size", "2", "--snapshots", str(tmp_path)]
    servers = [start(*words, "--every", "0.001", "--keep", "1", "--rank", str(rank)) for rank in (0, 1)]
    with killed(servers), Ranks(pushes, 1, port, 40) as ranks:
        ranks.reports()
        until(lambda: any(int(path.name[-6:]) > 1 for path in tmp_path.glob("*-" + 6 * "[0-9]")))  # by time
        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(deadline()) for server in servers] == [0, 0]
        ranks.results()
    whole = sorted(path for path in tmp_path.iterdir() if ".partial-" not in path.name)
    assert len(whole) == 1  # the last one
    with ps.join(memory=32 << 20, window=16 << 20) as kv:
        assert set(kv.restore(whole[-1])) == {"w", "t"}
        w = torch.empty(100_000)
        kv.pull("w", w)
        assert (w == 40).all()
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0, 0))
        assert (table.pull(torch.arange(1000)) == 40).all()


def comes_and_goes(me: Rank, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ps.join(store, role="worker", timeout=60.0) as kv:
        kv.init("w", torch.ones(10))


def test_servers_write_a_snapshot_when_all_workers_have_left(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--memory", "32M", "--size", "2", "--snapshots", str(tmp_path)]
    servers = [start(*words, "--rank", str(rank)) for rank in (0, 1)]
    with killed(servers):
        with Ranks(comes_and_goes, 1, port) as ranks:
            ranks.results()
        assert [server.wait(deadline()) for server in servers] == [0, 0]
    (path,) = tmp_path.iterdir()
    with ps.join(memory=32 << 20, window=16 << 20) as kv:
        assert kv.restore(path) == ["w"]


def test_a_server_outlives_the_one_with_the_store(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--memory", "32M", "--size", "2", "--snapshots", str(tmp_path)]
    servers = [start(*words, "--every", "0.1", "--forever", "--rank", str(rank)) for rank in (0, 1)]
    with killed(servers):
        until(lambda: any(tmp_path.glob("*-00000[0-9]")))
        servers[0].kill()
        servers[0].wait()
        with pytest.raises(subprocess.TimeoutExpired):
            servers[1].wait(1.0)
        servers[1].send_signal(signal.SIGTERM)
        assert servers[1].wait(deadline()) == 1


KEYS, COUNT = ["a", "b", "c"], 1000  # a key for each of three servers


def pushes_until_done(me: Rank, port: int) -> float:
    """Returns how often it has pushed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    kv = ps.join(store, role="worker", timeout=60.0)
    w, ones, n = torch.zeros(COUNT), torch.ones(COUNT), 0
    for key in KEYS:
        kv.init(key, w, update=ps.reduce("sum"), mode=ps.asynchronous())
    me.report("pushes")
    try:
        while not store.check(["done"]):
            n += 1
            for key in KEYS:
                kv.push_pull(key, ones, out=w).wait()
                assert w.min() == w.max() == n
        kv.leave()
    except ServerLost:
        kv.calls.close()
    return float(n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "how", "status"),
    [((1,), signal.SIGTERM, 0), ((0,), signal.SIGKILL, -signal.SIGKILL), ((0, 1, 2), signal.SIGTERM, 0)],
    ids=["server 1 is told to end", "server 0 is killed", "all are told to end"],
)
def test_snapshots_with_backups(tmp_path: Path, ended: tuple[int, ...], how: signal.Signals, status: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = ["--store", f"127.0.0.1:{store.port}", "--existing-store", "--memory", "32M", "--size", "3"]
    words += ["--backups", "1", "--snapshots", str(tmp_path), "--every", "0.01"]
    servers = [start(*words, "--rank", str(rank)) for rank in range(3)]

    def latest() -> int:
        return max((int(path.name[-6:]) for path in tmp_path.glob("*-*[0-9]")), default=0)

    def wait_for_another() -> None:
        before = latest()
        until(lambda: latest() > before + 1, "a snapshot that was begun from now on")

    with killed(servers):
        with Ranks(pushes_until_done, 1, store.port) as ranks:
            ranks.reports()
            wait_for_another()
            for rank in ended:
                servers[rank].send_signal(how)
            assert [servers[rank].wait(deadline()) for rank in ended] == [status] * len(ended)
            if len(ended) < 3:
                wait_for_another()
            store.set("done", "")
            (pushed,) = ranks.results()
        assert all(servers[rank].wait(deadline()) == 0 for rank in range(3) if rank not in ended)
    with ps.join(memory=32 << 20, window=16 << 20) as kv:
        assert kv.restore(max(tmp_path.glob("*-*[0-9]"))) == KEYS
        w = torch.empty(len(KEYS), COUNT)
        kv.pull(dict(zip(KEYS, w, strict=True)))
    least = pushed if len(ended) < 3 else 1
    assert least <= w.min() <= w.max() <= pushed


def test_the_last_snapshot_comes_after_a_worker_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = snapshots.Writer.finish

    def finish(self: Any, *rest: Any) -> None:
        assert go_on.wait(deadline())
        real(self, *rest)

    monkeypatch.setattr(snapshots.Writer, "finish", finish)
    store = dist.HashStore()
    with ps.serve(store, rank=0, size=1, memory=1 << 20) as serving, ps.join(store, role="worker") as kv:
        kv.init("w", torch.ones(3))
        saving = kv.snapshot(tmp_path / "worker")
        for _ in range(3):
            serving.ask_for_snapshot()
        assert not serving.may_ask()
        last = serving.ask_for_snapshot(last=True)
        path = serving.snapshot_path(tmp_path, last)
        assert last == 4 and serving.take_snapshots(tmp_path, last=last) == 3 and not path.exists()
        go_on.set()
        saving.wait()
        until(lambda: serving.take_snapshots(tmp_path, last=last) == last)
        assert path.exists() and len(list(tmp_path.iterdir())) == 2  # of the others none


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def has_a_full_disk(me: Rank, folder: str, last: int) -> tuple[str, list[str]]:
    """Of two servers, server 1 cannot write its part. The part of server `last` ends after the other."""
    with pytest.MonkeyPatch.context() as patch, ps.serve(me.store, rank=me.rank, size=2, memory=1 << 20) as serving:
        if me.rank == 1:
            patch.setattr(snapshots.Writer, "finish", full)
        if me.rank == 0:
            serving.ask_for_snapshot()
        me.meet("asked")
        if me.rank == last:
            me.meet("the first part has ended")
        said = ""
        try:
            until(lambda: serving.take_snapshots(folder) == 1)
        except SystemFailure as error:
            said = str(error)
        if me.rank != last:
            me.meet("the first part has ended")
        me.meet("all parts have ended")
        assert serving.may_ask()
        return said.rpartition(": ")[2], os.listdir(folder)


@pytest.mark.parametrize("last", [0, 1])
def test_nothing_is_left_of_a_snapshot_that_one_of_two_servers_could_not_write(last: int, tmp_path: Path) -> None:
    assert run(has_a_full_disk, 2, str(tmp_path), last) == [("", []), ("[Errno 28] No space left on device", [])]


def inherits_after_a_failed_snapshot(me: Rank, folder: str) -> tuple[int, list[str]]:
    """Server 1 cannot write its part, and ends when all parts have ended. Its backup does not try again."""
    options: dict[str, Any] = {"rank": me.rank, "size": 2, "backups": 1, "memory": 1 << 20}
    with pytest.MonkeyPatch.context() as patch, ps.serve(me.store, **options) as serving:
        until(lambda: all(shard.server.has_backup for shard in serving._local.serving().values()))
        if me.rank == 1:
            patch.setattr(snapshots.Writer, "finish", full)
        else:
            serving.ask_for_snapshot()
        me.meet("asked")
        with contextlib.suppress(SystemFailure):
            until(lambda: serving.take_snapshots(folder) == 1)
        until(serving.may_ask)
        me.meet("all parts have ended")
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: len(serving._local.serving()) == 2)
        return serving.take_snapshots(folder), os.listdir(folder)


def test_a_snapshot_that_failed_is_not_begun_again_by_a_backup(tmp_path: Path) -> None:
    with Ranks(inherits_after_a_failed_snapshot, 2, str(tmp_path)) as ranks:
        assert ranks.results(but=(1,)) == [(1, [])]


def test_a_file_that_a_killed_server_left_is_in_nobody_s_way(tmp_path: Path) -> None:
    with ps.serve(HashStore(), rank=0, size=1, memory=1 << 20) as serving:
        number = serving.ask_for_snapshot()
        unfinished = serving.unfinished(tmp_path, number)
        unfinished.mkdir()
        (unfinished / f"{file_of('0-of-1')}.part").touch()
        until(lambda: serving.take_snapshots(tmp_path) == number)
        files = {path.name for path in serving.snapshot_path(tmp_path, number).iterdir()}
        assert files == {INDEX, file_of("0-of-1")} and not unfinished.exists()


def waits(me: Rank, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ps.join(store, role="worker", workers=2, timeout=60.0) as kv:
        kv.init("w", torch.zeros(10))
        kv.barrier()
        kv.clock()
        pending = [kv.push("w", torch.ones(10))] if me.rank == 0 else []
        me.report(kv.worker)
        store.wait(["looked"])
        kv.wait(*pending or [kv.push("w", torch.ones(10))])


@pytest.mark.slow
def test_status_says_whom_they_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    server = start("--store", f"127.0.0.1:{port}", "--memory", "16M")
    with killed([server]):
        with Ranks(waits, 2, port) as ranks:
            numbers = ranks.reports()
            assert cli.main(["serve", "--status", "--store", f"127.0.0.1:{port}"]) == 0
            said = " ".join(capsys.readouterr().out.split())
            late = numbers[1]
            assert "server 0 (" in said and "1 blocks, 0 rows" in said
            assert f"1 requests wait for worker {late} (" in said
            assert said.count(": clock 1") == 2 and "clock 0" not in said  # who looks is not shown
            dist.TCPStore("127.0.0.1", port, is_master=False).set("looked", "yes")
            ranks.results()
        assert server.wait(deadline()) == 0


def test_a_server_in_this_process() -> None:
    store = dist.HashStore()
    with ps.serve(store, rank=0, size=1, memory=1 << 20) as serving:
        assert not serving.wait(0.05)  # nobody has come
        with pytest.raises(CollectiveTimeout, match="1 of 2 workers of group 'workers' have joined in time"):
            ps.join(store, role="worker", workers=2, timeout=0.2)
        with ps.join(store, role="worker") as kv:
            kv.init("w", torch.ones(3))
            assert not serving.wait(0.05)
        assert serving.wait(10) and serving.stats()["blocks"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "here"], "--store is 'here'; it must be HOST:PORT"),
        (
            ["--store", "127.0.0.1:1", "--timeout", "nan"],
            "argument --timeout: 'nan' seconds; it must be a number above 0",
        ),
        (["--store", "127.0.0.1:1", "--every", "0"], "argument --every: '0' seconds; it must be a number above 0"),
        (["--store", "127.0.0.1:1", "--every", "60"], "--every 60 has no folder to write to; add --snapshots FOLDER"),
        (["--store", "127.0.0.1:1", "--status", "--timeout", "0.3"], "the store of --store 127.0.0.1:1 was not found"),
        (["--store", "127.0.0.1:1", "--functions", "math"], "--functions has 'math'; it must be MODULE:NAME"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
