"""What is different where backups are reached by TCP; servers are told to be on several hosts by RINGREDUCE_HOST_ID.

test_backups.py has what is the same on one host, and tests/net real networks.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import test_backups as near
import torch
from bodies import in_process
from bodies.parameter_server import APART, SMALL, placed
from distributed.harness import Rank, Ranks, on_ranks, run
from processes import until
from test_backups import MODES, PLACES, PUSHES, SERVERS, WORKERS, was_killed

import ringreduce.parameter_server as ps
from ringreduce import _C
from ringreduce.coordination.process import own_pidfd
from ringreduce.errors import InvalidArgument, RingReduceError, TopologyError
from ringreduce.parameter_server.placement import backup_of


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_servers_of_one_host_keep_what_workers_of_another_push(mode: ps.Mode) -> None:
    times = random.randrange(5, PUSHES)
    arguments = (listening, near.tell_history, mode, (0, "server", "carried out", times))
    with Ranks(placed, SERVERS + WORKERS, (0, 0, 0, 1, 0), *arguments) as ranks:
        _, *others = ranks.results(but=(0,))
        assert was_killed(ranks, 0)
    for final in others[1:]:
        assert final == [[1.0] * PUSHES] * WORKERS, f"killed at the {times}th"


def listening(me: Rank, function: Callable[..., Any], *args: Any) -> Any:
    near.SMALL = SMALL | {"listen": True}
    return function(me, *args)


def test_a_killed_server_and_a_killed_backup_are_logged_by_those_that_go_on() -> None:
    times = random.randrange(1, PUSHES)
    doom = (1, "backup", "carried out", times)
    with Ranks(placed, SERVERS + WORKERS, PLACES["apart"], near.tell_history_when_it_is_logged, doom) as ranks:
        of_0, of_2, *finals = ranks.results(but=(1,))
        assert was_killed(ranks, 1)
    assert finals == [[[1.0] * PUSHES] * WORKERS] * WORKERS, f"killed at the {times}th"
    assert len(of_0) == 1
    assert of_0[0].startswith("the backup of server 0 has ended or cannot be reached: it goes on, and gets another (")
    assert len(of_2) == 1 and of_2[0].startswith("server 1 has ended or cannot be reached: its backup, in this process")


class KillsBeforeIt:
    """A client whose server is killed when it is first to read the values, after the server said that it may."""

    def __init__(self, client: _C.ParameterClient, pid: int) -> None:
        self._client, self._pid = client, pid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def read(self, parts: _C.ParameterParts, tensor: int, timeout: float) -> list[int] | None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._pid, deadline = 0, time.monotonic() + 30
            elsewhere = torch.zeros(3000)
            while self._client.read(parts, elsewhere.data_ptr(), timeout) != []:
                assert time.monotonic() < deadline, "the server's end is not seen"
            return []
        return self._client.read(parts, tensor, timeout)


def reads_too_late(me: Rank) -> Any:
    me.store.set(f"pid {me.rank}", str(os.getpid()))
    if me.rank < SERVERS:
        return near.serve(me)
    with near.worker(me) as kv:
        out = torch.zeros(3000)
        kv.init("w", out, update=ps.reduce("sum"), mode=ps.ssp(1))
        kv.push("w", torch.ones(3000)).wait()
        client: Any = kv.calls.client
        kv.calls.client = cast(_C.ParameterClient, KillsBeforeIt(client, int(me.store.get("pid 0"))))
        kv.pull("w", out)
        kv.calls.client = client
    return [out.min().item(), out.max().item()]


def test_a_pull_whose_server_ends_before_it_is_read_has_the_backups_value() -> None:
    with Ranks(placed, SERVERS + 1, (0, 0, 1, 0), reads_too_late) as ranks:
        assert ranks.results(but=(0,))[-1] == [1.0, 1.0]


def comes_and_leaves(me: Rank) -> Any:
    """Two servers of one host that listen, each with its backup in the other's process, and one that comes later."""
    if me.rank == 3:
        me.meet("servers")
        with ps.join(me.store, role="worker", timeout=30.0) as kv:
            kv.init("w", out := torch.zeros(3000), update=ps.reduce("sum"))
            kv.push("w", torch.ones(3000)).wait()
            backups = [said["backup"] for said in kv.stats()["servers"].values()]
            me.store.set("may leave 1", "")
            me.store.wait(["has left 1"])
            kv.push("w", torch.ones(3000)).wait()
            until(lambda: all(its["backup"] for its in kv.stats()["servers"].values()))
            me.store.set("may leave 0", "")
            me.store.wait(["has left 0"])
            kv.push("w", torch.ones(3000)).wait()
            kv.pull("w", out)
            last = [said["backup"] for said in kv.stats()["servers"].values()]
        return backups, last, out.unique().tolist()
    if me.rank == 2:
        me.meet("servers")
        with ps.serve(me.store, joins=True) as serving:
            me.store.set("came", "")
            me.store.wait(["has left 0"])
            return serving.wait(30.0), serving.give_away(1.0)
    with pytest.raises(InvalidArgument, match="servers that move only have workers"):
        ps.serve(me.store, rank=me.rank, size=2, servers=3, name="more", **SMALL | {"listen": True})
    with ps.serve(me.store, rank=me.rank, size=2, backups=1, **SMALL | {"listen": True}) as serving:
        me.meet("servers")
        me.store.wait(["came", f"may leave {me.rank}"])
        assert serving.give_away(30.0) and not serving._local.serving()
    me.store.set(f"has left {me.rank}", "")
    return None


def test_processes_leave_what_they_serve_to_others_until_one_is_left() -> None:
    _, _, stayed, (first, last, values) = run(placed, 4, (0, 0, 0, 0), comes_and_leaves)
    assert stayed == (True, False) and values == [3.0]
    assert [said.split(" (")[0] for said in first] == ["the backup of server 0", "the backup of server 1"]
    assert last == ["", ""]


@on_ranks(2, through=(placed, APART))
def test_more_servers_than_processes_without_backups_are_for_one_host(me: Rank) -> None:
    with pytest.raises(TopologyError) as raised:
        ps.serve(me.store, rank=me.rank, size=2, servers=4, **SMALL)
    said = str(raised.value)
    assert "is on another host than this server; more servers than processes need backups=1, or one host" in said


# ---- who goes on, step by step ---------------------------------------------------------------------------------------


def leaves_and_somebody_dies(me: Rank, doomed: int, step: str) -> Any:
    """Servers 0, 1 and 2, of which 0 is told to leave; its backup is at 1. One process dies at a step of that."""
    logged = near.Logged()
    if me.rank >= SERVERS:
        return pushes_meanwhile(me, doomed)
    with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, **SMALL) as serving:
        if me.rank == doomed:
            serving._local.shards[0].server.die_at(step, 1)
        me.meet("servers")
        while me.rank == 0 and not me.store.check(["may leave"]):
            time.sleep(0.01)
        if me.rank == 0:
            assert serving.give_away(30.0) and not serving._local.serving()
            me.store.set("has left", "")
        while not me.store.check(["done"]):
            time.sleep(0.01)
    return logged.messages


def pushes_meanwhile(me: Rank, doomed: int) -> bool:
    """Until all servers are served after the death, and have backups if they can. Whether every pull had what it should
    have."""
    me.meet("servers")
    with ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0) as kv:
        mine, i, is_right = kv.worker - SERVERS, 0, True
        value, push = torch.zeros(WORKERS, near.COUNT), torch.zeros(WORKERS, near.COUNT)
        kv.init("h", value, update=ps.reduce("sum"), mode=ps.asynchronous())
        push[mine] = 1
        while not me.store.check(["whole"]):
            kv.push("h", push).wait()
            kv.pull("h", value)
            i += 1
            is_right &= bool((value[mine] == i).all())
            if i == 20:
                me.store.set("may leave", "")
            looks = mine == 0 and i % 10 == 0 and me.store.check(["killed"])
            looks = looks and (doomed == 0 or me.store.check(["has left"]))
            if looks and all(its and (its["backup"] or doomed == 1) for its in kv.stats()["servers"].values()):
                me.store.set("whole", "")
        kv.barrier()
        me.store.set("done", "")
    return is_right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doomed", "step"),
    [(0, "leaves"), (1, "inherits"), (1, "gives"), (1, "taking over"), (1, "serving"), (-1, "never")],
)
def test_nothing_is_lost_when_a_process_is_killed_while_a_server_leaves(doomed: int, step: str) -> None:
    with Ranks(placed, SERVERS + WORKERS, PLACES["apart"], leaves_and_somebody_dies, doomed, step) as ranks:
        assert doomed < 0 or was_killed(ranks, doomed)
        ranks.store.set("killed", "")
        *_, first, second = ranks.results(but=(doomed,))
    assert first and second


class Tied:
    """A server, its backup, a worker beside the server that knows both, and one that only reads. What the server sends
    to the backup goes through here."""

    def __init__(self) -> None:
        self.server, self.backup = (_C.ParameterServer(1 << 20, print) for _ in range(2))
        self.silent = threading.Event(), threading.Event()
        self.server.lead_far(lambda why: self.silent[0].set())
        self.backup.follow_far(lambda why: self.silent[1].set())
        self._passes = threading.Event()
        self._passes.set()
        self._ends = []
        for end in (self.server, self.backup):
            here, there = socket.socketpair()
            end.connect_partner(there.detach(), "through the test")
            self._ends.append(here)
        for source, target, waits in ((0, 1, True), (1, 0, False)):
            threading.Thread(target=self._carry, args=(source, target, waits), daemon=True).start()
        self.client, self.reader = _C.ParameterClient(0, 1, 1 << 16), _C.ParameterClient(1, 1, 1 << 16)
        self.backup.join_far(id=0, group="workers", window=1 << 16)
        for worker, client in enumerate((self.client, self.reader)):
            window = {"window": os.dup(client.window), "window_bytes": client.window_bytes, "pidfd": own_pidfd()}
            self.server.join(id=worker, group="workers", servers=1, lane=0, **window)
            in_process.attach(client, self.server)
        self.client.attach_far_backup(0, "the backup")
        here, there = socket.socketpair()
        self.client.connect(0, here.detach(), "to the backup", replica=1)
        self.backup.connect(0, there.detach(), "to the worker")
        block, offset = in_process.make_block(self.server)
        self.parts, self.ones = _C.ParameterParts([(0, block, 0, 64, offset)]), torch.ones(16)
        for kind in ("initialise", "push"):
            assert self.client.wait(self.send(kind), 30.0)

    def _carry(self, source: int, target: int, waits: bool) -> None:
        with contextlib.suppress(OSError):
            while some := self._ends[source].recv(1 << 16):
                if waits:
                    self._passes.wait()
                self._ends[target].sendall(some)

    def hold(self, it: bool) -> None:
        self._passes.clear() if it else self._passes.set()

    def cut(self) -> None:
        """With what is held. Returns when both have noticed."""
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        assert all(silent.wait(30) for silent in self.silent)

    def send(self, kind: str = "push") -> _C.ParameterCall:
        return self.client.send(kind, self.parts, self.ones.data_ptr())

    def shown(self) -> tuple[int, float]:
        """To the reader: the version and the value."""
        value = torch.zeros(16)
        (version,) = self.reader.read(self.parts, value.data_ptr(), timeout=30.0)
        return version, value[0].item()

    def pulled(self) -> float:
        """By the worker, from the backup."""
        value = torch.zeros(16)
        call = self.client.pull(self.parts, value.data_ptr())
        assert self.client.wait(call, 30.0)
        return value[0].item()

    def stop(self) -> None:
        self.hold(False)
        self.server.stop()
        self.backup.stop()


def test_a_server_shows_and_answers_nothing_that_its_backup_has_not_confirmed() -> None:
    tied = Tied()
    assert tied.shown() == (1, 2.0)
    tied.hold(True)
    call = tied.send()
    assert not tied.client.wait(call, 0.3)
    assert tied.shown() == (1, 2.0), "a push is shown that the backup does not have"
    tied.hold(False)
    assert tied.client.wait(call, 30.0) and tied.shown() == (2, 3.0)
    tied.stop()


def test_a_server_that_is_replaced_is_refused_and_what_it_kept_back_is_applied_once_at_the_backup() -> None:
    tied = Tied()
    tied.hold(True)
    call = tied.send()
    tied.cut()
    assert not tied.client.wait(call, 0.3) and not tied.backup.serves, "nothing has been decided"
    tied.server.decided(False)
    assert tied.server.has_ended and not tied.client.wait(call, 0.3), "only the backup may answer it, once it serves"
    with pytest.raises(RingReduceError, match="has ended"):
        tied.shown()
    tied.backup.decided(True)
    assert tied.client.wait(call, 30.0) and not tied.client.is_near(0) and tied.pulled() == 3.0
    assert tied.client.wait(tied.send(), 30.0) and tied.pulled() == 4.0
    tied.stop()


def test_a_server_that_wins_goes_on_alone_and_its_backup_never_serves() -> None:
    tied = Tied()
    tied.hold(True)
    call = tied.send()
    tied.cut()
    assert not tied.client.wait(call, 0.3)
    tied.server.decided(True)
    tied.backup.decided(False)
    assert tied.client.wait(call, 30.0) and tied.shown() == (2, 3.0)
    assert tied.backup.has_ended and not tied.backup.serves and not tied.server.has_backup
    tied.server.stop()
    with pytest.raises(RingReduceError, match="has ended"):
        tied.client.wait(tied.send(), 30.0)
    tied.stop()


def tie(server: _C.ParameterServer, backup: _C.ParameterServer) -> threading.Event:
    """Makes a backup that counts; says when that does not hear the server any more."""
    silent = threading.Event()
    backup.follow_far(lambda why: silent.set())
    server.lead_far(lambda why: None)
    for end, socket_ in zip((server, backup), socket.socketpair(), strict=True):
        end.connect_partner(socket_.detach(), "to the other")
    until(lambda: server.backup_follows)
    server.count_backup()
    return silent


def attach(client: _C.ParameterClient, server: _C.ParameterServer, replica: int) -> None:
    server.join_far(id=0, group="workers", window=1 << 16)
    if replica == 0:
        client.attach_far(0, "the server")
    else:
        client.attach_far_backup(0, f"backup {replica}", replica)
    here, there = socket.socketpair()
    client.connect(0, here.detach(), "to a server", replica)
    server.connect(0, there.detach(), "to the worker")


def test_a_worker_turns_to_one_after_the_other_even_if_it_hears_late_of_all() -> None:
    """It is not to ask the backup of the one that serves. It also comes to a server that has taken over already."""
    servers = [_C.ParameterServer(1 << 20, print) for _ in range(4)]
    client, ones = _C.ParameterClient(0, 1, 1 << 16), torch.ones(16)
    client.seek()
    attach(client, servers[0], 0)
    block, offset = in_process.make_block(servers[0])
    parts = _C.ParameterParts([(0, block, 0, 64, offset)])
    for kind in ("initialise", "push"):
        assert client.wait(client.send(kind, parts, ones.data_ptr()), 30.0)
    silent = tie(servers[0], servers[1])
    attach(client, servers[1], 1)
    for last, following, its_backup in zip(servers, servers[1:], servers[2:], strict=False):
        last.stop()
        assert silent.wait(30)
        following.decided(True)
        silent = tie(following, its_backup)
    attach(client, servers[2], 2)
    attach(client, servers[3], 3)
    call = client.send("push", parts, ones.data_ptr())
    assert client.wait(call, 30.0) and client.asks(0) == [2, 3]
    servers[2].stop()
    assert silent.wait(30)
    value = torch.zeros(16)
    call = client.pull(parts, value.data_ptr())
    assert not client.wait(call, 0.2) and client.asks(0) == [3], "the backup has not taken over"
    servers[3].decided(True)
    assert client.wait(call, 30.0) and value.unique().tolist() == [3.0]
    servers[3].stop()
    assert not client.wait(client.send("push", parts, ones.data_ptr()), 0.2) and client.asks(0) == [-1]
    client.give_up(0, "nobody is left")
    assert client.asks(0) == []
    with pytest.raises(RingReduceError, match="nobody is left"):
        client.wait(client.send("push", parts, ones.data_ptr()), 30.0)


def test_a_servers_backup_is_on_another_host_where_there_is_one() -> None:
    assert [backup_of(server, "AAB") for server in range(3)] == [2, 2, 0]
    assert [backup_of(server, "AAA") for server in range(3)] == [1, 2, 0]
    assert [backup_of(server, "ABAB") for server in range(4)] == [1, 2, 3, 0]
