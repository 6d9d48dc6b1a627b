"""One call with an `Op`: the ranks agree, exchange their shares, combine them, and agree that all went well."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ringreduce import _C
from ringreduce.errors import CollectiveMismatch, InvalidArgument, OperatorFailed
from ringreduce.groups.lookup import backend_of
from ringreduce.groups.tensors import share_memory
from ringreduce.operators.combiners import TILE_BYTES, Interpreted
from ringreduce.operators.op import Op
from ringreduce.operators.rows import Given, Rows, check_alike, rows_of, shown

BLOCK_BYTES = 16 << 20
"""A call goes through its tensors in blocks of this size, so that the memory it needs beside them is bounded."""
FRAME_BYTES, DIGEST_BYTES = 1024, 16
"""What the ranks tell each other first, and how much of it is for the call. Small tensors fit in the rest."""
TEXT_BYTES = 1024
"""How much of a description or of an error the ranks tell each other."""
CHECKED = 4096
"""On how many elements a call tests what an operator claims."""

log = logging.getLogger(__name__)

Group: TypeAlias = dist.ProcessGroup | None
Work: TypeAlias = dist.Work | None


class Call:
    """One call with an operator on this rank."""

    def __init__(
        self,
        what: str,
        op: Op,
        group: Group,
        async_op: bool,
        sources: list[Rows],
        out: Given | None,
        counted: bool = True,
    ) -> None:
        if async_op:
            raise InvalidArgument(
                f"async_op is {async_op!r:.60}; operators run in the thread that calls: leave it out for {op!r}"
            )
        self.op, self.group, self.sources = op, group, sources
        self.targets = sources
        if out is not None:
            self.targets = rows_of(op, "out", out, result=True)
            check_alike(self.targets, sources, "out", "tensor")
            for target, source in zip(self.targets, sources, strict=True):
                if target.shape != source.shape:
                    shapes = f"{target.shape}, and tensor has {source.shape}"
                    raise InvalidArgument(f"out has shape {shapes}; they must be alike")
            for source in sources:  # results may not overwrite elements of later blocks
                if any(share_memory(source.rows, target.rows) for target in self.targets):
                    source.rows = source.rows.clone()
        self.backend = backend_of(group)
        self.rank, self.size = self.backend.rank(), self.backend.size()
        self.count = sources[0].count
        elements = " and ".join(str(each.elements) for each in sources)
        number = f"{self.count} elements of " if counted else ""
        checked = " with check=True" if op.check else ""
        self.what = f"{what} by operator {op.name!r}{checked} on {number}{elements}"
        self.row_bytes = sum(each.elements.row_bytes for each in sources)

    def tell_autograd(self) -> None:
        """That this rank's targets are written, which happens where torch does not see it."""
        torch.autograd.graph.increment_version([each for target in self.targets for each in target.tensors()])

    @cached_property
    def function(self) -> Callable[[Any, Any], Any]:
        """What combines outside of the engine."""
        native = self.op.native.function(self.op.name, self.sources[0].elements) if self.op.native else None
        return native or cast(Any, self.op.function)

    def all_reduced(self) -> bool:
        """Has the engine make an all_reduce; False, with nothing done, where it cannot."""
        source = self.sources[0]
        if self.op.check:
            reason = "check=True"
        elif len(self.sources) > 1:
            reason = "it is on several tensors"
        else:
            reason = self.backend.why_not(self.row_bytes)
        if reason:
            log.debug("%s does not run in the engine: %s", self.what, reason)
            return False
        if self.op.native and (operator := self.op.native.operator(self.op.name, source.elements)):
            self.backend.allreduce_by(operator, self.filled_target())
        else:
            self.all_reduce_in_python(cast(Interpreted, self.op.interpreted))
        return True

    def all_reduce_in_python(self, combiner: Interpreted) -> None:
        """As the engine's call ends well on ranks that got no value from the failed one, the ranks agree on success."""
        self.agree()
        errors: list[BaseException] = []
        operator = combiner.operator(self.op.name, self.sources[0].elements, errors)
        failure: OperatorFailed | None = None
        try:
            self.backend.allreduce_by(operator, self.filled_target())
        except OperatorFailed as raised:
            failure = raised
        except (KeyboardInterrupt, SystemExit) as raised:  # of a signal that came while the engine waited
            errors.append(raised)
        finally:
            del operator  # which an error may lead to by its frames, and Python's collector sees no further
        # What ends a program comes before an error of the function.
        error = next((each for each in errors if not isinstance(each, Exception)), errors[0] if errors else None)
        errors.clear()
        self.agree_on_success(error)
        if failure is not None:  # the ranks know of no error, so nothing explains it
            raise failure

    def filled_target(self) -> torch.Tensor:
        """The bytes of the target, which have the source's values."""
        source, target = self.sources[0], self.targets[0]
        if target is not source:
            target.rows.copy_(source.rows)
        return as_bytes(target.rows)

    def blocks(self) -> Iterator[Block]:
        """The call's elements, cut in blocks. Those of a small call have come with what the ranks compared."""
        if self.count * self.row_bytes <= FRAME_BYTES - DIGEST_BYTES:
            block = Block(self, 0, self.count, self.count, everywhere=True)
            rows = b"".join(as_bytes(source.rows).numpy().tobytes() for source in self.sources)
            block.take(self.agree(rows))
            yield block
            return
        self.agree()
        most = max(1, BLOCK_BYTES // max(1, self.row_bytes) // self.size) * self.size
        for begin in range(0, self.count, most):
            yield Block(self, begin, min(most, self.count - begin))

    def agree(self, rows: bytes = b"") -> list[bytes]:
        """Raises CollectiveMismatch if the ranks do not make the same call. Returns each rank's digest and `rows`."""
        digest = hashlib.blake2b(self.what.encode(), digest_size=DIGEST_BYTES).digest()
        frames = self.told((digest + rows).ljust(FRAME_BYTES, b"\0"))
        other = next((rank for rank, frame in enumerate(frames) if not frame.startswith(frames[0][:DIGEST_BYTES])), 0)
        if other:
            calls = self.told(_text(self.what))
            raise CollectiveMismatch(
                f"rank 0 called {_plain(calls[0])}, and rank {other} {_plain(calls[other])}; nothing was combined, and "
                "the group can be used again",
                other,
            )
        return frames

    def told(self, own: bytes) -> list[bytes]:
        """What every rank passes, of equal lengths."""
        taken = torch.empty(self.size * len(own), dtype=torch.uint8, device="cpu")
        gather_all(self.group, taken, _tensor(own))
        whole = taken.numpy().tobytes()
        return [whole[at : at + len(own)] for at in range(0, len(whole), len(own))]

    def agree_on_success(self, error: BaseException | None) -> None:
        """Raises OperatorFailed on all ranks if the operator has raised an error on any; on that one, KeyboardInterrupt
        and SystemExit stay what they are."""
        if not any(map(any, self.told(b"\0" if error is None else b"\1"))):
            return
        errors = self.told(_text("" if error is None else _said(error)))
        if error is not None and not isinstance(error, Exception):
            raise error
        culprit = next(rank for rank, text in enumerate(errors) if any(text))
        raise OperatorFailed(
            f"{self.what}: it failed on rank {culprit}: {_plain(errors[culprit])}; the group can be used again", culprit
        ) from error


class Block:
    """Elements `begin` to `begin + count` of a call: the ranks' shares of them in `rooms`, one room for each tensor.

    `share`: how many elements this rank combines (default: its part of them). With `everywhere` each rank combines all.
    """

    def __init__(self, call: Call, begin: int, count: int, share: int | None = None, everywhere: bool = False) -> None:
        self.call, self.op, self.size, self.sources = call, call.op, call.size, call.sources
        self.everywhere = everywhere
        self.begin, self.count = begin, count
        self.share = -(-count // call.size) if share is None else share  # rows of a rank; the last ones may have fewer
        self.mine = min(max(count - call.rank * self.share, 0), self.share) if share is None else share
        self.rooms: list[torch.Tensor] = []

    def take(self, frames: list[bytes]) -> None:
        """Fills the rooms from what `Call.agree` has returned."""
        begin = DIGEST_BYTES
        for source in self.sources:
            rows, end = source.rows, begin + source.rows.nbytes
            room = _tensor(b"".join(frame[begin:end] for frame in frames))
            self.rooms.append(room.view(rows.dtype).view(self.size, *rows.shape))
            begin = end

    def exchange(self, before: int = 0) -> None:
        """Brings the shares of this rank. Each room has a share for each rank, and `before` more in front."""
        if self.everywhere:
            return
        for source in self.sources:
            rows = source.rows[self.begin : self.begin + self.count]
            if self.share * self.size != self.count:
                rows = rows.new_empty((self.share * self.size, *rows.shape[1:]))
                rows[: self.count] = source.rows[self.begin : self.begin + self.count]
            room = rows.new_zeros if before else rows.new_empty
            self.rooms.append(room((before + self.size, self.share, *rows.shape[1:])))
            exchange_all(self.call.group, self.rooms[-1][before:].flatten(0, 1), rows)

    def combine(self, prefixes: bool = False) -> None:
        """Combines the shares into that of rank 0; with `prefixes`, all up to each rank's into that rank's."""
        rooms = [room[len(room) - self.size :] for room in self.rooms]
        tile = max(1, TILE_BYTES // max(1, *(source.elements.row_bytes for source in self.sources)))
        error: BaseException | None = None
        try:
            with torch.no_grad(), _no_calls():
                for begin in range(0, self.mine, tile):
                    shares = [room[:, begin : min(begin + tile, self.mine)] for room in rooms]
                    if self.op.check and self.begin == begin == 0 and self.size > 1:
                        self.check([share[:, :CHECKED] for share in shares])
                    self.combine_tile(shares, prefixes)
        except BaseException as raised:  # the other ranks wait to be told
            error = raised
        self.call.agree_on_success(error)

    def combine_tile(self, shares: list[torch.Tensor], prefixes: bool) -> None:
        total = self.operand([share[0] for share in shares])
        for rank in range(1, self.size):
            if prefixes:
                total = self.operand([share[rank - 1].clone() for share in shares])
            total = self.call.function(total, self.operand([share[rank] for share in shares]))
            if prefixes:
                self.store(total, [share[rank] for share in shares])
        if not prefixes and self.size > 1:
            self.store(total, [share[0] for share in shares])

    def check(self, shares: list[torch.Tensor]) -> None:
        """Raises ValueError if the operator is not what it claims to be on these elements."""
        a, b = ([share[rank] for share in shares] for rank in (0, 1))
        c = [share[2] if self.size > 2 else share[0].roll(1, 0) for share in shares]  # c = a would hide much
        whole, half = self.applied(a, b), len(a[0]) // 2
        parts = [self.applied([x[span] for x in a], [x[span] for x in b]) for span in (slice(half), slice(half, None))]
        claims = {
            "elements are combined each on its own": (whole, [torch.cat(each) for each in zip(*parts, strict=True)]),
            "f(f(a, b), c) is f(a, f(b, c))": (self.applied(whole, c), self.applied(a, self.applied(b, c))),
        }
        if self.op.commutative:
            claims["f(a, b) is f(b, a), as commutative=True says"] = whole, self.applied(b, a)
        for claim, (left, right) in claims.items():
            for source, x, y, *operands in zip(self.sources, left, right, a, b, c, strict=True):
                if not source.elements.close(x, y, operands):
                    raise ValueError(f"check=True: it is not so that {claim}")

    def applied(self, a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        result = [x.clone() for x in a]
        self.store(self.call.function(self.operand([x.clone() for x in a]), self.operand(b)), result)
        return result

    def operand(self, rows: list[torch.Tensor]) -> Any:
        """What the operator takes for these rows, one tensor or a tuple of them."""
        values = tuple(source.elements.operand(each) for source, each in zip(self.sources, rows, strict=True))
        return values[0] if len(values) == 1 else values

    def store(self, result: Any, rows: list[torch.Tensor]) -> None:
        values = (result,) if len(rows) == 1 else result
        if not isinstance(values, tuple | list) or len(values) != len(rows):
            raise TypeError(f"it returned {shown(values)}; it must return a tuple of {len(rows)}, like its operands")
        for source, value, each in zip(self.sources, values, rows, strict=True):
            source.elements.store(value, each)

    def to_all(self) -> None:
        """Every rank gets what was combined."""
        for room, target in zip(self.rooms, self.call.targets, strict=True):
            if self.everywhere:
                target.rows.copy_(room[0])
                continue
            with self.whole(target) as whole:
                gather_all(self.call.group, whole, room[0])

    def to_root(self, root: int) -> None:
        """Rank `root` gets it."""
        options = at_once(dist.GatherOptions)
        options.rootRank = root
        for room, target in zip(self.rooms, self.call.targets, strict=True):
            if self.everywhere and self.call.rank == root:
                target.rows.copy_(room[0])
            elif not self.everywhere and self.call.rank == root:
                with self.whole(target) as whole:
                    self.call.backend.gather([list(whole.chunk(self.size))], [room[0]], options)
            elif not self.everywhere:
                self.call.backend.gather([], [room[0]], options)

    def to_each(self, behind: int) -> None:
        """Rank r gets what was combined up to rank r - `behind`, if there is such a rank."""
        last = self.call.rank - behind
        for room, target in zip(self.rooms, self.call.targets, strict=True):
            if self.everywhere:
                if last >= 0:
                    target.rows.copy_(room[last])
                continue
            with self.whole(target, keep=last < 0) as whole:
                exchange_all(self.call.group, whole, room[1 - behind : len(room) - behind].flatten(0, 1))

    @contextmanager
    def whole(self, target: Rows, keep: bool = False) -> Iterator[torch.Tensor]:
        """Rows for the shares of all ranks, which become those of `target`, unless it is to `keep` its own."""
        own = target.rows[self.begin : self.begin + self.count]
        if self.share * self.size == self.count and not keep:
            yield own
            return
        rows = own.new_empty((self.share * self.size, *own.shape[1:]))
        yield rows
        if not keep:
            own.copy_(rows[: self.count])


@contextmanager
def _no_calls() -> Iterator[None]:
    """In which this thread may make no calls of groups, as where the engine runs a function."""
    _C.begin_no_calls()
    try:
        yield
    finally:
        _C.end_no_calls()


def at_once(kind: Callable[[], Any]) -> Any:
    options = kind()
    options.asyncOp = False
    return options


def gather_all(group: Group, output: torch.Tensor, input: torch.Tensor) -> None:
    if not _C.all_gather_now(group, output, input):
        backend_of(group)._allgather_base(output, input, at_once(AllgatherOptions))


def exchange_all(group: Group, output: torch.Tensor, input: torch.Tensor) -> None:
    if not _C.all_to_all_now(group, output, input):
        backend_of(group).alltoall_base(output, input, [], [], at_once(dist.AllToAllOptions))


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    # A single element counts as contiguous whatever its stride is, and view() minds the stride.
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)


def _tensor(data: bytes) -> torch.Tensor:
    """On the CPU, whatever torch's default device is."""
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its __str__
        return type(error).__name__


def _text(text: str) -> bytes:
    return text.encode(errors="backslashreplace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def _plain(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="ignore")
