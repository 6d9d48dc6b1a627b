"""How ranks meet on one host, on several, and where the kernel or the user says that they are not on one.

Ranks are threads, and hosts are what RINGREDUCE_HOST_ID says.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import Logged
from torch.distributed import HashStore

from ringreduce.coordination import wait, watch
from ringreduce.coordination.endpoint import Address, Location, PreparedEndpoint
from ringreduce.coordination.process import has_ended, identity, local_network, open_process, own_pidfd
from ringreduce.coordination.protocol import Member, View
from ringreduce.coordination.store import Bounded
from ringreduce.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TopologyError,
)
from ringreduce.groups import arrivals
from ringreduce.groups.arrivals import NOTHING, Beforehand
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.meet import Meeting, meet
from ringreduce.network.listener import Peer
from ringreduce.network.local import receive

PAGE = 4096


def meet_all(locations: list[Location], store: Any = None, timeout: float = 30.0, **other: Any) -> list[Any]:
    """What each rank brings home, or its error."""
    store = HashStore() if store is None else store
    size = len(locations)

    def decide(cores: list[frozenset[int]], near: bool, hosts: list[list[int]], labels: list[str]) -> str:
        assert len(cores) == size and not near
        return f"{hosts}"

    def one(rank: int) -> Meeting | RingReduceError:
        try:
            given = {"config": {}, "segment_bytes": lambda decision: PAGE * len(decision)} | other
            of_rank = ("config", "arena", "prepared")
            given = {key: value(rank) if key in of_rank and callable(value) else value for key, value in given.items()}
            exchange = Exchange(store, rank, size, timeout, before=given.pop("prepared", None) or NOTHING)
            return meet(exchange, decide=decide, location=locations[rank], **given)
        except RingReduceError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def close(meetings: list[Meeting]) -> None:
    for meeting in meetings:
        for fd in (meeting.memfd, *meeting.pidfds, *meeting.arenas):
            if fd >= 0:
                os.close(fd)
        if meeting.door:
            meeting.door.close()


def on_hosts(ids: str, **other: str) -> list[Location]:
    return [Location(host_id=host, **other) for host in ids]


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def link_all(meetings: list[Meeting], seconds: float = 20.0) -> dict[tuple[int, int], list[int]]:
    """Connects every rank with those on other hosts; returns the descriptors of each (rank, peer)."""
    links: dict[tuple[int, int], list[int]] = {}
    for rank, meeting in enumerate(meetings):
        own = next(host for host in meeting.hosts if rank in host)
        peers = {r: Peer(*meeting.names[r], meeting.doors[r]) for r in range(len(meetings)) if r not in own}

        def deliver(peer: int, fd: int, _: str, rank: int = rank) -> None:
            links.setdefault((rank, peer), []).append(fd)

        meeting.door.open(rank, "group", meeting.secret, peers, deliver, connections=2)
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(len(meetings)) as pool:
        list(pool.map(lambda m: m.door.connect(m.door._peers, deadline), meetings))
    return links


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("location", [Location(), Location("shared_memory"), Location(host_id="same")], ids=str)
def test_one_host_opens_no_door(size: int, location: Location) -> None:
    meetings = meet_all([location] * size)
    for rank, meeting in enumerate(meetings):
        assert meeting.hosts == [list(range(size))] and meeting.decision == str(meeting.hosts)
        assert meeting.door is None and meeting.doors == []
        assert meeting.names == [(socket.gethostname(), os.getpid())] * size
        assert [fd < 0 for fd in meeting.pidfds] == [r == rank for r in range(size)]
        assert meeting.cores == os.sched_getaffinity(0) and meeting.threads == []
        assert inode(meeting.memfd) == inode(meetings[0].memfd)
        assert os.fstat(meeting.memfd).st_size == PAGE * len(meeting.decision)
    assert len({meeting.secret for meeting in meetings}) == 1
    close(meetings)


@pytest.mark.parametrize(
    ("ids", "hosts"),
    [
        ("AABB", [[0, 1], [2, 3]]),
        ("ABAB", [[0, 2], [1, 3]]),
        ("BAAA", [[0], [1, 2, 3]]),
        ("ABCCA", [[0, 4], [1], [2, 3]]),
    ],
)
def test_several_hosts(ids: str, hosts: list[list[int]]) -> None:
    meetings = meet_all(on_hosts(ids))
    size = len(ids)
    for rank, meeting in enumerate(meetings):
        assert meeting.hosts == hosts and meeting.decision == str(hosts)
        here = next(host for host in hosts if rank in host)
        assert [fd >= 0 for fd in meeting.pidfds] == [r in here and r != rank for r in range(size)]
        assert [inode(other.memfd) == inode(meeting.memfd) for other in meetings] == [r in here for r in range(size)]
        assert os.fstat(meeting.memfd).st_size == PAGE * len(meeting.decision)  # room for all, on each
        assert meeting.door.addresses == meeting.doors[rank] and meeting.doors == meetings[0].doors
        assert meeting.secret == meetings[0].secret and len(meeting.secret) == 32
    links = link_all(meetings)
    expected = {(a, b) for a in range(size) for b in range(size) if ids[a] != ids[b]}
    assert links.keys() == expected and {len(fds) % 2 for fds in links.values()} == {0}
    for fds in links.values():
        for fd in fds:
            os.close(fd)
    close(meetings)


def prepare(locations: list[Location], listens: str = "") -> Callable[[int], Beforehand]:
    """All ranks' endpoints, as they come by a store; by `listens`, those with "-" do not listen for other hosts."""
    own = [PreparedEndpoint(location, {}, listens=listens[r : r + 1] != "-") for r, location in enumerate(locations)]
    endpoints = [json.loads(json.dumps(ready.endpoint)) for ready in own]
    return lambda rank: Beforehand(own[rank], endpoints)


@pytest.mark.parametrize("ids", ["AAAA", "AABB", "ABCCA"])
def test_ranks_that_have_each_others_cards_tell_a_store_nothing(ids: str) -> None:
    locations, store = on_hosts(ids), HashStore()
    meetings = meet_all(locations, store, prepared=prepare(locations))
    assert store.num_keys() == 0
    hosts = [[r for r, name in enumerate(ids) if name == host] for host in dict.fromkeys(ids)]
    assert all((each.hosts, each.secret) == (hosts, meetings[0].secret) for each in meetings)
    if len(hosts) > 1:
        for fds in link_all(meetings).values():
            for fd in fds:
                os.close(fd)
    close(meetings)


def test_a_card_without_a_door() -> None:
    """Where no port was free, say: then all tell the store where they listen."""
    locations, store = on_hosts("AB"), HashStore()
    meetings = meet_all(locations, store, prepared=prepare(locations, listens="+-"))
    assert store.num_keys() > 0 and meetings[0].doors == meetings[1].doors
    for fds in link_all(meetings).values():
        for fd in fds:
            os.close(fd)
    close(meetings)


def test_one_of_those_whose_endpoints_are_known_is_gone() -> None:
    locations = on_hosts("AAB")
    ready = prepare(locations)
    ready(1).prepared.close()
    errors = meet_all(locations, prepared=lambda rank: None if rank == 1 else ready(rank), timeout=1)
    assert isinstance(errors[0], SystemFailure) and errors[0].culprit == 1 and "joining rank 1" in str(errors[0])
    close([errors[2]])


def test_tcp_takes_each_rank_for_a_host() -> None:
    meetings = meet_all([Location("tcp", host_id="same")] * 3)
    assert [meeting.hosts for meeting in meetings] == [[[0], [1], [2]]] * 3
    assert len({inode(meeting.memfd) for meeting in meetings}) == 3
    close(meetings)


def test_hosts_are_told_apart_by_kernel_and_network_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "always-the-same")
    meetings = meet_all([Location(), Location(), Location(host_id="elsewhere")])
    assert meetings[0].hosts == [[0, 1], [2]]
    close(meetings)


def test_shared_memory_needs_one_host() -> None:
    for error in meet_all(on_hosts("AAB", transport="shared_memory"), timeout=5):
        assert isinstance(error, TopologyError) and error.culprit == 2
        assert "rank 2" in str(error) and "cannot share memory" in str(error) and "transport='auto'" in str(error)


def test_again_under_the_same_store() -> None:
    store = HashStore()
    first, second = meet_all(on_hosts("AB"), store), meet_all(on_hosts("AABB")[:2], store)
    assert first[0].hosts == [[0], [1]] and second[0].hosts == [[0, 1]]
    assert first[0].secret != second[0].secret
    close(first + second)


def test_the_interfaces_that_are_named() -> None:
    meetings = meet_all(on_hosts("AB", interfaces="127.0.0.0/8"))
    assert [[(a.interface, a.address) for a in door] for door in meetings[0].doors] == [[("lo", "127.0.0.1/8")]] * 2
    for fds in link_all(meetings).values():
        for fd in fds:
            os.close(fd)
    close(meetings)


def test_no_interface_fits() -> None:
    errors = meet_all([Location(host_id="A"), Location(host_id="B", interfaces="wlan7")], timeout=1)
    assert isinstance(errors[1], InvalidArgument)
    assert "RINGREDUCE_SOCKET_IFNAME='wlan7' leaves no interface; there are" in str(errors[1])
    assert isinstance(errors[0], PeerLost) and errors[0].culprit == 1 and str(errors[1]) in str(errors[0])


def test_secret_files(tmp_path: Path) -> None:
    for name, text in (("one", "1" * 32), ("other", "2" * 32)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    without = meet_all(on_hosts("AB"))
    same = meet_all(on_hosts("AB", secret_file=str(tmp_path / "one")))
    different = meet_all([Location(host_id=name, secret_file=str(tmp_path / name)) for name in ("one", "other")])
    assert same[0].secret == same[1].secret != without[0].secret
    assert different[0].secret != different[1].secret
    with pytest.raises(SystemFailure, match="different secrets"):
        link_all(different, seconds=1.0)
    close(without + same + different)


def test_a_secret_file_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "open").write_text("1" * 32)
    (tmp_path / "open").chmod(0o644)
    for error in meet_all([Location(secret_file=str(tmp_path / "open"))] * 2, timeout=1):  # also on one host
        assert isinstance(error, InvalidArgument) and "chmod 600" in str(error)


def test_the_same_host_id_on_hosts_that_are_not_one() -> None:
    """Rank 1 cannot reach rank 0's socket, as if that were on another machine."""

    class Elsewhere:
        def __init__(self) -> None:
            self._store = HashStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def get(self, key: str) -> bytes:
            text = self._store.get(key)
            return text.replace(b'"socket": ["00', b'"socket": ["00ff00ff') if key.endswith("who/1") else text

        multi_get = None

    errors = meet_all(on_hosts("AA"), Elsewhere(), timeout=1)
    assert isinstance(errors[0], SystemFailure) and errors[0].culprit == 1
    for part in ("joining rank 1", "should be on this host", "RINGREDUCE_HOST_ID", "refused"):
        assert part in str(errors[0])
    assert isinstance(errors[1], PeerLost) and str(errors[0]) in str(errors[1])


def test_ranks_that_do_not_come_are_named() -> None:
    def alone(rank: int) -> None:
        exchange = Exchange(HashStore(), rank, 3, 0.2)
        meet(exchange, lambda _: PAGE, {}, lambda *_: "", location=Location(host_id=str(rank)))

    with pytest.raises(CollectiveTimeout, match="ranks 1, 2 did not come"):
        alone(0)
    with pytest.raises(CollectiveTimeout, match="rank 0, which waits for all ranks, did not come"):
        alone(2)


def test_what_a_rank_did_before_its_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = (Exchange(store, rank, 2, 20.0) for rank in range(2))
    second.know(0, identity())

    death = PeerLost("rank 0 died", 0)

    def publishes_and_ends() -> PeerLost:
        first.publish("plans", [7])
        return death

    monkeypatch.setattr(second, "death", publishes_and_ends)
    assert second.answer("plans") == [7]
    monkeypatch.setattr(second, "death", lambda: death)
    with pytest.raises(PeerLost, match="rank 0 died"):
        second.answer("other plans")


def test_different_options() -> None:
    def config(rank: int) -> dict[str, Any]:
        return {"slices": 3, "wire_dtype": "int8" if rank == 2 else "float32"}

    for error in meet_all(on_hosts("AAB"), config=config, timeout=5):
        me = f"({socket.gethostname()}, pid {os.getpid()})"
        assert isinstance(error, InvalidArgument) and "slices" not in str(error)
        assert f"rank 0 {me} has wire_dtype='float32'; rank 2 {me} has wire_dtype='int8'" in str(error)


def test_descriptors_are_closed_in_programs_that_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment they arrive: another thread may start one at any time."""
    received: list[bool] = []

    def receive(*arguments: Any) -> Any:
        answer = recvmsg(*arguments)
        received.extend(os.get_inheritable(fd) for _, _, data in answer[1] for fd in array.array("i", data))
        return answer

    recvmsg = socket.socket.recvmsg
    monkeypatch.setattr(socket.socket, "recvmsg", receive)
    close(meet_all(on_hosts("aaa")))
    assert len(received) == 2 + 2 * (1 + 1 + 3) and not any(received)


def test_a_message_with_more_descriptors_than_asked_for_is_a_strangers() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = open_files()
        socket.send_fds(theirs, [b"hello"], [0, 1])
        with pytest.raises(ConnectionError, match="more than 1 descriptors"):
            receive(ours, 5, 1)
        socket.send_fds(theirs, [b"hello"], [0])
        message, fds = receive(ours, 5, 1)
        assert (message, len(fds)) == (b"hello", 1)
        os.close(fds[0])
        assert open_files() == before


def test_no_rank_can_cut_the_memory_of_others() -> None:
    meetings = meet_all(on_hosts("aa"))
    try:
        for size in (0, PAGE, 2**40):
            with pytest.raises(PermissionError):
                os.ftruncate(meetings[1].memfd, size)
    finally:
        close(meetings)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("refusals", [0, 5])
def test_arenas_are_handed_to_the_ranks_of_the_host(refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where so many descriptors are on their way that the kernel refuses more for a while."""
    send, refused = socket.send_fds, []

    def send_fds(*given: Any) -> int:
        if len(refused) < refusals:
            refused.append(1)
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send(*given)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    arenas = [os.memfd_create("arena"), -1, *(os.memfd_create("arena") for _ in range(3))]
    before = open_files()
    meetings = meet_all(on_hosts("aaabb"), arena=lambda rank: arenas[rank])
    for rank, meeting in enumerate(meetings):
        for peer, found in enumerate(meeting.arenas):
            wanted = peer != rank and peer != 1 and (peer < 3) == (rank < 3)
            assert (found >= 0) == wanted and (not wanted or inode(found) == inode(arenas[peer]))
            assert not wanted or found not in arenas
    close(meetings)
    assert len(refused) == refusals and open_files() == before
    for fd in arenas:
        if fd >= 0:
            os.close(fd)


WITHOUT_MAIN_THREAD = """
import ctypes, os, threading, time

def work():
    while os.path.exists("/proc/self/ns/net"):
        time.sleep(0.01)
    from ringreduce.coordination.process import identity, has_ended, local_network
    print(local_network(), has_ended(identity()), flush=True)
    os._exit(0)

threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_is_where_it_was() -> None:
    """As of a host program that embeds Python."""
    command = [sys.executable, "-c", WITHOUT_MAIN_THREAD]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{local_network()} False\n"


def test_a_process_that_has_the_number_of_one_that_has_ended() -> None:
    me = identity()
    earlier = me._replace(began=me.began - 1)
    assert not has_ended(me) and has_ended(earlier)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProcessLookupError, match="another one has its number"):
        open_process(earlier)
    assert os.listdir("/proc/self/fd") == before
    assert not has_ended(earlier._replace(clock="another time namespace's"))  # which reads another beginning
    assert not has_ended(me._replace(began=0))  # its kernel, or whoever hid /proc from it then, told it nothing
    address = Address(earlier, None, None, {}).dump()
    looks = watch.Watch(View(0, (Member("it", address),)), "me", Bounded(HashStore()), 1.0)
    assert looks.ended() == ["it"]
    looks.stop()


RANK_0_ARRIVES = "ringreduce//arrival/0"
"""The key under which rank 0 of the default group says that it is here."""


def attempt(store: Any, rank: int, size: int, timeout: float = 20.0, **other: Any) -> Meeting:
    exchange = Exchange(store, rank, size, timeout, **other)
    return meet(exchange, lambda _: PAGE, {}, lambda *_: "", location=Location())


def both(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, all at once."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RingReduceError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_rank_that_has_tried_more_often_than_the_others(more: int) -> None:
    store = HashStore()
    for _ in range(2):
        with pytest.raises(CollectiveTimeout):
            attempt(store, more, 3, timeout=0.1)
    left = store.get(RANK_0_ARRIVES) if more == 0 else b""

    def comes(rank: int) -> Meeting:
        while rank and more == 0 and store.get(RANK_0_ARRIVES) == left:  # else it hears of that attempt
            time.sleep(0.001)
        return attempt(store, rank, 3)

    for found in both(*(lambda rank=rank: comes(rank) for rank in range(3))):  # type: ignore[misc]
        if isinstance(found, Meeting):
            close([found])
        else:  # the others hear once of the rank that gave up
            assert more != 0 and isinstance(found, CollectiveTimeout), found
    meetings = both(*(lambda rank=rank: attempt(store, rank, 3) for rank in range(3)))  # type: ignore[misc]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


@pytest.mark.parametrize("gave_up", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_process_left_that_ended_before_this_one_began(
    rank: int, gave_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart by a launcher that keeps its store."""
    store = HashStore()
    earlier = Exchange(store, rank, 2, 20.0)
    ended = identity()._replace(began=identity().began - 1)
    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "identity", lambda: ended)
        earlier.arrive({"who": ended})
        if gave_up:
            earlier.give_up(SystemFailure("no memory"))
    with pytest.raises(PeerLost, match=f"rank {rank} .*({'no memory' if gave_up else 'died'})"):
        attempt(store, 1 - rank, 2)  # this process is older than the arrival: so it is of this attempt
    earlier = Exchange(store, rank, 2, 20.0)
    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "identity", lambda: ended)
        earlier.arrive({"who": ended})
        if gave_up:
            earlier.give_up(SystemFailure("no memory"))
    now = time.time()
    monkeypatch.setattr(arrivals, "process_began", lambda: now)
    meetings = both(lambda: attempt(store, 1 - rank, 2), lambda: time.sleep(0.3) or attempt(store, rank, 2))  # type: ignore[func-returns-value]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


def test_a_rank_of_an_attempt_on_another_host_that_nobody_sees_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 answers it, and answers again when the rank 0 of this attempt comes."""
    store = HashStore()
    elsewhere = identity()._replace(pids="another machine's")
    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "identity", lambda: elsewhere)
        Exchange(store, 0, 2, 20.0).arrive({"who": elsewhere})
    meetings = both(lambda: attempt(store, 1, 2), lambda: time.sleep(0.3) or attempt(store, 0, 2))  # type: ignore[func-returns-value]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


def test_rank_0_ignores_arrivals_of_the_group_that_it_made_before() -> None:
    """The process of rank 1 has ended since, and rank 0 waits for the one that takes its place."""
    store = HashStore()
    close(both(lambda: attempt(store, 0, 2), lambda: attempt(store, 1, 2)))
    ended = identity()._replace(began=identity().began - 1)
    key = Exchange(store, 1, 2, 20.0)._arrival_key(1)
    name, _, *rest = json.loads(store.get(key))
    store.set(key, json.dumps([name, ended, *rest]))
    meetings = both(lambda: attempt(store, 0, 2), lambda: time.sleep(0.6) or attempt(store, 1, 2))  # type: ignore[func-returns-value]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


def test_subgroups_that_are_made_leave_nothing_in_memory() -> None:
    store, before = HashStore(), len(arrivals.over)
    for _ in range(3):
        close(both(*(lambda rank=rank: attempt(store, rank, 2, within="whole") for rank in range(2))))  # type: ignore[misc]
    assert len(arrivals.over) == before


def test_attempts_that_are_over_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may make its default group any number of times. The latest attempts are remembered."""
    monkeypatch.setattr(arrivals, "MOST_OVER", 8)
    store = HashStore()
    for _ in range(6):
        close(both(lambda: attempt(store, 0, 2), lambda: attempt(store, 1, 2)))
    first, second = (json.loads(store.get(Exchange(store, rank, 2, 20.0)._arrival_key(rank)))[0] for rank in range(2))
    assert len(arrivals.over) <= 8 and {(0, first), (0, second), (1, first)} <= arrivals.over.keys()


def test_a_subgroup_that_is_made_again_after_a_failure() -> None:
    """Under the same keys, as `new_group` with local synchronization makes it."""
    store = HashStore()
    with pytest.raises(CollectiveTimeout):
        attempt(store, 0, 3, timeout=0.1, within="whole")
    failures = both(*(lambda rank=rank: attempt(store, rank, 3, 0.5, within="whole") for rank in (1, 2)))  # type: ignore[misc]
    assert all(isinstance(failure, CollectiveTimeout) for failure in failures), failures
    meetings = both(*(lambda rank=rank: attempt(store, rank, 3, within="whole") for rank in range(3)))  # type: ignore[misc]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_rank_that_fails_before_it_meets_the_others(fails: int) -> None:
    """The timeout is longer than a test may take."""
    store = HashStore()

    def one(rank: int) -> Meeting:
        exchange = Exchange(store, rank, 3, 300.0)
        if rank == fails:
            error = InvalidArgument("slices in RINGREDUCE_ENGINE is 'many'")
            exchange.give_up(error)
            raise error
        return meet(exchange, lambda _: PAGE, {}, lambda *_: "", location=Location())

    errors = both(*(lambda rank=rank: one(rank) for rank in range(3)))  # type: ignore[misc]
    for rank, error in enumerate(errors):
        assert isinstance(error, InvalidArgument if rank == fails else PeerLost)
        assert "slices in RINGREDUCE_ENGINE is 'many'" in str(error) and (rank == fails or error.culprit == fails)
    meetings = both(*(lambda rank=rank: attempt(store, rank, 3) for rank in range(3)))  # type: ignore[misc]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    close(meetings)


def test_ranks_that_want_groups_of_other_ranks() -> None:
    """Under one name, as torch gives it: each gets what it asked for, or an error that names both lists."""
    store = HashStore()

    def one(rank: int, wanted: list[int]) -> Any:
        return attempt(store, wanted.index(rank), len(wanted), ranks=wanted, within="the world")

    meetings = both(*(lambda r=r: one(r, [0, 1] if r < 2 else [2, 3]) for r in range(4)))  # type: ignore[misc]
    inodes = [inode(meeting.memfd) for meeting in meetings]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    close(meetings)
    store = HashStore()
    lists = {0: [0, 3], 3: [0, 1, 3]}
    for error in both(*(lambda r=r: one(r, lists[r]) for r in lists)):  # type: ignore[misc]
        assert isinstance(error, CollectiveMismatch) and "[0, 3]" in str(error) and "[0, 1, 3]" in str(error)
        assert f"rank 3 (rank {1 if error.culprit == 1 else 2} of the group, " in str(error)


def test_who_waits_logs_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "WARN_AFTER", 0.3)
    logged, store = Logged(), HashStore()
    exchanges = [Exchange(store, rank, 4, 2.5, ranks=[1, 3, 5, 7]) for rank in range(2)]
    errors = both(*(lambda e=e: meet(e, lambda _: PAGE, {}, lambda *_: "") for e in exchanges))  # type: ignore[misc]
    assert all(isinstance(error, CollectiveTimeout) for error in errors), errors
    assert "ranks 5, 7 (ranks 2, 3 of the group) did not come in time" in str(errors[0])
    process = f"{socket.gethostname()}, pid {os.getpid()}"
    for rank in range(2):
        mine = [
            text for text in logged.messages if f"rank {2 * rank + 1} (rank {rank} of the group, {process})" in text
        ]
        assert 1 <= len(mine) <= 4  # after 0.3, 0.6, 1.2 and 2.4 s
        assert all("for ranks 5, 7 (ranks 2, 3 of the group)" in text for text in mine)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSYS, "needs Linux 5.3"),
        (errno.EPERM, "seccomp"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "file-max"),
    ],
)
def test_a_pidfd_that_is_refused_says_the_reason_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refused(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)
    with pytest.raises(SystemFailure, match=os.strerror(number)) as raised:
        own_pidfd()
    assert fix in str(raised.value)
    assert ("Linux 5.3" in str(raised.value)) == (number == errno.ENOSYS)
