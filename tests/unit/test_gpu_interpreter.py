"""The GPU's interpreter, run on a CPU: all ranks in this process, a thread for every block.

Every built-in plan must give what its collective promises; waits must end where a peer does not come or makes another
call; and what broke must stay untouched.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import bodies.interpreter
import numpy as np
import pytest
from bodies.interpreter import FINGERPRINT, GAVE_UP, SECOND, Call, Group, Report, run

import ringreduce.plan.ring as ring
from ringreduce.plan import BUILDERS, Channel, Plan, Read, Step, build, layout, verify

pytestmark = pytest.mark.slow  # compiles the interpreter of GPUs for CPUs

interpreter = bodies.interpreter.interpreter  # a fixture

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
UNTOUCHED = -77


def blocks(collective: str, size: int, counts: list[int]) -> Iterator[tuple[list[list[np.ndarray]], ...]]:
    """Inputs, outputs and the outputs wanted; block b has counts[b % len(counts)] elements."""
    shape = layout(collective, size)
    rng = np.random.default_rng([size, *counts])
    count = [counts[block % len(counts)] for block in range(shape.blocks)]
    data = [[rng.integers(-(2**40), 2**40, count[b]) for b in range(shape.blocks)] for _ in range(size)]
    total = [sum(data[r][b] for r in range(size) if r in ranks_of(shape, b)) for b in range(shape.blocks)]
    inputs = [[data[r][b] for b in range(shape.blocks) if shape.has_input(r, b)] for r in range(size)]
    wanted = [[total[b] for b in range(shape.blocks) if shape.needs_output(r, b)] for r in range(size)]
    outputs = [[np.full(array.size, UNTOUCHED) for array in arrays] for arrays in wanted]
    return inputs, outputs, wanted


def ranks_of(shape: Any, block: int) -> list[int]:
    mask = shape.contributors(block)
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def check(reports: list[Report], outputs: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> None:
    assert [GAVE_UP[report.gave_up] for report in reports] == ["no"] * len(reports)
    for rank, (arrays, right) in enumerate(zip(outputs, wanted, strict=True)):
        for position, (array, values) in enumerate(zip(arrays, right, strict=True)):
            wrong = (array != values).nonzero()[0]
            assert wrong.size == 0, f"rank {rank}, tensor {position}: {wrong.size} wrong, the first at {wrong[0]}"


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_plan(interpreter: Any, collective: str, algorithm: str, stepwise: bool) -> None:
    for size, counts in itertools.product((1, 2, 3, 4), ([0], [1], [1000], [997, 3, 64, 0])):
        if len(counts) > 1 and layout(collective, size).blocks == 1:
            continue
        plan = build(collective, algorithm, size)
        inputs, outputs, wanted = blocks(collective, size, counts)
        check(run(interpreter, plan, inputs, outputs, stepwise=stepwise, lanes=2), outputs, wanted)


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("slice_elements", [8, 24, 4096])
def test_lanes_and_slices(interpreter: Any, lanes: int, slice_elements: int) -> None:
    for plan in (build("all_reduce", "two_shot", 3), ring.all_reduce([((0, 2, 1), 2), ((1, 2, 0), 1)])):
        for count in (5, 63, 64, 65, 1001):
            inputs, outputs, wanted = blocks("all_reduce", 3, [count])
            check(run(interpreter, plan, inputs, outputs, lanes=lanes, slice_elements=slice_elements), outputs, wanted)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_more_ranks(interpreter: Any, size: int, stepwise: bool) -> None:
    for collective, algorithm in ALGORITHMS:
        inputs, outputs, wanted = blocks(collective, size, [size * 24])
        plan = build(collective, algorithm, size)
        check(run(interpreter, plan, inputs, outputs, stepwise=stepwise, slice_elements=16), outputs, wanted)


# Of each step of two_shot on 4 ranks, for each rank: contributions, combination, collection.
TWO_SHOT = [0, 0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (TWO_SHOT, "no"),
        ([0, 1, 2, 3, 4, 5, 6], "no"),
        ([0, 0, 0, 1, 1, 1, 1], "timeout"),  # the result is held back until the others' have come
        ([0, 0, 0, 0, 1, 1, 1], "timeout"),
    ],
)
def test_batches_that_are_given(interpreter: Any, batches: list[int], why: str, stepwise: bool) -> None:
    inputs, outputs, wanted = blocks("all_reduce", 4, [700])
    call = Group(interpreter, 4).call(
        build("all_reduce", "two_shot", 4), inputs, outputs, batches=batches * 4, stepwise=stepwise, timeout=SECOND
    )
    assert set(call.make()) <= {why, "no"} and why in call.gave_up()
    if why == "no":
        check(list(call.reports), outputs, wanted)


def test_a_batch_waits_for_those_who_read_its_slots(interpreter: Any) -> None:
    inputs, outputs, _ = blocks("all_reduce", 4, [700])
    call = Group(interpreter, 4).call(build("all_reduce", "two_shot", 4), inputs, outputs, stepwise=True)
    # 4 sends a round, and 8 slots. For whom a slot was used in the call before, nobody knows.
    for first_round in (0, 1):
        assert [call.waits(2, first_round, batch) for batch in range(3)] == [3 * 3, 3 + 3, 3]
    for later in (2, 3, 17):
        assert [call.waits(2, later, batch) for batch in range(3)] == [3, 3 + 3, 3]


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_replayed_launch_needs_nothing_new(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, wanted = blocks("all_reduce", 3, [517])
    plan = build("all_reduce", "ring", 3)
    check(run(interpreter, plan, inputs, outputs, launches=5, stepwise=stepwise), outputs, wanted)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "two_shot", "tree"])
def test_in_place(interpreter: Any, algorithm: str, stepwise: bool) -> None:
    inputs, _, wanted = blocks("all_reduce", 4, [333])
    check(
        run(interpreter, build("all_reduce", algorithm, 4), inputs, inputs, stepwise=stepwise, lanes=2), inputs, wanted
    )


def test_roots(interpreter: Any) -> None:
    for root in range(3):
        values = [np.arange(100) * (rank + 1) for rank in range(3)]
        run(interpreter, build("broadcast", "ring", 3), [[v] for v in values], [[v] for v in values], root=root)
        assert all(np.array_equal(v, np.arange(100) * (root + 1)) for v in values)


# A reduce in which rank 1 combines what ranks 2 and 3 have and only forwards it, and rank 0 reads its output again.
RELAYED = Plan(
    "relayed",
    "reduce",
    4,
    (
        Channel(
            share=1,
            chunks=1,
            programs=(
                (Step(0, Read.INPUT, recv=(1,), write=True), Step(0, Read.OUTPUT, recv=(1,), write=True)),
                (Step(0, recv=(2, 3), send=(0,)), Step(0, Read.INPUT, send=(0,))),
                (Step(0, Read.INPUT, send=(1,)),),
                (Step(0, Read.INPUT, send=(1,)),),
            ),
        ),
    ),
)


@pytest.mark.parametrize("stepwise", [False, True])
def test_steps_that_only_forward(interpreter: Any, stepwise: bool) -> None:
    verify(RELAYED)
    for count in (0, 1, 300):
        inputs, outputs, wanted = blocks("reduce", 4, [count])
        check(run(interpreter, RELAYED, inputs, outputs, lanes=2, stepwise=stepwise), outputs, wanted)


@pytest.mark.parametrize(("size", "algorithm"), [(3, "two_shot"), (3, "ring"), (4, "ring"), (5, "ring"), (4, "tree")])
def test_average(interpreter: Any, size: int, algorithm: str) -> None:
    rng = np.random.default_rng(size)
    inputs = [[rng.integers(-99, 99, 201).astype(np.float32)] for _ in range(size)]  # no order of a sum rounds
    outputs = [[np.zeros(201, np.float32)] for _ in range(size)]
    plan = build("all_reduce", algorithm, size)
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", divisor=float(size), lanes=2)
    check(reports, outputs, [[sum(array for (array,) in inputs) / np.float32(size)]] * size)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("plan", [build("all_reduce", "two_shot", 3), build("all_reduce", "ring", 5), RELAYED])
def test_averages_of_narrow_floats_do_not_overflow(interpreter: Any, plan: Plan, stepwise: bool) -> None:
    largest = [np.full(201, np.finfo(np.float16).max) for _ in range(plan.size)]
    ranks = plan.size if plan.collective == "all_reduce" else 1
    outputs = [[np.zeros(201, np.float16)] if rank < ranks else [] for rank in range(plan.size)]
    how: dict[str, Any] = {"divisor": float(plan.size), "weighs": True, "lanes": 2, "stepwise": stepwise}
    reports = run(interpreter, plan, [[each] for each in largest], outputs, "float16_sum", **how)
    check(reports, outputs, [[largest[0]] for _ in range(ranks)] + [[]] * (plan.size - ranks))


@pytest.mark.parametrize("plan", [build("all_reduce", "two_shot", 4), build("all_reduce", "ring", 4), RELAYED])
def test_factors(interpreter: Any, plan: Plan) -> None:
    rng = np.random.default_rng(3)
    inputs = [[rng.integers(-99, 99, 201).astype(np.float32)] for _ in range(4)]
    ranks = 4 if plan.collective == "all_reduce" else 1
    outputs = [[np.zeros(201, np.float32)] if rank < ranks else [] for rank in range(4)]
    factors = [0.5, 3.0, -2.0, 0.25]
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", factors=factors)
    total = sum(array * np.float32(factor) for (array,), factor in zip(inputs, factors, strict=True))
    check(reports, outputs, [[total] for _ in range(ranks)] + [[]] * (4 - ranks))


def test_a_product_is_rounded_before_it_is_added(interpreter: Any) -> None:
    rng = np.random.default_rng(3)
    inputs = [[rng.standard_normal(201).astype(np.float32)] for _ in range(3)]
    outputs = [[np.zeros(201, np.float32)] for _ in range(3)]
    plan = build("all_reduce", "two_shot", 3)
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", factors=[0.5, 3.0, 0.1])
    a, b, c = (array * np.float32(f) for (array,), f in zip(inputs, (0.5, 3.0, 0.1), strict=True))
    check(reports, outputs, [[a + b + c]] * 3)


@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_elements_of_several_parts(interpreter: Any, algorithm: str) -> None:
    rng = np.random.default_rng(5)
    inputs = [[(rng.integers(-99, 99, 205) + 1j * rng.integers(-99, 99, 205)).astype(np.complex64)] for _ in range(3)]
    outputs = [[np.zeros(205, np.complex64)] for _ in range(3)]
    plan = build("all_reduce", algorithm, 3)
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", parts=2, lanes=2, divisor=2.0)
    check(reports, outputs, [[sum(array for (array,) in inputs) / np.complex64(2)]] * 3)


@pytest.mark.parametrize("threaded", [False, True])
def test_calls_of_many_kinds_in_one_group(interpreter: Any, threaded: bool) -> None:
    """Whatever lanes, plans and ways of launching a call has, it leaves the regions to the next one as they were."""
    group = Group(interpreter, 3, lanes=6)
    plans = [build(collective, algorithm, 3) for collective, algorithm in ALGORITHMS]
    for number, (plan, lanes) in enumerate(itertools.product(plans, (1, 3, 2))):
        inputs, outputs, wanted = blocks(plan.collective, 3, [300 + number])
        options = {"stepwise": number % 4 == 3, "slice_elements": 8 + 8 * (number % 3), "lanes": lanes}
        call = group.call(plan, inputs, outputs, threaded=threaded, **options)
        call.make()
        check(list(call.reports), outputs, wanted)
        assert group.words_in_use() == 0


# ---- Where tensors lie ----------------------------------------------------------------------------------------------

PACK = 16
"""Bytes that a kernel reads at once where all its operands lie alike modulo so many."""


def at_offset(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins `offset` bytes after a multiple of PACK."""
    memory = np.empty(array.nbytes + 2 * PACK, np.uint8)
    begin = -memory.ctypes.data % PACK + offset
    placed = memory[begin : begin + array.nbytes].view(array.dtype)
    placed[:] = array
    return placed


def run_at_offsets(
    interpreter: Any, plan: Plan, offsets: list[tuple[int, int]], stepwise: bool, element: type = np.uint8
) -> int:
    """Makes a call of `plan` with each rank's input and output at its pair of offsets, checks the results, and returns
    how many steps read their operands one element at a time."""
    inputs, outputs, wanted = blocks(plan.collective, plan.size, [301])
    inputs = [[at_offset(x.astype(element), a) for x in xs] for xs, (a, _) in zip(inputs, offsets, strict=True)]
    outputs = [[at_offset(x.astype(element), b) for x in xs] for xs, (_, b) in zip(outputs, offsets, strict=True)]
    group = Group(interpreter, plan.size, lanes=len(plan.channels), slot_bytes=128)
    kernel = f"uint{8 * np.dtype(element).itemsize}_sum"
    options = {"slice_elements": 128 // np.dtype(element).itemsize, "stepwise": stepwise}
    call = group.call(plan, inputs, outputs, kernel, **options)
    call.make()
    check(list(call.reports), outputs, [[x.astype(element) for x in tensors] for tensors in wanted])
    return call.unlike.value


PLACED = [build("all_reduce", algorithm, 3) for algorithm in ("ring", "one_shot", "two_shot", "tree")] + [
    RELAYED,
    build("all_gather", "ring", 3),
    build("all_to_all", "direct", 3),
]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("plan", PLACED, ids=lambda plan: f"{plan.collective}-{plan.name}")
def test_tensors_that_lie_alike_are_read_by_packs(interpreter: Any, plan: Plan, stepwise: bool) -> None:
    """Slots too then lie as the tensors do, wherever that is, and also those that a rank only forwards."""
    for offset in range(PACK):
        assert run_at_offsets(interpreter, plan, [(offset, offset)] * plan.size, stepwise) == 0, offset
    assert run_at_offsets(interpreter, plan, [(8, 8)] * plan.size, stepwise, np.uint64) == 0


@pytest.mark.parametrize("plan", [build("all_reduce", "two_shot", 2), RELAYED], ids=lambda plan: plan.name)
def test_every_pair_of_offsets(interpreter: Any, plan: Plan) -> None:
    """Of input and output, and of one rank's tensors and all others'."""
    for a, b in itertools.product(range(PACK), repeat=2):
        if a != b:
            assert run_at_offsets(interpreter, plan, [(a, b)] * plan.size, False) > 0
            assert run_at_offsets(interpreter, plan, [(a, a)] + [(b, b)] * (plan.size - 1), False) > 0


def test_an_offset_that_is_no_offset_stays_in_the_slot(interpreter: Any) -> None:
    group = Group(interpreter, 2)
    inputs, outputs, _ = blocks("broadcast", 2, [10])
    call = group.call(build("broadcast", "direct", 2), inputs, outputs, absent=(0,))
    group.notice(1, 0).offset = 2**40 + PACK
    group.forge(1, 0, 80)
    assert call.make()[1] == "no"
    assert (outputs[1][0] == 0).all()


# ---- Calls that end otherwise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_peer_that_does_not_come(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, _ = blocks("all_reduce", 3, [100])
    plan = build("all_reduce", "one_shot", 3)
    reports = run(interpreter, plan, inputs, outputs, absent=(1,), timeout=SECOND // 5, stepwise=stepwise, lanes=3)
    for rank in (0, 2):
        assert (GAVE_UP[reports[rank].gave_up], reports[rank].peer, reports[rank].step) == ("timeout", 1, 1)
        assert reports[rank].waiting_for == 1 and reports[rank].waited < SECOND // 5


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("stepwise", [False, True])
def test_after_a_timeout_nothing_is_done(interpreter: Any, stepwise: bool, threaded: bool) -> None:
    group = Group(interpreter, 3)
    inputs, outputs, _ = blocks("broadcast", 3, [100])
    plan = build("broadcast", "direct", 3)
    options = {"stepwise": stepwise, "threaded": threaded}
    late = group.call(plan, inputs, outputs, absent=(0,), timeout=SECOND // 10, **options)
    assert late.make() == ["no", "timeout", "timeout"]
    again = group.call(plan, inputs, outputs, **options)
    assert again.make() == ["no"] * 3  # the first report stands
    assert group.notice(1, 0).full == group.notice(2, 0).full == 1  # what rank 0 sent now lies there
    assert all((array == UNTOUCHED).all() for arrays in outputs[1:] for array in arrays)


@pytest.mark.parametrize("threaded", [False, True])
def test_lanes_end_with_the_first_that_gives_up(interpreter: Any, threaded: bool) -> None:
    group = Group(interpreter, 3)
    inputs, outputs, _ = blocks("all_reduce", 3, [100])
    call = group.call(build("all_reduce", "ring", 3), inputs, outputs, absent=(1,), lanes=3, threaded=threaded)
    made = threading.Thread(target=call.make)
    made.start()
    while not all(call.reports[rank].waited for rank in (0, 2)):
        time.sleep(0.001)
    for rank in (0, 2):
        group.break_rank(rank)  # as one of its lanes does
    made.join()
    assert call.gave_up() == ["no"] * 3


@pytest.mark.parametrize("stepwise", [False, True])
def test_abort(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, _ = blocks("all_reduce", 3, [100])
    plan = build("all_reduce", "ring", 3)
    reports = run(interpreter, plan, inputs, outputs, absent=(0,), aborted=True, lanes=3, stepwise=stepwise)
    assert [GAVE_UP[reports[rank].gave_up] for rank in (1, 2)] == ["aborted"] * 2


def test_abort_while_it_waits(interpreter: Any) -> None:
    inputs, outputs, _ = blocks("all_reduce", 2, [100])
    call = Group(interpreter, 2).call(build("all_reduce", "ring", 2), inputs, outputs, absent=(0,), lanes=3)
    made = threading.Thread(target=call.make)
    made.start()
    while not call.reports[1].waited:
        time.sleep(0.001)
    call.reports[1].abort = 1
    made.join()
    assert (call.gave_up()[1], call.reports[1].peer) == ("aborted", 0)


def one_step_before(interpreter: Any) -> tuple[Group, Call, list[list[np.ndarray]]]:
    """Rank 1 of a broadcast, whose one step can be taken: rank 0 has sent."""
    group = Group(interpreter, 2)
    inputs, outputs, _ = blocks("broadcast", 2, [10])
    call = group.call(build("broadcast", "direct", 2), inputs, outputs, stepwise=True)
    assert call.launch_batch(0, 0) == "no"
    return group, call, outputs


def test_steps_one_by_one(interpreter: Any) -> None:
    group, call, outputs = one_step_before(interpreter)
    assert group.notice(1, 0).full == 1
    assert (outputs[1][0] == UNTOUCHED).all()
    assert call.launch_batch(1, 0) == "no"
    assert not (outputs[1][0] == UNTOUCHED).any()
    assert group.words_in_use() == 0


@pytest.mark.parametrize("broken", [False, True])
def test_an_aborted_step_touches_nothing(interpreter: Any, broken: bool) -> None:
    """Though the words that its stream waits for are as they should be."""
    group, call, outputs = one_step_before(interpreter)
    if broken:
        group.break_rank(1)
    else:
        call.reports[1].abort = 1
    assert call.launch_batch(1, 0) == ("no" if broken else "aborted")
    assert (outputs[1][0] == UNTOUCHED).all()
    assert group.notice(1, 0).full == 1
    assert group.words_in_use() == 3  # the notice, the slot taken, and that rank 1 is broken


def test_a_step_does_not_wait(interpreter: Any) -> None:
    """A stream that was let go though nobody aborted launches it in vain."""
    inputs, outputs, _ = blocks("broadcast", 2, [10])
    call = Group(interpreter, 2).call(build("broadcast", "direct", 2), inputs, outputs, timeout=0, stepwise=True)
    assert call.launch_batch(1, 0) == "aborted"
    assert (outputs[1][0] == UNTOUCHED).all()


@pytest.mark.parametrize("stepwise", [False, True])
def test_another_call_on_a_peer(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, _ = blocks("all_reduce", 2, [100])
    reports = run(
        interpreter, build("all_reduce", "two_shot", 2), inputs, outputs, fingerprints=[1, 2], timeout=SECOND // 5,
        stepwise=stepwise,
    )  # fmt: skip
    found = {GAVE_UP[report.gave_up] for report in reports}
    assert "mismatch" in found and found <= {"mismatch", "timeout"}


def test_another_size_on_a_peer(interpreter: Any) -> None:
    inputs = [[np.ones(100, np.int64)], [np.ones(101, np.int64)]]
    outputs = [[np.zeros(array.size, np.int64) for array in arrays] for arrays in inputs]
    reports = run(interpreter, build("all_reduce", "one_shot", 2), inputs, outputs, timeout=SECOND // 5)
    assert "wrong_size" in {GAVE_UP[report.gave_up] for report in reports}


@pytest.mark.parametrize(
    ("sizes", "fingerprint", "why", "peer"),
    [
        ((80, 80), FINGERPRINT + 1, "mismatch", None),
        ((80, 88), FINGERPRINT, "wrong_size", 3),
        ((520, 520), FINGERPRINT, "wrong_size", None),  # a slot has 512
        ((2**63, 2**63), FINGERPRINT, "wrong_size", None),
        ((81, 81), FINGERPRINT, "wrong_size", None),  # no whole elements
    ],
)
def test_forged_notices_of_what_is_forwarded(
    interpreter: Any, sizes: tuple[int, int], fingerprint: int, why: str, peer: int | None
) -> None:
    group = Group(interpreter, 4)
    inputs, outputs, _ = blocks("reduce", 4, [10])
    call = group.call(RELAYED, inputs, outputs, absent=(0, 2, 3))
    for writer, size in zip((2, 3), sizes, strict=True):
        group.forge(1, writer, size, fingerprint)
    assert call.make()[1] == why
    assert call.reports[1].peer in ((peer,) if peer else (2, 3))
    assert group.notice(0, 1).full == 0


@pytest.mark.parametrize("size", [0, 72, 88, 2**64 - 8])
def test_forged_notices_of_what_is_written(interpreter: Any, size: int) -> None:
    group = Group(interpreter, 2)
    inputs, outputs, _ = blocks("broadcast", 2, [10])
    call = group.call(build("broadcast", "direct", 2), inputs, outputs, absent=(0,))
    group.forge(1, 0, size)
    assert call.make()[1] == "wrong_size"
    assert (outputs[1][0] == UNTOUCHED).all()
