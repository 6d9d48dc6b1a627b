"""How long a plan takes on a machine: alpha-beta, with the steps of ranks that share a core one after the other.

A step costs a constant, a little for every peer it hears from, and its bytes: each operand is read and each result
written, at a speed that depends on where that is (the core's cache, memory, or a slot that another core fills or
reads).  `Machine` holds these figures; they come from a probe.

One round is *walked*: every core runs its ranks, in the order of their programs, as soon as what they receive has
come.  A rank that has to wait looks for a while and then gives its core to the next rank there.  The result is the
round's latency, `first`.  Rounds overlap, and the slowest resource sets the pace of what follows the first:

    seconds = calls + first + (rounds - 1) * each,      each = max(work + overhead / window, first / window)

where *window* is the number of rounds that the engine keeps in flight, *work* what the busiest core does in one, and
*overhead* what it spends on passing from rank to rank (nothing, if it has one).  The formula is exact where every round
has the same bottleneck (a chain), and a good guess elsewhere: waits that the overlap does not fill are left out.
"""

import heapq
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, NamedTuple

from ringreduce.plan.model import CACHE_LINE, Plan, Read, Slicing, Step, layout, slot_depth

WINDOW = 8
"""Rounds that the engine keeps in flight, kWindow in csrc/engine/execution.h."""

# Constants of the engine, in seconds. Fitted to all_reduce of 64 B to 64 MB by 2, 4 and 8 ranks on 2 cores (Xeon with
# 2 MB of L2 a core, November 2026), as are those in tuning/machine.py.
CALL = 3e-6
"""For a call from Python, apart from its steps."""

STEP = 150e-9
"""For a step of a few bytes, apart from waiting."""

PEER = 60e-9
"""More, for each peer that a step hears from or sends to."""

WORTH_SPREADING = 0.8
"""Of the time that values take through slots which stay in the caches, those that are spread over more must take less.
Between two machines."""


# What can be true of a machine. With other figures the walk of a round might take for ever.
_SPEED = (1e-14, 1e-7)  # seconds per byte
LIMITS: Mapping[str, tuple[float, float]] = {
    "cores": (1, 2**16),
    "cache_bytes": (1, 2**40),
    "hop": (1e-9, 1e-2),
    "turn": (1e-8, 1.0),
    "wake": (1e-8, 1.0),
    "patience": (1e-9, 1.0),
    "copy_cached": _SPEED,
    "add_cached": _SPEED,
    "copy_memory": _SPEED,
    "copy_memory_all": _SPEED,
    "add_memory_all": _SPEED,
    "copy_scratch": _SPEED,
    "fetch_scratch": (0, _SPEED[1]),
    "staging": (1, 2**40),
    "put": _SPEED,
    "take": _SPEED,
}


@dataclass(frozen=True)
class Machine:
    """What a machine's cores and memory do, in seconds and seconds per byte.

    See csrc/engine/probe.h for what is measured and how.
    """

    cores: int
    cache_bytes: int
    """Of the last cache that a core has to itself."""
    hop: float
    """From a store on one core to another core's seeing it."""
    turn: float
    """Of a core, from a rank that yields it to another one there."""
    wake: float
    """Of a core, from a rank that wakes a sleeping one there to that one."""
    patience: float
    """How long a rank that has to wait looks before it yields."""
    copy_cached: float
    add_cached: float
    copy_memory: float
    copy_memory_all: float
    add_memory_all: float
    copy_scratch: float
    fetch_scratch: float
    """As the last, but by the kernel from another process; 0 if it does not do that."""
    staging: tuple[int, ...]
    """Bytes that two cores hand each other, ascending; for each of them the next two."""
    put: tuple[float, ...]
    take: tuple[float, ...]

    @property
    def spread(self) -> int:
        """Over how many bytes of slots two cores do best to hand each other values; 0: over none.

        A core that fills what another one has just read must first take it from that one's cache. Over so many bytes it
        has left the caches before it is filled again.
        """
        small = self.put[0] + self.take[0]
        best = min(zip(self.put, self.take, self.staging, strict=True), key=lambda each: each[0] + each[1])
        return best[2] if best[0] + best[1] < WORTH_SPREADING * small else 0

    @staticmethod
    def load(values: Mapping[str, Any]) -> "Machine":
        """From what `dataclasses.asdict` or a JSON file gives.  ValueError names what is missing or cannot be."""
        loaded: dict[str, Any] = {}
        for field in fields(Machine):
            value = values.get(field.name)
            least, most = LIMITS[field.name]
            several = field.type in (tuple[int, ...], tuple[float, ...])
            wanted = int if field.type in (int, tuple[int, ...]) else int | float
            figures = value if several and isinstance(value, list | tuple) else [value]
            if len(figures) != (4 if several else 1) or not all(
                isinstance(each, wanted) and not isinstance(each, bool) and least <= each <= most for each in figures
            ):
                kind = "four numbers" if several else "a number"
                raise ValueError(f"{field.name} is {value!r:.60}; expected {kind} from {least:g} to {most:g}")
            loaded[field.name] = tuple(figures) if several else value
        if list(loaded["staging"]) != sorted(set(loaded["staging"])):
            raise ValueError(f"staging is {loaded['staging']}; expected four numbers, ascending")
        return Machine(**loaded)


def chunk_bytes(plan: Plan, block_bytes: int) -> int:
    """The largest chunk of any channel, in whole cache lines."""
    total = sum(channel.share for channel in plan.channels)
    return CACHE_LINE * max(
        math.ceil(block_bytes * channel.share / total / channel.chunks / CACHE_LINE) for channel in plan.channels
    )


class Cost:
    """The cost of one plan on one machine."""

    def __init__(self, plan: Plan, machine: Machine, slicing: Slicing) -> None:
        self.plan, self.machine, self.slicing = plan, machine, slicing
        self.depth = slot_depth(plan.size)
        self.cores = min(machine.cores, plan.size)
        self.round = cache(self._round)

    def seconds(self, block_bytes: int, slice_bytes: int = 0) -> float:
        """Of one call over blocks of so many bytes, in slices of `slice_bytes` (0: by the rule)."""
        slicing = self.slicing.slice_bytes(block_bytes / self.plan.channels[0].chunks, slice_bytes)
        chunk = chunk_bytes(self.plan, block_bytes)
        size = min(slicing, chunk)
        first, work, overhead = self.round(size, self.in_memory(block_bytes))
        # A slot is in use for about half of a round.
        window = min(WINDOW, max(1, 2 * self.depth // self.most_sends))
        each = max(work + overhead / window, first / window)
        calls = CALL * math.ceil(self.plan.size / self.cores)  # those of a core's ranks, one after the other
        return calls + first + (max(1.0, chunk / slicing) - 1) * each

    def in_memory(self, block_bytes: int) -> bool:
        """Whether the tensors of a core's ranks are more than its cache holds."""
        blocks = layout(self.plan.collective, self.plan.size).blocks
        blocks = self.plan.size if blocks > self.plan.size else blocks  # of all_to_all a rank has one row
        return block_bytes * blocks * math.ceil(self.plan.size / self.cores) > self.machine.cache_bytes

    @cached_property
    def most_sends(self) -> int:
        """Slots that a rank takes per round, at the most."""
        return max(1, *(sum(1 for step in p if step.send) for c in self.plan.channels for p in c.programs))

    def _round(self, size: int, in_memory: bool) -> tuple[float, float, float]:
        """One round with slices of `size` bytes: its latency, and the busiest core's work and overhead in it."""
        costs = self.step_seconds(size, in_memory)
        first, overhead = _walk(self._programs, costs, self.cores, self.machine)
        busiest = max(sum(sum(costs[r]) for r in range(core, self.plan.size, self.cores)) for core in range(self.cores))
        return first, busiest, overhead

    def step_seconds(self, size: int, in_memory: bool) -> list[list[float]]:
        """Per rank and step, in the order of channels and programs: with slices of `size` bytes, apart from waiting."""
        m = self.machine
        cached = m.copy_cached / 2
        # A copy in memory is three transfers: what is read, what is overwritten, and what is written in the end.
        memory = m.copy_memory_all / 3
        read, again, fresh = (memory, memory, 2 * memory) if in_memory else (cached, cached, cached)
        # Readers are taken to be on other cores: ranks are not pinned, and what a rank on the same core sent is mostly
        # out of that core's cache when its reader's turn comes.
        footprint = min(self.depth, self.most_sends * WINDOW) * size
        put, take = (max(_between(m.staging, speeds, footprint) - cached, cached) for speeds in (m.put, m.take))
        combine = max(0.0, m.add_cached - m.copy_cached)

        def seconds(work: _Work) -> float:
            per_byte = (read * work.local + take * work.received + combine * work.combined) + (
                again * work.rewritten + fresh * work.written + put * work.sent
            )
            return STEP + PEER * work.peers + size * per_byte

        price = {work: seconds(work) for work in self._programs.kinds}
        return [[price[work] for work in steps] for steps in self._programs.work]

    @cached_property
    def _programs(self) -> "_Programs":
        return _compile(self.plan)


class _Work(NamedTuple):
    """What a step does with each of its bytes, in numbers of operands and results."""

    peers: int
    local: int
    received: int
    combined: int
    rewritten: int  # written where it was just read
    written: int
    sent: int


class _Programs(NamedTuple):
    """A plan for the walk.  Steps have a number per rank, over all channels; messages have one over all ranks."""

    channels: list[list[range]]  # per rank: the numbers of each channel's steps
    receives: list[list[list[int]]]  # per rank and step: the messages
    sends: list[list[int]]  # per rank and step: the message, or -1
    messages: int
    work: list[list[_Work]]
    kinds: set[_Work]


def _compile(plan: Plan) -> _Programs:
    size = plan.size
    programs = _Programs(_rows(size), _rows(size), _rows(size), 0, _rows(size), set())
    messages = 0
    for channel in plan.channels:
        under_way: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)  # by (source, target), in order
        for rank, program in enumerate(channel.programs):
            for step in program:
                programs.sends[rank].append(messages if step.send else -1)
                for peer in step.send:
                    under_way[rank, peer].append(messages)
                messages += bool(step.send)
        for rank, program in enumerate(channel.programs):
            done = len(programs.work[rank])
            programs.channels[rank].append(range(done, done + len(program)))
            for step in program:
                programs.receives[rank].append([under_way[peer, rank].popleft() for peer in step.recv])
                programs.work[rank].append(_work(step))
    return programs._replace(messages=messages, kinds={kind for steps in programs.work for kind in steps})


def _rows(count: int) -> list[list[Any]]:
    return [[] for _ in range(count)]


def _work(step: Step) -> _Work:
    local = step.read is not Read.NONE
    return _Work(
        peers=len(step.recv) + len(step.send),
        local=int(local),
        received=len(step.recv),
        combined=max(0, local + len(step.recv) - 1),
        rewritten=int(step.write and local and bool(step.recv)),
        written=int(step.write and not local),  # what is read and written, alone, is moved onto itself: nothing moves
        sent=int(bool(step.send)),
    )


def _walk(programs: _Programs, costs: Sequence[Sequence[float]], cores: int, machine: Machine) -> tuple[float, float]:
    """Runs one round; when it has ended, and the most time that a core spent on passing from rank to rank.

    Cores go step by step, always the one whose clock is behind, so that whatever has been sent by then is known.
    """
    size = len(programs.work)
    hop, turn, patience = machine.hop, machine.turn, machine.patience
    seen = [math.inf] * programs.messages  # when its readers can see a message
    at = [[steps.start for steps in channels] for channels in programs.channels]  # the next step, per rank and channel
    ranks = [deque(range(core, size, cores)) for core in range(cores)]  # the first one has the core
    looking = [True] * size  # whether a rank that has to wait would look, before it yields
    overhead = [0.0] * cores
    ahead = [(0.0, core, core) for core in range(cores)]  # (clock, tie-breaker, core)
    ticket = cores
    end = 0.0
    while ahead:
        clock, _, core = heapq.heappop(ahead)
        rank = ranks[core][0]
        soonest, finished, ran = math.inf, True, False
        for channel, steps in enumerate(programs.channels[rank]):
            number = at[rank][channel]
            if number == steps.stop:
                continue
            finished = False
            ready = max([seen[message] for message in programs.receives[rank][number]], default=0.0)
            if ready <= clock:
                clock += costs[rank][number]
                at[rank][channel] += 1
                if programs.sends[rank][number] >= 0:
                    seen[programs.sends[rank][number]] = clock + hop
                ran = looking[rank] = True
                break
            soonest = min(soonest, ready)
        if not ran:
            passed = turn
            if finished:
                ranks[core].popleft()
                end = max(end, clock)
                if not ranks[core]:
                    continue
            elif len(ranks[core]) == 1:  # nobody else is here: on to when a message comes, or when one may be sent
                later = min((other for other, _, _ in ahead if other > clock), default=clock)
                clock, passed = (soonest if soonest < math.inf else later), 0.0
            elif looking[rank]:
                passed, looking[rank] = min(patience, soonest - clock), False
            else:
                ranks[core].rotate(-1)
            clock += passed
            overhead[core] += passed
        heapq.heappush(ahead, (clock, ticket, core))
        ticket += 1
    return end, max(overhead)


def _between(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """The value at `size`, on a straight line over the logarithm of the size; beyond the ends as there."""
    above = bisect_left(sizes, size)
    if above == 0 or above == len(sizes):
        return values[min(above, len(sizes) - 1)]
    low, high = sizes[above - 1], sizes[above]
    share = math.log(size / low) / math.log(high / low)
    return values[above - 1] + share * (values[above] - values[above - 1])
