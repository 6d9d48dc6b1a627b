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
from processes import until

from ringreduce.coordination import join_queue, wait
from ringreduce.coordination.endpoint import Address
from ringreduce.coordination.join_queue import (
    FORGOTTEN_AFTER,
    LOOK_FOR_JOINERS,
    SILENT,
    JoinQueue,
    JoinWatcher,
    Patient,
)
from ringreduce.coordination.process import identity
from ringreduce.coordination.protocol import Member, View
from ringreduce.coordination.store import Bounded
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.errors import CollectiveTimeout, SystemFailure

ADDRESS = Address(identity(), None, None, {}).dump()


class Clock:
    """Stands for the module `time` where processes wait to join."""

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
    for module in (join_queue, wait):
        monkeypatch.setattr(module, "time", found)
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
    queue = JoinQueue(store)
    for _ in range(1000):
        assert queue.waiting(()) == ()
        clock.now += 0.1
    assert 1 / 0.1 < store.asked["joiner/1"] < 2 * FORGOTTEN_AFTER / 0.1
    later = JoinQueue(store)  # of a member that looks for the first time
    assert later.waiting(()) == () and store.value("joiner/1") == b""


def test_a_process_whose_number_was_forgotten_takes_another_one(clock: Clock) -> None:
    store, me = Counting(), Member("me", ADDRESS)
    looks = JoinQueue(store)

    def is_stopped() -> None:
        looks.waiting(())
        clock.now += FORGOTTEN_AFTER + 1
        assert looks.waiting(()) == ()

    store.before["joiner/1"] = is_stopped
    assert JoinQueue(store).come(me, Patient(1.0)) == 2
    assert looks.waiting(()) == (me,) and JoinQueue(store).waiting(()) == (me,)


class Failing(Counting):
    """A store that raises `error` until the clock shows `until`, and fails after it has carried out some requests."""

    def __init__(self, clock: Clock, until: float, error: Exception) -> None:
        super().__init__()
        self._clock, self._until, self._error = clock, until, error
        self.unanswered: list[str] = []
        """The keys of the requests that are carried out without an answer, once each."""

    def value(self, key: str) -> bytes | None:
        if self._clock.now < self._until:
            raise self._error
        return super().value(key)

    def add(self, key: str, value: int) -> int:
        sum = super().add(key, value)
        self._fail_at(key)
        return sum

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, value)
        self._fail_at(key)

    def _fail_at(self, key: str) -> None:
        if key in self.unanswered:
            self.unanswered.remove(key)
            raise self._error


def arrive_and_wait(queue: JoinQueue) -> None:
    ask = Patient(60.0)
    queue.wait("me", queue.come(Member("me", ADDRESS), ask), 5.0, ask)


def test_a_waiting_process_outlasts_a_store_that_is_out_of_reach(clock: Clock) -> None:
    me, view, ask = Member("me", ADDRESS), View(1, (Member("me", ADDRESS),)), Patient(60.0)
    queue = JoinQueue(Failing(clock, clock.now + 50, ConnectionError("refused")))
    number = queue.come(me, ask)
    queue.invite([me], view)
    assert queue.wait("me", number, 5.0, ask) == view


def test_the_silence_of_members_counts_only_while_the_store_answers(clock: Clock) -> None:
    began = clock.now
    store = Failing(clock, began + 50, ConnectionError("refused"))
    with pytest.raises(CollectiveTimeout, match="no member has looked who waits to be let in for 5 s"):
        arrive_and_wait(JoinQueue(store))
    assert began + 55 < clock.now < began + 57


@pytest.mark.parametrize(
    ("error", "says", "seconds"),
    [
        (ConnectionError("etcd: refused"), "has been out of reach for 60 s while .*: etcd: refused", 60.0),
        (RuntimeError("of some store"), "has been out of reach for 60 s while .*: of some store", 60.0),
        (dist.DistNetworkError("Broken pipe"), "has closed the connection while .*: Broken pipe", 0.0),
    ],
)
def test_a_waiting_process_says_why_it_gives_up(clock: Clock, error: Exception, says: str, seconds: float) -> None:
    began = clock.now
    store = Failing(clock, float("inf"), error)
    with pytest.raises(SystemFailure, match="start: the store " + says):
        arrive_and_wait(JoinQueue(store))
    assert began + seconds <= clock.now < began + seconds + 2


def test_a_waiting_process_whose_requests_were_not_answered_waits_once(clock: Clock) -> None:
    store, me = Failing(clock, 0.0, ConnectionError("no answer")), Member("me", ADDRESS)
    store.unanswered = ["waiting", "joiner/2"]
    assert JoinQueue(store).come(me, Patient(1.0)) == 2
    assert JoinQueue(store).waiting(()) == (me,)
    store.set("joiner/1", json.dumps(["me", ADDRESS]))  # a request that the store has carried out late
    assert JoinQueue(store).waiting(()) == (me,)


class Blocking(JoinQueue):
    """A queue whose store answers while `answers` is set."""

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


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ringreduce _look_out"]


def test_a_join_watcher_never_waits_for_the_store() -> None:
    queue = Blocking()
    queue.answers.clear()
    watcher = JoinWatcher(queue, ["a"])
    began = time.monotonic()
    assert watcher.found() == () and time.monotonic() < began + 1
    until(lambda: queue.looks == 1)
    me = Member("me", ADDRESS)
    queue.found = (me,)
    queue.answers.set()
    until(lambda: watcher.found() == (me,))
    queue.answers.clear()
    assert watcher.found() == (me,)  # this may still be true
    until(lambda: watcher.found() == (), seconds=SILENT + 30)  # nobody could tell this process that it is let in
    queue.answers.set()
    until(lambda: watcher.found() == (me,))
    watcher.pass_over(["me"])
    assert watcher.found() == ()
    watcher.stop()
    until(lambda: not watchers())


def test_a_join_watcher_looks_while_it_is_asked() -> None:
    queue = Blocking()
    held = [JoinWatcher(queue, [])]
    time.sleep(3 * LOOK_FOR_JOINERS)
    assert not watchers() and not queue.looks
    until(lambda: held[0].found() or queue.looks > 5)
    held[0]._seen.asked -= 1000  # nobody has asked for long
    until(lambda: held[0]._seen.pauses_long)
    looks = queue.looks
    time.sleep(5 * LOOK_FOR_JOINERS)
    assert queue.looks == looks
    until(lambda: held[0].found() or queue.looks > looks + 1)
    assert [thread.daemon for thread in watchers()] == [True]
    held.clear()
    gc.collect()
    until(lambda: not watchers())


class Unreachable(JoinQueue):
    """A queue whose looks fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Counting())
        self.looks, self._error = 0, error

    def waiting(self, but: Container[str]) -> tuple[Member, ...]:
        self.looks += 1
        raise self._error


def test_a_join_watcher_whose_store_has_died_looks_no_more() -> None:
    queue = Unreachable(dist.DistNetworkError("Connection reset by peer"))
    watcher = JoinWatcher(queue, [])
    assert watcher.found() == ()
    until(lambda: queue.looks and not watchers())
    assert queue.looks == 1 and watcher.found() == ()


@pytest.mark.parametrize(
    ("error", "least", "most"),
    [(RuntimeError("torch prints a page"), 2, 8), (ConnectionError("etcd is away"), 10, 200)],
)
def test_a_join_watcher_looks_less_often_at_a_store_that_prints(
    monkeypatch: pytest.MonkeyPatch, error: Exception, least: int, most: int
) -> None:
    monkeypatch.setattr(join_queue, "AFTER_FAILURE", 0.01)
    queue = Unreachable(error)
    watcher = JoinWatcher(queue, [])
    watcher.found()
    time.sleep(1.0)
    assert least <= queue.looks <= most
    watcher.stop()
    until(lambda: not watchers())
