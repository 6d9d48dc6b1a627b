"""Which algorithm GPUs run for which size, where neither the user's rules nor a topology say.

The numbers are estimates: nothing of this has been measured on a GPU. The switch points of `ringreduce.plan.choose`
were swept on CPUs and say nothing about GPUs.

**Each rank has a GPU** (`run`). A call has as many *phases* as the longest chain of messages, each of which is sent
after the one before it has come. The model gives a phase a fixed cost, `PHASE`; then the rank reads its peers' memory
over its link, `LINK` bytes a second. All contributions come in one phase, and so do all parts of the result.

    all_reduce          phases   reads over the link
    one_shot            1        (n - 1) S
    two_shot            2        2 (n - 1) / n S     a part of S from all peers, then the parts of all peers

They take equally long where ``PHASE = (n - 1) (n - 2) / n * S / LINK``; with two ranks one_shot is never slower. With 8
ranks this is at 286 KB; torch's own kernels over peer memory (symm_mem/intra_node_comm) change at 256 KB.

A ring takes the tensor once through every link, in n - 1 phases, if the tensor is long enough to flow through all ranks
at once.

    direct              phases   through the busiest link   equal to a ring where
    broadcast           1        (n - 1) S                  S = PHASE LINK
    reduce              2        2 (n - 1) / n S            S = PHASE LINK n (n - 3) / (n - 2)

A shorter tensor does not flow: each rank takes all of it before the next one begins. So PHASE LINK is the least for
both collectives, also where 3 ranks reduce. Sizes are rounded down to powers of two.

**Ranks share a GPU** (`steps`). A *batch* of steps is one launch and one cuStreamBatchMemOp, which the model gives the
cost `BATCH`. All bytes go through the same memory, `MEMORY` bytes a second. Ranks take turns, so the batches and the
bytes of all ranks add up. A batch has at most 16 steps; up to 17 ranks two_shot needs one batch for all contributions,
one for the combination, and one for all parts of the result.

    all_reduce          batches of a rank          bytes that it reads and writes
    one_shot            2                          (n + 3) S
    two_shot            1 + 2 ceil((n - 1) / 16)   (5 - 2 / n) S

Up to 17 ranks they take equally long where ``BATCH = (n - 2 + 2 / n) S / MEMORY``: with 8 ranks at 1.6 MB.

The other collectives run directly. Only reduce has fewer batches in a ring: one a rank instead of two. But there each
rank waits for the one before it, and this model does not count such waits.
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
