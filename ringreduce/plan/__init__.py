"""Plans: what every rank does in a collective, as data.  See `model` for what a plan is, `verify` for its proof.

One file an algorithm (`direct`, `ring`, `tree`, `halving_doubling`), listed in `builders`.  `hierarchical` and
`across_hosts` make one plan of several, for groups of ranks and for ranks on several hosts.  `choose` says which
algorithm runs for which size, and `lower` turns a plan into the array the engine reads, `alike` that of one rank where
all do the same (`symmetric`).

A group needs no more than these at its first call.  What follows is imported where it is used: `cost` says how long a
plan takes on CPU ranks, and `by_cost` chooses by that.  `simulate` runs plans over a `network` of links, with one rank
for all where all are equal, and a `parameter_server` beside them.
Standard library only: no torch, no NumPy, no side effects.
"""

from ringreduce.common.failures import PlanError
from ringreduce.plan.alike import lower_for
from ringreduce.plan.builders import BUILDERS, Builder, build
from ringreduce.plan.choose import (
    IN_RANK_ORDER,
    Range,
    Rule,
    Table,
    lookup,
    one_shot_end,
    parse_algorithms,
    ranges,
    ranges_between,
    table,
)
from ringreduce.plan.lower import digest, digest_of, lower
from ringreduce.plan.model import COLLECTIVES, Channel, Layout, Plan, Program, Read, Slicing, Step, layout, slot_depth
from ringreduce.plan.symmetric import symmetric
from ringreduce.plan.verify import out_of_order, verify
