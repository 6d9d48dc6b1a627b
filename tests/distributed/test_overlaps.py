"""Outputs that share memory with inputs: every call gives what it would give if inputs were copied before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run_cases

import ringreduce
from ringreduce.errors import InvalidArgument

TRANSPORTS = {
    "slots": ringreduce.Options(fetch=0, engine="channel_bytes=64K,least_slice_bytes=64"),
    "fetched": ringreduce.Options(engine="channel_bytes=64K,least_fetch_bytes=64"),
    "arena": ringreduce.Options(engine="channel_bytes=64K"),
    "gloo": ringreduce.Options(transport="gloo", engine="least_slice_bytes=64,slices=3"),
}
COUNTS = (1, 4, 5, 600)
"""Elements of a block; some have several slices."""


@dataclass(frozen=True)
class View:
    """Where a tensor lies in a rank's memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(self.sizes, self.strides, self.offset)

    def places(self, length: int) -> set[int]:
        return set(self.of(torch.arange(length)).flatten().tolist())

    @property
    def count(self) -> int:
        return torch.Size(self.sizes).numel()


class Memory:
    """A rank's memory, and where the inputs and outputs of one call lie in it."""

    def __init__(self, rng: random.Random, length: int) -> None:
        self.rng, self.length = rng, length
        self.outputs: list[View] = []
        self.inputs: list[View] = []

    def view(self, count: int, written: bool) -> View:
        halves = [((count,), (1,)), ((count,), (2,)), ((2, count // 2), (1, 2)), ((2, count // 2), (count, 1))]
        sizes, strides = self.rng.choice(halves[:2] if count % 2 else halves)
        if not written and self.rng.random() < 0.1:
            strides = tuple(0 for _ in sizes)
        extent = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
        return View(sizes, strides, self.rng.randrange(self.length - extent + 1))

    def place_outputs(self, counts: list[int]) -> None:
        """Without a place in two of them."""
        if len(set(counts)) == 1 and self.rng.random() < 0.3:  # columns
            self.outputs = [View((counts[0],), (len(counts),), i) for i in range(len(counts))]
            self.rng.shuffle(self.outputs)
            return
        taken: set[int] = set()
        for count in counts:
            while True:
                found = self.view(count, written=True)
                if taken.isdisjoint(found.places(self.length)):
                    break
            taken |= found.places(self.length)
            self.outputs.append(found)

    def place_inputs(self, counts: list[int]) -> None:
        """Often where outputs, or other inputs, are, or a little beside them."""
        for count in counts:
            alike = [v for v in self.outputs + self.inputs if v.count == count]
            how = self.rng.random()
            if not alike or how < 0.25:
                self.inputs.append(self.view(count, written=False))
                continue
            near = self.rng.choice(alike)
            moved = View(near.sizes, near.strides, near.offset + self.rng.randrange(-2, 3))
            last = sum((n - 1) * s for n, s in zip(near.sizes, near.strides, strict=True))
            fits = how < 0.5 and moved.offset >= 0 and moved.offset + last < self.length
            self.inputs.append(moved if fits else near)


Blocks = list[list[torch.Tensor]]
"""Per rank, the tensors of a list."""


@dataclass(frozen=True)
class Case:
    """A collective: how many elements each rank's outputs and inputs have, the call, and what it must give."""

    counts: Callable[[int, int, int, int], tuple[list[int], list[int]]]
    """Of rank, size, root and the count of a block: of the outputs and the inputs."""
    call: Callable[[list[torch.Tensor], list[torch.Tensor], int, bool], object]
    """Of outputs, inputs, root and async_op."""
    expected: Callable[[Blocks, int, int], list[torch.Tensor]]
    """Of all ranks' inputs, rank and root: the outputs, flat."""


def parts(tensors: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """The equal parts of each rank's one tensor."""
    return [list(t.flatten().chunk(size)) for t in tensors]


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def gathered_twice(outputs: list[torch.Tensor], inputs: list[torch.Tensor], root: int, async_op: bool) -> object:
    work = group().allgather_into_tensor_coalesced(outputs, inputs)
    return work if async_op else work.wait()


def scattered_twice(outputs: list[torch.Tensor], inputs: list[torch.Tensor], root: int, async_op: bool) -> object:
    work = group().reduce_scatter_tensor_coalesced(outputs, inputs)
    return work if async_op else work.wait()


CASES = {
    "all_gather": Case(
        lambda rank, size, root, n: ([n + r for r in range(size)], [n + rank]),
        lambda out, given, root, async_op: dist.all_gather(out, given[0], async_op=async_op),
        lambda given, rank, root: [of_rank[0] for of_rank in given],
    ),
    "all_gather_single": Case(
        lambda rank, size, root, n: ([n * size], [n]),
        lambda out, given, root, async_op: ringreduce.all_gather_single(out[0], given[0], async_op=async_op),
        lambda given, rank, root: [torch.cat([of_rank[0].flatten() for of_rank in given])],
    ),
    "all_gather_into_tensor_coalesced": Case(
        lambda rank, size, root, n: ([n * size, 2 * size], [n, 2]),
        gathered_twice,
        lambda given, rank, root: [torch.cat([of_rank[i].flatten() for of_rank in given]) for i in range(2)],
    ),
    "reduce_scatter": Case(
        lambda rank, size, root, n: ([n + rank], [n + r for r in range(size)]),
        lambda out, given, root, async_op: dist.reduce_scatter(out[0], given, async_op=async_op),
        lambda given, rank, root: [torch.stack([of_rank[rank].flatten() for of_rank in given]).sum(0)],
    ),
    "reduce_scatter_single": Case(
        lambda rank, size, root, n: ([n], [n * size]),
        lambda out, given, root, async_op: ringreduce.reduce_scatter_single(out[0], given[0], async_op=async_op),
        lambda given, rank, root: [torch.stack([t[0].flatten() for t in given]).sum(0).chunk(len(given))[rank]],
    ),
    "reduce_scatter_tensor_coalesced": Case(
        lambda rank, size, root, n: ([n, 2], [n * size, 2 * size]),
        scattered_twice,
        lambda given, rank, root: [
            torch.stack([t[i].flatten() for t in given]).sum(0).chunk(len(given))[rank] for i in range(2)
        ],
    ),
    "gather": Case(
        lambda rank, size, root, n: ([n] * size if rank == root else [], [n]),
        lambda out, given, root, async_op: dist.gather(given[0], out or None, dst=root, async_op=async_op),
        lambda given, rank, root: [of_rank[0] for of_rank in given] if rank == root else [],
    ),
    "scatter": Case(
        lambda rank, size, root, n: ([n], [n] * size if rank == root else []),
        lambda out, given, root, async_op: dist.scatter(out[0], given or None, src=root, async_op=async_op),
        lambda given, rank, root: [given[root][rank]],
    ),
    "all_to_all": Case(
        lambda rank, size, root, n: ([n + rank] * size, [n + r for r in range(size)]),
        lambda out, given, root, async_op: dist.all_to_all(out, given, async_op=async_op),
        lambda given, rank, root: [of_rank[rank] for of_rank in given],
    ),
    "all_to_all_single": Case(
        lambda rank, size, root, n: ([n * size], [n * size]),
        lambda out, given, root, async_op: dist.all_to_all_single(out[0], given[0], async_op=async_op),
        lambda given, rank, root: [
            torch.cat([of[rank] for of in parts([of_rank[0] for of_rank in given], len(given))])
        ],
    ),
    "all_reduce with out": Case(
        lambda rank, size, root, n: ([n], [n]),
        lambda out, given, root, async_op: ringreduce.all_reduce(given[0].reshape_as(out[0]), out=out[0]),
        lambda given, rank, root: [torch.stack([of_rank[0].flatten() for of_rank in given]).sum(0)],
    ),
}


def one_call(me: Rank, case: Case, rng: random.Random, empty: Callable[[int], torch.Tensor], note: str) -> None:
    root, count, length = rng.randrange(me.size), rng.choice(COUNTS), 0
    counts = [case.counts(rank, me.size, root, count) for rank in range(me.size)]
    length = 2 * max(3 * sum(outputs) + sum(inputs) for outputs, inputs in counts)
    values, places = [], []
    for rank, (outputs, inputs) in enumerate(counts):
        place = Memory(rng, length)
        place.place_outputs(outputs)
        place.place_inputs(inputs)
        places.append(place)
        values.append((torch.arange(length) * (rank + 2) % 251).float())
    given = [[v.of(memory).clone() for v in p.inputs] for p, memory in zip(places, values, strict=True)]
    wanted = values[me.rank].clone()
    own = places[me.rank]
    for view, result in zip(own.outputs, case.expected(given, me.rank, root), strict=True):
        view.of(wanted).copy_(result.reshape(view.sizes))

    memory = empty(length).copy_(values[me.rank])
    made: dict[View, torch.Tensor] = {}
    same_object = random.Random(count).random() < 0.5  # rather than another view of the same memory

    def tensor(view: View) -> torch.Tensor:
        fresh = view.of(memory)
        return made.setdefault(view, fresh) if same_object else fresh

    work = case.call(
        [tensor(v) for v in own.outputs], [tensor(v) for v in own.inputs], root, async_op := rng.random() < 0.3
    )
    if async_op and work is not None:
        work.wait()  # type: ignore[attr-defined]
    assert torch.equal(memory, wanted), f"{note}: outputs {own.outputs}, inputs {own.inputs}, root {root}"


def overlapping(me: Rank, transport: str) -> None:
    def empty(length: int) -> torch.Tensor:
        return ringreduce.empty(length) if transport == "arena" else torch.empty(length)

    with me.join(options=TRANSPORTS[transport]):
        for name, case in CASES.items():
            for call in range(300 // me.size**2):
                one_call(me, case, random.Random(f"{name} {call}"), empty, f"{name}, call {call}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_outputs_over_inputs(ranks: int) -> None:
    run_cases(overlapping, ranks, {transport: (transport,) for transport in TRANSPORTS})


@on_ranks(2)
def test_outputs_of_several_calls_in_one_must_not_share_memory(me: Rank) -> None:
    with me.join():
        memory = torch.zeros(8)
        for outputs, inputs in (
            ([memory[:2], memory[1:3]], [torch.ones(1), torch.ones(1)]),
            ([memory[:2], memory.view(torch.int32)[1:3]], [torch.ones(1), torch.ones(1, dtype=torch.int32)]),
        ):
            with pytest.raises(InvalidArgument, match="two of the tensors to be written share memory"):
                group().allgather_into_tensor_coalesced(outputs, inputs)
        apart = [memory[:2], memory[2:4].view(torch.int32)]
        group().allgather_into_tensor_coalesced(apart, [torch.ones(1), torch.ones(1, dtype=torch.int32)]).wait()
        assert memory[:2].tolist() == [1, 1]
        assert memory[2:4].view(torch.int32).tolist() == [1, 1]
