"""`Replication` does what a replica's `Standing` says. The servers are stand-ins that note what they are told.

tests/unit/test_succession.py searches what can come of it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ringreduce.errors import Aborted, InvalidArgument, SystemFailure
from ringreduce.parameter_server import control
from ringreduce.parameter_server.doors import Reached
from ringreduce.parameter_server.server.replication import Replication
from ringreduce.parameter_server.store import Views
from ringreduce.parameter_server.views import Replica, View

A, B = Replica(0, 0), Replica(1, 1)
PAIR = View(0, A).with_backup(1, 1)


class Server:
    """What C++ is told of who goes on."""

    capacity, confirmed = 0, 0
    is_heir = leaves = False
    has_backup = backup_follows = True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.on_silence: Callable[[str], None]

    def freeze(self) -> int:
        return 0

    def lead_far(self, on_silence: Callable[[str], None], name: str) -> None:
        self.on_silence = on_silence

    def connect_partner(self, descriptor: int, path: str) -> None:
        os.close(descriptor)

    def decided(self, goes_on: bool) -> None:
        self.told.append(goes_on)

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.told.append(name)


class Shard:
    def __init__(self) -> None:
        self.server = Server()

    def has_workers(self) -> bool:
        return False

    def follow_far(self, on_silence: Callable[[str], None]) -> None:
        self.server.on_silence = on_silence


class Unanswered(Views):
    """The first request to change a view, once this is told to, is carried out and not answered. Then others act."""

    others: Callable[[], Any] | None = None

    def change(self, server: int, before: View | None, after: View) -> View:
        found = super().change(server, before, after)
        others, self.others = self.others, None
        if others is not None:
            others()
            raise ConnectionError("no answer")
        return found


def reach(its: dict[str, Any], deadline: float, look: Callable[[], None]) -> Reached:
    """A process that takes every backup."""
    here, there = socket.socketpair()
    control.send(there, {"name": f"process {its['number']}"})
    return Reached(here, [(there.detach(), "")])


@pytest.fixture
def views() -> Unanswered:
    return Unanswered(dist.HashStore())


@pytest.fixture
def of_a(views: Unanswered) -> tuple[Replication, Shard]:
    """Process 0, whose server has its backup in process 1."""
    replication, shard = Replication(0, views, reach), Shard()
    replication.begin(0, shard)  # type: ignore[arg-type]
    replication.lead(0, shard, {"number": 1}, 1.0)  # type: ignore[arg-type]
    assert views.of(0) == PAIR and shard.server.told == ["count_backup"]
    shard.server.told.clear()
    return replication, shard


def of_b(views: Views) -> tuple[Replication, Shard]:
    """Process 1, with that backup."""
    replication, shard = Replication(1, views, reach), Shard()
    replication.follow(0, shard, PAIR.text(), 0, None)  # type: ignore[arg-type]
    return replication, shard


def told(shard: Shard, *what: Any) -> None:
    deadline = time.monotonic() + 30
    while len(shard.server.told) < len(what) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert shard.server.told == list(what)


def test_a_server_ends_when_its_new_backup_has_won_before_the_store_answers(views: Unanswered) -> None:
    replication, shard = Replication(0, views, reach), Shard()
    replication.begin(0, shard)  # type: ignore[arg-type]
    views.others = lambda: views.change(0, PAIR, PAIR.alone(B))
    with pytest.raises(ConnectionError):
        replication.lead(0, shard, {"number": 1}, 1.0)  # type: ignore[arg-type]
    assert shard.server.told == ["stop"] and not replication.is_settled(shard)  # type: ignore[arg-type]


def test_a_backup_that_may_count_is_not_abandoned_when_its_server_is_closed(views: Unanswered) -> None:
    replication, shard = Replication(0, views, reach), Shard()
    replication.begin(0, shard)  # type: ignore[arg-type]
    views.others = replication.close
    with pytest.raises(Aborted):
        replication.lead(0, shard, {"number": 1}, 1.0)  # type: ignore[arg-type]
    assert shard.server.told == []


def test_a_backup_that_cannot_be_connected_is_abandoned(views: Unanswered) -> None:
    replication, shard = Replication(0, views, reach), Shard()
    replication.begin(0, shard)  # type: ignore[arg-type]

    def refuse(descriptor: int, path: str) -> None:
        os.close(descriptor)
        raise SystemFailure("no thread can be started")

    shard.server.connect_partner = refuse  # type: ignore[method-assign]
    with pytest.raises(SystemFailure):
        replication.lead(0, shard, {"number": 1}, 1.0)  # type: ignore[arg-type]
    assert shard.server.told == ["abandon_backup"] and replication.is_settled(shard)  # type: ignore[arg-type]


def test_a_server_that_is_replaced_while_it_leaves_does_not_ask_to_go_on(views: Unanswered, of_a: Any) -> None:
    replication, shard = of_a
    after = views.change(0, PAIR, PAIR.alone(B))
    assert not replication.hand_over(0, shard)
    shard.server.on_silence("gone")
    told(shard, "unfreeze", False)
    assert views.of(0) == after and not replication.is_settled(shard)


def test_an_heir_that_is_replaced_does_not_ask_to_go_on(views: Unanswered, of_a: Any) -> None:
    replication, shard = of_b(views)
    shard.server.is_heir = True
    after = views.change(0, PAIR, PAIR.swapped().alone(A))
    replication.serve_alone(0, shard)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        replication.lead(0, shard, {"number": 2}, 1.0)  # type: ignore[arg-type]
    shard.server.on_silence("gone")
    told(shard, False)
    assert views.of(0) == after


def test_an_heir_with_a_backup_does_not_lose_it_to_the_silence_of_its_server(views: Unanswered, of_a: Any) -> None:
    replication, shard = of_b(views)
    views.change(0, PAIR, PAIR.swapped())
    shard.server.is_heir, of_its_server = True, shard.server.on_silence
    asks, may_answer = threading.Event(), threading.Event()

    def meanwhile() -> None:
        asks.set()
        assert may_answer.wait(30)

    views.others = meanwhile
    leads = threading.Thread(target=replication.lead, args=(0, shard, {"number": 2}, 1.0))
    leads.start()
    assert asks.wait(30)
    of_its_server("gone")  # which is decided when the store has answered
    may_answer.set()
    leads.join()
    time.sleep(0.1)
    told(shard, "count_backup")
    assert views.of(0) == PAIR.swapped().with_backup(2, 3) and not replication.is_settled(shard)  # type: ignore[arg-type]


def test_a_backup_takes_no_place_of_one_that_knows_a_later_view(views: Unanswered) -> None:
    replication, shard = of_b(views)
    later = PAIR.alone(A).with_backup(1, 3)
    replication.follow(0, Shard(), later.text(), 2, shard)  # type: ignore[arg-type]
    replication.follow(0, known := Shard(), later.text(), 2, None)  # type: ignore[arg-type, assignment]
    with pytest.raises(InvalidArgument, match="has been replaced"):
        replication.follow(0, Shard(), PAIR.swapped().with_backup(1, 4).text(), 2, known)  # type: ignore[arg-type]


def test_every_backup_has_a_number_of_its_own(views: Unanswered, of_a: Any) -> None:
    replication, shard = of_a
    shard.server.on_silence("gone")
    told(shard, True)
    numbers = []

    def refuse(its: dict[str, Any], deadline: float, look: Callable[[], None]) -> Reached:
        numbers.append(replication._known[shard].offered)
        raise ConnectionError("it takes none")

    replication._dial = refuse
    for _ in range(2):
        with pytest.raises(ConnectionError):
            replication.lead(0, shard, {"number": 1}, 1.0)
    assert numbers == [3, 4]
