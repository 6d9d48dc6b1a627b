"""Which algorithm runs for which size: the grammar, the defaults, and how rules override them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.plan import (
    BUILDERS,
    PlanError,
    Range,
    Rule,
    build,
    lookup,
    one_shot_end,
    parse_algorithms,
    ranges_between,
    table,
)

K = 1024


def test_defaults_are_direct_and_all_reduce_turns_at_a_size() -> None:
    chosen = table(2)
    assert chosen["all_reduce"] == [Range(64 * K, "one_shot"), Range(None, "two_shot")]
    assert all(ranges == [Range(None, "direct")] for collective, ranges in chosen.items() if collective != "all_reduce")
    assert list(chosen) == list(BUILDERS)


def test_larger_groups_turn_to_two_shot_earlier() -> None:
    assert [one_shot_end(size) for size in (1, 2, 4, 8)] == [64 * K, 64 * K, 32 * K, 16 * K]
    assert table(4)["all_reduce"][0] == Range(32 * K, "one_shot")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", ()),
        ("all_reduce:ring", (Rule("all_reduce", "ring"),)),
        ("allreduce:ring; alltoall:direct ;", (Rule("all_reduce", "ring"), Rule("all_to_all", "direct"))),
        ("reducescatter:ring:2K-1M", (Rule("reduce_scatter", "ring", 2 * K, K * K),)),
        ("allgather:ring:1g-", (Rule("all_gather", "ring", K**3),)),
        ("broadcast:tree:7-8", (Rule("broadcast", "tree", 7, 8),)),
        (
            "allreduce:direct:0-32K;ring:32K-",
            (Rule("all_reduce", "direct", 0, 32 * K), Rule("all_reduce", "ring", 32 * K)),
        ),
        (
            "broadcast:tree:0-1K; ring:1K-;reduce:tree",
            (Rule("broadcast", "tree", 0, K), Rule("broadcast", "ring", K), Rule("reduce", "tree")),
        ),
        ("all_reduce:ring:32K-:64K", (Rule("all_reduce", "ring", 32 * K, None, 64 * K),)),
        ("all_reduce:ring:0-:0", (Rule("all_reduce", "ring"),)),
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
        ("all_reduce:ring:0-1K:2K:3", r"'all_reduce:ring:0-1K:2K:3' is not collective:algorithm"),
        ("all_reduce:ring:0-1K:2", r"'2' is not a slice of 64 to 1G bytes such as 64K, or 0"),
        ("all_reduce:ring:0-1K:big", r"'big' is not a slice"),
        ("ring:32K-", r"'ring:32K-': unknown collective 'ring'; known are all_reduce"),
        (
            "broadcast:tree:0-1K;halving_doubling",
            r"unknown collective 'halving_doubling'; .* broadcast are direct, ring",
        ),
        ("broadcast:tree:0-1K;ring:512-", r"'ring:512-' claims sizes that 'broadcast:tree:0-1024' has"),
        ("all_reduce:ring:1K", r"'1K' is not a range of bytes such as 0-32K"),
        ("all_reduce:ring:-1K", r"'-1K' is not a range"),
        ("all_reduce:ring:0-8000000000G", r"beyond 2\^62 bytes; leave its end out"),
        (f"all_reduce:ring:{'9' * 5000}-", r"is not a range"),
        ("all_reduce:ring:\u0663-", r"is not a range"),
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
        ("all_reduce:direct", [(64 * K, "one_shot"), (None, "two_shot")]),
        ("all_reduce:ring:1M-", [(64 * K, "one_shot"), (K * K, "two_shot"), (None, "ring")]),
        ("all_reduce:tree:1K-2K", [(K, "one_shot"), (2 * K, "tree"), (64 * K, "one_shot"), (None, "two_shot")]),
        ("all_reduce:ring:0-96K", [(96 * K, "ring"), (None, "two_shot")]),
        ("all_reduce:ring:0-4K;all_reduce:ring:4K-", [(None, "ring")]),
        ("all_reduce:one_shot:0-1M", [(K * K, "one_shot"), (None, "two_shot")]),
    ],
)
def test_rules_override_the_defaults_where_they_apply(text: str, ranges: list[tuple[int | None, str]]) -> None:
    assert [(end, algorithm) for end, algorithm, _ in table(2, parse_algorithms(text))["all_reduce"]] == ranges


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
    ends = [entry.end for entry in ranges]
    assert ends[-1] is None
    assert ends[:-1] == sorted(set(ends[:-1]))  # type: ignore[type-var]
    for count in range(low + 2):
        claimed = [rule.algorithm for rule in rules if rule.begin <= count < rule.end]  # type: ignore[operator]
        default = "one_shot" if count < one_shot_end(1024) else "two_shot"
        assert lookup(ranges, count).algorithm == (claimed or [default])[0]


def test_what_was_decided_gives_way_to_rules_and_leaves_the_rest_as_it_was() -> None:
    decided = parse_algorithms("all_reduce:tree:1K-4K:128;broadcast:ring")
    chosen = table(2, parse_algorithms("all_reduce:ring:2K-3K;reduce:tree:0-:64K"), decided)
    assert chosen["all_reduce"] == [
        Range(K, "one_shot"),
        Range(2 * K, "tree", 128),
        Range(3 * K, "ring"),
        Range(4 * K, "tree", 128),
        Range(64 * K, "one_shot"),
        Range(None, "two_shot"),
    ]
    assert chosen["broadcast"] == [Range(None, "ring")]
    assert chosen["reduce"] == [Range(None, "tree", 64 * K)]


def test_measured_sizes_part_at_their_geometric_mean() -> None:
    found = [(64, "tree", 0), (256, "tree", 0), (1024, "ring", 0), (4096, "ring", 128)]
    rules = list(ranges_between("broadcast", found))
    assert rules == [
        Rule("broadcast", "tree", 0, 512),
        Rule("broadcast", "ring", 512, 2048),
        Rule("broadcast", "ring", 2048, None, 128),
    ]
    assert parse_algorithms(";".join(map(str, rules))) == tuple(rules)


def test_every_choice_can_be_built() -> None:
    for collective, ranges in table(3).items():
        for _, algorithm, _ in ranges:
            assert build(collective, algorithm, 3).size == 3
            assert build(collective, algorithm, 3) is build(collective, algorithm, 3)
