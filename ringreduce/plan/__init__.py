"""Plans: what every rank does in a collective, as data.  See `model` for what a plan is, `verify` for its proof.

One file an algorithm (`direct`, `ring`, `tree`, `halving_doubling`), listed in `builders`; `choose` picks one by size,
and `lower` turns it into the array the engine reads.  Standard library only: no torch, no NumPy, no side effects.
"""

from ringreduce.plan.builders import BUILDERS, Builder, build
from ringreduce.plan.choose import Rule, one_shot_end, parse_algorithms, table
from ringreduce.plan.lower import digest, lower
from ringreduce.plan.model import (
    COLLECTIVES,
    Channel,
    Layout,
    Plan,
    PlanError,
    Program,
    Read,
    Step,
    layout,
    slot_depth,
)
from ringreduce.plan.verify import verify

__all__ = [
    "BUILDERS",
    "COLLECTIVES",
    "Builder",
    "Channel",
    "Layout",
    "Plan",
    "PlanError",
    "Program",
    "Read",
    "Rule",
    "Step",
    "build",
    "digest",
    "layout",
    "lower",
    "one_shot_end",
    "parse_algorithms",
    "slot_depth",
    "table",
    "verify",
]
