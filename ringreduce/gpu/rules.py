"""Which algorithm GPUs run for which size, where neither the user's rules nor a topology say.

The numbers are estimates: nothing of this has been measured on a GPU. The switch points of `ringreduce.plan.choose`
were swept on CPUs and say nothing about GPUs.

**Each rank has a GPU** (`run`). A *phase* is what a rank does between two looks at its peers' words: it has a fixed
cost, `PHASE`, and then reads peers' memory over its link, `LINK` bytes a second.

    all_reduce          phases   reads over the link
    one_shot            1        (n - 1) S
    two_shot            2        2 (n - 1) / n S     a part of S from all peers, then the parts of all peers

They take equally long where ``PHASE = (n - 1) (n - 2) / n * S / LINK``; with two ranks one_shot is never slower. With 8
ranks this is at 286 KB; torch's own kernels over peer memory (symm_mem/intra_node_comm) change at 256 KB.

A direct broadcast or reduce takes the tensor n - 1 times through the root's link, a ring once, after n - 2 more phases:
from ``PHASE * LINK`` bytes on the ring takes less time.

**Ranks share a GPU** (`steps`). Every step is two launches, `STEP`, and all bytes go through the same memory, `MEMORY`
bytes a second. Ranks take turns, so that all of their steps and bytes add up:

    all_reduce          steps of a rank    bytes that it reads and writes
    one_shot            2                  (n + 3) S
    two_shot            2 n - 1            about 6 S

so they take equally long where ``(2 n - 3) STEP = (n - 3) S / MEMORY``; up to three ranks one_shot is never slower. The
other collectives have the fewest steps directly.
"""

from __future__ import annotations

from ringreduce.plan.choose import Rule

PHASE = 5e-6
"""Seconds, an estimate: a store, a flag over NVLink, the look of a peer and a block's barriers, of 1 to 2 us each."""

LINK = 300e9
"""Bytes a second in one direction: NVLink of an A100, as published. An H100 has 450e9."""

STEP = 5e-6
"""Seconds, an estimate: two launches of 2 to 3 us."""

MEMORY = 2e12
"""Bytes a second: an A100's memory, as published."""


def rules(size: int, *, steps: bool) -> tuple[Rule, ...]:
    """For groups of `size` ranks on GPUs, which take a call step by step or in one kernel."""
    equal = _where_equal(size, steps)
    end = None if equal is None else _power_of_two(equal)
    both = [Rule("all_reduce", "one_shot", 0, end)]
    if end is not None:
        both.append(Rule("all_reduce", "two_shot", end))
    if not steps and size > 2:
        both += [Rule(collective, "ring", _power_of_two(PHASE * LINK)) for collective in ("broadcast", "reduce")]
    return tuple(both)


def _where_equal(size: int, steps: bool) -> float | None:
    """Bytes of an all_reduce that takes as long by one_shot as by two_shot; None if one_shot is never slower."""
    if steps:
        return (2 * size - 3) * STEP * MEMORY / (size - 3) if size > 3 else None
    return PHASE * LINK * size / ((size - 1) * (size - 2)) if size > 2 else None


def _power_of_two(count: float) -> int:
    """The largest that is not above: estimates deserve no more digits."""
    return 1 << int(count).bit_length() - 1
