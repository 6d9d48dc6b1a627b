"""The cost model: its pipeline formula against a simulation of all rounds, and what it leads to."""

import dataclasses
import math

import pytest

from ringreduce.plan import (
    BUILDERS,
    Slicing,
    build,
    lookup,
    slot_depth,
    table,
)
from ringreduce.plan.by_cost import by_cost
from ringreduce.plan.cost import CALL, WINDOW, Cost, Machine, chunk_bytes

K = 1024
SLICE = 16 * K
HUGE = 2**40

MACHINE = Machine(
    cores=64,
    cache_bytes=HUGE,
    hop=100e-9,
    turn=2e-6,
    wake=3e-6,
    patience=6e-6,
    copy_cached=0.02e-9,
    add_cached=0.03e-9,
    copy_memory=0.06e-9,
    copy_memory_all=0.09e-9,
    add_memory_all=0.09e-9,
    copy_scratch=0.06e-9,
    fetch_scratch=0.1e-9,
    staging=(64 * K, 256 * K, K * K, 4 * K * K),
    put=(0.04e-9, 0.04e-9, 0.05e-9, 0.08e-9),
    take=(0.05e-9, 0.05e-9, 0.06e-9, 0.09e-9),
)


def slicing(size: int) -> Slicing:
    return Slicing(slices=4, least_slice_bytes=SLICE, most_slice_bytes=4 * K * K // slot_depth(size))


def cost_of(collective: str, algorithm: str, size: int, machine: Machine = MACHINE) -> Cost:
    return Cost(build(collective, algorithm, size), machine, slicing(size))


def simulated(cost: Cost, rounds: int) -> float:
    """All rounds of a plan whose ranks have cores of their own, step by step as the engine goes: the oldest first."""
    plan, costs = cost.plan, cost.step_seconds(SLICE, False)
    sent: dict[tuple[int, int, int, int], list[float]] = {}  # (channel, round, source, target) -> seen from when on
    at = {(rank, c, k): 0 for rank in range(plan.size) for c in range(len(plan.channels)) for k in range(rounds)}
    read = dict.fromkeys(((c, k, a, b) for c in range(len(plan.channels)) for k in range(rounds)
                          for a in range(plan.size) for b in range(plan.size)), 0)  # fmt: skip
    clock = [0.0] * plan.size
    first_step = [[sum(len(c.programs[rank]) for c in plan.channels[:i]) for i in range(len(plan.channels))]
                  for rank in range(plan.size)]  # fmt: skip

    def next_steps(rank: int):  # type: ignore[no-untyped-def]
        for c, channel in enumerate(plan.channels):
            program = channel.programs[rank]
            unfinished = [k for k in range(rounds) if at[rank, c, k] < len(program)]
            for k in unfinished[: 1 if not unfinished else WINDOW]:
                if k >= unfinished[0] + WINDOW:
                    break
                step = program[at[rank, c, k]]
                waits = [sent.get((c, k, peer, rank), []) for peer in step.recv]
                taken = [read[c, k, peer, rank] for peer in step.recv]
                if all(len(times) > number for times, number in zip(waits, taken, strict=True)):
                    ready = max((times[number] for times, number in zip(waits, taken, strict=True)), default=0.0)
                    yield max(clock[rank], ready), k, c, rank, step

    while any(at[rank, c, k] < len(plan.channels[c].programs[rank]) for rank, c, k in at):
        start, k, c, rank, step = min(
            (each for rank in range(plan.size) for each in next_steps(rank)), key=lambda e: e[:4]
        )
        clock[rank] = start + costs[rank][first_step[rank][c] + at[rank, c, k]]
        at[rank, c, k] += 1
        for peer in step.recv:
            read[c, k, peer, rank] += 1
        for peer in step.send:
            sent.setdefault((c, k, rank, peer), []).append(clock[rank] + cost.machine.hop)
    return max(clock)


def block_of(cost: Cost, rounds: int) -> int:
    """The block whose chunks have so many slices."""
    plan = cost.plan
    shares = [channel.share for channel in plan.channels]
    return rounds * SLICE * max(channel.chunks for channel in plan.channels) * sum(shares) // max(shares)


@pytest.mark.parametrize("rounds", [1, 2, 5, 20])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("collective", "algorithm"), [("broadcast", "ring"), ("reduce", "ring"), ("broadcast", "direct")]
)
def test_the_formula_is_exact_for_chains(collective: str, algorithm: str, size: int, rounds: int) -> None:
    cost = cost_of(collective, algorithm, size)
    seconds = cost.seconds(block_of(cost, rounds), SLICE) - CALL
    assert seconds == pytest.approx(simulated(cost, rounds), rel=1e-9)


@pytest.mark.parametrize(
    ("collective", "algorithm"), [(collective, name) for collective, names in BUILDERS.items() for name in names]
)
def test_the_formula_is_near_the_simulation_for_every_plan(collective: str, algorithm: str) -> None:
    for size in (2, 4):
        cost = cost_of(collective, algorithm, size)
        assert cost.seconds(block_of(cost, 1), SLICE) - CALL == pytest.approx(simulated(cost, 1), rel=0.05)
        assert cost.seconds(block_of(cost, 12), SLICE) - CALL == pytest.approx(simulated(cost, 12), rel=0.25)


def test_more_bytes_take_no_less_time() -> None:
    for cores in (1, 2, 64):
        machine = dataclasses.replace(MACHINE, cores=cores, cache_bytes=2 * K * K)
        for size in (2, 3, 8):
            for collective, names in BUILDERS.items():
                for name in names:
                    cost = cost_of(collective, name, size, machine)
                    times = [cost.seconds(64 * 2**power, SLICE) for power in range(20)]
                    assert times == sorted(times), (collective, name, size, cores)
                    assert times[-1] > 2 * times[0]


def test_ranks_that_share_cores_take_longer() -> None:
    for collective, names in BUILDERS.items():
        for name in names:
            alone, together = (
                cost_of(collective, name, 4, dataclasses.replace(MACHINE, cores=cores)).seconds(64 * K)
                for cores in (4, 2)
            )
            assert together > 1.2 * alone


def test_small_blocks_go_in_one_shot_and_large_ones_in_two() -> None:
    for size in (3, 4, 8, 16):
        ranges = table(size, decided=by_cost(size, MACHINE, slicing(size)))["all_reduce"]
        assert lookup(ranges, 64).algorithm == "one_shot"
        assert lookup(ranges, 64 * K * K).algorithm == "two_shot"
        direct = [entry.algorithm for entry in ranges]
        assert direct == sorted(direct), "one_shot came back"


def test_slow_memory_leads_to_smaller_slices() -> None:
    """Where slots that do not stay in a core's cache cost ten times as much, slices are chosen that keep them there."""
    far = dataclasses.replace(MACHINE, put=(0.04e-9, 0.04e-9, 0.4e-9, 0.8e-9), take=(0.05e-9, 0.05e-9, 0.5e-9, 0.9e-9))
    chosen = lookup(table(2, decided=by_cost(2, far, slicing(2)))["all_reduce"], 64 * K * K)
    assert 0 < chosen.slice_bytes <= 32 * K
    near = dataclasses.replace(MACHINE, put=(0.04e-9,) * 4, take=(0.05e-9,) * 4)
    assert lookup(table(2, decided=by_cost(2, near, slicing(2)))["all_reduce"], 64 * K * K).slice_bytes == 0


def test_what_is_fetched_goes_the_direct_way() -> None:
    rules = by_cost(4, MACHINE, slicing(4), fetch_from=64 * K)
    for collective, ranges in table(4, decided=rules).items():
        chunks = 4 if collective == "all_reduce" else 1
        entry = lookup(ranges, chunks * 256 * K)
        if collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            assert entry[1:] == ("two_shot" if collective == "all_reduce" else "direct", 0)
        else:
            assert entry == lookup(table(4, decided=by_cost(4, MACHINE, slicing(4)))[collective], chunks * 256 * K)
    assert lookup(table(4, decided=rules)["all_reduce"], 64).algorithm == "one_shot"


def test_large_groups_keep_the_built_in_rules() -> None:
    assert by_cost(33, MACHINE, slicing(33)) == ()
    assert {rule.collective for rule in by_cost(32, MACHINE, slicing(32), ["gather", "reduce"])} == {"gather", "reduce"}


def test_chunks_and_slices_are_those_of_the_engine() -> None:
    assert chunk_bytes(build("all_reduce", "two_shot", 4), 1000) == 256
    assert chunk_bytes(build("all_reduce", "bidirectional_ring", 4), 1024) == 128
    assert slicing(2).slice_bytes(K * K) == 256 * K
    assert slicing(2).slice_bytes(100) == SLICE
    assert slicing(2).slice_bytes(64 * K * K) == 512 * K
    assert slicing(2).slice_bytes(K * K, 100) == 64


def test_a_machine_comes_back_as_it_was_written() -> None:
    assert Machine.load(dataclasses.asdict(MACHINE)) == MACHINE


@pytest.mark.parametrize(
    ("field", "value"),
    [("hop", None), ("hop", -1.0), ("hop", math.inf), ("hop", True), ("cores", 0), ("put", [1, 2, 3]), ("put", 4),
     ("take", [1, 2, 3, "4"])],
)  # fmt: skip
def test_a_wrong_figure_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        Machine.load({**dataclasses.asdict(MACHINE), field: value})
