"""Every collective and message between ranks of several hosts; what distributed/test_collectives.py asks of one host.

Hosts are interleaved and uneven, with one interface or two, over IPv4 and IPv6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import (
    COLLECTIVES,
    SMALL_SLOTS,
    all_reduce,
    same,
    sizes,
    total,
    values,
)
from bodies.surface import (
    beside_a_hanging_call,
    coalesced_collectives,
    shrinking_by_force,
)
from net.network import Network
from net.ranks import Rank, run

import ringreduce
from ringreduce.groups.lookup import backend_of

PLACEMENTS = {
    "2 x 1": [0, 1],
    "3 x 1": [0, 1, 2],
    "2 x 2": [0, 0, 1, 1],
    "interleaved": [0, 1, 0, 1],
    "uneven": [0, 0, 0, 1],
}
MANY = 400_009  # elements, of which every connection takes many frames


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(hosts=3, interfaces=2) as made:
        yield made


def each_placement(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)(test)


def links() -> list[Any]:
    """This rank's, in the default group."""
    return backend_of(None).links()


# collectives


def barrier(me: Rank, count: int, call: int) -> None:
    """No rank leaves it before all have come."""
    key = f"arrived {count} {call}"
    me.store.add(key, 1)
    dist.barrier()
    assert me.store.add(key, 0) == me.size


def every_collective(me: Rank, options: ringreduce.Options, least: int, most: int) -> None:
    """With all sizes from `least` to `most`, and a root for each."""
    with me.join(options=options):
        for name, collective in (COLLECTIVES | {"barrier": barrier}).items():
            for call, count in enumerate(n for n in (*sizes(me.size), MANY) if least <= n <= most):
                try:
                    collective(me, count, call)
                except Exception as error:
                    raise AssertionError(f"{name} with {count} elements, call {call}") from error


@each_placement
def test_all_collectives_of_all_sizes_through_small_slots(network: Network, placement: list[int]) -> None:
    run(network, placement, every_collective, SMALL_SLOTS, 0, 100_000)


@each_placement
def test_all_collectives_of_large_sizes(network: Network, placement: list[int]) -> None:
    run(network, placement, every_collective, ringreduce.Options(), MANY, MANY)


def over_and_over(me: Rank) -> None:
    """Calls of all sizes in a row: what one leaves on its way meets the next."""
    with me.join(options=SMALL_SLOTS):
        for call in range(400):
            all_reduce(me, (call * call * 37) % 5000 if call % 20 else 50_000, call)
            if call % 7 == 0:
                COLLECTIVES["all_to_all_single_uneven"](me, call % 50, call)


@each_placement
def test_calls_in_quick_succession(network: Network, placement: list[int]) -> None:
    run(network, placement, over_and_over)


def shared_tensors(me: Rank) -> None:
    """Those of `ringreduce.empty`, which ranks of one host lend each other, and those elsewhere cannot see."""
    with me.join():
        for call, count in enumerate((0, 1, 1009, 300_007)):
            tensor = ringreduce.empty(count)
            tensor.copy_(values(me.rank, count, call))
            dist.all_reduce(tensor)
            same(tensor, total(me.size, count, call))

            mine, gathered = ringreduce.empty(count), ringreduce.empty(count * me.size)
            mine.copy_(values(me.rank, count, call))
            dist.all_gather_into_tensor(gathered, mine)
            mine.fill_(-1.0)  # at once: nobody may still be sending it
            same(gathered, torch.cat([values(rank, count, call) for rank in range(me.size)]))

            dist.reduce_scatter_tensor(mine, gathered)
            same(mine, me.size * values(me.rank, count, call))
            dist.broadcast(mine, src=me.size - 1)
            same(mine, me.size * values(me.size - 1, count, call))

            exchanged = ringreduce.empty(count * me.size)
            dist.all_to_all_single(exchanged, gathered)
            gathered.fill_(-1.0)
            same(exchanged, values(me.rank, count, call).repeat(me.size))


@each_placement
def test_shared_tensors(network: Network, placement: list[int]) -> None:
    run(network, placement, shared_tensors)


def one_call_at_a_time(me: Rank, collective: str) -> None:
    """In a group of its own each, whose first call it is: the links that it needs are made for it."""
    with me.join(collective):
        COLLECTIVES[collective](me, 1000, 1)


@pytest.mark.parametrize("collective", ("all_reduce", "gather", "all_to_all_single", "send_and_recv", "recv_from_any"))
def test_the_first_call_of_a_group(network: Network, collective: str) -> None:
    run(network, [0, 1, 0, 1], one_call_at_a_time, collective)


# asynchronous calls, messages and groups: as on one host


@pytest.mark.parametrize("asynchronous", (False, True))
def test_coalesced_collectives(network: Network, asynchronous: bool) -> None:
    run(network, [0, 1, 1], coalesced_collectives, asynchronous)


@pytest.mark.parametrize("body", (shrinking_by_force, beside_a_hanging_call), ids=lambda f: f.__name__)
def test_groups_with_a_rank_that_is_late(network: Network, body: Callable[[Rank], None]) -> None:
    run(network, [0, 1, 2], body)


# over which interfaces and addresses


def paths_and_sums(me: Rank, options: ringreduce.Options) -> list[str]:
    """Of all connections of this rank, and what it has reduced is right."""
    with me.join(options=options):
        for call, count in enumerate((1, 10_007, MANY)):
            all_reduce(me, count, call)
        return [path for link in links() for path in link.paths]


def test_all_interfaces_carry_their_share(network: Network) -> None:
    for paths in run(network, [0, 1, 1], paths_and_sums, None):
        assert {path.rpartition(" ")[2] for path in paths} == {"eth0", "eth1"}


@pytest.mark.parametrize("connections", (1, 3))
def test_one_interface_if_one_is_named(network: Network, connections: int) -> None:
    options = ringreduce.Options(socket_ifname="=eth1", connections=connections)
    for rank, paths in enumerate(run(network, [0, 1], paths_and_sums, options)):
        assert len(paths) == connections
        own = (f"{network.address(rank, 1)}:", f"[{ip_address(network.address(rank, 1, 6))}]:")
        assert all(path.startswith(own) and path.endswith("via eth1") for path in paths)


def test_ipv6_alone(network: Network) -> None:
    options = ringreduce.Options(socket_ifname="fd77::/16")
    for rank, paths in enumerate(run(network, [0, 1, 2], paths_and_sums, options)):
        own = {ip_address(path[1:].partition("]")[0]) for path in paths}
        assert own == {ip_address(network.address(rank, interface, 6)) for interface in range(2)}


def far_and_near(me: Rank) -> tuple[set[int], int]:
    """The ranks that this one has links to after all collectives, and the bytes it has sent over them."""
    with me.join():
        for collective in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_to_all_single"):
            COLLECTIVES[collective](me, 10_000, 0)
        return {link.peer for link in links()}, sum(link.bytes_out for link in links())


def test_ranks_of_one_host_use_its_memory(network: Network) -> None:
    before = network.bytes_out(2)
    for rank, (peers, sent) in enumerate(run(network, [0, 1, 0, 1], far_and_near)):
        assert peers <= {1, 3} if rank % 2 == 0 else peers <= {0, 2}
        assert sent > 0
    assert run(network, [2, 2, 2], far_and_near) == [(set(), 0)] * 3
    assert network.bytes_out(2) - before < 200_000  # the store's


def test_bytes_are_counted_as_the_interface_does(network: Network) -> None:
    before = network.bytes_out(1)
    values = run(network, [0, 1], far_and_near)
    left = network.bytes_out(1) - before
    assert 0.8 * left < values[1][1] < left


def slow_and_lossy(me: Rank) -> None:
    with me.join():
        for call in range(10):
            all_reduce(me, 20_000, call)
            COLLECTIVES["all_to_all_single"](me, 1000, call)
        COLLECTIVES["send_and_recv"](me, 50_000, 0)


def test_frames_that_are_delayed_and_lost() -> None:
    with Network(hosts=3, delay=0.003, loss=0.01) as network:
        run(network, [0, 1, 1, 2], slow_and_lossy)
