"""One round of one channel, executed on symbols: what every step receives, makes and leaves behind.

A symbol says which chunk a value belongs to, whose inputs are in it, by which expression they were combined, and
whether that was in rank order.  The machine keeps the rules of the engine (outboxes with `depth` slots and many
readers, receives in order per pair of ranks, steps that run all at once or not at all) and stops with a PlanError at
the first step that breaks one.  `verify` judges what it leaves in the outputs; `lower` takes from it which slot each
receive reads.
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from ringreduce.common.failures import PlanError
from ringreduce.plan.model import Plan, Read, Step, layout


@dataclass(frozen=True)
class Value:
    """The inputs of `ranks` (a bit mask) for `chunk`, combined by an expression: equal ones mean equal bits."""

    chunk: int
    ranks: int
    expression: Hashable
    disorder: str | None = field(default=None, compare=False)
    """The first combination in it that was not in rank order, in words."""


@dataclass(frozen=True)
class Outcome:
    """What came of a step: the (peer, send index) it took, peers in rank order, how many ranks' inputs its value has,
    and in which phase it runs.

    The send index counts the sending steps of the peer's program; it names the slot.  Phases are those of an execution
    in lockstep, without slots: compute, exchange, compute, exchange ...  What is sent in a phase is exchanged at its
    end, all together; so a step runs in the first phase after all messages that it takes were sent, and not before the
    steps before it.
    """

    taken: tuple[tuple[int, int], ...]
    inputs: int
    phase: int


@dataclass(frozen=True)
class Round:
    """The outcome of every step of every rank, and every rank's output chunks at the end."""

    outcomes: tuple[tuple[Outcome, ...], ...]
    outputs: tuple[dict[int, Value], ...]


def run_round(plan: Plan, index: int, depth: int, root: int = 0) -> Round:
    """Execute one round of channel `index` with outboxes of `depth` slots, or raise PlanError.

    Rank 0 of the plan is rank `root` of the group: operands are combined in the order of the group's ranks.

    The structure of the plan (ranges, peers) must be right already.  The order in which ranks get their turn does not
    matter: a step that can run stays able to run until it does, whatever the others do.
    """
    machine = Machine(plan, index, depth, root)
    machine.run()
    return Round(tuple(map(tuple, machine.outcomes)), tuple(machine.outputs))


class Machine:
    """The state of one channel: program counters, outboxes, messages under way, outputs."""

    def __init__(self, plan: Plan, index: int, depth: int, root: int = 0) -> None:
        self.plan = plan
        self.index = index
        self.depth = depth
        self.root = root
        self.layout = layout(plan.collective, plan.size)
        self.chunks = plan.channels[index].chunks
        self.programs = plan.channels[index].programs
        self.outcomes: list[list[Outcome]] = [[] for _ in self.programs]  # as long as the steps a rank has executed
        self.outputs: list[dict[int, Value]] = [{} for _ in self.programs]
        self.unread: list[list[int]] = [[] for _ in self.programs]  # readers still to come, for each message sent
        self.sent_in: list[list[int]] = [[] for _ in self.programs]  # the phase of each message sent
        self.messages: defaultdict[tuple[int, int], deque[tuple[int, Value]]] = defaultdict(deque)  # (source, target)
        self.expressions: dict[tuple[Hashable, ...], int] = {}

    def run(self) -> None:
        """Let every rank go as far as it can, again whenever a peer sent to it or consumed what it had sent."""
        ready = deque(range(self.plan.size))
        while ready:
            rank = ready.popleft()
            while (step := self.next_step(rank)) and self.obstacle(rank, step) is None:
                self.execute(rank, step)
                ready.extend((*step.recv, *step.send))
        self.check_finished()

    def next_step(self, rank: int) -> Step | None:
        done = len(self.outcomes[rank])
        return self.programs[rank][done] if done < len(self.programs[rank]) else None

    def obstacle(self, rank: int, step: Step) -> tuple[int, str] | None:
        """The rank that keeps `step` from running and what it has yet to do, or None if the step can run."""
        for peer in step.recv:
            if not self.messages[peer, rank]:
                return peer, f"a message from rank {peer}"
        reused = len(self.unread[rank]) - self.depth
        if step.send and reused >= 0 and self.unread[rank][reused] > 0:
            reader = next(peer for peer in range(self.plan.size) if self.holds(rank, peer, reused))
            return reader, f"rank {reader} to read message {reused} (the outbox has {self.depth} slots)"
        return None

    def holds(self, source: int, target: int, message: int) -> bool:
        """Whether `target` has yet to read that message of `source`."""
        return any(sent == message for sent, _ in self.messages[source, target])

    def execute(self, rank: int, step: Step) -> None:
        taken, operands = [], []
        local = self.local_operand(rank, step)
        if local is not None:
            operands.append((rank, local))
        for peer in sorted(step.recv):
            sent, value = self.messages[peer, rank].popleft()
            self.unread[peer][sent] -= 1
            taken.append((peer, sent))
            operands.append((peer, value))
        before = self.outcomes[rank][-1].phase if self.outcomes[rank] else 0
        phase = max((before, *(self.sent_in[peer][sent] + 1 for peer, sent in taken)))
        value = self.combine(rank, step, sorted(operands, key=lambda operand: self.in_group(operand[0])))
        if step.write:
            if not self.layout.needs_output(rank, step.chunk // self.chunks):
                raise self.error(rank, step, "writes a chunk of which this rank has no output; drop the write")
            self.outputs[rank][step.chunk] = value
        if step.send:
            for peer in step.send:
                self.deliver(rank, peer, value)
            self.unread[rank].append(len(step.send))
            self.sent_in[rank].append(phase)
        self.outcomes[rank].append(Outcome(tuple(taken), value.ranks.bit_count(), phase))

    def deliver(self, rank: int, peer: int, value: Value) -> None:
        self.messages[rank, peer].append((len(self.unread[rank]), value))

    def local_operand(self, rank: int, step: Step) -> Value | None:
        written = self.outputs[rank].get(step.chunk)
        if step.read is Read.NONE:
            return None
        if step.read is Read.OUTPUT:
            if written is None:
                raise self.error(rank, step, "reads an output chunk that this rank has not written")
            return written
        if not self.layout.has_input(rank, step.chunk // self.chunks):
            raise self.error(rank, step, "reads a chunk of which this rank has no input")
        value = Value(step.chunk, 1 << rank, self.expression(-1 - rank))
        if written not in (None, value):
            raise self.error(rank, step, "reads input that this rank has overwritten: in place, output is input")
        return value

    def combine(self, rank: int, step: Step, operands: list[tuple[int, Value]]) -> Value:
        """The combination of (giver, value) pairs in rank order; a single value stays what it is.

        Collectives that only move data need no rule of their own: a chunk has one contribution, never two to combine.
        """
        ranks = 0
        for giver, value in operands:
            if value.chunk != step.chunk:
                raise self.error(rank, step, f"rank {giver} sent chunk {value.chunk} here; the orders differ")
            if twice := ranks & value.ranks:
                raise self.error(rank, step, f"takes the contribution of {name_ranks(twice)} twice")
            ranks |= value.ranks
        if len(operands) == 1:
            return operands[0][1]
        values = [value for _, value in operands]
        disorder = next(filter(None, (value.disorder for value in values)), None) or self.disorder(rank, step, values)
        return Value(step.chunk, ranks, self.expression(*(value.expression for value in values)), disorder)

    def disorder(self, rank: int, step: Step, values: list[Value]) -> str | None:
        """Where inputs of ranks would be combined before those of lower ranks, in words.

        Operands that are in order themselves stay so if each ends before the next begins.  A complete result in order
        is made of neighbouring ranges only, since a rank that is missing between two others can no longer get there.
        """
        for left, right in pairwise(map(self.ranks_in_group, values)):
            if not ends_before(left, right):
                before, after = name_ranks(left), name_ranks(right)
                where = f"rank {self.in_group(rank)}, step {len(self.outcomes[rank])} (chunk {step.chunk})"
                return f"{self.where()}, {where}: combines {before} before {after}"
        return None

    def in_group(self, rank: int) -> int:
        """The rank in the group that is `rank` of the plan."""
        return (rank + self.root) % self.plan.size

    def ranks_in_group(self, value: Value) -> int:
        """As a bit mask."""
        turned = value.ranks << self.root
        return turned & (1 << self.plan.size) - 1 | turned >> self.plan.size

    def expression(self, *operands: Hashable) -> Hashable:
        """The number of an expression: the same for the same operands in the same order.  ``-1 - rank`` is an input."""
        return self.expressions.setdefault(operands, len(self.expressions))

    def check_finished(self) -> None:
        """Every program has run to its end and every message has been read."""
        stuck = [rank for rank in range(self.plan.size) if self.next_step(rank)]
        if stuck:
            raise PlanError(f"{self.where()}: deadlock: {self.waiting_chain(stuck[0])}")
        for (source, target), left in sorted(self.messages.items()):
            if left:
                sent, value = left[0]
                step = [at for at, step in enumerate(self.programs[source]) if step.send][sent]
                raise PlanError(
                    f"{self.where()}, rank {source}, step {step} (chunk {value.chunk}): what it sends to rank {target} "
                    f"is never received; drop the send or add a receive to rank {target}"
                )

    def waiting_chain(self, rank: int) -> str:
        """Who waits for whom, from `rank` along the chain until it closes or meets a rank that has finished."""
        links: list[str] = []
        seen: set[int] = set()
        while (step := self.next_step(rank)) and rank not in seen and (obstacle := self.obstacle(rank, step)):
            seen.add(rank)
            links.append(f"rank {rank}, step {len(self.outcomes[rank])} (chunk {step.chunk}) waits for {obstacle[1]}")
            rank = obstacle[0]
        if step is None:
            links.append(f"rank {rank} has finished")
        return "; ".join(links)

    def where(self) -> str:
        return f"{describe(self.plan)}, channel {self.index}"

    def error(self, rank: int, step: Step, what: str) -> PlanError:
        return PlanError(f"{self.where()}, rank {rank}, step {len(self.outcomes[rank])} (chunk {step.chunk}): {what}")


def ends_before(left: int, right: int) -> bool:
    """Whether all ranks of one bit mask are below all of another."""
    return left < right & -right


def describe(plan: Plan) -> str:
    """How messages call a plan."""
    return f"plan {plan.name!r} ({plan.collective}, size {plan.size})"


def name_ranks(ranks: int) -> str:
    """The ranks of a bit mask, in words."""
    numbers = [str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else "no rank"
