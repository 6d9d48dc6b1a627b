"""The proof that a plan is right, by executing it on symbols before anything moves.

What is proved, for every channel:

- *Results.* Every rank ends with every chunk it needs, made of each contribution exactly once; and if several ranks
  hold a reduced chunk, all made it by the same expression, operands in the same order, so they hold the same bits.
- *In place.* The proof assumes that a rank's output chunk occupies the memory of its input chunk, so that no plan
  reads input after it has overwritten it with something else.
- *Order*, where `out_of_order` is asked: each result combines its contributions in the order of ranks.
- *Progress.* No rank waits forever for a message or for a slot, and every message sent is received.

One round is enough.  When a round ends, every message has been consumed and every slot is free, so the next round
can start from the same state: executed one after the other, any number of rounds completes.  The engine may overlap
rounds, but that cannot deadlock either.  Each step has fixed waits (its messages, its slot), and a step that can run
stays able to run whatever the others do: the system is a *marked graph*, in which all maximal executions run the same
steps, and which stays live when constraints between steps are removed (Commoner, Holt, Even and Pnueli, "Marked
directed graphs", 1971).  Overlap only removes one: that a rank's round begins after its previous round has ended.
"""

from collections.abc import Hashable, Mapping

from ringreduce.common.failures import PlanError
from ringreduce.plan.model import Channel, Layout, Plan, Program, Read, Step, layout, slot_depth
from ringreduce.plan.symbolic import Round, Value, describe, name_ranks, run_round


def verify(plan: Plan, depth: int | None = None) -> None:
    """Prove `plan` right for outboxes of `depth` slots (by default what the engine gives), or raise PlanError.

    The message names the plan, channel, rank and step at fault and, where it applies, the chunk and contributions.
    """
    _check_is_plan(plan)
    prove(plan, slot_depth(plan.size) if depth is None else depth)


def out_of_order(plan: Plan, root: int = 0) -> str | None:
    """Where `plan` does not combine in the order of ranks, in words; None if all its results are in rank order.

    A plan in rank order serves operators that are associative and not commutative: its results are x0 op x1 op x2 ...,
    whatever the parentheses.  In a `reduce`, `root` is the rank that has the part of rank 0 of the plan.  Raises
    PlanError if the plan is wrong, and for a root that it does not have.
    """
    _check_is_plan(plan)
    roots = plan.size if plan.collective == "reduce" else 1
    if not isinstance(root, int) or not 0 <= root < roots:
        raise PlanError(f"{describe(plan)}: root is {root!r:.60}; it must be from 0 to {roots - 1}")
    rounds = prove(plan, slot_depth(plan.size), root)
    results = (value for executed in rounds for outputs in executed.outputs for value in outputs.values())
    return next((value.disorder for value in results if value.disorder), None)


def _check_is_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r:.60}; give a ringreduce.Plan, as ringreduce.plan.build makes them")


def prove(plan: Plan, depth: int, root: int = 0) -> tuple[Round, ...]:
    """`verify`, returning the executed round of each channel."""
    if plan.size < 1:
        raise PlanError(f"{describe(plan)}: the size must be at least 1")
    if depth < 1:
        raise PlanError(f"{describe(plan)}: an outbox of {depth} slots cannot send; the depth must be at least 1")
    if not plan.channels:
        raise PlanError(f"{describe(plan)}: there are no channels; add at least one")
    shape = layout(plan.collective, plan.size)
    for index, channel in enumerate(plan.channels):
        _check_structure(plan, index, channel, shape)
    rounds = tuple(run_round(plan, index, depth, root) for index in range(len(plan.channels)))
    for index, executed in enumerate(rounds):
        check_outputs(plan, index, dict(enumerate(executed.outputs)), shape)
    return rounds


def _check_structure(plan: Plan, index: int, channel: Channel, shape: Layout) -> None:
    where = f"{describe(plan)}, channel {index}"
    if channel.share < 1:
        raise PlanError(f"{where}: share is {channel.share}; it must be at least 1")
    if channel.chunks < 1:
        raise PlanError(f"{where}: chunks is {channel.chunks}; it must be at least 1")
    if len(channel.programs) != plan.size:
        raise PlanError(f"{where}: there are {len(channel.programs)} programs; there must be one per rank, {plan.size}")
    for rank, program in enumerate(channel.programs):
        check_steps(where, rank, program, plan.size, shape.blocks * channel.chunks)


def check_steps(where: str, rank: int, program: Program, size: int, chunks: int) -> None:
    """Raises PlanError for the first step of a rank that is wrong whatever the others do."""
    for number, step in enumerate(program):
        if fault := _step_fault(step, rank, size, chunks):
            raise PlanError(f"{where}, rank {rank}, step {number} (chunk {step.chunk}): {fault}")


def _step_fault(step: Step, rank: int, size: int, chunks: int) -> str | None:
    """What is wrong with the form of a step, whatever the others do."""
    if not 0 <= step.chunk < chunks:
        return f"there is no such chunk; chunks are 0..{chunks - 1}"
    for action, peers in (("receives from", step.recv), ("sends to", step.send)):
        for peer in peers:
            if not 0 <= peer < size:
                return f"{action} rank {peer}; ranks are 0..{size - 1}"
            if peer == rank:
                return f"{action} itself; read or write the local chunk instead"
        if len(set(peers)) < len(peers):
            return f"{action} a rank twice: {peers}"
    if step.read is Read.NONE and not step.recv:
        return "has no operand; it must read or receive"
    if not step.write and not step.send:
        return "makes a value that goes nowhere; it must write or send"
    return None


def check_outputs(plan: Plan, index: int, outputs: Mapping[int, Mapping[int, Value]], shape: Layout) -> None:
    """Raises PlanError unless what these ranks hold at the end of a channel's round is what they need."""
    chunks = plan.channels[index].chunks
    for block in range(shape.blocks):
        holders = [rank for rank in outputs if _must_write(shape, rank, block)]
        if not holders:
            continue
        contributors = shape.contributors(block)
        for chunk in range(block * chunks, (block + 1) * chunks):
            expressions: dict[Hashable, int] = {}
            for rank in holders:
                where = f"{describe(plan)}, channel {index}, rank {rank} (chunk {chunk})"
                value = outputs[rank].get(chunk)
                if value is None:
                    raise PlanError(f"{where}: no step writes this output chunk")
                if missing := contributors & ~value.ranks:
                    raise PlanError(f"{where}: the output lacks the contribution of {name_ranks(missing)}")
                expressions[value.expression] = rank
            if len(expressions) > 1:
                first, second, *_ = expressions.values()
                raise PlanError(
                    f"{describe(plan)}, channel {index} (chunk {chunk}): ranks {first} and {second} combine the "
                    "contributions differently, so their bits may differ; reduce once and send the result"
                )


def _must_write(shape: Layout, rank: int, block: int) -> bool:
    return shape.needs_output(rank, block) and not (shape.one_buffer and shape.has_input(rank, block))
