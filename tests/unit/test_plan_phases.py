"""Phases: what a plan over point-to-point messages does when; executed here in lockstep, on symbols of our own."""

from collections import defaultdict, deque

import pytest

from ringreduce.plan import BUILDERS, Plan, Read, build, layout, slot_depth
from ringreduce.plan.symbolic import run_round

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
SIZES = range(1, 10)


def phases_of(plan: Plan, channel: int) -> list[list[int]]:
    """Per rank the phase of each step."""
    return [[outcome.phase for outcome in rank] for rank in run_round(plan, channel, slot_depth(plan.size)).outcomes]


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_a_step_has_the_first_phase_after_all_it_needs(collective: str, algorithm: str) -> None:
    for size in SIZES:
        plan = build(collective, algorithm, size)
        for index, channel in enumerate(plan.channels):
            phases = phases_of(plan, index)
            outcomes = run_round(plan, index, slot_depth(size)).outcomes
            sent = [
                [phase for step, phase in zip(program, its, strict=True) if step.send]
                for program, its in zip(channel.programs, phases, strict=True)
            ]
            for rank, its in enumerate(phases):
                for number, phase in enumerate(its):
                    needs = [sent[peer][message] + 1 for peer, message in outcomes[rank][number].taken]
                    assert phase == max([0, *needs, *its[:number]])


def execute(plan: Plan, index: int) -> list[dict[int, list[int]]]:
    """One channel in lockstep: per rank its output chunks, each as the ranks whose inputs are in it, in order.

    In place: an output chunk that no step has written yet is the input. Messages of a phase are there in the next one,
    neither before nor out of order; whatever is sent comes from the memory as it is at the end of the phase.
    """
    shape, channel = layout(plan.collective, plan.size), plan.channels[index]
    phases = phases_of(plan, index)
    arrived: defaultdict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    outputs: list[dict[int, list[int]]] = [{} for _ in channel.programs]
    for phase in range(max(max(its, default=0) for its in phases) + 1):
        under_way = []
        for rank, (program, its) in enumerate(zip(channel.programs, phases, strict=True)):
            for step, when in zip(program, its, strict=True):
                if when != phase:
                    continue
                operands = [(peer, arrived[peer, rank].popleft()) for peer in step.recv]
                if step.read is Read.INPUT:
                    assert shape.has_input(rank, step.chunk // channel.chunks)
                    operands.append((rank, [rank]))
                elif step.read is Read.OUTPUT:
                    operands.append((rank, outputs[rank][step.chunk]))
                value = [giver for _, ranks in sorted(operands) for giver in ranks]
                if step.write:
                    outputs[rank][step.chunk] = value
                under_way += [((rank, peer), value) for peer in step.send]
        for pair, value in under_way:
            arrived[pair].append(value)
    assert not any(arrived.values())
    return outputs


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_lockstep_gives_what_verify_demands(collective: str, algorithm: str) -> None:
    for size in SIZES:
        plan = build(collective, algorithm, size)
        shape = layout(collective, size)
        for index, channel in enumerate(plan.channels):
            outputs = execute(plan, index)
            for chunk in range(shape.blocks * channel.chunks):
                block = chunk // channel.chunks
                results = set()
                for rank in range(size):
                    if not shape.needs_output(rank, block) or (shape.one_buffer and shape.has_input(rank, block)):
                        continue
                    assert sorted(outputs[rank][chunk]) == [r for r in range(size) if shape.has_input(r, block)]
                    results.add(tuple(outputs[rank][chunk]))
                assert len(results) <= 1  # by one expression, so with the same bits


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "count"),
    [
        ("all_reduce", "one_shot", 8, 2),
        ("all_reduce", "two_shot", 8, 3),
        ("all_reduce", "ring", 8, 15),
        ("all_reduce", "halving_doubling", 8, 7),
        ("broadcast", "direct", 8, 2),
        ("all_to_all", "direct", 8, 2),
    ],
)
def test_how_many_phases_an_algorithm_has(collective: str, algorithm: str, size: int, count: int) -> None:
    plan = build(collective, algorithm, size)
    assert 1 + max(max(its) for its in phases_of(plan, 0)) == count
