"""Hierarchy: reduce inside every group, combine across groups, spread inside again.

Ranks stand in *groups* of one size (the GPUs of a host, the cores of a NUMA node); the ranks with the same place in
their groups are a *rail*.  Inside each group a reduce_scatter leaves every rank with one part of the tensor, each rail
all_reduces its part, an all_gather inside the groups spreads the results.  Between groups only ``1 / group size`` of
the tensor crosses per rail: of G groups each sends ``2 (G - 1) / G`` of the tensor, where a ring over all ranks would
send ``2 (n - 1) / n``, and in fewer hops (hierarchical all_reduce: Horovod, BlueConnect by Cho et al. 2019).

Each of the three is any plan of its collective: the algorithms inside and across are chosen apart, and several rings
inside make several channels.  Part `p` of the tensor, as cut by the plan inside, is cut again in the chunks of the plan
across: chunk ``p * across + c``.

Slots: what the plan inside needs times the chunks across, plus what that across needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.plan.model import Channel, Plan, Program, Read, Step

Groups = Sequence[Sequence[int]]
"""The ranks of each group, by their places in it."""


class Stages(NamedTuple):
    """The plans of one channel, of one channel each, and its weight: `inside` and `back` for as many ranks as a group
    has, `across` for as many as there are groups."""

    inside: Plan
    """A reduce_scatter."""
    across: Plan
    """An all_reduce."""
    back: Plan
    """An all_gather."""
    weight: int = 1


def all_reduce(groups: Groups, channels: Sequence[Stages], name: str = "hierarchical", made: int | None = None) -> Plan:
    """all_reduce in three stages, for every channel.  With `made`, only the first so many groups get programs, and the
    plans across need no others; each group's ranks must follow those of the group before.  Raises PlanError if groups
    and plans do not fit each other."""
    _check_groups(groups, name)
    several = tuple(_channel(groups, each, name, made or len(groups)) for each in channels)
    return Plan(name, "all_reduce", len(groups) * len(groups[0]), several)


def _channel(groups: Groups, stages: Stages, name: str, made: int) -> Channel:
    _check_stages(groups, stages, name)
    inside, across, back = (plan.channels[0] for plan in stages[:3])
    places, pieces = len(groups[0]), across.chunks
    programs: list[Program] = [()] * (made * places)
    for number, group in enumerate(groups[:made]):
        for place, rank in enumerate(group):
            rail = [other[place] for other in groups]
            programs[rank] = (
                *_inside(inside.programs[place], group, pieces, Read.INPUT),
                *_across(across.programs[number], rail, place * pieces),
                *_inside(back.programs[place], group, pieces, Read.OUTPUT),
            )
    return Channel(stages.weight, places * pieces, tuple(programs))


def _inside(program: Program, group: Sequence[int], pieces: int, local: Read) -> Program:
    """Every step once for each piece of its part."""
    return tuple(_step(step, group, step.chunk * pieces + piece, local) for step in program for piece in range(pieces))


def _across(program: Program, rail: Sequence[int], first: int) -> Program:
    """The pieces from `first` on; a rank's own contribution is what the plan inside has left in its output."""
    return tuple(_step(step, rail, first + step.chunk, Read.OUTPUT) for step in program)


def _step(step: Step, ranks: Sequence[int], chunk: int, local: Read) -> Step:
    return replace(
        step,
        chunk=chunk,
        read=local if step.read is Read.INPUT else step.read,
        recv=tuple(ranks[peer] for peer in step.recv),
        send=tuple(ranks[peer] for peer in step.send),
    )


def _check_groups(groups: Groups, name: str) -> None:
    places = len(groups[0])
    if any(len(group) != places for group in groups):
        sizes = ", ".join(str(len(group)) for group in groups)
        raise PlanError(f"{name}: the groups have {sizes} ranks; a hierarchy needs groups of one size")
    if sorted(rank for group in groups for rank in group) != list(range(places * len(groups))):
        raise PlanError(f"{name}: the groups {groups} must have each rank 0..{places * len(groups) - 1} once")


def _check_stages(groups: Groups, stages: Stages, name: str) -> None:
    places = len(groups[0])
    wanted = (("reduce_scatter", places), ("all_reduce", len(groups)), ("all_gather", places))
    for plan, (collective, size) in zip(stages[:3], wanted, strict=True):
        if (plan.collective, plan.size, len(plan.channels)) != (collective, size, 1):
            raise PlanError(
                f"{name}: {plan.name!r} is a plan for {plan.collective} among {plan.size} with {len(plan.channels)} "
                f"channels; here goes one for {collective} among {size} with one channel"
            )
        if plan.collective != "all_reduce" and plan.channels[0].chunks != 1:
            raise PlanError(f"{name}: {plan.name!r} has {plan.channels[0].chunks} chunks a block; here it must be one")
