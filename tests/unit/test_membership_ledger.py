"""The ledger: values under keys in shared memory, with writers in several processes, some of which die."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ringreduce.coordination.ledger import FREE, Ledger
from ringreduce.coordination.protocol import Member, Report, View, log_key
from ringreduce.coordination.rounds import Membership
from ringreduce.coordination.store import Bounded, Directory, Under, value_of
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.errors import Expelled, SystemFailure
from ringreduce.groups.survivors import Lineage

SIZE = 4 << 20


@contextlib.contextmanager
def memory() -> Iterator[int]:
    memfd = os.memfd_create("ledger")
    try:
        os.ftruncate(memfd, SIZE)
        yield memfd
    finally:
        os.close(memfd)


@pytest.fixture
def memfd() -> Iterator[int]:
    with memory() as fd:
        yield fd


def test_two_mappings_see_the_same(memfd: int) -> None:
    one, other = Ledger(memfd, 0, SIZE), Ledger(memfd, 0, SIZE)
    assert one.get("a") == "" and not other.check(["a"])
    assert one.compare_set("a", "", "1") == "1"
    assert other.compare_set("a", "", "2") == "1"  # too late
    assert other.compare_set("a", "1", "two, with ä and \n") == "two, with ä and \n"
    assert one.get("a") == "two, with ä and \n"
    assert other.append("a", "more") == "two, with ä and \nmore" == one.get("a")
    assert one.append("new", "") == "" and one.append("new", "x") == "x" == other.get("new")
    assert one.compare_set("a", "two, with ä and \nmore", "") == "" and other.append("a", "y") == "y"
    one.set("b", b"\x00\xff")
    assert other.value("b") == b"\x00\xff" and other.check(["a", "b"]) and not other.check(["a", "c"])
    assert [one.add("n", 5), other.add("n", -2)] == [5, 3]


def test_a_writer_that_dies_before_it_publishes_is_not_seen(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = Ledger(memfd, 0, SIZE), Ledger(memfd, 0, SIZE)
    other.set("a", "1")
    monkeypatch.setattr(dying, "_write", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        dying.set("a", "2")
    assert other.get("a") == "1"
    assert other.compare_set("a", "1", "3") == "3" and Ledger(memfd, 0, SIZE).get("a") == "3"


def test_a_writer_that_was_stopped_comes_too_late(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, other = Ledger(memfd, 0, SIZE), Ledger(memfd, 0, SIZE)
    write = stopped._write

    def meanwhile(*record: Any) -> None:
        write(*record)
        other.compare_set("view", "", "theirs")

    monkeypatch.setattr(stopped, "_write", meanwhile)
    assert stopped.compare_set("view", "", "mine") == "theirs" == other.get("view")


def test_a_full_ledger_says_so(memfd: int) -> None:
    ledger = Ledger(memfd, 0, SIZE)
    with pytest.raises(SystemFailure, match=f"{SIZE} bytes is full"):
        for number in range(100):
            ledger.set("a", str(number) * (SIZE // 20))
    assert ledger.get("a")[0] in "0123456789"  # what was written stays


@pytest.mark.parametrize("newest", [8, SIZE, 2**63])
def test_a_damaged_ledger_says_so(memfd: int, newest: int) -> None:
    ledger = Ledger(memfd, 0, SIZE)
    ledger._newest.compare_set(0, newest)
    with pytest.raises(SystemFailure, match="damaged"):
        ledger.get("a")


ROOM = 256 << 20  # more than six writers can fill in five seconds


def count(memfd: int, seconds: float, seed: int, key: str) -> None:
    """Until the end: adds 1 to "all", and after that to its own key."""
    ledger, end = Ledger(memfd, 0, ROOM), time.monotonic() + seconds
    while time.monotonic() < end:
        ledger.add("all", 1)
        ledger.add(key, 1)
    os._exit(0)


def test_no_addition_is_lost_when_writers_are_killed(memfd: int) -> None:
    """What a killed writer has added to its own key, it has added to the common one before; at most one more."""
    os.ftruncate(memfd, ROOM)
    draw, context = random.Random(1), multiprocessing.get_context("fork")
    killed = 4
    writers = [context.Process(target=count, args=(memfd, 5.0 if n < killed else 0.5, n, f"of {n}")) for n in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers[:killed]:
        time.sleep(draw.uniform(0, 0.08))
        writer.kill()
    for writer in writers:
        writer.join(30)
    ledger = Ledger(memfd, 0, ROOM)
    own = [int(ledger.value(f"of {n}") or 0) for n in range(6)]
    assert sum(own) <= int(ledger.get("all")) <= sum(own) + killed
    assert sum(own) > 0 and all(writer.exitcode == 0 for writer in writers[killed:])
    ledger.set("after", "1")  # goes on
    assert Ledger(memfd, 0, ROOM).get("after") == "1"


# rounds, with members as threads


@pytest.fixture(params=["ledger", "store"])
def directories(request: pytest.FixtureRequest, memfd: int) -> list[Directory]:
    """One for each of four members."""
    if request.param == "store":
        store = dist.HashStore()
        return [Under(Bounded(store), "group/") for _ in range(4)]
    return [Ledger(memfd, 0, SIZE) for _ in range(4)]


def rounds(directories: list[Directory], unit: int = 1) -> list[Membership]:
    first = View(0, tuple(Member(str(number)) for number in range(len(directories))), unit=unit)
    return [Membership(directory, str(number), first) for number, directory in enumerate(directories)]


def leave(members: list[Membership], reports: list[Report], **other: object) -> list[View | Exception]:
    found: dict[int, View | Exception] = {}

    def one(number: int) -> None:
        try:
            found[number] = members[number].leave(reports[number], **other)  # type: ignore[arg-type]
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[number] for number in range(len(members))]


def test_survivors_get_one_view(directories: list[Directory]) -> None:
    members = rounds(directories)
    reports = [Report(step) for step in (4, 5, 4)]
    views = leave(members[:3], reports, lost=lambda: ["3"])
    assert views[0] == views[1] == views[2] == View(1, tuple(map(Member, "012")), 5, ("3",))
    again = leave(members[:2], [Report(5), Report(5)], lost=lambda: ["2"])
    assert again[0] == again[1] == View(2, tuple(map(Member, "01")), 5, ("2",))


def test_who_is_silent_is_given_up_and_finds_out(directories: list[Directory]) -> None:
    members = rounds(directories)
    views = leave(members[1:], [Report(), Report(), Report()], silent_after=0.3)
    assert views == [View(1, tuple(map(Member, "123")), 0, ("0",))] * 3
    for _ in range(2):
        with pytest.raises(Expelled, match=r"without 0 in epoch 1: it had not reported when [123] gave it up; start"):
            members[0].leave(Report(7))


def test_who_is_excluded_is_told_by_whom(directories: list[Directory]) -> None:
    members = rounds(directories, unit=2)
    views = leave(members[2:], [Report(lost=("1",)), Report()])
    assert views == [View(1, tuple(map(Member, "23")), 0, ("0", "1"), unit=2)] * 2
    with pytest.raises(Expelled, match="1 in epoch 1: 2 excluded it, or took its process for dead; start it anew"):
        members[1].leave(Report())
    with pytest.raises(Expelled, match="0 in epoch 1: 2 excluded 1 of its unit, or took its process"):
        members[0].leave(Report())


def test_others_go_on_without_a_member_that_resigns(directories: list[Directory]) -> None:
    """Also if it had reported before, and they have gone on with it."""
    members = rounds(directories)
    directories[3].append(log_key(0), Report().line("3"))
    leave(members[:3], [Report()] * 3)
    members[3].resign(0)
    views = leave(members[:3], [Report()] * 3)
    assert views == [View(2, tuple(map(Member, "012")), 0, ("3",))] * 3


def test_a_member_that_is_expelled_resigns_without_a_word(directories: list[Directory]) -> None:
    """Its step is one that the others may have to do again."""
    members = rounds(directories)
    leave(members[1:], [Report(1)] * 3, silent_after=0.3)
    with pytest.raises(Expelled):
        members[0].leave(Report(2))
    members[0].resign(2)
    views = leave(members[1:], [Report(1)] * 3)
    assert views == [View(2, tuple(map(Member, "123")), 1)] * 3


def test_durable_commits(directories: list[Directory]) -> None:
    members = rounds(directories)
    assert members[0].commit(3) and members[1].commit(3)
    views = leave(members[1:], [Report(2)] * 3, lost=lambda: ["0"])
    assert views == [View(1, tuple(map(Member, "123")), 3, ("0",))] * 3
    assert not members[0].commit(4)  # the others have gone on
    with pytest.raises(Expelled):
        members[0].leave(Report(4))


def test_a_directory_that_is_gone_is_an_error() -> None:
    class Gone:
        def get(self, key: str) -> str:
            raise OSError("Connection reset by peer")

        def compare_set(self, key: str, expected: str, desired: str) -> str:
            raise OSError("Connection reset by peer")

        def append(self, key: str, text: str) -> str:
            raise OSError("Connection reset by peer")

    member = Membership(Gone(), "0", View(0, (Member("0"),)), patience=0.2)
    with pytest.raises(SystemFailure, match=r"out of reach for .* Connection reset"):
        member.leave(Report())


def test_the_words_are_where_the_module_says(memfd: int) -> None:
    ledger = Ledger(memfd, 0, SIZE)
    ledger.set("key", "value")
    assert int.from_bytes(os.pread(memfd, 8, FREE), "little") == 24  # 16 of the record, and its text


def test_a_store_that_does_not_answer() -> None:
    """Requests end in time; others fail at once until it answers; then all is well."""
    store, silent = dist.HashStore(), threading.Event()
    bounded = Bounded(Slow(store, silent), seconds=0.2)
    bounded.set("a", "1")
    assert bounded.get("a") == "1" and bounded.value("b") is None and bounded.check(["a"])
    assert bounded.compare_set("a", "1", "2") == "2" and bounded.add("n", 3) == 3
    silent.set()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="the store has not answered for 0 s"):
        bounded.set("a", "3")
    with pytest.raises(ConnectionError):
        bounded.get("a")
    assert time.monotonic() - began < 5
    silent.clear()
    while True:
        try:
            assert bounded.get("a") == "3"  # the first request was carried out late
            break
        except ConnectionError:
            assert time.monotonic() - began < 60
    with pytest.raises(RuntimeError):
        Bounded(Broken()).check(["a"])


def test_the_thread_of_a_bounded_store_ends_with_it() -> None:
    others = set(threading.enumerate())  # some may belong to stores of other tests, which wait for garbage collection
    bounded = Bounded(dist.HashStore())
    bounded.set("a", "1")
    (thread,) = set(threading.enumerate()) - others
    del bounded
    thread.join(60)
    assert not thread.is_alive()


def stores_of_torch(folder: Path) -> dict[str, Callable[[], dist.Store]]:
    return {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(folder / "store"), 1),
    }


@pytest.mark.parametrize("kind", ["tcp", "hash", "file", "ledger"])
def test_a_look_at_a_store_of_torch_changes_nothing(kind: str, tmp_path: Path, memfd: int) -> None:
    stores = {**stores_of_torch(tmp_path), "ledger": lambda: KeyStore(Ledger(memfd, 0, SIZE), "of a group/")}
    inner = stores[kind]()  # torch keeps the half of it that is in C++
    store = dist.PrefixStore("job", inner)
    for look in (functools.partial(value_of, store), Bounded(store).value):
        assert look("missing") is None and not store.check(["missing"])
        store.set("empty", "")
        store.set("there", "x")
        assert (look("empty"), look("there")) == (b"", b"x")
        assert (bytes(store.get("empty")), bytes(store.get("there"))) == (b"", b"x")


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_what_is_appended_to_a_store_of_torch(kind: str, tmp_path: Path) -> None:
    store = dist.PrefixStore("job", inner := stores_of_torch(tmp_path)[kind]())
    one, other = Bounded(store), Under(Bounded(store), "group/")
    assert one.append("group/log", "a\n") == "a\n" and other.append("log", "b\n") == "a\nb\n"
    assert one.append("group/log", "c\n") == "a\nb\nc\n" == other.get("log")
    del inner


class Slow:
    """A store that answers nothing while `silent` is set."""

    def __init__(self, store: dist.Store, silent: threading.Event) -> None:
        self._store, self._silent = store, silent

    def __getattr__(self, name: str) -> object:
        while self._silent.is_set():
            time.sleep(0.01)
        return getattr(self._store, name)


def test_survivors_do_not_wait_for_a_store_that_answers_nothing() -> None:
    silent = threading.Event()
    membership = Lineage(0, [("host", 1)], Slow(dist.HashStore(), silent), "group", "attempt", [0]).membership  # type: ignore[arg-type]
    membership.patience, membership.directory._directory._seconds = 0.3, 0.2  # type: ignore[attr-defined]
    silent.set()
    with pytest.raises(SystemFailure, match="its directory has been out of reach"):
        membership.leave(Report())
    silent.clear()


class Broken:
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")
