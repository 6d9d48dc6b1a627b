"""The plan: what every rank does in one collective, as data and without sizes.

How the data is cut.  A collective moves *blocks* (one for all_reduce, one per rank for all_gather, one per pair of
ranks for all_to_all; see `layout`).  Each *channel* of a plan owns a *stripe* of every block, in proportion to its
share, and cuts that stripe in `chunks` equal parts; chunk `c` of block `b` has the id ``b * chunks + c``.  At run time
a chunk is further cut in *slices* that fit a slot, and *round* `k` runs every program once on slice `k` of every chunk.

What a rank does.  A program is a sequence of steps of one shape: combine, in rank order, the local chunk (if read) and
what each peer in `recv` sent; write the value to the output chunk, send it to every peer in `send`, or both.  One
operand is a plain move, several are reduced with the operation of the call.

How a sent value travels.  A rank has, per channel, one *outbox* of `depth` slots that all its receivers read: sending
to many peers is one write into one slot.  The k-th sending step takes slot ``k % depth``, once every reader of the
slot's previous occupant has consumed it.  A receive takes the oldest unread slot that the peer addressed to this rank.

Roots.  Rooted plans (broadcast, reduce, gather, scatter) are written for root 0; for another root the engine runs
them with every rank, and every block of gather and scatter, replaced by ``(rank - root) % size``.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.common.from_json import load, parsed

CACHE_LINE = 64


class Read(Enum):
    """Which local chunk a step takes as an operand."""

    NONE = "none"
    """None: only what was received."""
    INPUT = "input"
    """That of the caller's input."""
    OUTPUT = "output"
    """That of the output, as earlier steps have written it."""


@dataclass(frozen=True)
class Step:
    """value = combine [local chunk if read] and what each peer in `recv` sent; then write it, send it, or both."""

    chunk: int
    """The id of the chunk: ``block * chunks + number``, with the channel's `chunks`."""
    read: Read = Read.NONE
    """Which local chunk is combined with what is received."""
    recv: tuple[int, ...] = ()
    """The peers that a value is taken from: the oldest that each has sent to this rank and that was not taken yet."""
    write: bool = False
    """Whether the value is written to the output chunk."""
    send: tuple[int, ...] = ()
    """The peers that the value is sent to."""


Program = tuple[Step, ...]


@dataclass(frozen=True)
class Channel:
    """One ring, tree or exchange: its weight among the channels, chunks per block, and one program per rank."""

    share: int
    """Its part of each block is `share` over the sum of all channels' shares."""
    chunks: int
    """The number of equal parts that its part of each block is cut in."""
    programs: tuple[Program, ...]
    """The steps of each rank, by rank in the group."""


@dataclass(frozen=True)
class Plan:
    """One collective among `size` ranks, under the name of the algorithm that wrote it."""

    name: str
    """Of the algorithm, as messages and `ringreduce.topology` show it."""
    collective: str
    """One of `COLLECTIVES`."""
    size: int
    """The number of ranks."""
    channels: tuple[Channel, ...]
    """They run side by side, each on its part of every block."""

    def to_json(self) -> str:
        """The plan as a JSON document that `from_json` loads back to an equal plan."""
        return json.dumps(asdict(self), default=lambda read: read.value)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Load what `to_json` wrote.  Keys and types are checked here; whether the plan is right is for `verify`."""
        plan: Plan = load(Plan, parsed(text, "plan", PlanError), "plan", PlanError, whole=True)
        if plan.collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise PlanError(f"plan.collective is {plan.collective!r}; expected one of {known}")
        return plan


class Layout(NamedTuple):
    """Which rank holds which block before a collective, and which it must hold after it.

    The result of a block is the combination of all its inputs: of every rank's if the collective reduces, else of the
    only one there is.  With `one_buffer`, input and output are one buffer, so a rank that holds a block's input
    already holds its output and need not write it.
    """

    size: int
    blocks: int
    has_input: Callable[[int, int], bool]
    needs_output: Callable[[int, int], bool]
    reduces: bool = False
    one_buffer: bool = False

    def contributors(self, block: int) -> int:
        """The ranks whose inputs make up the block's result, as a bit mask."""
        return sum(1 << rank for rank in range(self.size) if self.has_input(rank, block))


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")


def layout(collective: str, size: int) -> Layout:
    """The layout of one of `COLLECTIVES`.  Predicates take (rank, block); block ``source * size + target`` of
    all_to_all is what rank `source` has for rank `target`."""

    def every(rank: int, block: int) -> bool:
        return True

    def root(rank: int, block: int) -> bool:
        return rank == 0

    def own(rank: int, block: int) -> bool:
        return rank == block

    def source(rank: int, block: int) -> bool:
        return rank == block // size

    def target(rank: int, block: int) -> bool:
        return rank == block % size

    match collective:
        case "all_reduce":
            return Layout(size, 1, every, every, reduces=True)
        case "reduce_scatter":
            return Layout(size, size, every, own, reduces=True)
        case "all_gather":
            return Layout(size, size, own, every)
        case "broadcast":
            return Layout(size, 1, root, every, one_buffer=True)
        case "reduce":
            return Layout(size, 1, every, root, reduces=True)
        case "gather":
            return Layout(size, size, own, root)
        case "scatter":
            return Layout(size, size, root, own)
        case "all_to_all":
            return Layout(size, size * size, source, target)
    raise PlanError(f"collective {collective!r} is unknown; known are {', '.join(COLLECTIVES)}")


class Slicing(NamedTuple):
    """How the engine cuts chunks: its options of these names, the last at most a slot."""

    slices: int
    least_slice_bytes: int
    most_slice_bytes: int

    def slice_bytes(self, chunk_bytes: float, chosen: int = 0) -> int:
        """What `Engine::slice_bytes` makes of it: `chosen`, or by the rule where that is 0."""
        size = chosen or max(int(chunk_bytes) // self.slices, self.least_slice_bytes)
        return min(max(size // CACHE_LINE * CACHE_LINE, CACHE_LINE), self.most_slice_bytes)


def slot_depth(size: int) -> int:
    """Slots of an outbox that the engine gives each channel of a group: a power of two, at least 8 and `2 * size`.

    Most builders send less than ``2 * size`` messages in one round (rings send ``2 * size - 2``), so with this depth a
    rank hardly ever waits for a slot that it filled in the same round.  What each needs at least, its file says.
    """
    return max(8, 1 << (2 * size - 1).bit_length())
