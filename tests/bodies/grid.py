"""One combination of dtype, operation, layout and API, checked on every rank."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bodies.collectives import DTYPES, name_of, reduced, supported
from distributed.harness import Rank

from ringreduce.errors import InvalidArgument, RingReduceError

SHAPE = (2, 3, 4, 5)
FILLER = 7  # what outputs hold before the call; no result is that
OPS: dict[str, Callable[[int], Any]] = {
    **{op.lower(): lambda rank, op=op: getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")},
    **{op.lower(): lambda rank, op=op: getattr(dist.ReduceOp, op) for op in ("BAND", "BOR", "BXOR")},
    "premul_sum": lambda rank: dist._make_nccl_premul_sum(premul_factor(rank)),
}


def premul_factor(rank: int) -> float:
    return 1.0 if rank % 2 else 0.5


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


@dataclasses.dataclass(frozen=True)
class Layout:
    """`cut` says which elements of a block (or of several, joined) there are, `place` lays them out in fresh memory."""

    place: Callable[[torch.Tensor], torch.Tensor]
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    exists: Callable[[torch.dtype], bool] = lambda dtype: True


def can_be_negated(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not name_of(dtype).startswith("float8")


LAYOUTS = {
    "contiguous": Layout(torch.clone),
    "offset": Layout(lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape)),
    "transposed": Layout(lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)),
    "every second": Layout(lambda t: torch.stack([t, t], -1)[..., 0]),
    "channels_last": Layout(lambda t: t.contiguous(memory_format=torch.channels_last)),
    "expanded": Layout(lambda t: t[:, :1].clone().expand(t.shape), cut=lambda t: t[:, :1].expand(t.shape)),
    "empty": Layout(torch.clone, cut=lambda t: t[:, :0]),
    "no dimension": Layout(
        lambda t: t.clone().view(() if t.numel() == 1 else t.shape), cut=lambda t: t.flatten()[:: 2 * 3 * 4 * 5]
    ),
    "conjugate": Layout(lambda t: t.conj().resolve_conj().conj(), exists=lambda dtype: dtype.is_complex),
    "negative": Layout(lambda t: torch._neg_view(-t), exists=can_be_negated),
}
"""As inputs and as outputs, except that nothing may be written to what is expanded."""
WHOLE = ("contiguous", "offset", "transposed", "every second", "channels_last")
"""Layout "by rank" is another of these on every rank."""
MOVED_DTYPES = (
    "complex32",
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("uint16", "uint32", "uint64", "uint4", "int4", "uint1", "int1"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)
QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2")


def quantized(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch._empty_affine_quantized(shape, scale=1.0, zero_point=0, dtype=dtype)


REFUSED: dict[str, tuple[Callable[[torch.Size], torch.Tensor], str]] = {
    **{
        name: (functools.partial(torch.empty, dtype=getattr(torch, name)), f"{name}.*(convert|view)")
        for name in MOVED_DTYPES
    },
    **{
        name: (functools.partial(quantized, dtype=getattr(torch, name)), f"{name}.*(dequantize|convert)")
        for name in QUANTIZED
    },
    "sparse": (lambda shape: torch.zeros(shape).to_sparse(), "Sparse.*strided"),
    "sparse_csr": (lambda shape: torch.zeros(shape).view(6, -1).to_sparse_csr(), "SparseCsr.*strided"),
    "mkldnn": (lambda shape: torch.zeros(shape).to_mkldnn(), "Mkldnn.*strided"),
    "meta": (lambda shape: torch.zeros(shape, device="meta"), "meta.*CPU"),
}
"""Tensors of every dtype and layout that is not served, and what the error must say. Those of MOVED_DTYPES are
refused by reductions only; test_moved_dtypes.py has the other calls."""


@functools.cache
def values(rank: int, block: int, call: int, dtype: torch.dtype, divisor: int) -> torch.Tensor:
    """Block `block` of `rank`, in a dtype wide enough to reduce exactly; sums of 3 are divisible by `divisor`."""
    element = torch.arange(2 * 3 * 4 * 5).view(SHAPE)

    def whole(block: int) -> torch.Tensor:
        if divisor == 3:  # one rank has nothing, the others 0, 1.5 or 3
            return (element // 2 + call) % 3 * 1.5 * ((element + rank + block) % 3 != 0)
        return (element // 7 + (rank + 1) * (element % 5 + 1) + block + call) % 3

    if dtype == torch.bool:
        return whole(block) == 0
    if dtype.is_complex:
        return torch.complex(whole(block).double(), whole(block + 1).double())
    return whole(block).double() if dtype.is_floating_point else whole(block)


class Case:
    """One call of one collective, on one rank: its arguments, and what must come of it."""

    def __init__(self, me: Rank, api: Any, group: Any, wanted: Combination, call: int) -> None:
        self.rank, self.size, self.root = me.rank, me.size, call % me.size
        self.api, self.group, self.call = api, group, call
        self.refused = wanted.refused
        self.dtype, self.op_name, self.op = wanted.dtype, wanted.op, OPS[wanted.op](me.rank)
        self.given, self.taken = (
            WHOLE[(call + me.rank) % len(WHOLE)] if layout == "by rank" else layout
            for layout in (wanted.given, wanted.taken)
        )
        self.made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def block(self, rank: int, block: int) -> torch.Tensor:
        return values(rank, block, self.call % 3, self.dtype, self.size if self.op_name == "avg" else 0)

    def logical(self, layout: str, parts: list[torch.Tensor]) -> torch.Tensor:
        return LAYOUTS[layout].cut(torch.cat(parts))

    def _make(self, layout: str, logical: torch.Tensor) -> torch.Tensor:
        if self.refused:
            return REFUSED[self.refused][0](logical.shape)
        tensor = LAYOUTS[layout].place(logical.to(self.dtype))
        self.made.append((tensor, plain(tensor).clone(), memory(tensor).clone()))
        return tensor

    def give(self, *blocks: int) -> torch.Tensor:
        """This rank's blocks, joined to one tensor."""
        return self._make(self.given, self.logical(self.given, [self.block(self.rank, b) for b in blocks]))

    def take(self, blocks: int = 1) -> torch.Tensor:
        """Room for as many blocks as that."""
        # All tensors of a call have as many elements; those of `given` decide.
        shape = LAYOUTS[self.given].cut(torch.zeros(2 * blocks, *SHAPE[1:])).shape
        filler = torch.full(shape, FILLER if self.dtype != torch.bool else 0).to(self.dtype)
        return self._make(self.taken, filler)

    def total(self, *blocks: int) -> torch.Tensor:
        rows = []
        for rank in range(self.size):
            rows.append(self.logical(self.given, [self.block(rank, b) for b in blocks]))
        if self.op_name != "premul_sum":
            return reduced(torch.stack(rows), self.op_name).to(self.dtype)
        return sum(row * premul_factor(rank) for rank, row in enumerate(rows)).to(self.dtype)

    def of(self, *ranks_and_blocks: tuple[int, int]) -> torch.Tensor:
        """Those blocks, joined."""
        return self.logical(self.given, [self.block(*at) for at in ranks_and_blocks]).to(self.dtype)

    def keeps_memory(self, written: list[torch.Tensor]) -> bool:
        """Whether nothing but the elements of `written` has changed: no input, nothing between an output's elements."""
        for tensor, values, content in self.made:
            if any(tensor is output for output in written):
                tensor.copy_(values)
            if not torch.equal(memory(tensor), content):
                return False
        return True


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(comparable(tensor), comparable(other))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor.float() if name_of(tensor.dtype).startswith("float8") else tensor).flatten()


def memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


# One function a collective. It makes the call, and returns what it wrote with what it should have written; or None
# where this rank has no part.

Results = list[tuple[torch.Tensor, torch.Tensor]] | None


def all_reduce(case: Case) -> Results:
    tensor = case.give(0)
    case.api.all_reduce(tensor, case.op, case.group)
    return [(tensor, case.total(0))]


def reduce(case: Case) -> Results:
    tensor = case.give(0)
    case.api.reduce(tensor, case.root, case.op, case.group)
    return [(tensor, case.total(0))] if case.rank == case.root else []


def reduce_scatter(case: Case) -> Results:
    output = case.take()
    case.api.reduce_scatter(output, [case.give(b) for b in range(case.size)], case.op, case.group)
    return [(output, case.total(case.rank))]


def reduce_scatter_tensor(case: Case) -> Results:
    output = case.take()
    case.api.reduce_scatter_tensor(output, case.give(*range(case.size)), case.op, case.group)
    return [(output, case.total(*range(case.size)).chunk(case.size)[case.rank])]


def all_reduce_coalesced(case: Case) -> Results:
    tensors = [case.give(b) for b in range(2)]
    with dist._coalescing_manager(case.group):
        for tensor in tensors:
            dist.all_reduce(tensor, case.op, case.group)
    return [(tensor, case.total(b)) for b, tensor in enumerate(tensors)]


def reduce_scatter_tensor_coalesced(case: Case) -> Results:
    blocks = range(case.size), range(1, case.size + 1)
    outputs = [case.take() for _ in blocks]
    with dist._coalescing_manager(case.group):
        for output, b in zip(outputs, blocks, strict=True):
            dist.reduce_scatter_tensor(output, case.give(*b), case.op, case.group)
    return [(o, case.total(*b).chunk(case.size)[case.rank]) for o, b in zip(outputs, blocks, strict=True)]


def all_gather(case: Case) -> Results:
    outputs = [case.take() for _ in range(case.size)]
    case.api.all_gather(outputs, case.give(0), case.group)
    return [(output, case.of((rank, 0))) for rank, output in enumerate(outputs)]


def all_gather_into_tensor(case: Case) -> Results:
    output = case.take(case.size)
    case.api.all_gather_into_tensor(output, case.give(0), case.group)
    return [(output, case.of(*((rank, 0) for rank in range(case.size))))]


def all_gather_into_tensor_coalesced(case: Case) -> Results:
    outputs = [case.take(case.size) for _ in range(2)]
    with dist._coalescing_manager(case.group):
        for b, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, case.give(b), case.group)
    return [(output, case.of(*((rank, b) for rank in range(case.size)))) for b, output in enumerate(outputs)]


def all_gather_coalesced(case: Case) -> Results:
    outputs = [[case.take() for _ in range(2)] for _ in range(case.size)]
    dist.all_gather_coalesced(outputs, [case.give(b) for b in range(2)], case.group)
    return [(o, case.of((rank, b))) for rank, tensors in enumerate(outputs) for b, o in enumerate(tensors)]


def broadcast(case: Case) -> Results:
    tensor = case.give(0)
    case.api.broadcast(tensor, case.root, case.group)
    return [(tensor, case.of((case.root, 0)))]


def gather(case: Case) -> Results:
    outputs = [case.take() for _ in range(case.size)] if case.rank == case.root else None
    if not outputs and only_output_is_refused(case):
        return None
    case.api.gather(case.give(0), outputs, case.root, case.group)
    return [(output, case.of((rank, 0))) for rank, output in enumerate(outputs or ())]


def scatter(case: Case) -> Results:
    output = case.take()
    inputs = [case.give(b) for b in range(case.size)] if case.rank == case.root else None
    case.api.scatter(output, inputs, case.root, case.group)
    return [(output, case.of((case.root, case.rank)))]


def all_to_all(case: Case) -> Results:
    outputs = [case.take() for _ in range(case.size)]
    case.api.all_to_all(outputs, [case.give(b) for b in range(case.size)], case.group)
    return [(output, case.of((rank, case.rank))) for rank, output in enumerate(outputs)]


def all_to_all_single(case: Case) -> Results:
    output = case.take(case.size)
    case.api.all_to_all_single(output, case.give(*range(case.size)), group=case.group)
    return [(output, case.of(*((rank, case.rank) for rank in range(case.size))))]


def send_and_recv(case: Case) -> Results:
    """From the root to the next rank."""
    target = (case.root + 1) % case.size
    if case.rank == case.root and not only_output_is_refused(case):
        case.api.send(case.give(0), target, tag=case.call, group=case.group)
    if case.rank == target:
        output = case.take()
        case.api.recv(output, case.root, tag=case.call, group=case.group)
        return [(output, case.of((case.root, 0)))]
    return None


def batch_isend_irecv(case: Case) -> Results:
    """Around the ring."""
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    output = case.take()
    receive = dist.P2POp(dist.irecv, output, before, case.group, case.call)
    if only_output_is_refused(case):
        messages = [receive]
    else:
        messages = [receive, dist.P2POp(dist.isend, case.give(0), after, case.group, case.call)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [(output, case.of((before, 0)))]


def only_output_is_refused(case: Case) -> bool:
    """A rank whose own call is right would make it, and wait for the ones that were told that theirs is wrong."""
    return case.taken == "expanded"


REDUCING = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
REDUCING_COALESCED = (all_reduce_coalesced, reduce_scatter_tensor_coalesced)
MOVING = (
    *(all_gather, all_gather_into_tensor, broadcast, gather, scatter),
    *(all_to_all, all_to_all_single, send_and_recv),
)
MOVING_COALESCED = (all_gather_into_tensor_coalesced, all_gather_coalesced, batch_isend_irecv)
IN_PLACE = (all_reduce, reduce, broadcast, all_reduce_coalesced)


@dataclasses.dataclass(frozen=True)
class Combination:
    collective: Callable[[Case], Results]
    dtype: torch.dtype
    op: str = "sum"
    given: str = "contiguous"
    taken: str = "contiguous"
    refused: str = ""  # what takes the place of every tensor

    def refusal(self) -> str:
        """A pattern of the message, if it must be refused."""
        patterns = [REFUSED[self.refused][1]] if self.refused else []
        if self.collective in (*REDUCING, *REDUCING_COALESCED) and not supported(self.dtype, self.op):
            patterns.append(f"'{self.op}'.*{name_of(self.dtype)}")
        if "expanded" in (self.given if self.collective in IN_PLACE else self.taken):
            patterns.append("expanded.*contiguous")
        return "|".join(patterns)

    def __str__(self) -> str:
        tensors = self.refused or f"{name_of(self.dtype)}, {self.given} -> {self.taken}"
        return f"{self.collective.__name__}({tensors}, {self.op})"


SAME = [(layout, layout) for layout in LAYOUTS] + [("expanded", "contiguous"), ("by rank", "by rank")]


def combinations(reducing: Any, moving: Any, layouts: Any, dtypes: Any = DTYPES) -> list[Combination]:
    result = []
    for dtype, (given, taken) in itertools.product(dtypes, layouts):
        if given == "by rank" or (LAYOUTS[given].exists(dtype) and LAYOUTS[taken].exists(dtype)):
            result += [Combination(f, dtype, op, given, taken) for f, op in itertools.product(reducing, OPS)]
            result += [Combination(f, dtype, "sum", given, taken) for f in moving]
    return result


class Report:
    """What failed, by the kind of failure; and how many combinations had which outcome."""

    def __init__(self) -> None:
        self.failures: dict[str, list[str]] = collections.defaultdict(list)
        self.outcomes: collections.Counter[str] = collections.Counter()

    def fail(self, combination: Combination, reason: str) -> None:
        self.failures[reason].append(str(combination))

    def text(self) -> str:
        return "\n".join(
            f"{len(cases)} x {reason}\n    {'; '.join(cases[:4])}" for reason, cases in self.failures.items()
        )


def attempt(report: Report, combination: Combination, case: Case) -> None:
    """Makes the call and reports what is wrong with its outcome."""
    refusal = combination.refusal()
    try:
        results = combination.collective(case)
    except InvalidArgument as error:
        report.outcomes["refused"] += 1
        results = []
        if not refusal or not re.search(refusal, str(error), re.IGNORECASE):
            report.fail(combination, f"InvalidArgument: {error}")
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, RingReduceError):
            raise
        return report.fail(combination, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    else:
        if results is None:
            return
        if refusal:
            return report.fail(combination, "no error")
        report.outcomes["right"] += 1
    if not all(same(tensor, expected) for tensor, expected in results):
        report.fail(combination, "wrong result")
    if not case.keeps_memory([tensor for tensor, _ in results]):
        report.fail(combination, "memory that is not the output's was written")
