"""What every rank sees when one on another host dies, stops, comes late, leaves or calls something else, and when the
network between them fails; what distributed/test_faults.py asks of one host.

Times are bounded from below and above, and each fault has its control: the same program without it goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from bodies import faults
from bodies.collectives import all_reduce
from bodies.faults import error_of
from bodies.lifecycle import in_child, leave_a_child_behind, outlived_by_a_child
from bodies.surface import dead_at_the_barrier
from net.network import Network
from net.ranks import Rank, Ranks, run, until_told
from processes import GROUP_TIMEOUT

import ringreduce
from ringreduce.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    RingReduceError,
    SystemFailure,
)
from ringreduce.groups.lookup import backend_of

NOTICED = 2.0
"""Seconds in which all ranks must know of a death or a mismatch."""
ADDRESS = r"(10\.77\.0\.\d|\[fd77::\d\]):\d+ "
APART = [0] * 5 + [1] * 5
"""So many ranks on two hosts that they have no links to some until these are needed: rank 0 to 9, for one."""


def sends_more_than_fits_a_packet(me: Rank) -> Any:
    with me.join(timeout=20, options=ringreduce.Options(dead_after=2)):
        all_reduce(me, 10, 0)
        _, message, culprit, _ = error_of(lambda: all_reduce(me, 20_000, 1))
        return message, culprit


@pytest.mark.slow
def test_packets_that_a_switch_drops_for_their_size_are_named() -> None:
    """The hosts' interfaces take 9000 bytes, and the switch 1500."""
    with Network(hosts=2) as network:
        for host in range(2):
            line = "ip link set eth0 mtu 9000 gso_max_segs 1"
            assert network.popen(host, line.split()).wait() == 0
        found = run(network, [0, 1], sends_more_than_fits_a_packet)
        assert [culprit for _, culprit in found] == [1, 0]
        assert all("Connection timed out" in message for message, _ in found)
        assert any("; only small frames had passed: " in message for message, _ in found), found


# death


@pytest.mark.parametrize(
    "placement, dead",
    (([0, 1], 1), ([0, 1, 2], 0), ([0, 0, 1, 1], 1), ([0, 0, 1, 1], 2), ([0, 1, 0, 1], 3), ([0, 0, 0, 1], 3)),
    ids=str,
)
def test_survivors_of_a_kill_name_the_dead_rank_at_once(network: Network, placement: list[int], dead: int) -> None:
    survivors = [rank for rank in range(len(placement)) if rank != dead]
    with Ranks(network, placement, faults.reduce_in_a_loop, 60.0, 20.0, survivors) as ranks:
        faults.death_is_known(ranks, dead, NOTICED)


def test_without_a_kill_the_loop_goes_on(network: Network) -> None:
    run(network, [0, 0, 1, 2], faults.reduce_in_a_loop, 0.3 + NOTICED, 20.0, [])


def ring_in_a_loop(me: Rank) -> Any:
    with me.join(timeout=20, options=ringreduce.Options(algorithms="all_reduce:ring")):
        neighbors = {link.peer for link in backend_of(None).links()}
        me.report("in the loop")

        def loop() -> None:
            for call in range(10**6):
                all_reduce(me, 30_000, call % 10)

        return neighbors, *error_of(loop)


def test_ranks_without_a_link_to_the_dead_one_hear_of_it() -> None:
    with Network(hosts=8) as network, Ranks(network, 1, ring_in_a_loop) as ranks:
        ranks.reports()
        time.sleep(0.2)
        killed = ranks.signal(4, signal.SIGKILL)
        outcomes = ranks.results(but=[4])
        assert sum(4 in neighbors for neighbors, *_ in outcomes) < 7
        for _, kind, message, culprit, when in outcomes:
            assert (kind, culprit) == (PeerLost, 4)
            assert "rank 4" in message
            assert killed < when < killed + NOTICED


@pytest.mark.parametrize("placement", ([0, 1, 2], [0, 1, 0]), ids=str)
def test_recv_from_a_killed_rank(network: Network, placement: list[int]) -> None:
    with Ranks(network, placement, faults.recv_from_nobody) as ranks:
        faults.death_is_known(ranks, 1, NOTICED)


def test_a_monitored_barrier_names_a_dead_rank(network: Network) -> None:
    with Ranks(network, [0, 1, 2], dead_at_the_barrier) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        assert ranks.results(but=[1]) == [1, 1]


FIRST_CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "reduce": lambda: dist.reduce(torch.ones(10), dst=2),
    "send": lambda: dist.send(torch.ones(10**6), 1),
    "recv": lambda: dist.recv(torch.ones(10), 1),
    "all_to_all": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
}


def call_after_a_death(me: Rank, call: str) -> Any:
    with me.join(timeout=20):
        dist.barrier()
        me.report("here")
        if me.rank == 1:
            signal.pause()
        time.sleep(0.5)
        start = time.monotonic()
        return start, *error_of(FIRST_CALLS[call])


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_call_after_a_rank_has_died(network: Network, call: str) -> None:
    """While nobody waited for it."""
    with Ranks(network, [0, 1, 2], call_after_a_death, call) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        for start, kind, message, culprit, when in ranks.results(but=[1]):
            assert (kind, culprit) == (PeerLost, 1), message
            assert "rank 1" in message
            assert when < start + NOTICED


def test_a_rank_is_dead_though_a_child_of_it_lives(network: Network) -> None:
    with Ranks(network, [0, 1, 2], leave_a_child_behind) as ranks:
        outlived_by_a_child(ranks)


def fork_while_busy(me: Rank) -> None:
    """Children that are forked in the middle of calls hold none of the sockets that this rank holds."""

    def held() -> int:
        ports = {int(path.partition(" -> ")[0].rpartition(":")[2]) for link in links for path in link.paths}
        return sum(connection.laddr.port in ports for connection in psutil.Process().net_connections("tcp"))

    with me.join():
        for call in range(8):
            works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(10)]
            links = backend_of(None).links()
            child = in_child(held)
            assert held() >= len(links) > 0
            assert child() == "0"
            for work in works:
                work.wait()
            all_reduce(me, 1000, call)


def test_forked_children_hold_no_connection(network: Network) -> None:
    run(network, [0, 1, 2], fork_while_busy)


# stopped and late ranks


def test_a_stop_shorter_than_the_timeout_is_no_error(network: Network) -> None:
    with Ranks(network, [0, 1, 1], faults.reduce_in_a_loop, 3.0, 3.0, []) as ranks:
        faults.is_stopped_for_a_second(ranks)


def never_comes(me: Rank) -> Any:
    with me.join(call_timeout=1.5):
        dist.barrier()
        start = time.monotonic()
        outcome = None
        if me.rank != 2:
            outcome = (start, *error_of(lambda: dist.all_reduce(torch.ones(30_000))))
        me.meet("given up")
        return outcome


@pytest.mark.parametrize("placement", ([0, 1, 2], [0, 0, 1], [0, 1, 0]), ids=str)
def test_a_rank_that_never_comes_is_named(network: Network, placement: list[int]) -> None:
    for start, kind, message, culprit, when in run(network, placement, never_comes)[:2]:
        assert (kind, culprit) == (CollectiveTimeout, 2), message
        assert "rank 2" in message
        assert start + 1.3 < when < start + 1.5 + NOTICED


def no_group(me: Rank) -> Any:
    if me.rank == 2:
        me.meet("given up")
        return None
    outcome = time.monotonic(), *error_of(lambda: me.join(timeout=1.5).__enter__())
    me.meet("given up")
    return outcome


def test_a_rank_that_does_not_join_is_named(network: Network) -> None:
    for start, kind, message, _, when in run(network, [0, 1, 2], no_group)[:2]:
        assert kind is CollectiveTimeout
        assert "rank 2" in message or "rank 0" in message  # who waits for all
        assert start + 1.3 < when < start + 1.5 + NOTICED


# mismatches and ends


def test_leaving_out_a_call_is_a_mismatch(network: Network) -> None:
    faults.leaving_out_is_known(run(network, [0, 1, 2], faults.leave_out_a_call))


@pytest.mark.parametrize("placement", ([0, 1, 2], [0, 1, 1]), ids=str)
def test_abort_wakes_all_waiting_ranks(network: Network, placement: list[int]) -> None:
    faults.abort_is_known(run(network, placement, faults.abort_while_waiting), NOTICED)


def leave_early(me: Rank) -> Any:
    # If the others are gone before rank 1, it hears that they made a call that it never made.
    ending = contextlib.suppress(CollectiveMismatch) if me.rank == 1 else contextlib.nullcontext()
    with ending, me.join(timeout=20):
        all_reduce(me, 1000, 0)
        if me.rank == 1:
            return None
        return error_of(lambda: [all_reduce(me, 1000, call) for call in range(100)])


@pytest.mark.parametrize("placement", ([0, 1, 2], [0, 1, 0]), ids=str)
def test_a_rank_that_leaves_is_named(network: Network, placement: list[int]) -> None:
    outcomes = run(network, placement, leave_early)
    for kind, message, culprit, _ in (outcomes[0], outcomes[2]):
        assert (kind, culprit) == (PeerLost, 1)
        assert "left the group" in message


def many_groups(me: Rank) -> tuple[int, int, int]:
    """Descriptors and threads after a few groups, and after many more."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for call in range(30):
        with me.join("again and again"):
            all_reduce(me, 5000, call)
            second = dist.new_group()
            dist.all_reduce(torch.ones(10), group=second)
        me.meet(f"destroyed {call}")
        if call == 9:
            first = held()
    return first, held()


def test_groups_are_destroyed_and_made_again(network: Network) -> None:
    for first, last in run(network, [0, 1, 1], many_groups):
        assert last[0] <= first[0] + 2 and last[1] <= first[1] + 2


# the network


def reduce_large(me: Rank, count: int) -> list[float]:
    with me.join(timeout=20):
        me.report("in the loop")
        return until_told(me, lambda call: all_reduce(me, count, call))


@pytest.mark.parametrize("placement", ([0, 1], [0, 1, 1, 2]), ids=str)
def test_a_call_outlives_an_outage(network: Network, placement: list[int]) -> None:
    with Ranks(network, placement, reduce_large, 200_000) as ranks:
        ranks.reports()
        time.sleep(0.3)
        network.flap(1, 2.0)
        time.sleep(2.5)  # TCP comes again later than the link does
        ranks.tell("enough")
        for took in ranks.results():
            assert max(took) > 1.5  # the outage was in the middle of it
            assert len(took) > 10


def cut_off(me: Rank, dead_after: int, timeout: float, count: int, idle: float) -> Any:
    with me.join(timeout=timeout, options=ringreduce.Options(dead_after=dead_after)):
        dist.barrier()
        me.report("here")
        time.sleep(idle)

        def loop() -> None:
            while True:
                dist.all_reduce(torch.ones(count))

        return error_of(loop)


@pytest.mark.parametrize("placement", ([0, 1], [0, 0, 1, 1]), ids=str)
@pytest.mark.parametrize(
    "dead_after, timeout, count, idle, kinds",
    (
        (2, 20.0, 1_000_000, 0.0, {PeerLost}),
        (2, 20.0, 1, 0.0, {PeerLost}),
        (2, 20.0, 1, 4.0, {PeerLost}),
        (30, 3.0, 1_000_000, 0.0, {CollectiveTimeout}),
    ),
    ids=("large", "small", "idle", "by the timeout"),
)
def test_a_link_that_is_cut_for_good_is_named(
    network: Network,
    dead_after: int,
    timeout: float,
    count: int,
    idle: float,
    kinds: set[type[RingReduceError]],
    placement: list[int],
) -> None:
    with Ranks(network, placement, cut_off, dead_after, timeout, count, idle) as ranks:
        ranks.reports()
        time.sleep(0.2)
        network.set_link(1, up=False)
        cut = time.monotonic()
        try:
            outcomes = ranks.results()
        finally:
            network.set_link(1, up=True)
        for rank, (kind, message, culprit, when) in enumerate(outcomes):
            assert kind in kinds, message
            assert placement[culprit] != placement[rank], message
            assert f"rank {culprit} ({socket.gethostname()}, pid {ranks.pid(culprit)})" in message
            assert re.search(ADDRESS, message), message
            waited = "channel" in message or "to take what was sent to it" in message
            assert waited == (idle == 0), message  # an idle group learns of it before its next call
            assert "has not arrived" not in message, message  # all that is known is what that rank has told
            assert cut < when < cut + max(idle, min(dead_after, timeout)) + 3.5


def exchange_without_a_link(me: Rank) -> Any:
    """Rank 0 sends, and rank 9 receives, or the reverse."""
    with me.join(call_timeout=2, options=ringreduce.Options(dead_after=30)):
        assert me.rank != 0 or 9 not in {link.peer for link in backend_of(None).links()}
        me.report("here")
        sender = me.hear()
        start = time.monotonic()
        if me.rank == sender:
            return start, *error_of(lambda: dist.send(torch.ones(10), 9 - me.rank))
        if me.rank == 9 - sender:
            return start, *error_of(lambda: dist.recv(torch.ones(10), sender))
        return None


@pytest.mark.parametrize("sender", (0, 9))
def test_a_link_that_cannot_be_made_is_named(network: Network, sender: int) -> None:
    with Ranks(network, APART, exchange_without_a_link) as ranks:
        ranks.reports()
        network.set_link(1, up=False)
        try:
            ranks.tell(sender)
            outcomes = ranks.results()
        finally:
            network.set_link(1, up=True)
        for rank, peer in ((0, 9), (9, 0)):
            start, kind, message, culprit, when = outcomes[rank]
            assert (kind, culprit) == (CollectiveTimeout, peer), message
            assert f"rank {peer} ({socket.gethostname()}, pid {ranks.pid(peer)})" in message
            assert re.search(ADDRESS, message), message
            assert start + 1.5 < when < start + 2 + NOTICED


@pytest.mark.parametrize("dead, call", ((0, "send"), (0, "recv"), (9, "send"), (9, "recv")))
def test_a_call_to_a_dead_rank_without_a_link(network: Network, dead: int, call: str) -> None:
    with Ranks(network, APART, call_a_dead_rank, dead, call) as ranks:
        ranks.reports()
        ranks.signal(dead, signal.SIGKILL)
        start, kind, message, culprit, when = ranks.results(but=[dead])[0 if dead else -1]
        assert (kind, culprit) == (PeerLost, dead), message
        assert f"rank {dead} ({socket.gethostname()}, pid {ranks.pid(dead)})" in message
        assert re.search(ADDRESS, message), message
        assert when < start + NOTICED


def call_a_dead_rank(me: Rank, dead: int, call: str) -> Any:
    with me.join(timeout=20):
        me.report("here")
        if me.rank == dead:
            signal.pause()
        time.sleep(0.5)
        if me.rank != 9 - dead:
            return None
        start = time.monotonic()
        return start, *error_of(lambda: getattr(dist, call)(torch.ones(10), dead))


def early_messages(me: Rank) -> None:
    """Asynchronous messages do not wait for what the peer does first, whether there is a link or not."""
    with me.join(timeout=10):
        for one, other in ((9, 0), (1, 8)):  # who posts early, and who is late
            for post, answer in ((dist.irecv, dist.send), (dist.isend, dist.recv)):
                tensor = torch.full((1000,), float(me.rank))
                work = post(tensor, other) if me.rank == one else None
                dist.barrier()
                if me.rank == other:
                    answer(tensor, one)
                if work:
                    work.wait()
                if me.rank in (one, other):
                    assert tensor.eq(other if post is dist.irecv else one).all()


def test_asynchronous_messages_need_no_link_yet(network: Network) -> None:
    run(network, APART, early_messages)


# groups that cannot be made


def join_as(me: Rank, environ: dict[str, str]) -> Any:
    """Rank 1 has these variables. All can make a group afterwards."""
    if me.rank == 1:
        os.environ.update(environ)
    error = error_of(lambda: me.join(timeout=GROUP_TIMEOUT).__enter__())
    for name in environ:
        os.environ.pop(name, None)
    with me.join("afterwards"):
        all_reduce(me, 1000, 0)
    return error


HINDRANCES = {
    "no interface": ({"RINGREDUCE_SOCKET_IFNAME": "ib"}, "leaves no interface"),
    "no ports": ({"RINGREDUCE_PORTS": "none"}, "is no range of ports"),
    "no secret": ({"RINGREDUCE_SECRET_FILE": "/nowhere"}, "No such file"),
    "another host": ({"RINGREDUCE_HOST_ID": "host of 0"}, "which should be on this host"),
}


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_all_hear_why_a_rank_does_not_come(network: Network, hindrance: str) -> None:
    """At once, instead of waiting for it for the group's timeout."""
    environ, why = HINDRANCES[hindrance]
    start = time.monotonic()
    others = {"RINGREDUCE_HOST_ID": "host of 0"} if hindrance == "another host" else {}
    with Ranks(network, [0, 1], join_as, environ, env=others) as ranks:
        (kind, message, culprit, when), own = ranks.results()
    # Rank 0, the leader of what says it is one host, finds out itself that it cannot reach rank 1.
    assert (kind, culprit) == (SystemFailure if hindrance == "another host" else PeerLost, 1), message
    assert "rank 1" in message and why in message
    assert why in own[1]
    assert when < start + GROUP_TIMEOUT


# leaving


def leave_first(me: Rank) -> None:
    """Rank 0 is through with the call, and gone, while most of its data is still on its way."""
    counts = (700_000, 10)
    with me.join():
        outputs = [torch.full((count,), -1.0) for count in counts]
        dist.all_gather(outputs, torch.full((counts[me.rank],), float(me.rank)))
        for rank, output in enumerate(outputs):
            assert (output == rank).all()


def test_a_rank_that_leaves_first_is_heard_to_the_end() -> None:
    with Network(hosts=2, rate="4mbit") as network:
        run(network, [0, 1], leave_first)
