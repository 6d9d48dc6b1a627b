"""The proof of a symmetric plan, and what one rank runs of it: in time and memory for one program, not for all.

All ranks are at the same step at any time, as each does what rank 0 does, renumbered.  So what rank 0 receives from a
peer is what it has sent itself to that peer's opposite, renumbered; a slot of its own is read when it has read the like
of a peer; and if rank 0 never waits for ever, nobody does.  What is proved is what `verify` proves.

The bits of a result.  A reduction of inputs, one of each rank, is made in rank order by whoever makes it: so the ranks
that are in it tell it from others.  Any other is known by who made it, and in which step.  Rank 0 is compared with the
ranks from which turning leads to all others, so that all agree.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from ringreduce.plan.lower import digest_of, lower_program, marked
from ringreduce.plan.model import Plan, Step, layout, slot_depth
from ringreduce.plan.symbolic import Machine, Outcome, Value, describe
from ringreduce.plan.symmetric import Symmetric, symmetric
from ringreduce.plan.verify import check_outputs, check_steps

INPUTS = "inputs"
"""The expression of one rank's input, and of inputs of several that were combined at once."""


class _View(Machine):
    """Rank 0's view of a channel."""

    def __init__(self, plan: Plan, index: int, depth: int, alike: Symmetric) -> None:
        super().__init__(plan, index, depth)
        self.alike = alike
        self.ids = self.layout.blocks * self.chunks
        self.programs *= plan.size  # and what is known of rank 0 is known of all
        self.outcomes *= plan.size
        self.unread *= plan.size
        self.sent_in *= plan.size

    def run(self) -> None:
        while step := self.next_step(0):
            if obstacle := self.obstacle(0, step):
                raise self.error(0, step, f"deadlock: it waits for {obstacle[1]}, and so does every rank")
            self.execute(0, step)
        self.check_finished()

    def deliver(self, rank: int, peer: int, value: Value) -> None:
        source = self.alike.opposite(peer, self.plan.size)
        self.messages[source, 0].append((len(self.unread[0]), self.turned(value, source)))

    def holds(self, source: int, target: int, message: int) -> bool:
        return super().holds(self.alike.opposite(target, self.plan.size), 0, message)

    def expression(self, *operands: object) -> str:
        return INPUTS

    def combine(self, rank: int, step: Step, operands: list[tuple[int, Value]]) -> Value:
        made = super().combine(rank, step, operands)
        if len(operands) == 1 or all(value.ranks.bit_count() == 1 for _, value in operands):
            return made
        return replace(made, expression=(len(self.outcomes[0]), 0))

    def turned(self, value: Value, by: int) -> Value:
        """What rank `by` has where rank 0 has this."""
        size, turned = self.plan.size, self.alike.turned
        ranks = value.ranks
        if ranks != (1 << size) - 1:
            ranks = sum(1 << turned(rank, by, size) for rank in range(ranks.bit_length()) if ranks >> rank & 1)
        expression = value.expression
        if isinstance(expression, tuple):
            expression = expression[0], turned(expression[1], by, size)
        return Value(self.alike.turned_chunk(value.chunk, by, size, self.ids), ranks, expression)

    def outputs_of(self, rank: int) -> dict[int, Value]:
        values = (self.turned(value, rank) for value in self.outputs[0].values())
        return {value.chunk: value for value in values}


@lru_cache(maxsize=64)
def _prove(collective: str, algorithm: str, size: int) -> tuple[Plan, tuple[tuple[Outcome, ...], ...]]:
    """Rank 0's programs, and what comes of each of their steps.  Raises PlanError if the plan is wrong."""
    alike = symmetric(collective, algorithm, size)
    assert alike is not None
    plan, shape = Plan(algorithm, collective, size, alike.channels(size)), layout(collective, size)
    outcomes = []
    for index, channel in enumerate(plan.channels):
        where = f"{describe(plan)}, channel {index}"
        check_steps(where, 0, channel.programs[0], size, shape.blocks * channel.chunks)
        view = _View(plan, index, slot_depth(size), alike)
        view.run()
        check_outputs(plan, index, {rank: view.outputs_of(rank) for rank in (0, *alike.generators(size))}, shape)
        outcomes.append(tuple(view.outcomes[0]))
    return plan, tuple(outcomes)


def _returned(
    alike: Symmetric, size: int, ids: int, program: tuple[Step, ...], outcomes: tuple[Outcome, ...]
) -> set[int]:
    """The steps of rank 0 that are marked so, see `lower`."""
    sending = [number for number, step in enumerate(program) if step.send]
    makers = {}
    for number, outcome in enumerate(outcomes):
        for source, sent in outcome.taken:  # as the opposite of `source` takes what rank 0 has sent it
            given, peer = sending[sent], alike.opposite(source, size)
            chunk = alike.turned_chunk(program[number].chunk, peer, size, ids)
            if program[given].send == (peer,) and program[given].chunk == chunk:
                makers[given] = peer, number
    return marked(program, outcomes, makers, [sending] * size)


def lower_for(collective: str, algorithm: str, size: int, rank: int) -> tuple[list[int], int]:
    """What `rank` runs of a symmetric plan, and the plan's digest, which is the same for all ranks."""
    words = _lower_for(collective, algorithm, size, rank)
    return words, digest_of(collective, words if rank == 0 else _lower_for(collective, algorithm, size, 0))


@lru_cache(maxsize=256)
def _lower_for(collective: str, algorithm: str, size: int, rank: int) -> list[int]:
    plan, outcomes = _prove(collective, algorithm, size)
    alike = symmetric(collective, algorithm, size)
    assert alike is not None
    blocks = layout(collective, size).blocks
    ends = list(accumulate(channel.share for channel in plan.channels))
    words = [size, len(plan.channels)]
    for channel, came, end in zip(plan.channels, outcomes, ends, strict=True):
        program, ids = channel.programs[0], blocks * channel.chunks
        own = tuple(alike.turned_step(step, rank, size, ids) for step in program)
        mine = [
            replace(each, taken=tuple(sorted((alike.turned(peer, rank, size), sent) for peer, sent in each.taken)))
            for each in came
        ]
        words += (end - channel.share, end, ends[-1], channel.chunks)
        words += [-1] * rank
        words += lower_program(rank, own, mine, _returned(alike, size, ids, program, came))
        words += [-1] * (size - rank - 1)
    return words
