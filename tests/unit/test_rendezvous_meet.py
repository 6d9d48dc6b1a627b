"""How ranks meet on one host, on several, and where the kernel or the user says that they are not on one.

Ranks are threads, and hosts are what RINGREDUCE_HOST_ID says.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringreduce.elastic import watch
from ringreduce.errors import (
    CollectiveTimeout,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
    TopologyError,
)
from ringreduce.membership.directory import Bounded
from ringreduce.membership.protocol import Member, View
from ringreduce.rendezvous import host
from ringreduce.rendezvous.card import Place, Prepared, Ready
from ringreduce.rendezvous.host import Meeting, meet
from ringreduce.rendezvous.links import Peer
from ringreduce.rendezvous.store import Exchange, has_ended, identity, open_process

PAGE = 4096


def meet_all(places: list[Place], store: Any = None, timeout: float = 30.0, **other: Any) -> list[Any]:
    """What each rank brings home, or its error."""
    store = HashStore() if store is None else store
    size = len(places)

    def decide(cores: list[frozenset[int]], near: bool, hosts: list[list[int]], labels: list[str]) -> str:
        assert len(cores) == size and not near
        return f"{hosts}"

    def one(rank: int) -> Meeting | RingReduceError:
        try:
            given = {"config": "", "segment_bytes": lambda decision: PAGE * len(decision)} | other
            of_rank = ("config", "arena", "prepared")
            given = {key: value(rank) if key in of_rank and callable(value) else value for key, value in given.items()}
            return meet(store, rank, size, timeout=timeout, decide=decide, place=places[rank], **given)
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


def on_hosts(ids: str, **other: str) -> list[Place]:
    return [Place(host_id=host, **other) for host in ids]


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
@pytest.mark.parametrize("place", [Place(), Place("shared_memory"), Place(host_id="same")], ids=str)
def test_one_host_opens_no_door(size: int, place: Place) -> None:
    meetings = meet_all([place] * size)
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


def prepare(places: list[Place], config: str = "", listens: str = "") -> Callable[[int], Prepared]:
    """The cards of all ranks, as they come by a store; by `listens`, those with "-" do not listen for other hosts."""
    own = [Ready(place, config, listens=listens[r : r + 1] != "-") for r, place in enumerate(places)]
    cards = [json.loads(json.dumps(ready.card)) for ready in own]
    return lambda rank: Prepared(own[rank], cards)


@pytest.mark.parametrize("ids", ["AAAA", "AABB", "ABCCA"])
def test_ranks_that_have_each_others_cards_tell_a_store_nothing(ids: str) -> None:
    places, store = on_hosts(ids), HashStore()
    meetings = meet_all(places, store, prepared=prepare(places))
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
    places, store = on_hosts("AB"), HashStore()
    meetings = meet_all(places, store, prepared=prepare(places, listens="+-"))
    assert store.num_keys() > 0 and meetings[0].doors == meetings[1].doors
    for fds in link_all(meetings).values():
        for fd in fds:
            os.close(fd)
    close(meetings)


def test_one_of_those_whose_cards_are_known_is_gone() -> None:
    places = on_hosts("AAB")
    ready = prepare(places)
    ready(1).ready.close()
    errors = meet_all(places, prepared=lambda rank: None if rank == 1 else ready(rank), timeout=1)
    assert isinstance(errors[0], SystemFailure) and errors[0].culprit == 1 and "joining rank 1" in str(errors[0])
    close([errors[2]])


def test_tcp_takes_each_rank_for_a_host() -> None:
    meetings = meet_all([Place("tcp", host_id="same")] * 3)
    assert [meeting.hosts for meeting in meetings] == [[[0], [1], [2]]] * 3
    assert len({inode(meeting.memfd) for meeting in meetings}) == 3
    close(meetings)


def test_hosts_are_told_apart_by_kernel_and_network_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "always-the-same")
    meetings = meet_all([Place(), Place(), Place(host_id="elsewhere")])
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
    errors = meet_all([Place(host_id="A"), Place(host_id="B", interfaces="wlan7")], timeout=1)
    assert isinstance(errors[1], InvalidArgument)
    assert "RINGREDUCE_SOCKET_IFNAME='wlan7' leaves no interface; there are" in str(errors[1])
    assert isinstance(errors[0], PeerLost) and errors[0].culprit == 1 and str(errors[1]) in str(errors[0])


def test_secret_files(tmp_path: Path) -> None:
    for name, text in (("one", "1" * 32), ("other", "2" * 32)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    without = meet_all(on_hosts("AB"))
    same = meet_all(on_hosts("AB", secret_file=str(tmp_path / "one")))
    different = meet_all([Place(host_id=name, secret_file=str(tmp_path / name)) for name in ("one", "other")])
    assert same[0].secret == same[1].secret != without[0].secret
    assert different[0].secret != different[1].secret
    with pytest.raises(SystemFailure, match="different secrets"):
        link_all(different, seconds=1.0)
    close(without + same + different)


def test_a_secret_file_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "open").write_text("1" * 32)
    (tmp_path / "open").chmod(0o644)
    for error in meet_all([Place(secret_file=str(tmp_path / "open"))] * 2, timeout=1):  # also on one host
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
        meet(HashStore(), rank, 3, lambda _: PAGE, "", 0.2, lambda *_: "", place=Place(host_id=str(rank)))

    with pytest.raises(CollectiveTimeout, match="ranks 1, 2 did not come"):
        alone(0)
    with pytest.raises(CollectiveTimeout, match="rank 0, which waits for all ranks, did not come"):
        alone(2)


def test_what_a_rank_did_before_its_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first, second = (Exchange(store, rank, 2, 20.0) for rank in range(2))
    second.know(0, identity())

    def publishes_and_ends() -> int:
        first.publish("plans", [7])
        return 0

    monkeypatch.setattr(second, "_dead", publishes_and_ends)
    assert second.answer("plans") == [7]
    monkeypatch.setattr(second, "_dead", lambda: 0)
    with pytest.raises(PeerLost, match=r"rank 0 .* died"):
        second.answer("other plans")


def test_different_options() -> None:
    for error in meet_all(on_hosts("AAB"), config=lambda rank: "x" if rank == 2 else "y", timeout=5):
        assert isinstance(error, InvalidArgument) and "rank 0 has y, rank 2 has x" in str(error)


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
            host.receive(ours, 5, 1)
        socket.send_fds(theirs, [b"hello"], [0])
        message, fds = host.receive(ours, 5, 1)
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


def test_a_process_that_has_the_number_of_one_that_has_ended() -> None:
    me = identity()
    earlier = me._replace(began=me.began - 1)
    assert not has_ended(me) and has_ended(earlier)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProcessLookupError, match="another one has its number"):
        open_process(earlier)
    assert os.listdir("/proc/self/fd") == before
    address = json.dumps(earlier._asdict())
    looks = watch.Watch(View(0, (Member("it", address),)), "me", Bounded(HashStore()), 1.0)
    assert looks.ended() == ["it"]
    looks.stop()
