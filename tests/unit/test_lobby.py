"""Where processes wait to be let in, over a store in this process."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Container

import pytest
import torch.distributed as dist

from ringreduce.elastic import lobby as lobbies
from ringreduce.elastic.lobby import FORGOTTEN_AFTER, LOOK_FOR_JOINERS, SILENT, Lobby, Lookout
from ringreduce.membership.directory import Bounded
from ringreduce.membership.key_store import KeyStore
from ringreduce.membership.protocol import Member
from ringreduce.rendezvous import store as rendezvous

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


class Blocking(Lobby):
    """A lobby whose store answers while `answers` is set."""

    def __init__(self) -> None:
        super().__init__(Counting())
        self.looks = 0
        self.answers = threading.Event()
        self.answers.set()
        self.found: tuple[Member, ...] = ()

    def waiting(self, but: Container[str]) -> tuple[Member, ...]:
        self.looks += 1
        assert self.answers.wait(60)
        return self.found


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def lookouts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ringreduce lookout"]


def test_a_lookout_never_waits_for_the_store() -> None:
    lobby = Blocking()
    lobby.answers.clear()
    lookout = Lookout(lobby, ["a"])
    began = time.monotonic()
    assert lookout.found() == () and time.monotonic() < began + 1
    until(lambda: lobby.looks == 1)
    me = Member("me", ADDRESS)
    lobby.found = (me,)
    lobby.answers.set()
    until(lambda: lookout.found() == (me,))
    lobby.answers.clear()
    assert lookout.found() == (me,)  # this may still be true
    until(lambda: lookout.found() == (), SILENT + 30)  # nobody could tell this process that it is let in
    lobby.answers.set()
    until(lambda: lookout.found() == (me,))
    lookout.pass_over(["me"])
    assert lookout.found() == ()
    lookout.stop()
    until(lambda: not lookouts())


def test_a_lookout_looks_while_it_is_asked() -> None:
    lobby = Blocking()
    held = [Lookout(lobby, [])]
    time.sleep(3 * LOOK_FOR_JOINERS)
    assert not lookouts() and not lobby.looks
    until(lambda: held[0].found() or lobby.looks > 5)
    held[0]._seen.asked -= 1000  # nobody has asked for long
    until(lambda: held[0]._seen.pauses_long)
    looks = lobby.looks
    time.sleep(5 * LOOK_FOR_JOINERS)
    assert lobby.looks == looks
    until(lambda: held[0].found() or lobby.looks > looks + 1)
    assert [thread.daemon for thread in lookouts()] == [True]
    held.clear()
    gc.collect()
    until(lambda: not lookouts())
