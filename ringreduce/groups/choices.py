"""Chooses the plan of a call: as the user says, else the topology, else what rank 0 has decided for the group."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ringreduce import _C, plan
from ringreduce.config import Options, slicing_for, slot_bytes_for

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Links
    from ringreduce.groups.decision import Decision
    from ringreduce.topology.group_plans import GroupTopology

ANY_SIZE = 2**64 - 1


class Choices:
    """The plans of one rank of a group. The engine asks for one when a call first needs it.

    Between hosts, what is known of the network chooses after all others.
    """

    def __init__(self, rank: int, size: int, options: Options, decision: Decision, links: Links | None = None) -> None:
        self.rank, self.size, self.options, self.decision, self.links = rank, size, options, decision, links

    def ranges(
        self, collective: str, root: int | None = None, few_roundings: bool = False
    ) -> tuple[list[plan.Range], Mapping[tuple[str, str], plan.Plan]]:
        """Ascending, and the plans among them that are not by an algorithm's name alone. None: what serves any root.

        `few_roundings`: for elements that each step rounds."""
        users = plan.parse_algorithms(self.options.algorithms)
        topology = self.decision.topology
        own = dict(topology.plans()) if topology else {}
        decided = (*(topology.rules() if topology else ()), *plan.parse_algorithms(self.decision.rules))
        if self.links:
            from ringreduce.groups import between_hosts

            slicing = slicing_for(self.options, slot_bytes_for(self.size, self.options), fetch=False)
            between = self.links.order, self.links.wire, slicing
            by_root = root is not None and collective in between_hosts.BY_ROOT
            if by_root and not any(rule.collective == collective for rule in users):
                for_root = between_hosts.plans_for_root(*between, collective, root or 0, few_roundings)
                return [plan.Range(end, each.name) for end, each in for_root], {
                    (collective, each.name): each for _, each in for_root
                }
            for_hosts, plans = between_hosts.plans_for(*between, self.options.wire_dtype, few_roundings)
            own, decided = {**plans, **own}, (*decided, *for_hosts)
        return plan.ranges(collective, self.size, users, decided), own

    def in_order(self) -> list[plan.Range]:
        """What serves an all_reduce on one host whose operator need not commute: rules for other algorithms than those
        that combine in rank order do not count."""
        users, decided = (
            [rule for rule in plan.parse_algorithms(text) if rule.algorithm in plan.IN_RANK_ORDER]
            for text in (self.options.algorithms, self.decision.rules)
        )
        return plan.ranges("all_reduce", self.size, users, decided)

    def ask(
        self, collective: str, root: int, block_bytes: int, in_order: bool, few_roundings: bool
    ) -> tuple[list[int], int, int, int, int]:
        """(lowered for this rank, digest, least bytes, most bytes, slice bytes) of what serves such calls."""
        ranges, own = (self.in_order(), {}) if in_order else self.ranges(collective, root, few_roundings)
        chosen = plan.lookup(ranges, block_bytes)
        begin = max((each.end for each in ranges if each.end is not None and each.end <= block_bytes), default=0)
        planned = own.get((collective, chosen.algorithm))
        lowered = _lowered(planned) if planned else lowered_plan(collective, chosen.algorithm, self.size, self.rank)
        return (*lowered, begin, ANY_SIZE if chosen.end is None else chosen.end - 1, chosen.slice_bytes)

    def plans(self) -> Iterator[plan.Plan]:
        """Of all collectives and sizes."""
        for collective in plan.BUILDERS:
            ranges, own = self.ranges(collective)
            for each in ranges:
                yield own.get((collective, each.algorithm)) or plan.build(collective, each.algorithm, self.size)


def add_plans(
    size: int,
    options: Options,
    topology: GroupTopology | None,
    decided: Sequence[plan.Rule],
    target: _C.GpuEngine,
) -> None:
    """Gives an engine on GPUs a plan for each collective and size: as the user says, else the topology, else as
    `decided`."""
    own = topology.plans() if topology else {}
    decided = (*(topology.rules() if topology else ()), *decided)
    for collective, ranges in plan.table(size, plan.parse_algorithms(options.algorithms), decided).items():
        for end, algorithm, slice_bytes in reversed(ranges):  # as each takes all up to its end
            lowered, digest = _lowered(own.get((collective, algorithm)) or plan.build(collective, algorithm, size))
            target.add_plan(collective, lowered, digest, ANY_SIZE if end is None else end - 1, slice_bytes)


def lowered_plan(collective: str, algorithm: str, size: int, rank: int) -> tuple[list[int], int]:
    """What a rank runs of a plan, and its digest."""
    if plan.symmetric(collective, algorithm, size):
        return plan.lower_for(collective, algorithm, size, rank)
    return _lowered(plan.build(collective, algorithm, size))


@functools.lru_cache(maxsize=256)
def _lowered(built: plan.Plan) -> tuple[list[int], int]:
    words = plan.lower(built)
    return words, plan.digest_of(built.collective, words)
