"""Which algorithm GPUs run for which size, where neither the user's rules nor a topology say.

The numbers are estimates: nothing of this has been measured on a GPU. docs/gpu.md has the model
that the formulas below come from.
"""

from __future__ import annotations

from ringreduce.plan.choose import Rule

PHASE = 5e-6
"""Seconds, an estimate: a store, a flag over NVLink, the look of a peer and a block's barriers, of 1 to 2 us each."""

LINK = 300e9
"""Bytes a second in one direction: NVLink of an A100, as published. An H100 has 450e9."""

BATCH = 5e-6
"""Seconds, an estimate: a launch and a cuStreamBatchMemOp of 2 to 3 us each."""

MEMORY = 2e12
"""Bytes a second: an A100's memory, as published."""

MOST_STEPS = 16
"""Of a batch: kMostSteps of the engine."""


def rules(size: int, *, steps: bool) -> tuple[Rule, ...]:
    """For groups of `size` ranks on GPUs, which take a call batch by batch or in one kernel."""
    equal = _where_equal(size, steps)
    end = None if equal is None else _power_of_two(equal)
    chosen = [Rule("all_reduce", "one_shot", 0, end)]
    if end is not None:
        chosen.append(Rule("all_reduce", "two_shot", end))
    if not steps and size > 2:
        times = {"broadcast": 1.0, "reduce": max(1.0, size * (size - 3) / (size - 2))}
        chosen += [Rule(collective, "ring", _power_of_two(PHASE * LINK * n)) for collective, n in times.items()]
    return tuple(chosen)


def batches(algorithm: str, size: int) -> int:
    """Of a rank in an all_reduce of `size` > 1 ranks whose slices fit their slots."""
    return 2 if algorithm == "one_shot" else 1 + 2 * -(-(size - 1) // MOST_STEPS)


def _where_equal(size: int, steps: bool) -> float | None:
    """Bytes of an all_reduce that takes as long by one_shot as by two_shot; None if one_shot is never slower."""
    if steps and size > 1:
        more = batches("two_shot", size) - batches("one_shot", size)
        return more * BATCH * MEMORY / (size - 2 + 2 / size)
    return PHASE * LINK * size / ((size - 1) * (size - 2)) if size > 2 else None


def _power_of_two(count: float) -> int:
    """The largest that is not above: estimates deserve no more digits."""
    return 1 << int(count).bit_length() - 1
