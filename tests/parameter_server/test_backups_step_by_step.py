"""Servers and their backups in one process, where the test says what happens next: what each sends, and to whom."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bodies.in_process import attach, let_in, make_backup, make_block, server_and_backup
from processes import until

from ringreduce import _C
from ringreduce.coordination.process import own_pidfd
from ringreduce.errors import InvalidArgument, SystemFailure


def test_a_backup_that_fails_says_so_and_its_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    server, backup = _C.ParameterServer(1 << 20, print), _C.ParameterServer(1 << 12, print)
    make_backup(server, backup)  # which is too small for it
    client = _C.ParameterClient(0, 1, 1 << 16)
    let_in(server, client)
    attach(client, server)
    make_block(server, count=600)
    block, offset = make_block(server)
    parts, w = _C.ParameterParts([(0, block, 0, 64, offset)]), torch.ones(16)
    for kind in ("initialise", "push", "push"):
        assert client.wait(client.send(kind, parts, w.data_ptr()), 30.0)
    assert client.read(parts, w.data_ptr(), timeout=30.0) == [2] and torch.equal(w, torch.full((16,), 3.0))
    until(lambda: not server.has_backup)
    until(lambda: bool(caplog.messages))
    (said,) = caplog.messages
    assert "has failed and is none any more: a block of 600 elements needs" in said
    server.stop()
    time.sleep(0.1)
    assert not backup.serves, "it does not have what its server had"
    backup.stop()


def test_a_backup_that_was_replaced_does_not_take_over() -> None:
    """The server ends at once, so that neither has looked."""
    for _ in range(20):
        server, first, second = (_C.ParameterServer(1 << 20, print) for _ in range(3))
        make_backup(server, first)
        make_block(server)
        make_backup(server, second)
        server.stop()
        until(lambda: bool(second.serves))  # noqa: B023
        until(lambda: bool(first.has_ended))  # noqa: B023
        assert not first.serves and second.turn == 1 and second.statistics()["blocks"] == 1
        first.stop()
        second.stop()


def leaving() -> tuple[Any, Any, Any, Any]:
    """A server that leaves, its heir, and a worker with a push that the server has not taken."""
    server, heir = server_and_backup()
    client, w = _C.ParameterClient(0, 1, 1 << 16), torch.ones(16)
    let_in(server, client)
    attach(client, server)
    block, offset = make_block(server)
    parts = _C.ParameterParts([(0, block, 0, 64, offset)])
    assert client.wait(client.send("initialise", parts, w.data_ptr()), 30.0)
    server.leave_to_backup()
    until(lambda: bool(heir.is_heir))

    def push_ends() -> None:
        """Of which the value has no more than it should."""
        nonlocal pushed
        assert client.wait(call if pushed == 0 else client.send("push", parts, w.data_ptr()), 30.0)
        pushed += 1
        out = torch.zeros(16)
        client.read(parts, out.data_ptr(), timeout=30.0)
        assert out.unique().tolist() == [1.0 + pushed]

    pushed, call = 0, client.send("push", parts, w.data_ptr())
    assert not client.wait(call, 0.1) and not heir.serves and server.leaves
    return server, heir, client, push_ends


def test_a_server_that_leaves_comes_back_if_its_heir_ends_before_that_has_a_backup() -> None:
    server, heir, _, push_ends = leaving()
    heir.stop()
    push_ends()
    assert server.serves and not server.leaves and not server.has_ended and not server.has_backup
    server.stop()


def test_an_heir_that_ends_once_it_has_a_backup_is_followed_by_that() -> None:
    for _ in range(10):
        server, heir, _, push_ends = leaving()
        third = _C.ParameterServer(1 << 20, print)
        make_backup(heir, third)
        heir.stop()
        push_ends()
        until(lambda: bool(server.has_ended))  # noqa: B023
        assert third.serves and third.turn == 2
        push_ends()
        third.stop()
        server.stop()


@pytest.mark.parametrize("ends", [False, True], ids=["server lives", "server ends"])
def test_an_heir_goes_on_alone_if_it_is_told_to(ends: bool) -> None:
    server, heir, _, push_ends = leaving()
    if ends:
        server.stop()
    heir.serve_alone()
    push_ends()
    until(lambda: bool(server.has_ended))
    assert heir.serves and not heir.is_heir
    push_ends()
    heir.stop()
    server.stop()


def test_a_worker_receives_at_once_what_servers_send_it_about_backups() -> None:
    """The kernel bounds how many descriptors a user's processes have sent each other and not received."""

    def unread() -> int:
        return int.from_bytes(fcntl.ioctl(client.news, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    server, backup = server_and_backup()
    client, w = _C.ParameterClient(0, 1, 1 << 16), torch.ones(16)
    let_in(server, client)
    assert unread() > 0
    attach(client, server)
    assert unread() == 0
    block, offset = make_block(server)
    parts = _C.ParameterParts([(0, block, 0, 64, offset)])
    another = _C.ParameterServer(1 << 20, print)
    make_backup(server, another)
    assert unread() > 0

    def reads() -> bool:
        assert client.wait(client.send("initialise", parts, w.data_ptr()), 30.0)
        return unread() == 0

    until(reads)
    for each in (server, backup, another):
        each.stop()


def test_a_worker_joins_a_backup_that_knows_it_and_ends_without_leaving() -> None:
    server, backup = server_and_backup()
    client, other = (_C.ParameterClient(number, 1, 1 << 16) for number in range(2))
    let_in(server, client)
    server.stop()
    until(lambda: bool(backup.serves))
    let_in(backup, client)  # its server had no time to say that it was let in
    with pytest.raises(InvalidArgument, match="there is a worker 0 already"):
        let_in(backup, other)
    assert list(backup.workers()) == [0]
    client.close_news()
    until(lambda: backup.statistics()["clocks"] == {})
    backup.stop()


class Stopped:
    """What a server knows of a backup that reads nothing yet."""

    def __init__(self, server: Any) -> None:
        self.backup, self._server = _C.ParameterServer(1 << 26, print), server
        self._log, about = _C.ParameterServer.log(), {"name": "the backup", "address": ""}
        ours, self.passage = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {"bell": os.dup(self.backup.bell), "values": os.dup(self.backup.values), "pidfd": own_pidfd()}
        given |= {"log": os.dup(self._log), "passage": ours.detach()}
        server.lead(capacity=1 << 20, **given, **about)

    def goes_on(self) -> None:
        given = {"bell": os.dup(self._server.bell), "values": os.dup(self._server.values), "pidfd": own_pidfd()}
        given |= {"log": self._log, "passage": self.passage.detach()}
        self.backup.follow(**given, name="the backup", address="")


def server_with_a_reply_to_write() -> tuple[Any, Stopped, Any, Any, Callable[[], Any]]:
    """A server, its backup, which does nothing yet, a worker, its call that waits for the backup, and how it pushes."""
    server, client, w = _C.ParameterServer(1 << 20, print), _C.ParameterClient(0, 1, 1 << 16), torch.ones(16)
    stopped = Stopped(server)
    let_in(server, client)
    attach(client, server)
    block, offset = make_block(server)
    parts = _C.ParameterParts([(0, block, 0, 64, offset)])
    call = client.send("initialise", parts, w.data_ptr())
    assert not client.wait(call, 0.1)  # answered once the backup has carried it out
    return server, stopped, client, call, lambda: client.send("push", parts, w.data_ptr())


def test_a_server_writes_its_last_reply_before_it_leaves_its_workers_to_an_heir() -> None:
    """A worker empties its lane when the heir serves: nobody else may write there by then."""
    server, stopped, client, call, push = server_with_a_reply_to_write()
    leaving = threading.Thread(target=server.leave_to_backup)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive() and not server.leaves, "it leaves with a reply to write"
    stopped.goes_on()
    leaving.join(30)
    assert not leaving.is_alive() and client.wait(call, 0.0)
    until(lambda: bool(stopped.backup.is_heir))
    stopped.backup.serve_alone()
    assert client.wait(push(), 30.0)
    server.stop()
    stopped.backup.stop()


def test_a_server_whose_backup_stands_still_does_not_leave_and_goes_on() -> None:
    server, stopped, client, call, push = server_with_a_reply_to_write()
    with pytest.raises(InvalidArgument, match="has not carried out its log in time"):
        server.leave_to_backup()
    assert not server.leaves
    stopped.goes_on()
    assert client.wait(call, 30.0)
    assert client.wait(push(), 30.0)
    server.stop()
    stopped.backup.stop()


def make_table(server: Any, width: int) -> int:
    mode = {"mode": "asynchronous", "quorum": 0, "grace": 0.0, "staleness": 0, "group": "workers"}
    rule = {"kind": "sgd", "lr": 1.0}
    return int(server.create(dtype="float32", count=0, width=width, rule=rule, **mode)[0])


def test_a_new_backup_gets_the_rows_of_tables_slab_by_slab_and_is_not_waited_for() -> None:
    server, client, width, rows = _C.ParameterServer(1 << 26, print), _C.ParameterClient(0, 1, 1 << 22), 1024, 4000
    let_in(server, client)
    attach(client, server)
    table = _C.ParameterTable([make_table(server, width)], "float32", width)

    def push(first: int) -> Any:
        ids, gradients = torch.arange(first, first + 500), torch.ones(500, width)
        return table.push(client, table.rows(ids.data_ptr(), 500), gradients.data_ptr(), distinct=True)

    for first in range(0, rows, 500):
        assert client.wait(push(first), 30.0)
    stopped = Stopped(server)
    stopped.passage.settimeout(30)
    sizes: list[int] = []
    while len(sizes) < 3:
        _, descriptors, _, _ = socket.recv_fds(stopped.passage, 1024, 240)
        sizes.append(os.fstat(descriptors[-1]).st_size)
        for each in descriptors:
            os.close(each)
    assert sizes[1] < 10_000, "the state has rows"
    assert 1_000_000 < sizes[2] < 3_000_000, "a slab"
    assert server.backup_starts
    assert client.wait(push(0), 30.0), "a push waits for a backup that does not count"
    assert not server.has_backup
    server.stop()
    stopped.backup.stop()


@pytest.mark.slow
@pytest.mark.parametrize("rows", (1500, 6000), ids=("all fit", "there is no room for some"))
def test_a_new_backup_has_every_push_that_came_while_it_was_made(rows: int) -> None:
    """Pushes of rows that it has not got yet, of new ones, and in one case of some that the server has to refuse."""
    server, client, width = _C.ParameterServer(1 << 24, print), _C.ParameterClient(0, 1, 1 << 22), 512
    let_in(server, client)
    attach(client, server)
    tables = [_C.ParameterTable([make_table(server, width)], "float32", width) for _ in range(2)]
    wanted, applied, refused = torch.zeros(2, rows, width), 0, 0

    def push() -> None:
        nonlocal applied, refused
        which, ids, gradients = random.randrange(2), torch.randint(rows, (40,)).unique(), torch.ones(40, width)
        taken = tables[which].rows(ids.data_ptr(), len(ids))
        call = tables[which].push(client, taken, gradients.data_ptr(), distinct=True)
        assert client.wait(call, 30.0)
        if not call.went_well:
            refused += 1
        else:
            applied += 1
            wanted[which, ids] -= 1

    while applied < 100 or (rows > 2000 and refused == 0):
        push()
    assert (refused > 0) == (rows > 2000)
    backups = [_C.ParameterServer(1 << 24, print) for _ in range(5)]
    for backup in backups:  # each replaces the one before
        making = threading.Thread(target=make_backup, args=(server, backup))
        making.start()
        while making.is_alive():
            push()
        making.join()
        assert server.has_backup
    for _ in range(20):
        push()
    server.stop()
    until(lambda: bool(backup.serves))
    for which, table in enumerate(tables):
        for first in range(0, rows, 500):
            ids, out = torch.arange(first, first + 500), torch.zeros(500, width)
            taken = table.rows(ids.data_ptr(), 500)
            call = table.pull(client, taken)
            assert client.wait(call, 30.0)
            table.take(client, taken, call, out.data_ptr(), distinct=True)
            assert torch.equal(out, wanted[which, first : first + 500])
    for backup in backups:
        backup.stop()


def test_a_server_answers_while_its_backup_stands_still() -> None:
    server, backup = _C.ParameterServer(1 << 20, print), _C.ParameterServer(1 << 20, print)
    given = {"bell": os.dup(backup.bell), "values": os.dup(backup.values), "pidfd": own_pidfd()}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    about = {"capacity": 1 << 20, "name": "", "address": "", "passage": ours.detach()}
    server.lead(log=_C.ParameterServer.log(), **given, **about)  # which the other one never reads
    with pytest.raises(InvalidArgument, match="its server's backup takes at most"):
        make_block(server, "x" * (1 << 20))
    made = 0

    def make_many() -> None:
        nonlocal made
        with pytest.raises(SystemFailure, match="has its process been stopped"):
            while True:
                make_block(server, "x" * 10_000)
                made += 1

    thread = threading.Thread(target=make_many)
    thread.start()
    while thread.is_alive():
        known = server.statistics()["blocks"]
        thread.join(0.05)
    assert known == made > 50 and server.statistics()["lag"] > 500_000
    client = _C.ParameterClient(0, 1, 1 << 16)
    let_in(server, client)  # there is room for that
    server.lose(0)
    backup.stop()
    make_block(server)
    assert not server.has_backup and server.statistics()["blocks"] == made + 1
    server.stop()
    theirs.close()


def test_a_backup_takes_nothing_from_a_worker_that_has_not_turned_to_it() -> None:
    servers = server_and_backup()
    client = _C.ParameterClient(0, 1, 1 << 16)
    let_in(servers[0], client)
    attach(client, servers[0])
    block, offset = make_block(servers[0])
    parts, w = _C.ParameterParts([(0, block, 0, 64, offset)]), torch.ones(16)
    for kind in ("initialise", "push", "push"):
        assert client.wait(client.send(kind, parts, w.data_ptr()), 30.0)
    servers[0].stop()
    until(lambda: bool(servers[1].serves))
    time.sleep(0.1)
    assert servers[1].statistics()["requests"] == 3, "it took the lane while the worker may still empty it"
    assert client.wait(client.send("push", parts, w.data_ptr()), 30.0)
    assert client.read(parts, w.data_ptr(), timeout=30.0) == [3] and torch.equal(w, torch.full((16,), 4.0))
    servers[1].stop()


def test_a_worker_that_was_asleep_finds_the_last_of_many_that_served() -> None:
    """What it reads has what another one has pushed to the last."""
    server = _C.ParameterServer(1 << 20, print)
    clients = [_C.ParameterClient(number, 1, 1 << 16) for number in range(2)]
    for number, client in enumerate(clients):
        let_in(server, client, number)
        attach(client, server)
    block, offset = make_block(server)
    parts, w = _C.ParameterParts([(0, block, 0, 64, offset)]), torch.ones(16)
    assert clients[0].wait(clients[0].send("initialise", parts, w.data_ptr()), 30.0)
    asked = clients[1].send("push", parts, w.data_ptr())  # of which it never hears from this server
    until(lambda: bool(server.statistics()["updates"] == 1))
    for i in range(5):
        backup = _C.ParameterServer(1 << 20, print)
        make_backup(server, backup)
        server.stop()
        assert clients[0].wait(clients[0].send("push", parts, w.data_ptr()), 30.0)
        server = backup
        assert server.serves and server.turn == i + 1
    if random.randrange(2):
        assert clients[1].wait(asked, 30.0)
    out = torch.zeros(16)
    assert clients[1].read(parts, out.data_ptr(), timeout=30.0) == [6] and torch.equal(out, torch.full((16,), 7.0))
    assert clients[1].wait(asked, 30.0)
    server.stop()
