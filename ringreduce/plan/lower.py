"""From a plan to the flat array of 32-bit integers that the engine reads.

    size, channel count, then per channel:
        share begin, share end, share total (cumulative, in units of the shares), chunks per block, then per rank:
            step count, sends per round, then per step:
                chunk; read (0 none, 1 input, 2 output); write; completes; local position;
                receive count, then per receive: peer, send index; send count, then per send: peer

Receives are sorted by peer: the order of combination.  *local position* is where the local chunk goes among them, -1
if it is not read.  *send index* says which of the peer's sending steps of a round made the value, hence its slot.
*completes* marks the step whose result holds all contributions for the first time, where an average divides.
"""

import struct
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate

from ringreduce.plan.model import Plan, Program, Read, Step, slot_depth
from ringreduce.plan.symbolic import Outcome
from ringreduce.plan.verify import prove

READ_CODES = {Read.NONE: 0, Read.INPUT: 1, Read.OUTPUT: 2}


def lower(plan: Plan) -> list[int]:
    """The array described above.  The plan is verified on the way: nothing unproved reaches the engine."""
    rounds = prove(plan, slot_depth(plan.size))
    ends = list(accumulate(channel.share for channel in plan.channels))
    words = [plan.size, len(plan.channels)]
    for channel, executed, end in zip(plan.channels, rounds, ends, strict=True):
        words += (end - channel.share, end, ends[-1], channel.chunks)
        for rank, (program, outcomes) in enumerate(zip(channel.programs, executed.outcomes, strict=True)):
            words += _lower_program(rank, program, outcomes)
    return words


def digest(plan: Plan) -> int:
    """A 63-bit number that two ranks share exactly if they run the same collective by the same programs."""
    words = lower(plan)
    content = plan.collective.encode() + struct.pack(f"<{len(words)}i", *words)
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1


def _lower_program(rank: int, program: Program, outcomes: tuple[Outcome, ...]) -> Iterator[int]:
    yield from (len(program), sum(1 for step in program if step.send))
    for step, outcome in zip(program, outcomes, strict=True):
        yield from (step.chunk, READ_CODES[step.read], int(step.write), int(outcome.completes))
        yield from (_local_position(rank, step), len(step.recv))
        for peer, send_index in outcome.taken:
            yield from (peer, send_index)
        yield from (len(step.send), *step.send)


def _local_position(rank: int, step: Step) -> int:
    return -1 if step.read is Read.NONE else sum(1 for peer in step.recv if peer < rank)
