"""A plan's results, executed with NumPy."""

import functools
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringreduce.plan import Plan, layout, lower, slot_depth

Array = npt.NDArray[np.int64]
COMPLETED = 10**12  # what a completing step adds, so that one too many or too few shows in the result


@dataclass(frozen=True)
class LoweredStep:
    chunk: int
    read: int
    write: int
    inputs: int
    returned: int
    phase: int
    local_position: int
    recv: list[tuple[int, int]]
    send: list[int]


@dataclass(frozen=True)
class LoweredChannel:
    share: tuple[int, int, int]
    chunks: int
    sends: list[int]
    programs: list[list[LoweredStep]]


def decode(words: list[int]) -> list[LoweredChannel]:
    """Read the array as its documentation says; every word is used once."""
    stream = iter(words)
    size, channel_count = next(stream), next(stream)
    channels = []
    for _ in range(channel_count):
        share = (next(stream), next(stream), next(stream))
        chunks, sends, programs = next(stream), [], []
        for _ in range(size):
            step_count = next(stream)
            sends.append(next(stream))
            steps = []
            for _ in range(step_count):
                head = [next(stream) for _ in range(7)]
                recv = [(next(stream), next(stream)) for _ in range(next(stream))]
                steps.append(LoweredStep(*head, recv, [next(stream) for _ in range(next(stream))]))
            programs.append(steps)
        channels.append(LoweredChannel(share, chunks, sends, programs))
    assert next(stream, None) is None
    return channels


@functools.lru_cache(maxsize=1)
def lowered(plan: Plan) -> list[LoweredChannel]:
    return decode(lower(plan))


class Rank:
    """One rank's place in one channel: how far it is, and its outbox."""

    def __init__(self, depth: int) -> None:
        self.round = 0
        self.step = 0
        self.slots: list[tuple[Array, int] | None] = [None] * depth  # with the number of inputs in the value
        self.lent: dict[int, tuple[int, Array]] = {}  # messages to be returned: the block and elements they lie in
        self.written: dict[int, int] = {}  # the same of the chunks of the output
        self.unread: list[set[int]] = []  # per message ever sent, who has yet to read it


def run_channel(
    channel: LoweredChannel, depth: int, width: int, inputs: list[Array], outputs: list[Array], rng: random.Random
) -> None:
    """Run all rounds of one channel.  inputs[rank] and outputs[rank] are [block, element]; slices are `width` long."""
    count = inputs[0].shape[1]
    begin, end, total = channel.share
    stripe = np.arange(count * begin // total, count * end // total)
    chunks = np.array_split(stripe, channel.chunks)
    rounds = -(-max(len(chunk) for chunk in chunks) // width)
    ranks = [Rank(depth) for _ in channel.programs]

    def ready(number: int) -> bool:
        rank, step = ranks[number], channel.programs[number][ranks[number].step]
        for peer, index in step.recv:
            message = rank.round * channel.sends[peer] + index
            if message >= len(ranks[peer].unread) or number not in ranks[peer].unread[message]:
                return False
        reused = len(rank.unread) - depth
        return not (step.send and reused >= 0 and rank.unread[reused])

    def execute(number: int) -> None:
        rank, step = ranks[number], channel.programs[number][ranks[number].step]
        block, part = divmod(step.chunk, channel.chunks)
        elements = chunks[part][rank.round * width : (rank.round + 1) * width]
        lends = step.returned and inputs[number] is outputs[number]
        operands, inputs_in, returns = [], [], []
        for peer, index in step.recv:
            message = rank.round * channel.sends[peer] + index
            slot = ranks[peer].slots[message % depth]
            assert slot is not None
            operands.append(slot[0])
            inputs_in.append(slot[1])
            ranks[peer].unread[message].remove(number)
            if message in ranks[peer].lent:
                returns.append((peer, *ranks[peer].lent.pop(message)))
        if step.read:
            local = (inputs, outputs)[step.read - 1][number][block, elements]
            operands.insert(step.local_position, local)
            inputs_in.append(1 if step.read == 1 else rank.written[step.chunk])
        assert step.inputs == sum(inputs_in)
        completes = len(operands) > 1 and step.inputs == len(channel.programs)
        value = np.sum(operands, axis=0) + (COMPLETED if completes else 0)
        for peer, its_block, its_elements in returns:
            outputs[peer][its_block, its_elements] = value
        if step.write and not (lends and step.recv):
            outputs[number][block, elements] = value
        if step.write:
            rank.written[step.chunk] = step.inputs
        if step.send:
            if lends:
                rank.lent[len(rank.unread)] = block, elements
            rank.slots[len(rank.unread) % depth] = value.copy(), step.inputs
            rank.unread.append(set(step.send))
        rank.step += 1
        if rank.step == len(channel.programs[number]):
            rank.step, rank.round = 0, rank.round + 1

    while waiting := [number for number, rank in enumerate(ranks) if rank.round < rounds and channel.programs[number]]:
        runnable = [number for number in waiting if ready(number)]
        assert runnable, "deadlock"
        execute(rng.choice(runnable))


def check_results(plan: Plan, count: int, width: int, in_place: bool, seed: int) -> None:
    """Inputs differ by rank, block and element; elements that a rank does not hold are poison."""
    shape, size = layout(plan.collective, plan.size), plan.size
    poison = -(10**15)
    contribution = np.array(
        [
            [[(rank + 1) * 1009 + block * 100_003 + element * (rank + 7) for element in range(count)]
             for block in range(shape.blocks)]
            for rank in range(size)
        ],
        dtype=np.int64,
    ).reshape(size, shape.blocks, count)  # fmt: skip
    held = np.array([[shape.has_input(rank, block) for block in range(shape.blocks)] for rank in range(size)])
    inputs = list(np.where(held[:, :, None], contribution, poison))
    outputs = inputs if in_place else [np.full_like(block, poison) for block in inputs]
    if shape.one_buffer:
        outputs[0] = inputs[0]
    for channel in lowered(plan):
        run_channel(channel, slot_depth(size), width, inputs, outputs, random.Random(seed))

    completed = COMPLETED if shape.reduces and size > 1 else 0
    expected = np.where(held[:, :, None], contribution, 0).sum(axis=0) + completed
    for rank in range(size):
        for block in range(shape.blocks):
            if shape.needs_output(rank, block):
                np.testing.assert_array_equal(outputs[rank][block], expected[block])
