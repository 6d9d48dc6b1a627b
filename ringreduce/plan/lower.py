"""From a plan to the flat array of 32-bit integers that the engine reads.

    size, channel count, then per channel:
        share begin, share end, share total (cumulative, in units of the shares), chunks per block, then per rank:
            step count, sends per round, then per step:
                chunk; read (0 none, 1 input, 2 output); write; inputs; returned; phase; local position;
                receive count, then per receive: peer, send index; send count, then per send: peer

Receives are sorted by peer: the order of combination.  *local position* is where the local chunk goes among them, -1
if it is not read.  *send index* says which of the peer's sending steps of a round made the value, hence its slot.
*inputs* says how many ranks' inputs are in the step's value; the step that combines the last of them completes a
reduction.
*returned* marks two steps of a rank: one that hands its local chunk to a peer, and the next that touches the chunk,
which only takes what that peer made of it.  In a call in place the peer may then write the value where it found the
chunk: nobody needs what was there any more.  *phase* is when the step runs over a transport of point-to-point calls:
what is sent in a phase is exchanged at its end (`symbolic.Outcome`).

Where all ranks do the same (`symmetric`), one rank's array has -1 in place of the step count of every other rank, and
nothing more of it (`alike`).
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
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
        returned = _returned(channel.programs, executed.outcomes)
        for rank, (program, outcomes) in enumerate(zip(channel.programs, executed.outcomes, strict=True)):
            words += lower_program(rank, program, outcomes, returned[rank])
    return words


def digest(plan: Plan) -> int:
    """A 63-bit number that two ranks share exactly if they run the same collective by the same programs."""
    return digest_of(plan.collective, lower(plan))


def digest_of(collective: str, words: Sequence[int]) -> int:
    """The same from the array."""
    content = collective.encode() + struct.pack(f"<{len(words)}i", *words)
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1


def _returned(programs: tuple[Program, ...], outcomes: tuple[tuple[Outcome, ...], ...]) -> list[set[int]]:
    """Per rank: the numbers of the steps that are marked so; see above."""
    sending = [[number for number, step in enumerate(program) if step.send] for program in programs]
    makers: list[dict[int, tuple[int, int]]] = [{} for _ in programs]  # of a step that one peer alone receives
    for rank, program in enumerate(programs):
        for number, outcome in enumerate(outcomes[rank]):
            for peer, sent in outcome.taken:
                given = sending[peer][sent]
                if programs[peer][given].send == (rank,) and program[number].chunk == programs[peer][given].chunk:
                    makers[peer][given] = rank, number
    return [marked(*each, sending) for each in zip(programs, outcomes, makers, strict=True)]


def marked(
    program: Program,
    outcomes: Sequence[Outcome],
    makers: Mapping[int, tuple[int, int]],
    sending: Sequence[Sequence[int]],
) -> set[int]:
    """The steps of a rank that are marked as returned.

    `makers`: for a step whose value one peer alone receives, and combines in the same chunk: that peer, and the step
    in which it does.  `sending`: per rank, its steps that send.
    """
    found: set[int] = set()
    waiting: dict[int, int] = {}  # chunk: the step that handed it out, if nothing touched it since
    for number, step in enumerate(program):
        given = waiting.pop(step.chunk, None)
        if given is not None and step.write and not step.send and step.read is Read.NONE and len(step.recv) == 1:
            (peer, sent), *_ = outcomes[number].taken
            if (peer, sending[peer][sent]) == makers[given]:
                found |= {given, number}
        if number in makers and step.read is Read.INPUT and not step.recv and not step.write:
            waiting[step.chunk] = number
    return found


def lower_program(rank: int, program: Program, outcomes: Sequence[Outcome], returned: set[int]) -> Iterator[int]:
    """One rank's part of the array."""
    yield from (len(program), sum(1 for step in program if step.send))
    for number, (step, outcome) in enumerate(zip(program, outcomes, strict=True)):
        yield from (step.chunk, READ_CODES[step.read], int(step.write), outcome.inputs)
        yield from (int(number in returned), outcome.phase, _local_position(rank, step), len(step.recv))
        for peer, send_index in outcome.taken:
            yield from (peer, send_index)
        yield from (len(step.send), *step.send)


def _local_position(rank: int, step: Step) -> int:
    return -1 if step.read is Read.NONE else sum(1 for peer in step.recv if peer < rank)
