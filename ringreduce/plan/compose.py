"""Composition of programs: an all_reduce is a reduction followed by a distribution of its result."""

from dataclasses import replace

from ringreduce.plan.model import Program


def compose(reduction: Program, distribution: Program) -> Program:
    """One rank's program of `reduction` then `distribution` (reduce_scatter then all_gather, or reduce then broadcast).

    A rank whose reduction ends by writing a finished chunk begins its distribution by sending that chunk; the two
    steps are one: combine, write and send, so the chunk is not read back.  Other ranks just run one after the other.
    """
    *before, last = reduction
    first, *after = distribution
    if not last.write:
        return reduction + distribution
    return (*before, replace(last, send=first.send), *after)
