"""The ledger: values under keys in shared memory, with writers in several processes, some of which die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ringreduce.errors import Expelled, SystemFailure
from ringreduce.membership.directory import Directory, OfStore
from ringreduce.membership.ledger import FREE, Ledger
from ringreduce.membership.protocol import Member, Report, View
from ringreduce.membership.rounds import Membership

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
    one.set("b", b"\x00\xff")
    assert other.value("b") == b"\x00\xff" and other.check(["a", "b"]) and not other.check(["a", "c"])
    assert [one.add("n", 5), other.add("n", -2)] == [5, 3]
    assert other.names() == ["a", "b", "n"]


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

    def meanwhile(at: int, key: str, value: bytes) -> None:
        write(at, key, value)
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
        return [OfStore(store, "group") for _ in range(4)]
    return [Ledger(memfd, 0, SIZE) for _ in range(4)]


def rounds(directories: list[Directory]) -> list[Membership]:
    first = View(0, tuple(Member(str(number)) for number in range(len(directories))))
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
    with pytest.raises(Expelled, match="went on without 0 in epoch 1"):
        members[0].leave(Report(7))


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

    member = Membership(Gone(), "0", View(0, (Member("0"),)), patience=0.2)
    with pytest.raises(SystemFailure, match=r"out of reach for .* Connection reset"):
        member.leave(Report())


def test_the_words_are_where_the_module_says(memfd: int) -> None:
    ledger = Ledger(memfd, 0, SIZE)
    ledger.set("key", "value")
    assert int.from_bytes(os.pread(memfd, 8, FREE), "little") == 24  # 16 of the record, and its text
