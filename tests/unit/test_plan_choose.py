"""Which algorithm runs for which size: the grammar, the defaults, and how rules override them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.plan import BUILDERS, PlanError, Rule, build, one_shot_end, parse_algorithms, table

K = 1024


def test_defaults_are_direct_and_all_reduce_turns_at_a_size() -> None:
    chosen = table(2)
    assert chosen["all_reduce"] == [(32 * K, "one_shot"), (None, "two_shot")]
    assert all(ranges == [(None, "direct")] for collective, ranges in chosen.items() if collective != "all_reduce")
    assert list(chosen) == list(BUILDERS)


def test_larger_groups_turn_to_two_shot_earlier() -> None:
    assert [one_shot_end(size) for size in (1, 2, 4, 8)] == [32 * K, 32 * K, 16 * K, 8 * K]
    assert table(4)["all_reduce"][0] == (16 * K, "one_shot")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", ()),
        ("all_reduce:ring", (Rule("all_reduce", "ring"),)),
        ("allreduce:ring; alltoall:direct ;", (Rule("all_reduce", "ring"), Rule("all_to_all", "direct"))),
        ("reducescatter:ring:2K-1M", (Rule("reduce_scatter", "ring", 2 * K, K * K),)),
        ("allgather:ring:1g-", (Rule("all_gather", "ring", K**3),)),
        ("broadcast:tree:7-8", (Rule("broadcast", "tree", 7, 8),)),
    ],
)
def test_rules_are_read(text: str, rules: tuple[Rule, ...]) -> None:
    assert parse_algorithms(text) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all_sum:ring", r"'all_sum:ring': unknown collective 'all_sum'; known are all_reduce, .*all_to_all"),
        ("broadcast:tree;gather:ring", r"'gather:ring': unknown algorithm 'ring'; gather has direct"),
        ("all_reduce:rings", r"all_reduce has one_shot, two_shot, .*halving_doubling, direct"),
        ("all_reduce", r"'all_reduce' is not collective:algorithm"),
        ("all_reduce:ring:0-1K:2", r"'all_reduce:ring:0-1K:2' is not collective:algorithm"),
        ("all_reduce:ring:1K", r"'1K' is not a range of bytes such as 0-32K"),
        ("all_reduce:ring:-1K", r"'-1K' is not a range"),
        ("all_reduce:ring:1K-1024", r"the range '1K-1024' is empty"),
        ("all_reduce:ring:0-2K;allreduce:tree:1K-", r"'allreduce:tree:1K-' claims sizes that 'all_reduce:ring:0-2048'"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_known(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_algorithms(text)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("all_reduce:ring", [(None, "ring")]),
        ("all_reduce:direct", [(32 * K, "one_shot"), (None, "two_shot")]),
        ("all_reduce:ring:1M-", [(32 * K, "one_shot"), (K * K, "two_shot"), (None, "ring")]),
        ("all_reduce:tree:1K-2K", [(K, "one_shot"), (2 * K, "tree"), (32 * K, "one_shot"), (None, "two_shot")]),
        ("all_reduce:ring:0-64K", [(64 * K, "ring"), (None, "two_shot")]),
        ("all_reduce:ring:0-4K;all_reduce:ring:4K-", [(None, "ring")]),
        ("all_reduce:one_shot:0-1M", [(K * K, "one_shot"), (None, "two_shot")]),
    ],
)
def test_rules_override_the_defaults_where_they_apply(text: str, ranges: list[tuple[int | None, str]]) -> None:
    assert table(2, parse_algorithms(text))["all_reduce"] == ranges


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 50), st.sampled_from(["ring", "tree"])), max_size=4))
def test_every_size_gets_the_algorithm_that_claims_it(claims: list[tuple[int, int, str]]) -> None:
    rules: list[Rule] = []
    low = 0
    for gap, length, algorithm in claims:
        rules.append(Rule("all_reduce", algorithm, low + gap, low + gap + length))
        low += gap + length
    text = ";".join(map(str, rules))
    assert parse_algorithms(text) == tuple(rules)

    ranges = table(1024, rules)["all_reduce"]
    ends = [end for end, _ in ranges]
    assert ends[-1] is None
    assert ends[:-1] == sorted(set(ends[:-1]))  # type: ignore[type-var]
    for count in range(low + 2):
        claimed = [rule.algorithm for rule in rules if rule.begin <= count < rule.end]  # type: ignore[operator]
        default = "one_shot" if count < one_shot_end(1024) else "two_shot"
        found = next(algorithm for end, algorithm in ranges if end is None or count < end)
        assert found == (claimed or [default])[0]


def test_every_choice_can_be_built() -> None:
    for collective, ranges in table(3).items():
        for _, algorithm in ranges:
            assert build(collective, algorithm, 3).size == 3
            assert build(collective, algorithm, 3) is build(collective, algorithm, 3)
