"""Sweeps over groups: each run makes one, calls it, and ends it.

    make faults ONLY="all_gather allocation"

If a rank raises, so does each that has not returned, soon and naming the rank; afterwards the group works on all ranks
or raises on all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed.harness import Rank
from torch.distributed import distributed_c10d

import ringreduce
from shortage.requests import ANY
from shortage.sweeps import KINDS_OF_CALLS, TIMEOUT, Run, Sweep, Turn, Values, are_right

Scenario = Callable[[Rank], tuple[Callable[[], Any], Values]]
"""Of a rank, in its default group: the call, and what it gives."""

SMALL, LARGE = 16, 4 << 20  # elements of float32


def reduces(elements: int, all_reduce: Callable[[torch.Tensor], Any], columns: int = 1) -> Scenario:
    """With more than one column, of a tensor that is not contiguous."""

    def prepare(me: Rank) -> tuple[Callable[[], Any], Values]:
        tensor = torch.full((columns, elements), float(me.rank + 1)).T
        return lambda: all_reduce(tensor), [(tensor, me.size * (me.size + 1) / 2)]

    return prepare


def feeds_back(me: Rank) -> tuple[Callable[[], Any], Values]:
    return reduces(1 << 17, packed("int8", feedback=ringreduce.Feedback()))(me)


def waited_for(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def coalesces(me: Rank) -> tuple[Callable[[], Any], Values]:
    tensors = [torch.full((n,), 1.0) for n in (3, 100, 5)]

    def call() -> None:
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    return call, [(tensor, float(me.size)) for tensor in tensors]


def coalesces_parts(me: Rank) -> tuple[Callable[[], Any], Values]:
    gathered, summed = [torch.zeros(me.size * n) for n in (3, 100)], [torch.zeros(n) for n in (3, 100)]

    def call() -> None:
        with dist._coalescing_manager():
            for got in gathered:
                dist.all_gather_into_tensor(got, torch.ones(len(got) // me.size))
        with dist._coalescing_manager():
            for got in summed:
                dist.reduce_scatter_tensor(got, torch.ones(len(got) * me.size))

    return call, [*((got, 1.0) for got in gathered), *((got, float(me.size)) for got in summed)]


def gathers(me: Rank) -> tuple[Callable[[], Any], Values]:
    got, own = [torch.zeros(1000) for _ in range(me.size)], torch.full((1000,), float(me.rank))
    return lambda: dist.all_gather(got, own), [(each, float(rank)) for rank, each in enumerate(got)]


def gathers_uneven(me: Rank) -> tuple[Callable[[], Any], Values]:
    got, own = [torch.zeros(1000 + rank) for rank in range(me.size)], torch.full((1000 + me.rank,), float(me.rank))
    return lambda: dist.all_gather(got, own), [(each, float(rank)) for rank, each in enumerate(got)]


def exchanges(elements: int) -> Scenario:
    def prepare(me: Rank) -> tuple[Callable[[], Any], Values]:
        got, own = torch.zeros(me.size * elements), torch.full((me.size * elements,), float(me.rank))
        wanted = torch.arange(me.size, dtype=torch.float32).repeat_interleave(elements)
        return lambda: dist.all_to_all_single(got, own), [(got, wanted)]

    return prepare


def splits(me: Rank) -> tuple[Callable[[], Any], Values]:
    got = torch.zeros((me.rank + 2) * me.size)
    sends, receives = [rank + 2 for rank in range(me.size)], [me.rank + 2] * me.size
    own = torch.full((sum(sends),), float(me.rank))
    wanted = torch.arange(me.size, dtype=torch.float32).repeat_interleave(me.rank + 2)
    return lambda: dist.all_to_all_single(got, own, receives, sends), [(got, wanted)]


def exchanges_lists(me: Rank) -> tuple[Callable[[], Any], Values]:
    got, own = [torch.zeros(100) for _ in range(me.size)], [torch.full((100,), float(me.rank)) for _ in range(me.size)]
    return lambda: dist.all_to_all(got, own), [(each, float(rank)) for rank, each in enumerate(got)]


def scatters(me: Rank) -> tuple[Callable[[], Any], Values]:
    got, own = torch.zeros(1000), [torch.full((1000,), 1.0) for _ in range(me.size)]
    return lambda: dist.reduce_scatter(got, own), [(got, float(me.size))]


def from_a_root(me: Rank) -> tuple[Callable[[], Any], Values]:
    tensor, summed = torch.full((1000,), float(me.rank)), torch.full((1000,), 1.0)
    root = [(summed, float(me.size))] if me.rank == 0 else []
    return lambda: (dist.broadcast(tensor, 1), dist.reduce(summed, 0)), [(tensor, 1.0), *root]


def lists_of_a_root(me: Rank) -> tuple[Callable[[], Any], Values]:
    own, got = torch.full((1000,), float(me.rank)), torch.zeros(1000)
    at_root = [torch.zeros(1000) for _ in range(me.size)] if me.rank == 0 else []
    given = [torch.full((1000,), float(rank)) for rank in range(me.size)] if me.rank == 0 else []

    def call() -> None:
        dist.gather(own, at_root or None, 0)
        dist.scatter(got, given or None, 0)

    return call, [(got, float(me.rank)), *((each, float(rank)) for rank, each in enumerate(at_root))]


def sparse(me: Rank) -> tuple[Callable[[], Any], Values]:
    tensor = torch.sparse_coo_tensor(torch.tensor([[me.rank]]), torch.ones(1), (8,), check_invariants=True)
    wanted = torch.cat([torch.ones(me.size), torch.zeros(8 - me.size)])
    return lambda: dist.all_reduce(tensor), [(tensor, wanted)]


def sends(elements: int, columns: int = 1) -> Scenario:
    """Each to the next, and from the one before."""

    def prepare(me: Rank) -> tuple[Callable[[], Any], Values]:
        own, got = torch.full((columns, elements), float(me.rank)).T, torch.zeros(columns, elements).T
        to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        return lambda: waited_for([dist.isend(own, to), dist.irecv(got, source)]), [(got, float(source))]

    return prepare


def takes_from_the_arena(me: Rank) -> tuple[Callable[[], Any], Values]:
    got: Values = []

    def call() -> None:
        tensor = ringreduce.empty(LARGE)
        tensor.fill_(1.0)
        ringreduce.all_reduce(tensor)
        got.append((tensor, float(me.size)))

    return call, got


def makes_a_subgroup(me: Rank) -> tuple[Callable[[], Any], Values]:
    tensor = torch.ones(100)

    def call() -> None:
        group = dist.new_group(list(range(me.size)), timeout=timedelta(seconds=TIMEOUT))
        dist.all_reduce(tensor, group=group)

    return call, [(tensor, float(me.size))]


def packed(wire_dtype: str, **options: Any) -> Callable[[torch.Tensor], Any]:
    return functools.partial(ringreduce.all_reduce, wire_dtype=wire_dtype, **options)


CALLS: dict[str, Scenario] = {
    "all_reduce 64 B": reduces(SMALL, ringreduce.all_reduce),
    "all_reduce 16 MB": reduces(LARGE, ringreduce.all_reduce),
    "all_reduce, columns": reduces(1000, ringreduce.all_reduce, columns=3),
    "all_reduce int8 with feedback": feeds_back,
    "all_reduce int8": reduces(1 << 17, packed("int8")),
    "all_reduce bfloat16": reduces(1 << 17, packed("bfloat16")),
    "operator": reduces(1000, functools.partial(ringreduce.all_reduce, op=ringreduce.Op.torch(torch.add))),
    "dist.all_reduce 64 B": reduces(SMALL, dist.all_reduce),
    "dist.all_reduce 16 MB, async": reduces(LARGE, lambda t: waited_for([dist.all_reduce(t, async_op=True)])),
    "coalesced": coalesces,
    "coalesced parts": coalesces_parts,
    "all_gather": gathers,
    "all_gather, sizes differ": gathers_uneven,
    "all_to_all 4 KB": exchanges(512),
    "all_to_all 16 MB": exchanges(LARGE // 2),
    "all_to_all, split sizes": splits,
    "all_to_all, lists": exchanges_lists,
    "reduce_scatter": scatters,
    "broadcast and reduce": from_a_root,
    "gather and scatter": lists_of_a_root,
    "sparse": sparse,
    "messages 64 B": sends(SMALL),
    "messages 16 MB": sends(LARGE),
    "messages, columns": sends(1000, columns=3),
    "barrier": lambda me: (dist.barrier, []),
    "arena": takes_from_the_arena,
    "subgroup": makes_a_subgroup,
    "receive in vain": lambda me: (lambda: dist.irecv(torch.zeros(10), (me.rank - 1) % me.size), []),
}
"""The group of the last one has the message until it ends."""

GROUP_GOES_ON = ("subgroup",)
"""After an error in one of these, which is another group's."""

FAILS_BEFORE_A_CALL = ("arena",)
"""The others may be told by the victim's next call, which is another than theirs."""

TRANSPORTS: dict[str, dict[str, Any]] = {"shared_memory": {}, "tcp": {"transport": "tcp"}}


@dataclasses.dataclass(frozen=True)
class GroupSweep(Sweep):
    """`phase`: "make", "call" or "destroy"."""

    def live(self, turn: Turn) -> None:
        found = turn.found
        turn.attempt(lambda: self._call(turn))
        found.made = dist.is_initialized()
        if found.made:
            turn.afterwards(lambda: self._look(turn))
        turn.meet("used")
        if found.made:
            turn.attempt(lambda: turn.armed("destroy", dist.destroy_process_group))
        if dist.is_initialized():  # that failed
            dist.destroy_process_group()
        distributed_c10d._world.group_count = 0  # by which torch names the next group; failed attempts count

    def _call(self, turn: Turn) -> None:
        turn.armed("make", lambda: self._make(turn))
        dist.barrier()
        call, values = CALLS[self.scenario](turn.me)
        turn.armed("call", call)
        turn.found.right = are_right(values)

    def _make(self, turn: Turn) -> None:
        dist.init_process_group(
            "ringreduce",
            store=dist.PrefixStore(str(turn), turn.me.store),
            rank=turn.me.rank,
            world_size=turn.me.size,
            timeout=timedelta(seconds=TIMEOUT),
            pg_options=ringreduce.Options(**TRANSPORTS[self.transport]),
        )

    def _look(self, turn: Turn) -> None:
        after = torch.ones(100)
        dist.all_reduce(after)
        turn.found.right &= are_right([(after, float(turn.me.size))])

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        if self.phase == "destroy":
            return
        victim = runs[self.victim]
        for rank, each in enumerate(runs):
            if rank == self.victim or not each.error:
                continue
            if not (victim.error or victim.afterwards):  # the call may have ended for it
                yield f"rank {rank} raises though rank {self.victim} does not: {each.error}"
            if f"rank {self.victim}" not in each.error:
                yield f"rank {rank} does not name rank {self.victim}: {each.error}"
            if "CollectiveMismatch" in each.error and self.scenario not in FAILS_BEFORE_A_CALL:
                yield f"rank {rank} is told of another call: {each.error}"
        groups = [each.afterwards for each in runs if each.made]
        if len({bool(error) for error in groups}) > 1:
            yield f"afterwards the group works on some ranks only: {groups}"
        if victim.error and not victim.afterwards and self.phase == "call" and self.scenario not in GROUP_GOES_ON:
            yield "the group works after an error"


def one_by_one() -> Iterator[list[Sweep]]:
    """Each request."""
    for ranks, transport, kind in itertools.product((2, 3), TRANSPORTS, KINDS_OF_CALLS):
        for victim in range(ranks):
            yield [GroupSweep("barrier", kind, "make", transport, victim, ranks=ranks)]
            yield [GroupSweep("receive in vain", kind, "destroy", transport, victim, ranks=ranks)]
            for name in CALLS:
                yield [GroupSweep(name, kind, "call", transport, victim, ranks=ranks)]


def by_places(kind: str = ANY, seconds: float = 0.0) -> Iterator[list[Sweep]]:
    """One request at each place that making a group, all calls and its end reach."""
    for victim in (0, 1):
        calls = [("barrier", "make"), *((name, "call") for name in CALLS), ("receive in vain", "destroy")]
        yield [
            GroupSweep(name, kind, phase, transport, victim, seconds, anew=True)
            for transport in TRANSPORTS
            for name, phase in calls
        ]
