"""Where processes wait to be let in, over a store in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch.distributed as dist

from ringreduce import lobby as lobbies
from ringreduce.lobby import FORGOTTEN_AFTER, Lobby
from ringreduce.membership.directory import Bounded
from ringreduce.membership.protocol import Member
from ringreduce.rendezvous import store as rendezvous
from ringreduce.survivors import KeyStore

ADDRESS = json.dumps(rendezvous.identity()._asdict())


class Clock:
    """Stands for the module `time` in the lobby."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(1e9 * self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(lobbies, "time", found)
    return found


class Counting(KeyStore):
    """A store that counts the requests for values."""

    def __init__(self) -> None:
        super().__init__(Bounded(dist.HashStore()), "")
        self.asked: Counter[str] = Counter()
        self.before: dict[str, Callable[[], None]] = {}
        """What happens before a key is set."""

    def value(self, key: str) -> bytes | None:
        self.asked[key] += 1
        return super().value(key)

    def set(self, key: str, value: str | bytes) -> None:
        self.before.pop(key, lambda: None)()
        super().set(key, value)


def test_a_number_without_a_process_is_forgotten(clock: Clock) -> None:
    store = Counting()
    store.add("waiting", 1)  # and then it died
    lobby = Lobby(store)
    for _ in range(1000):
        assert lobby.waiting(()) == ()
        clock.now += 0.1
    assert 1 / 0.1 < store.asked["joiner/1"] < 2 * FORGOTTEN_AFTER / 0.1
    later = Lobby(store)  # of a member that looks for the first time
    assert later.waiting(()) == () and store.value("joiner/1") == b""


def test_a_process_whose_number_was_forgotten_takes_another_one(clock: Clock) -> None:
    store, me = Counting(), Member("me", ADDRESS)
    looks = Lobby(store)

    def is_stopped() -> None:
        looks.waiting(())
        clock.now += FORGOTTEN_AFTER + 1
        assert looks.waiting(()) == ()

    store.before["joiner/1"] = is_stopped
    assert Lobby(store)._come(me) == 2
    assert looks.waiting(()) == (me,) and Lobby(store).waiting(()) == (me,)
