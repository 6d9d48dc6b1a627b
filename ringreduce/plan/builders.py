"""The table of algorithms: for each collective, the functions from a size to a plan, by name."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from ringreduce.common.failures import PlanError
from ringreduce.plan import direct, halving_doubling, ring, tree
from ringreduce.plan.model import Plan

Builder = Callable[[int], Plan]


def _over(rings: Callable[[int], ring.Rings], build_on: Callable[[ring.Rings, str], Plan], name: str) -> Builder:
    return lambda size: build_on(rings(size), name)


BUILDERS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": {
        "one_shot": direct.one_shot,
        "two_shot": direct.two_shot,
        "ring": _over(ring.one_ring, ring.all_reduce, "ring"),
        "bidirectional_ring": _over(ring.both_ways, ring.all_reduce, "bidirectional_ring"),
        "tree": tree.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
    },
    "reduce_scatter": {
        "direct": direct.reduce_scatter,
        "ring": _over(ring.one_ring, ring.reduce_scatter, "ring"),
        "bidirectional_ring": _over(ring.both_ways, ring.reduce_scatter, "bidirectional_ring"),
    },
    "all_gather": {
        "direct": direct.all_gather,
        "ring": _over(ring.one_ring, ring.all_gather, "ring"),
        "bidirectional_ring": _over(ring.both_ways, ring.all_gather, "bidirectional_ring"),
    },
    "broadcast": {
        "direct": direct.broadcast,
        "ring": _over(ring.one_ring, ring.broadcast, "ring"),
        "tree": tree.broadcast,
    },
    "reduce": {"direct": direct.reduce, "ring": _over(ring.one_ring, ring.reduce, "ring"), "tree": tree.reduce},
    "gather": {"direct": direct.gather},
    "scatter": {"direct": direct.scatter},
    "all_to_all": {"direct": direct.all_to_all},
}


@lru_cache(maxsize=256)
def build(collective: str, algorithm: str, size: int) -> Plan:
    """The plan of one entry of `BUILDERS` for `size` ranks.  Plans are immutable, so equal calls share one."""
    if collective not in BUILDERS:
        raise PlanError(f"collective {collective!r} is unknown; known are {', '.join(BUILDERS)}")
    if algorithm not in BUILDERS[collective]:
        known = ", ".join(BUILDERS[collective])
        raise PlanError(f"{collective} has no algorithm {algorithm!r}; known are {known}")
    if size < 1:
        raise PlanError(f"a group of {size} ranks has no plan; the size must be at least 1")
    return BUILDERS[collective][algorithm](size)
