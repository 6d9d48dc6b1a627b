"""Plans for ranks on several hosts: right for all shapes of hosts, and no more on the wire than they promise."""

from fractions import Fraction
from itertools import pairwise, product

import pytest
from bodies.plan_results import check_results
from bodies.roundings import roundings
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.plan import Plan, PlanError, Read, Step, across_hosts, layout, slot_depth, table, verify
from ringreduce.plan import build as build_flat
from ringreduce.plan.across_hosts import ACROSS, BY_BLOCKS, Hosts, build, choose, shapes
from ringreduce.plan.choose import ROOTED
from ringreduce.plan.verify import prove

PAIRS = [(collective, across) for collective in ACROSS for across in ACROSS[collective]]


def even(number: int, ranks: int) -> list[list[int]]:
    return [[host * ranks + rank for rank in range(ranks)] for host in range(number)]


SHAPES: list[Hosts] = [
    [[0]],
    [[0, 1, 2]],
    [[0], [1]],
    [[0, 1], [2, 3]],
    [[0, 1, 2], [3]],
    [[3], [1, 0], [4, 2]],
    [[5, 0], [2, 4], [1, 3]],
    even(4, 1),
    even(4, 2),
    [[2], [0], [1], [3], [6, 4, 5]],
    [[0, 1, 2, 3, 4], [5], [6]],
]


def homes(plan: Plan, hosts: Hosts, root: int) -> list[int]:
    """The number of each rank's host, by the rank's number in the plan."""
    turn = root if plan.collective in ROOTED else 0
    of = {(rank - turn) % plan.size: number for number, host in enumerate(hosts) for rank in host}
    return [of[rank] for rank in range(plan.size)]


def bytes_out(plan: Plan, hosts: Hosts, root: int = 0) -> tuple[Fraction, ...]:
    """What leaves each host, in blocks of the collective (of all_reduce, broadcast and reduce: in tensors)."""
    home = homes(plan, hosts, root)
    total = sum(channel.share for channel in plan.channels)
    out = [Fraction(0)] * len(hosts)
    for channel in plan.channels:
        for rank, program in enumerate(channel.programs):
            messages = sum(home[peer] != home[rank] for step in program for peer in step.send)
            out[home[rank]] += Fraction(messages * channel.share, total * channel.chunks)
    return tuple(out)


def hops(plan: Plan, hosts: Hosts, root: int = 0) -> int:
    """The most messages between hosts that come one after the other in a round, as each waits for the one before."""
    home = homes(plan, hosts, root)
    longest = 0
    for channel, executed in zip(plan.channels, prove(plan, slot_depth(plan.size)), strict=True):
        in_time = sorted(
            (outcome.phase, rank, number)
            for rank, outcomes in enumerate(executed.outcomes)
            for number, outcome in enumerate(outcomes)
        )
        before = [0] * plan.size  # of each rank: messages in the chain to where it stands
        sent: list[list[int]] = [[] for _ in home]  # the same, when it sent each of its messages
        for _, rank, number in in_time:
            for peer, index in executed.outcomes[rank][number].taken:
                before[rank] = max(before[rank], sent[peer][index] + (home[peer] != home[rank]))
            if channel.programs[rank][number].send:
                sent[rank].append(before[rank])
        longest = max(longest, *before)
    return longest


@st.composite
def any_hosts(draw: st.DrawFn, most: int = 5) -> Hosts:
    """One to five hosts of one rank or more each, ranks in any order."""
    counts = draw(st.lists(st.integers(1, most), min_size=1, max_size=5))
    ranks = draw(st.permutations(range(sum(counts))))
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [list(ranks[begin:end]) for begin, end in pairwise(ends)]


def roots(collective: str, given_hosts: Hosts) -> range:
    return range(sum(map(len, given_hosts)) if collective in ROOTED else 1)


@pytest.mark.parametrize(("collective", "across"), PAIRS)
def test_every_plan_is_right_for_every_root(collective: str, across: str) -> None:
    for shape in SHAPES:
        for root, rails in product(roots(collective, shape), (None, 1, 2)):
            plan = build(collective, across, shape, root, rails)
            assert plan.name == ("leaders_" if rails == 1 else "hosts_") + across
            assert (plan.collective, plan.size) == (collective, sum(map(len, shape)))
            verify(plan)
            sends = [sum(1 for step in program if step.send) for one in plan.channels for program in one.programs]
            assert max(sends) <= slot_depth(plan.size)


@pytest.mark.parametrize("in_place", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize(("collective", "across"), PAIRS)
def test_plans_compute_what_the_collective_is(collective: str, across: str, in_place: bool) -> None:
    if in_place and collective == "all_to_all":
        return
    for shape in SHAPES:
        size = sum(map(len, shape))
        plan = build(collective, across, shape, size - 1)
        for count, width in ((0, 4), (1, 4), (size + 1, 1), (37, 2)):
            check_results(plan, count, width, in_place, seed=size)


@settings(max_examples=100)
@given(data=st.data(), shape=any_hosts(), seed=st.integers(0, 2**32))
def test_any_hosts_make_a_right_plan(data: st.DataObject, shape: Hosts, seed: int) -> None:
    collective, across = data.draw(st.sampled_from(PAIRS))
    root = data.draw(st.sampled_from(roots(collective, shape)))
    plan = build(collective, across, shape, root, data.draw(st.none() | st.integers(1, 6)))
    in_place = collective != "all_to_all" and data.draw(st.booleans())
    check_results(plan, data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5)), in_place, seed)


@pytest.mark.parametrize(("collective", "across"), PAIRS)
def test_large_and_lopsided_groups_fit_in_their_slots(collective: str, across: str) -> None:
    for shape in (even(2, 8), even(8, 8), [list(range(8)), *([rank] for rank in range(8, 15))]):
        verify(build(collective, across, shape))


# ---- The wire --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", ["ring", "two_shot", "bidirectional_ring"])
@given(shape=any_hosts())
def test_all_reduce_sends_the_least_there_is(across: str, shape: Hosts) -> None:
    number = len(shape)
    least = Fraction(2 * (number - 1), number)
    assert bytes_out(build("all_reduce", across, shape), shape) == (least,) * number
    assert bytes_out(build("all_reduce", across, shape, rails=1), shape) == (least,) * number


@given(shape=any_hosts())
def test_in_a_reduce_scatter_each_host_sends_each_other_rank_its_block_once(shape: Hosts) -> None:
    size = sum(map(len, shape))
    for across in ACROSS["reduce_scatter"]:
        out = bytes_out(build("reduce_scatter", across, shape), shape)
        assert out == tuple(size - len(host) for host in shape)


@given(shape=any_hosts())
def test_in_an_all_gather_each_block_reaches_each_other_host_once(shape: Hosts) -> None:
    size, number = sum(map(len, shape)), len(shape)
    direct = bytes_out(build("all_gather", "direct", shape), shape)
    assert direct == tuple((number - 1) * len(host) for host in shape)
    ring = bytes_out(build("all_gather", "ring", shape), shape)
    assert ring == tuple(size - len(following) if number > 1 else 0 for following in [*shape[1:], shape[0]])


@given(shape=any_hosts(), data=st.data())
def test_a_root_sends_or_receives_the_tensor_once_by_ring(shape: Hosts, data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(range(sum(map(len, shape)))))
    (home,) = (number for number, host in enumerate(shape) if root in host)
    number = len(shape)
    before = (home - 1) % number
    out = bytes_out(build("broadcast", "ring", shape, root), shape, root)
    assert out == tuple(int(at != before) if number > 1 else 0 for at in range(number))
    for across in ("ring", "tree", "star"):
        out = bytes_out(build("reduce", across, shape, root), shape, root)
        assert out == tuple(int(at != home) for at in range(number))


@given(shape=any_hosts(), data=st.data())
def test_blocks_of_gather_scatter_and_all_to_all_cross_once(shape: Hosts, data: st.DataObject) -> None:
    size = sum(map(len, shape))
    root = data.draw(st.sampled_from(range(size)))
    (home,) = (number for number, host in enumerate(shape) if root in host)
    away = [0 if number == home else len(host) for number, host in enumerate(shape)]
    assert bytes_out(build("gather", "direct", shape, root), shape, root) == tuple(away)
    scattered = bytes_out(build("scatter", "direct", shape, root), shape, root)
    assert scattered == tuple(sum(away) if number == home else 0 for number in range(len(shape)))
    crossed = bytes_out(build("all_to_all", "direct", shape), shape)
    assert crossed == tuple(len(host) * (size - len(host)) for host in shape)


def test_a_flat_ring_sends_more() -> None:
    assert bytes_out(build_flat("all_reduce", "ring", 4), even(2, 2)) == (Fraction(3, 2),) * 2


@given(shape=any_hosts())
def test_every_local_rank_carries_its_share(shape: Hosts) -> None:
    """Between even hosts all ranks send the same; in uneven ones as even as rails can be dealt."""
    plan = build("all_reduce", "ring", shape)
    (channel,) = plan.channels
    rails = channel.chunks // len(shape)
    for host in shape:
        sent = [
            sum(peer not in host for step in channel.programs[rank] for peer in step.send)
            // max(2 * (len(shape) - 1), 1)
            for rank in host
        ]
        assert len(shape) == 1 or sum(sent) == rails
        assert max(sent) - min(sent) <= 1


HOPS = {
    ("all_reduce", "ring"): lambda number: 2 * (number - 1),
    ("all_reduce", "one_shot"): lambda number: min(number - 1, 1),
    ("all_reduce", "two_shot"): lambda number: min(number - 1, 1) * 2,
    ("reduce_scatter", "direct"): lambda number: min(number - 1, 1),
    ("reduce_scatter", "ring"): lambda number: number - 1,
    ("all_gather", "direct"): lambda number: min(number - 1, 1),
    ("all_gather", "ring"): lambda number: number - 1,
    ("broadcast", "direct"): lambda number: min(number - 1, 1),
    ("broadcast", "ring"): lambda number: number - 1,
    ("broadcast", "tree"): lambda number: number.bit_length() - 1,
    ("reduce", "star"): lambda number: min(number - 1, 1),
    ("reduce", "ring"): lambda number: number - 1,
    ("reduce", "tree"): lambda number: number.bit_length() - 1,
    ("gather", "direct"): lambda number: min(number - 1, 1),
    ("scatter", "direct"): lambda number: min(number - 1, 1),
    ("all_to_all", "direct"): lambda number: min(number - 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "across"), HOPS)
@given(shape=any_hosts(most=3))
def test_messages_follow_one_another_no_more_often_than_among_single_ranks(
    collective: str, across: str, shape: Hosts
) -> None:
    for root in roots(collective, shape):
        for rails in (None, 1):
            plan = build(collective, across, shape, root, rails)
            assert hops(plan, shape, root) == HOPS[collective, across](len(shape))


def test_hosts_of_one_rank_run_the_plan_between_hosts() -> None:
    for across in ACROSS["all_reduce"]:
        assert build("all_reduce", across, even(4, 1)).channels == ACROSS["all_reduce"][across](4).channels


def test_the_programs_of_a_small_plan_step_by_step() -> None:
    (channel,) = build("all_reduce", "one_shot", [[0, 1], [2]], rails=1).channels
    assert channel.programs == (
        (
            Step(0, Read.INPUT, recv=(1,), write=True, send=(2,)),
            Step(0, Read.OUTPUT, recv=(2,), write=True, send=(1,)),
        ),
        (Step(0, Read.INPUT, send=(0,)), Step(0, recv=(0,), write=True)),
        (Step(0, Read.INPUT, send=(0,)), Step(0, Read.INPUT, recv=(0,), write=True)),
    )


# ---- The choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ACROSS)
@settings(max_examples=25)
@given(
    shape=any_hosts(),
    latency=st.floats(0, 0.1),
    bandwidth=st.floats(1e6, 1e10),
    pick=st.integers(0, 2**16),
)
def test_what_is_chosen_covers_all_sizes_by_right_plans(
    collective: str, shape: Hosts, latency: float, bandwidth: float, pick: int
) -> None:
    size = sum(map(len, shape))
    root = pick % size if collective in ROOTED else 0
    ranges = choose(collective, shape, latency, bandwidth, root)
    assert ranges[0][0] == 0
    assert ranges[-1][1] is None
    assert all(one[1] == following[0] for one, following in pairwise(ranges))
    for _, _, plan in ranges:
        assert (plan.collective, plan.size) == (collective, size)
        verify(plan)


@pytest.mark.parametrize("shape", [even(2, 2), even(4, 1), even(4, 2), even(8, 1), [[0, 1, 2], [3], [4]]], ids=str)
def test_small_all_reduces_take_one_delay_and_large_ones_the_least_bytes(shape: Hosts) -> None:
    number = len(shape)
    for latency, bandwidth in ((5e-3, 125e6), (20e-3, 12.5e6), (50e-6, 125e6)):
        ranges = choose("all_reduce", shape, latency, bandwidth)
        assert {hops(plan, shape) for begin, _, plan in ranges if begin <= 1024} == {1}
        assert bytes_out(ranges[-1][2], shape) == (Fraction(2 * (number - 1), number),) * number


@pytest.mark.parametrize("shape", [even(2, 1), even(2, 2), even(4, 2)], ids=str)
def test_large_all_reduces_go_by_plans_that_can_be_packed_if_they_are(shape: Hosts) -> None:
    for packed in (1 / 2, 33 / 128):
        ranges = choose("all_reduce", shape, 50e-6, 125e6, packed=packed)
        assert not any(plan.name.endswith("one_shot") for begin, _, plan in ranges if begin >= 2**18)
        assert {hops(plan, shape) for begin, _, plan in ranges if begin <= 1024} == {1}


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("shape", [even(2, 2), even(3, 1), even(4, 3), even(8, 2), [[0, 1, 2], [3], [4]]], ids=str)
def test_what_rounds_least_often_is_chosen_if_it_sends_no_more(collective: str, shape: Hosts) -> None:
    for latency, bandwidth in ((50e-6, 125e6), (20e-6, 12.5e9)):
        usual = choose(collective, shape, latency, bandwidth)
        chosen = choose(collective, shape, latency, bandwidth, few_roundings=True)
        for begin, _, plan in chosen:
            instead_of = next(other for _, end, other in usual if end is None or begin < end)
            assert max(bytes_out(plan, shape)) <= max(bytes_out(instead_of, shape))
            assert roundings(plan) <= roundings(instead_of)
        if collective == "all_reduce" or (collective == "reduce_scatter" and len(shape[0]) == len(shape[1])):
            assert {roundings(plan) for _, _, plan in chosen} == {1 + (len(shape[0]) > 1)}


@pytest.mark.parametrize("collective", sorted(set(ACROSS) - {"all_reduce"}))
def test_small_blocks_of_all_others_take_one_delay(collective: str) -> None:
    for shape in (even(2, 2), even(4, 1), even(4, 2), [[0, 1, 2], [3], [4]]):
        assert hops(choose(collective, shape, 5e-3, 125e6)[0][2], shape) == 1


def test_one_host_gets_the_built_in_plans() -> None:
    for collective in ACROSS:
        chosen = [(end, plan.name) for _, end, plan in choose(collective, [[2, 0, 1]], 1e-5, 1e9)]
        assert chosen == [(end, name) for end, name, _ in table(3)[collective]]


@pytest.mark.parametrize("collective", ACROSS)
@pytest.mark.parametrize("shape", [even(2, 2), even(3, 2), even(4, 1), even(5, 3), even(7, 1), even(8, 2)], ids=str)
def test_the_model_counts_as_the_plans_do(collective: str, shape: Hosts) -> None:
    """A root's receiving is not in `bytes_out`."""
    size = sum(map(len, shape))
    for name, figures in shapes(collective, shape).items():
        kind, _, across = name.partition("_")
        if kind in ("hosts", "leaders"):
            plan = build(collective, across, shape, rails=1 if kind == "leaders" else None)
        else:
            plan = build_flat(collective, name, size)
        (chunks,) = {channel.chunks * len(plan.channels) for channel in plan.channels}
        sends = max(sum(1 for step in program if step.send) for one in plan.channels for program in one.programs)
        assert Fraction(figures.chunk).limit_denominator(1000) == Fraction(1, chunks)
        assert sends <= figures.sends <= sends + 2
        assert figures.delays == hops(plan, shape)
        assert not layout(collective, size).reduces or figures.roundings == roundings(plan)
        if collective != "reduce" and across != "tree" and collective not in across_hosts.PLAIN:
            assert Fraction(figures.wire).limit_denominator(1000) == max(bytes_out(plan, shape))
        assert figures.wire >= max(bytes_out(plan, shape)) - 1e-9


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], r"hosts: \[\]: no rank; each of the ranks"),
        ([[0, 1], []], r"host 1 of \[\[0, 1\], \[\]\] has no ranks; leave it out"),
        ([[0, 1], [3]], "rank 2 is missing; each of the ranks 0..2 must be in one of the hosts"),
        ([[0, 1], [1, 2]], "rank 1 is there twice"),
        ([[1, 2]], "rank 0 is missing"),
        ([[-1, 0]], "rank 1 is missing"),
    ],
)
def test_hosts_have_each_rank_once(wrong: Hosts, message: str) -> None:
    for call in (
        lambda: build("all_reduce", "ring", wrong),
        lambda: choose("all_reduce", wrong, 1e-5, 1e9),
    ):
        with pytest.raises(PlanError, match=message):
            call()


def test_other_arguments_that_cannot_be_are_named() -> None:
    pair = [[0], [1]]
    with pytest.raises(PlanError, match="collective 'sum' is unknown; known are all_reduce"):
        build("sum", "ring", pair)
    with pytest.raises(PlanError, match="collective 'sum' is unknown; known are all_reduce"):
        choose("sum", pair, 1e-5, 1e9)
    with pytest.raises(PlanError, match="all_gather has no plan 'tree' between hosts; known are direct, ring"):
        build("all_gather", "tree", pair)
    for root in (-1, 2):
        with pytest.raises(PlanError, match=f"root is {root}; the hosts have ranks 0..1"):
            build("broadcast", "ring", pair, root)
    with pytest.raises(PlanError, match="rails is 0; it must be at least 1"):
        build("all_reduce", "ring", pair, rails=0)
    for wrong in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"latency is .*; it must be a number of seconds, at least 0"):
            choose("all_reduce", pair, wrong, 1e9)
    for wrong in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(PlanError, match=r"packed is .*; it must be a share of the bytes, above 0 and at most 1"):
            choose("all_reduce", pair, 1e-5, 1e9, packed=wrong)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"bandwidth is .*; it must be bytes per second, above 0"):
            choose("all_reduce", pair, 1e-5, wrong)


def test_hosts_may_be_any_sequences() -> None:
    shape = [[3], [1, 0], [4, 2]]
    for collective, across in PAIRS:
        assert build(collective, across, shape) == build(collective, across, [tuple(host) for host in shape])


def test_rails_are_reduced_until_the_slots_suffice() -> None:
    shape = [list(range(8)), *([rank] for rank in range(8, 15))]
    (channel,) = build("all_reduce", "ring", shape).channels
    assert 1 < channel.chunks // 8 < 8


@pytest.mark.parametrize("collective", BY_BLOCKS)
def test_what_is_cut_by_blocks_needs_no_rails(collective: str) -> None:
    shape = [[0, 1, 2], [3]]
    assert build(collective, "ring", shape, rails=2) == build(collective, "ring", shape)
