"""Which plans combine in the order of ranks: `out_of_order` says so of exactly those that compute the left fold.

Plans are executed here by other code than the proof's. Every finite monoid is one of maps of a finite set into itself
(Cayley), so maps are drawn. Words, cut off above one letter a rank, are the monoid in which every wrong order shows.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.plan import (
    BUILDERS,
    IN_RANK_ORDER,
    Plan,
    PlanError,
    Read,
    across_hosts,
    build,
    out_of_order,
    ring,
    symbolic,
    tree,
)

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
Operator = Callable[[Any, Any], Any]


def results(plan: Plan, op: Operator, inputs: Sequence[Any], root: int = 0) -> Iterator[Any]:
    """What the ranks write, where rank r gives `inputs[r]` for every chunk, and `root` has the part of rank 0."""

    def in_group(rank: int) -> int:
        return (rank + root) % plan.size

    for channel in plan.channels:
        messages: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        outputs: list[dict[int, Any]] = [{} for _ in range(plan.size)]
        programs = [deque(program) for program in channel.programs]
        while any(programs):
            runnable = (
                rank
                for rank, program in enumerate(programs)
                if program and all(messages[peer, rank] for peer in program[0].recv)
            )
            rank = next(runnable)
            step = programs[rank].popleft()
            operands = {in_group(peer): messages[peer, rank].popleft() for peer in step.recv}
            if step.read is not Read.NONE:
                own = inputs[in_group(rank)] if step.read is Read.INPUT else outputs[rank][step.chunk]
                operands[in_group(rank)] = own
            value = functools.reduce(op, (operands[peer] for peer in sorted(operands)))
            if step.write:
                outputs[rank][step.chunk] = value
            for peer in step.send:
                messages[rank, peer].append(value)
        for written in outputs:
            yield from written.values()


def in_order_of_words(plan: Plan, root: int) -> bool:
    words = [(rank,) for rank in range(plan.size)]
    return all(word == tuple(range(plan.size)) for word in results(plan, words_joined(plan.size), words, root))


def words_joined(most: int) -> Operator:
    """The finite monoid of words of at most so many letters; a longer one is None, as is what it is joined with."""
    return lambda a, b: None if a is None or b is None or len(a + b) > most else a + b


def after(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The map a, then the map b."""
    return tuple(b[each] for each in a)


def built_in() -> Iterator[tuple[Plan, int]]:
    for collective in REDUCING:
        for algorithm in BUILDERS[collective]:
            for size in range(2, 10):
                for root in range(size if collective == "reduce" else 1):
                    yield build(collective, algorithm, size), root


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan with a root: built in, over random trees or rings, or among random hosts."""
    collective, size = draw(st.sampled_from(REDUCING)), draw(st.integers(2, 9))
    root = draw(st.integers(0, size - 1)) if collective == "reduce" else 0
    kind = draw(st.sampled_from(["built in", "trees", "rings", "hosts"]))
    if kind == "trees":
        parents = [None, *(draw(st.integers(0, rank - 1)) for rank in range(1, size))]
        names = draw(st.permutations(range(size)))
        of: list[int | None] = [None] * size
        for rank, parent in enumerate(parents):
            of[names[rank]] = None if parent is None else names[parent]
        made = {"all_reduce": tree.all_reduce_over, "reduce": tree.reduce_over}.get(collective)
        return (made or tree.reduce_scatter_over)([(tuple(of), 1)]), root
    if kind == "rings":
        order = draw(st.permutations(range(size)) | st.just(list(range(size))))
        over = {"all_reduce": ring.all_reduce, "reduce": ring.reduce}.get(collective, ring.reduce_scatter)
        return over([(order, 1)]), root
    if kind == "hosts":
        ends = sorted(draw(st.sets(st.integers(1, size - 1))))
        ranks = draw(st.permutations(range(size)) | st.just(list(range(size))))
        hosts = [ranks[begin:end] for begin, end in zip([0, *ends], [*ends, size], strict=True)]
        across = draw(st.sampled_from(sorted(across_hosts.ACROSS[collective])))
        return across_hosts.build(collective, across, hosts, root), root
    return build(collective, draw(st.sampled_from(sorted(BUILDERS[collective]))), size), root


@given(plans(), st.data())
def test_a_plan_in_order_is_the_left_fold_in_every_finite_monoid(case: tuple[Plan, int], data: st.DataObject) -> None:
    plan, root = case
    disorder = out_of_order(plan, root)
    assert (disorder is None) == in_order_of_words(plan, root), disorder
    if disorder is None:
        points = data.draw(st.integers(1, 5))
        maps = st.lists(st.integers(0, points - 1), min_size=points, max_size=points).map(tuple)
        inputs = data.draw(st.lists(maps, min_size=plan.size, max_size=plan.size))
        expected = functools.reduce(after, inputs)
        assert all(result == expected for result in results(plan, after, inputs, root))
    else:
        assert re.fullmatch(
            rf"plan '{plan.name}' .*, channel \d+, rank \d, step \d+ \(chunk \d+\): combines ranks? [\d, ]+ before "
            r"ranks? [\d, ]+",
            disorder,
        )


def test_which_built_in_plans_are_in_order() -> None:
    """All roots of reduce."""
    ordered: dict[tuple[str, str], list[int]] = defaultdict(list)
    for collective in REDUCING:
        for algorithm in BUILDERS[collective]:
            for size in range(2, 10):
                roots = range(size if collective == "reduce" else 1)
                if all(out_of_order(build(collective, algorithm, size), root) is None for root in roots):
                    ordered[collective, algorithm].append(size)
    every = list(range(2, 10))
    assert ordered == {
        ("all_reduce", "one_shot"): every,
        ("all_reduce", "two_shot"): every,
        ("all_reduce", "ring"): [2],
        ("all_reduce", "bidirectional_ring"): [2],
        ("all_reduce", "tree"): [2, 3, 4, 5],
        ("all_reduce", "halving_doubling"): [2, 3],
        ("reduce_scatter", "direct"): every,
        ("reduce_scatter", "ring"): [2],
        ("reduce_scatter", "bidirectional_ring"): [2],
        ("reduce", "direct"): every,
        ("reduce", "ring"): [2],
        ("reduce", "tree"): [2, 3],
    }
    always = {name for (collective, name), sizes in ordered.items() if collective == "all_reduce" and sizes == every}
    assert {*IN_RANK_ORDER} == always | {"direct"}  # which is one of the two


def test_hosts_whose_ranks_follow_each_other() -> None:
    for across in ("one_shot", "two_shot", "tree"):
        together, mixed = (
            across_hosts.build("all_reduce", across, hosts) for hosts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        )
        assert out_of_order(together) is None
        disorder = out_of_order(mixed)
        assert disorder is not None and "before rank" in disorder


def lowest_only(left: int, right: int) -> bool:
    return left & -left < right & -right


def highest_only(left: int, right: int) -> bool:
    return left.bit_length() < right.bit_length()


def first_pair(values: Any) -> Iterator[Any]:
    first, second, *_ = values
    yield first, second


class OfCompleteValues(symbolic.Machine):
    """Looks only at combinations that complete a result."""

    def disorder(self, rank: int, step: Any, values: Any) -> str | None:
        complete = sum(value.ranks for value in values) == (1 << self.plan.size) - 1
        return super().disorder(rank, step, values) if complete else None


class WithoutRoot(symbolic.Machine):
    """Takes the plan's numbers for the ranks of the group."""

    def in_group(self, rank: int) -> int:
        return rank

    def ranks_in_group(self, value: symbolic.Value) -> int:
        return value.ranks


MUTANTS: dict[str, tuple[str, Any]] = {
    "anything goes": ("ends_before", lambda left, right: True),
    "nothing goes": ("ends_before", lambda left, right: False),
    "the lowest ranks": ("ends_before", lowest_only),
    "the highest ranks": ("ends_before", highest_only),
    "the first two operands": ("pairwise", first_pair),
    "complete values": ("Machine", OfCompleteValues),
    "without the root": ("Machine", WithoutRoot),
}


def swapped(size: int) -> tuple[Plan, int]:
    """A tree whose root combines the pairs {0, 2} and {1, 3}, and so on."""
    parents: list[int | None] = [None, *(0 if rank == 1 else rank - 2 for rank in range(1, size))]
    return tree.reduce_over([(tuple(parents), 1)]), 0


def interleaved() -> Iterator[tuple[Plan, int]]:
    for size in range(4, 8):
        yield swapped(size)
    yield tree.all_reduce_over([((1, 3, 0, None), 1)]), 0  # 0, 2, 1 becomes one operand, in order before 3
    for hosts in ([[0, 3], [1, 2]], [[0, 1, 4], [2, 3]], [[0, 2], [1, 3]]):
        yield across_hosts.build("all_reduce", "two_shot", hosts), 0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_rules_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    cases = [*built_in(), *interleaved()]
    truth = [in_order_of_words(*case) for case in cases]
    assert [out_of_order(*case) is None for case in cases] == truth
    monkeypatch.setattr(symbolic, *MUTANTS[mutant])
    assert [out_of_order(*case) is None for case in cases] != truth


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(PlanError, match="plan is 3"):
        out_of_order(3)  # type: ignore[arg-type]
    for root in (-1, 3, 1.0):
        with pytest.raises(PlanError, match=f"root is {root}; it must be from 0 to 2"):
            out_of_order(build("reduce", "direct", 3), root)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="root is 1; it must be from 0 to 0"):
        out_of_order(build("all_reduce", "ring", 3), 1)
