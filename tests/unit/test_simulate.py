"""The simulator against closed forms, and one rank that stands for all against all of them."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.plan import BUILDERS, Channel, Plan, PlanError, Read, Step, build, direct, ring, slot_depth, tree
from ringreduce.plan import simulate as simulate_module
from ringreduce.plan.network import Network, Route, switch
from ringreduce.plan.parameter_server import parameter_server
from ringreduce.plan.simulate import SYMMETRIC, Simulated, simulate, simulate_symmetric
from ringreduce.plan.verify import verify
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.rates import Assumed

B = 10e9  # bytes per second
A = 5e-6  # seconds
SIZES = (0, 1e3, 1e5, 64e6)


def close(seconds: float) -> object:
    """Closed forms hold to a millionth: what is left is rounding."""
    return pytest.approx(seconds, rel=1e-6, abs=1e-12)


def seconds(collective: str, algorithm: str, size: int, size_bytes: float, **options: float) -> float:
    plan = build(collective, algorithm, size)
    return simulate(plan, switch(size, B, A), size_bytes, **options).seconds  # type: ignore[arg-type]


def pairwise(links: dict[tuple[int, int], float], latency: float = 0.0) -> Network:
    """A link of its own, of the given capacity, from rank to rank."""
    numbers = {ends: number for number, ends in enumerate(links)}
    names = tuple(f"{source} -> {target}" for source, target in links)
    return Network(names, tuple(links.values()), lambda *ends: Route(((numbers[ends], 1.0),), latency))


def messages(size: int, *ends: tuple[int, int]) -> Plan:
    """A plan in which each source sends the whole tensor to each of its targets at once."""
    programs = []
    for rank in range(size):
        targets = tuple(target for source, target in ends if source == rank)
        sources = tuple(source for source, target in ends if target == rank)
        send = (Step(0, Read.INPUT, send=targets),) if targets else ()
        take = (Step(0, Read.INPUT, recv=sources, write=True),) if sources else ()
        programs.append((*send, *take))
    return Plan("messages", "all_reduce", size, (Channel(1, 1, tuple(programs)),))


# Closed forms.  Hockney's model: a message takes A + bytes / B; n ranks, S bytes.


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_ring(n: int, size_bytes: float) -> None:
    hop = A + size_bytes / n / B
    assert seconds("all_reduce", "ring", n, size_bytes) == close(2 * (n - 1) * hop)
    assert seconds("reduce_scatter", "ring", n, size_bytes) == close((n - 1) * hop)
    assert seconds("all_gather", "ring", n, size_bytes) == close((n - 1) * hop)


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("n", [3, 8, 13])
def test_ring_in_both_directions_on_links_of_its_own_takes_half_the_bandwidth_term(n: int, size_bytes: float) -> None:
    links = {(rank, (rank + way) % n): B for rank in range(n) for way in (1, -1)}
    found = simulate(ring.all_reduce(ring.both_ways(n)), pairwise(links, A), size_bytes)
    assert found.seconds == close(2 * (n - 1) * (A + size_bytes / 2 / n / B))


def test_stripes_are_in_proportion_to_the_shares() -> None:
    n, orders = 5, ((0, 1, 2, 3, 4), (0, 2, 4, 1, 3))
    links = {
        (order[at - 1], order[at]): weight * B for order, weight in zip(orders, (2, 1), strict=True) for at in range(n)
    }
    found = simulate(ring.all_reduce(((orders[0], 2), (orders[1], 1))), pairwise(links), 3e6)
    assert found.seconds == close(2 * (n - 1) / n * 3e6 / (3 * B))
    assert found.link_busy_seconds == (close(found.seconds),) * 10


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_direct_exchange(n: int, size_bytes: float) -> None:
    whole, part = size_bytes / B, size_bytes / n / B
    assert seconds("all_reduce", "one_shot", n, size_bytes) == close(A + (n - 1) * whole)
    assert seconds("all_reduce", "two_shot", n, size_bytes) == close(2 * (A + (n - 1) * part))
    assert seconds("reduce_scatter", "direct", n, size_bytes) == close(A + (n - 1) * part)
    assert seconds("all_gather", "direct", n, size_bytes) == close(A + (n - 1) * part)
    assert seconds("broadcast", "direct", n, size_bytes) == close(A + (n - 1) * whole)
    assert seconds("gather", "direct", n, size_bytes) == close(A + (n - 1) * part)
    assert seconds("scatter", "direct", n, size_bytes) == close(A + (n - 1) * part)
    assert seconds("all_to_all", "direct", n, size_bytes) == close(A + (n - 1) * part)


@pytest.mark.parametrize("slices", [1, 2, 32])
@pytest.mark.parametrize("levels", [2, 3, 5])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_binary_tree(collective: str, levels: int, slices: int) -> None:
    """A parent's link carries each slice twice, for two children, one after the other: a level takes ``A + 2 * slice``,
    and slices follow one another at that distance, latency aside."""
    n, size_bytes = 2**levels - 1, 64e6
    part = size_bytes / slices / B
    found = seconds(collective, "tree", n, size_bytes, slice_bytes=size_bytes / slices)
    assert found == close((levels - 1) * (A + 2 * part) + (slices - 1) * 2 * part)


@pytest.mark.parametrize("slices", [1, 2, 32])
@pytest.mark.parametrize("n", [2, 5, 16])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_chain(collective: str, n: int, slices: int) -> None:
    part = 64e6 / slices / B
    found = seconds(collective, "ring", n, 64e6, slice_bytes=64e6 / slices)
    assert found == close((n - 1) * (A + part) + (slices - 1) * part)


@pytest.mark.parametrize("n", [4, 7, 16])
def test_two_trees_approach_the_bandwidth_of_the_links(n: int) -> None:
    """A rank sends and receives at most S in the tree where it is inside, up and down together 3/2 S, and half of that
    again in the other: two tensors each way over every link."""
    found = simulate(tree.all_reduce(n), switch(n, B), 64e6)
    assert max(found.link_bytes) == close(2 * 64e6)
    assert 2 * 64e6 / B <= found.seconds < 1.05 * 2 * 64e6 / B
    assert found.rounds > 8


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_halving_doubling(n: int) -> None:
    """``2 log2(n) A + 2 (n - 1) / n S / B`` where one of the terms is small.  Between the two the plan is faster: its
    hops go chunk by chunk, so that the first of the next are under way while the last of this one are."""
    hops = 2 * math.log2(n)

    def textbook(size_bytes: float) -> float:
        return hops * A + 2 * (n - 1) / n * size_bytes / B

    for size_bytes in (0, 10, 200e6):
        assert seconds("all_reduce", "halving_doubling", n, size_bytes) == pytest.approx(textbook(size_bytes), rel=0.01)
    for size_bytes in (1e4, 1e5, 1e6):
        found = seconds("all_reduce", "halving_doubling", n, size_bytes)
        assert max(hops * A, textbook(size_bytes) - hops * A) <= found <= textbook(size_bytes) * (1 + 1e-9)


@pytest.mark.parametrize("n", [4, 16, 64])
def test_halving_alone_hop_by_hop(n: int) -> None:
    """Each hop begins when the first chunk of the one before is there and its link has done that hop's: with ``c`` for
    the time of a chunk, ``n / 2, n / 4, ..., 1`` chunks a hop, it takes the sum of ``max(A + c, chunks * c)``."""
    plan = build("all_reduce", "halving_doubling", n)
    halving = tuple(
        (*program[: n - 1], dataclasses.replace(program[n - 1], send=())) for program in plan.channels[0].programs
    )
    plan = dataclasses.replace(plan, channels=(dataclasses.replace(plan.channels[0], programs=halving),))
    for size_bytes in (1e4, 1e5, 1e6, 64e6):
        c = size_bytes / n / B
        expected = sum(max(A + c, n / 2**hop * c) for hop in range(1, int(math.log2(n)) + 1))
        assert simulate(plan, switch(n, B, A), size_bytes).seconds == close(expected)


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("workers", [7, 16, 64])
def test_parameter_server(workers: int, shards: int) -> None:
    found = parameter_server(workers, shards, 160e6, B, A)
    assert found.seconds == close(2 * (A + workers / shards * 160e6 / B))
    assert found.link_bytes[-2:] == (close(workers * 160e6 / shards),) * 2


def test_parameter_server_with_many_shards_uses_the_links_of_the_workers_in_both_directions_at_once() -> None:
    """The first shards answer while the last are pushed."""
    assert 160e6 / B < parameter_server(4, 64, 160e6, B).seconds < 1.15 * 160e6 / B


# Contention.


def test_two_messages_over_one_link_take_twice_as_long() -> None:
    one_link = Network(("shared",), (B,), lambda *_: Route(((0, 1.0),), A))
    assert simulate(messages(4, (0, 1)), one_link, 1e6).seconds == close(A + 1e6 / B)
    both = simulate(messages(4, (0, 1), (2, 3)), one_link, 1e6)
    assert both.seconds == close(A + 2e6 / B)
    assert both.link_bytes == (close(2e6),)
    assert both.link_busy_seconds == (close(2e6 / B),)


def test_four_gpus_behind_one_uplink() -> None:
    """Their own links are as fast as the uplink that they share: four times as long as one alone."""
    own = {gpu: gpu for gpu in range(4)}
    uplink = Network(("",) * 5, (B,) * 5, lambda source, _: Route(((own[source], 1.0), (4, 1.0)), A))
    assert simulate(messages(5, (0, 4)), uplink, 1e6).seconds == close(A + 1e6 / B)
    assert simulate(messages(5, *((gpu, 4) for gpu in range(4))), uplink, 1e6).seconds == close(A + 4e6 / B)


def test_the_narrowest_link_of_a_route_sets_the_pace_and_others_are_free_for_more() -> None:
    """Rank 0's fast link feeds two slow ones at once."""
    links = Network(("out", "to 1", "to 2"), (10 * B, B, B), lambda _, target: Route(((0, 1.0), (target, 1.0)), A))
    assert simulate(messages(3, (0, 1)), links, 1e6).seconds == close(A + 1e6 / B)
    both = simulate(messages(3, (0, 1), (0, 2)), links, 1e6, slice_bytes=1e6)
    assert both.seconds == close(A + 1e6 / B / 10 + 1e6 / B)


def test_a_message_that_waits_for_a_link_holds_up_no_other() -> None:
    """Ranks 0 and 1 send to 2, whose link is slow; what 0 then sends to 3, to be passed on to 4, does not wait."""
    capacity = {"out of 0": B, "out of 1": B, "into 2": B / 10, "into 3": B, "3 to 4": B / 30}
    ways = {(1, 2): (1, 2), (0, 2): (0, 2), (0, 3): (0, 3), (3, 4): (4,)}
    network = Network(
        tuple(capacity), tuple(capacity.values()), lambda *ends: Route(tuple((link, 1.0) for link in ways[ends]), 0.0)
    )
    hop = 1e6 / B
    found = simulate(messages(5, (1, 2), (0, 2), (0, 3), (3, 4)), network, 1e6, slice_bytes=1e6)
    assert found.seconds == close(30 * hop)
    passed_on = (
        (Step(0, Read.INPUT, send=(2,)), Step(0, Read.INPUT, send=(3,))),
        (Step(0, Read.INPUT, send=(2,)),),
        (Step(0, recv=(0, 1), write=True),),
        (Step(0, recv=(0,), send=(4,)),),
        (Step(0, recv=(3,), write=True),),
    )
    found = simulate(Plan("fork", "all_reduce", 5, (Channel(1, 1, passed_on),)), network, 1e6, slice_bytes=1e6)
    assert found.seconds == close((1 + 1 + 30) * hop)
    assert found.link_busy_seconds == tuple(map(close, (2 * hop, hop, 20 * hop, hop, 30 * hop)))


def test_traffic_spread_over_two_links() -> None:
    spread = Network(("one", "other"), (B / 2, B / 2), lambda *_: Route(((0, 0.5), (1, 0.5)), A))
    found = simulate(messages(2, (0, 1)), spread, 1e6)
    assert found.seconds == close(A + 1e6 / B)
    assert found.link_bytes == (close(5e5), close(5e5))


# Slices and slots.


def test_rounds_in_flight_are_limited_by_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks swap halves, then sums: a round takes two hops of ``A + slice``, and with a window of 1 a rank begins
    the next only then; with one of 2 that fills the links meanwhile, as a slice takes as long as the latency."""
    slices, part = 10, 1e6 / 2 / 10
    plan, network = build("all_reduce", "ring", 2), switch(2, B, A)
    monkeypatch.setattr(simulate_module, "WINDOW", 1)
    alone = simulate(plan, network, 1e6, slice_bytes=part)
    assert alone.rounds == slices
    assert alone.seconds == close(slices * 2 * (A + part / B))
    monkeypatch.setattr(simulate_module, "WINDOW", 2)
    together = simulate(plan, network, 1e6, slice_bytes=part)
    assert together.seconds == close(slices * 2 * part / B + A)


def test_an_outbox_has_as_many_slots_as_in_the_engine() -> None:
    """Rank 1 reads what rank 0 sends only when it has heard from rank 2, after a second: whatever rank 0 has beyond its
    slots waits that long, and then for one another."""
    network = Network(
        ("0 -> 1",), (B,), lambda source, _: Route(((0, 1.0),) if source == 0 else (), 1.0 * (source == 2))
    )

    def late(messages: int) -> float:
        give = (Step(0, Read.INPUT, send=(1,)),) * messages
        take = (Step(0, recv=(2,), write=True), *(Step(0, recv=(0,), write=True),) * messages)
        plan = Plan("late", "all_reduce", 3, (Channel(1, 1, (give, take, (Step(0, Read.INPUT, send=(1,)),))),))
        return simulate(plan, network, 1e6, slice_bytes=1e6).seconds

    depth = slot_depth(3)
    assert late(depth) == close(1.0)
    assert late(depth + 3) == close(1.0 + 3e6 / B)


def test_the_last_slice_is_what_is_left() -> None:
    found = simulate(tree.broadcast(2), switch(2, B, A), 1e6, slice_bytes=4e5)
    assert (found.rounds, found.slice_bytes, found.messages, found.steps) == (3, 4e5, 3, 6)
    assert found.link_bytes == (close(1e6), 0.0, 0.0, close(1e6))
    assert found.seconds == close(A + 1e6 / B)


@pytest.mark.parametrize("algorithm", BUILDERS["all_reduce"])
def test_by_itself_it_slices_what_gains_from_it_and_nothing_else(algorithm: str) -> None:
    found = simulate(build("all_reduce", algorithm, 8), switch(8, B, A), 64e6)
    assert (found.rounds > 1) == (algorithm == "tree")
    if algorithm == "tree":
        options = [
            simulate(build("all_reduce", algorithm, 8), switch(8, B, A), 64e6, slice_bytes=64e6 / 2**k)
            for k in range(1, 9)
        ]
        assert found.seconds <= 1.02 * min(option.seconds for option in options)


@pytest.mark.parametrize(("collective", "algorithm"), [(c, a) for c, names in BUILDERS.items() for a in names])
def test_bytes_on_links(collective: str, algorithm: str) -> None:
    """Of all links together: at least what has to move, and the same in slices."""
    n, size_bytes = 6, 6e6
    plan = build(collective, algorithm, n)
    whole, sliced = (simulate(plan, switch(n, B, A), size_bytes, slice_bytes=part) for part in (size_bytes, 1e5))
    assert sliced.link_bytes == tuple(map(close, whole.link_bytes))
    outward = sum(whole.link_bytes[::2])
    assert outward == close(sum(whole.link_bytes[1::2]))
    lowest = {
        "all_reduce": 2 * (n - 1),
        "broadcast": n - 1,
        "reduce": n - 1,
        "gather": (n - 1) / n,
        "scatter": (n - 1) / n,
    }
    assert outward >= lowest.get(collective, n - 1) * size_bytes * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(c, a) for c, names in BUILDERS.items() for a in names]),
    st.integers(2, 9),
    # Of times that are too short for normal numbers, four times one is not exactly its fourfold.
    st.just(0.0) | st.floats(1, 1e8),
    st.just(0.0) | st.floats(1e-9, 1e-3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_any_plan_on_any_links(
    names: tuple[str, str], n: int, size_bytes: float, latency: float, slices: int, random: object
) -> None:
    """No faster than its busiest link; the same twice; all in proportion."""
    plan = build(*names, n)
    capacity = {(a, b): random.uniform(1e9, 1e11) for a in range(n) for b in range(n) if a != b}  # type: ignore[attr-defined]
    part = max(size_bytes, 1.0) / slices

    def run(scale: float) -> Simulated:
        network = pairwise(capacity, scale * latency)
        return simulate(plan, network, scale * size_bytes, slice_bytes=scale * part)

    found = run(1.0)
    assert found.seconds >= max(found.link_busy_seconds) * (1 - 1e-9)
    assert run(1.0) == found
    assert run(4.0).seconds == 4.0 * found.seconds


# One rank for all.


def programs_of(plan: Plan, rank: int) -> list[list[tuple[object, ...]]]:
    return [[(s.recv, s.write, s.read, s.send) for s in channel.programs[rank]] for channel in plan.channels]


def renumbered(algorithm: str, peers: tuple[int, ...], rank: int, n: int) -> tuple[int, ...]:
    return tuple(peer ^ rank if algorithm == "halving_doubling" else (peer + rank) % n for peer in peers)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("algorithm", SYMMETRIC["all_reduce"])
def test_all_ranks_do_what_rank_0_does(algorithm: str, n: int) -> None:
    if algorithm == "halving_doubling" and n & (n - 1):
        with pytest.raises(PlanError, match="power of two"):
            SYMMETRIC["all_reduce"][algorithm].channels(n)
        return
    plan = build("all_reduce", algorithm, n)
    channels = SYMMETRIC["all_reduce"][algorithm].channels(n)
    assert [(c.share, c.chunks, c.programs) for c in channels] == [
        (c.share, c.chunks, c.programs[:1]) for c in plan.channels
    ]
    for rank in range(n):
        image = [
            [
                (renumbered(algorithm, s.recv, rank, n), s.write, s.read, renumbered(algorithm, s.send, rank, n))
                for s in channel.programs[0]
            ]
            for channel in channels
        ]
        assert programs_of(plan, rank) == image
        opposite = SYMMETRIC["all_reduce"][algorithm].opposite(rank, n)
        assert renumbered(algorithm, (opposite,), rank, n) == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [0, 777, 1e5, 12345678])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16, 29])
@pytest.mark.parametrize("algorithm", SYMMETRIC["all_reduce"])
def test_rank_0_alone_takes_as_long_as_with_all_others(algorithm: str, n: int, size_bytes: float) -> None:
    if algorithm == "halving_doubling" and n & (n - 1):
        n = 32
    every = simulate(build("all_reduce", algorithm, n), switch(n, B, A), size_bytes)
    one = simulate_symmetric(algorithm, n, size_bytes, B, A)
    # Messages that reach a link at once go by rank, which favours some; that only matters between rounds.
    assert one.seconds == (close(every.seconds) if every.rounds == 1 else pytest.approx(every.seconds, rel=0.01))
    assert (one.messages, one.steps, one.rounds) == (every.messages, every.steps, every.rounds)
    assert one.link_bytes == tuple(map(close, every.link_bytes[:2]))
    assert one.link_busy_seconds == tuple(map(close, every.link_busy_seconds[:2]))


@pytest.mark.parametrize("n", [1024, 16384])
def test_thousands_of_ranks_by_symmetry(n: int) -> None:
    size_bytes = 1e9
    hop = A + size_bytes / n / B
    assert simulate_symmetric("ring", n, size_bytes, B, A).seconds == close(2 * (n - 1) * hop)
    assert simulate_symmetric("two_shot", n, size_bytes, B, A).seconds == close(2 * (A + (n - 1) / n * size_bytes / B))
    halving = simulate_symmetric("halving_doubling", n, size_bytes, B)
    assert halving.seconds == close(2 * (n - 1) / n * size_bytes / B)
    assert simulate_symmetric("halving_doubling", n, 0, B, A).seconds == close(2 * math.log2(n) * A)


def test_hundreds_of_ranks_step_by_step() -> None:
    n, size_bytes = 256, 64e6
    found = simulate(build("all_reduce", "ring", n), switch(n, B, A), size_bytes)
    assert found.seconds == close(2 * (n - 1) * (A + size_bytes / n / B))
    assert found.steps == n * (2 * n - 1)


# The figures with which textbooks explain ring all-reduce: 160 MB over four GPUs behind a switch, and over a DGX-1.


def test_the_figures_of_the_texts() -> None:
    size, pcie, nvlink, double, single = 160e6, 16e9, 18e9, range(8), (0, 3, 5, 2, 4, 7, 1, 6)
    root = (Step(0, Read.INPUT, recv=(1, 2, 3), write=True, send=(1, 2, 3)),)
    other = (Step(0, Read.INPUT, send=(0,)), Step(0, recv=(0,), write=True))
    over_one_gpu = Plan("over one GPU", "all_reduce", 4, (Channel(1, 1, (root, other, other, other)),))
    links = {}
    for order, width in ((double, 2), (single, 1)):
        for one, next_ in zip(order, (*order[1:], order[0]), strict=True):
            links[one, next_] = links[next_, one] = width * nvlink
    two_rings = ring.all_reduce([(list(double), 2), (list(single), 1)])
    ours = plan_for(preset("dgx1-v100", Assumed(nvlink=nvlink / 1e9)))
    lanes = ours.network
    without_latency = Network(lanes.names, lanes.capacity, lambda *ends: Route(lanes.route(*ends).links, 0.0))
    for plan in (over_one_gpu, two_rings, ours.plan):
        verify(plan)
    found = [
        simulate(over_one_gpu, switch(4, pcie), size, slice_bytes=size),  # all is summed before anything is sent back
        parameter_server(workers=4, shards=1, size_bytes=size, bandwidth=pcie),
        simulate(direct.two_shot(4), switch(4, pcie), size),
        simulate(two_rings, pairwise(links), size),
        simulate_symmetric("ring", 16384, size, 3 * nvlink),
        simulate(ours.plan, without_latency, size),
    ]
    assert [1e3 * each.seconds for each in found] == pytest.approx([60, 80, 15, 5.185, 5.926, 2.593], rel=1e-3)
    assert found[-1].seconds == close(found[3].seconds / 2)


# What cannot be simulated.


def test_plans_that_do_not_match_themselves() -> None:
    network = switch(2, B)

    def plan(*programs: tuple[Step, ...]) -> Plan:
        return Plan("wrong", "all_reduce", 2, (Channel(1, 1, programs),))

    give, take = Step(0, Read.INPUT, send=(1,)), Step(0, recv=(0,), write=True)
    with pytest.raises(PlanError, match="rank 1 receives more from rank 0"):
        simulate(plan((), (take,)), network, 1)
    with pytest.raises(PlanError, match="rank 1 does not receive all that rank 0 sends"):
        simulate(plan((give,), ()), network, 1)
    with pytest.raises(PlanError, match="rank 0 sends to rank 7"):
        simulate(plan((Step(0, Read.INPUT, send=(7,)),), ()), network, 1)
    with pytest.raises(PlanError, match="wait for one another"):
        simulate(plan((Step(0, recv=(1,), write=True), give), (take, Step(0, Read.INPUT, send=(0,)))), network, 1)
    with pytest.raises(PlanError, match="it needs channels"):
        simulate(Plan("none", "all_reduce", 2, ()), network, 1)
    with pytest.raises(PlanError, match="capacity of 0"):
        simulate(direct.one_shot(2), switch(2, 0.0), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size_bytes", -1),
        ("slice_bytes", 0),
        ("slice_bytes", 1e-9),
        ("size_bytes", math.nan),
    ],
)
def test_arguments_out_of_range_are_named(name: str, value: float) -> None:
    arguments = {"size_bytes": 1e6, name: value}
    with pytest.raises(PlanError, match=name.replace("slice_bytes", "slice")):
        simulate(direct.one_shot(2), switch(2, B), **arguments)  # type: ignore[arg-type]


def test_groups_without_symmetry_are_refused() -> None:
    with pytest.raises(PlanError, match="'tree' is not known to be symmetric; those are one_shot"):
        simulate_symmetric("tree", 8, 1e6, B)
    with pytest.raises(PlanError, match="at least 1"):
        simulate_symmetric("ring", 0, 1e6, B)
    with pytest.raises(PlanError, match="both must be at least 1"):
        parameter_server(0, 1, 1e6, B)


def test_a_long_search_begins_where_that_of_a_smaller_size_ended(monkeypatch):
    """Without that, curves up to large sizes of machines with many GPUs take minutes."""
    walked = []
    walk = simulate_module._Simulation.walk

    def counted(self, slices, latencies=True):
        walked.append(max(map(len, slices)))
        return walk(self, slices, latencies)

    monkeypatch.setattr(simulate_module._Simulation, "walk", counted)
    monkeypatch.setattr(simulate_module, "FEW_STEPS", 100)
    plan, network = build("all_reduce", "tree", 8), switch(8, 1e10, 1e-6)
    whole = simulate(plan, network, 64e6)
    from_whole = sum(walked)
    walked.clear()
    near = simulate(plan, network, 64e6, rounds=whole.rounds)
    assert whole.rounds > 8 and sum(walked) < from_whole
    assert near.seconds == pytest.approx(whole.seconds, rel=0.01)
