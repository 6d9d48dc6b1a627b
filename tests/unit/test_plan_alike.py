"""What one rank runs of a symmetric plan: the same as of the plan in full, and proved as strictly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ringreduce.plan import PlanError, Program, Read, Step, alike, build, lower
from ringreduce.plan.symmetric import SYMMETRIC, symmetric

SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31)
ALL = [(collective, algorithm) for collective, each in SYMMETRIC.items() for algorithm in each]


def by_rank(words: list[int]) -> list[tuple[list[int], list[list[int]]]]:
    """Of each channel of a lowered plan: its head, and each rank's part."""
    size, channels, at, found = words[0], words[1], 2, []
    for _ in range(channels):
        head, parts, at = words[at : at + 4], [], at + 4
        for _ in range(size):
            begin, steps, at = at, words[at], at + 1
            if steps >= 0:
                at += 1
                for _ in range(steps):
                    at += 8 + 2 * words[at + 7]
                    at += 1 + words[at]
            parts.append(words[begin:at])
        found.append((head, parts))
    assert at == len(words)
    return found


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_a_rank_runs_what_the_plan_in_full_says(collective: str, algorithm: str) -> None:
    for size in SIZES:
        if symmetric(collective, algorithm, size) is None:
            assert algorithm == "halving_doubling" and size & (size - 1)
            continue
        full = by_rank(lower(build(collective, algorithm, size)))
        digests = set()
        for rank in range(size):
            words, digest = alike.lower_for(collective, algorithm, size, rank)
            digests.add(digest)
            for (head, parts), (own_head, own_parts) in zip(full, by_rank(words), strict=True):
                assert own_head == head
                assert own_parts == [parts[rank] if r == rank else [-1] for r in range(size)]
        assert len(digests) == 1


def spoiled(change: Callable[[Program], Program], algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves an all_reduce of 4 ranks after `change` of the program of all."""
    good = SYMMETRIC["all_reduce"][algorithm]

    def channels(size: int) -> tuple[object, ...]:
        return tuple(replace(each, programs=(change(each.programs[0]),)) for each in good.channels(size))

    wrong = good._replace(channels=channels)  # type: ignore[arg-type]
    monkeypatch.setattr(alike, "symmetric", lambda *_: wrong)
    alike._prove.__wrapped__("all_reduce", algorithm, 4)


@pytest.mark.parametrize("algorithm", SYMMETRIC["all_reduce"])
def test_programs_that_are_as_they_should_be(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(lambda program: program, algorithm, monkeypatch)


@pytest.mark.parametrize(
    ("algorithm", "change", "why"),
    [
        ("ring", lambda program: program[:-1], "is never received"),
        ("ring", lambda program: (*program[1:], program[0]), "waits for a message from rank 3"),
        ("ring", lambda program: (replace(program[0], chunk=1), *program[1:]), "the orders differ"),
        (
            "ring",
            lambda program: tuple(replace(step, write=step.write and bool(step.send)) for step in program),
            "goes",
        ),
        ("two_shot", lambda program: (replace(program[0], send=(0,)), *program[1:]), "sends to itself"),
        (
            "two_shot",
            lambda program: tuple(step for step in program if 2 not in (*step.send, *step.recv)),
            "the orders differ",
        ),
        ("one_shot", lambda program: (program[0], replace(program[1], read=Read.NONE)), "lacks the contribution"),
        # Each rank adds its own value first: all sums are complete, and of different bits.
        (
            "one_shot",
            lambda _: (
                Step(0, Read.INPUT, send=(1, 2, 3)),
                Step(0, Read.INPUT, recv=(1,), write=True),
                Step(0, Read.OUTPUT, recv=(2, 3), write=True),
            ),
            "combine the contributions differently",
        ),
    ],
)
def test_wrong_programs_are_refused(
    algorithm: str, change: Callable[[Program], Program], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=why):
        spoiled(change, algorithm, monkeypatch)


def test_an_outbox_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "slot_depth", lambda size: 2)
    with pytest.raises(PlanError, match="the outbox has 2 slots"):
        spoiled(lambda program: program, "two_shot", monkeypatch)


def test_a_thousand_ranks_take_no_thousand_programs() -> None:
    words, _ = alike.lower_for("all_reduce", "ring", 1024, 7)
    assert len(words) < 30_000  # those of all ranks would be 25 million
