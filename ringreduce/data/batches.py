"""How a batch lies in shared memory: its tensors one after the other, then a description of what they are part of.

laid_out = lay_out(samples)             # samples of one batch, as the dataset returns them
laid_out.write(memory)                  # memory of at least laid_out.bytes bytes
batch = read(memory, laid_out.end, laid_out.bytes)     # in any process; its tensors are views of the memory
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ringreduce.groups.tensors import check_dense, refuse_masked

ALIGNMENT = 64

Memory = NDArray[np.uint8]


class Leaf(NamedTuple):
    """Where a tensor of a batch is in its memory."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Failure(NamedTuple):
    """In place of a batch: why there is none."""

    text: str
    id: int
    """The example's; -1 if it is not known."""


@dataclass
class LaidOut:
    """A batch that is about to be written."""

    end: int = 0
    """Where the tensors end and the description begins."""
    description: bytes = b""
    _parts: list[tuple[Leaf, list[Any], bool]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.end + len(self.description)

    def add(self, parts: list[Any], dtype: str, shape: tuple[int, ...], size: int, stacked: bool) -> Leaf:
        """Adds a tensor, which is `parts` one after the other. `size`: of an element, in bytes."""
        leaf = Leaf(dtype, shape, self.end)
        self._parts.append((leaf, parts, stacked))
        self.end += -(-size * math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return leaf

    def write(self, memory: Memory) -> None:
        for leaf, parts, stacked in self._parts:
            if 0 in leaf.shape:
                continue
            if isinstance(parts[0], torch.Tensor):
                out = _tensor(leaf, memory)
                torch.stack(parts, out=out) if stacked else out.copy_(parts[0])
            else:
                count = math.prod(leaf.shape)
                np.concatenate(parts, axis=None, out=np.frombuffer(memory, leaf.dtype, count, leaf.offset))
        memory[self.end : self.bytes] = np.frombuffer(self.description, np.uint8)


def lay_out(samples: list[Any]) -> LaidOut:
    """Stacks samples to a batch.

    A sample is a tensor, an array, a number, or a tuple, list or mapping of samples. What else there is (texts, for
    example) is handed on in a list. Raises `ValueError` if the samples do not fit each other.
    """
    laid_out = LaidOut()
    laid_out.description = pickle.dumps(_stacked(samples, laid_out, ""), pickle.HIGHEST_PROTOCOL)
    return laid_out


def lay_out_whole(batch: Any) -> LaidOut:
    """The same for a batch that is one already, or a `Failure`."""
    laid_out = LaidOut()
    laid_out.description = pickle.dumps(_whole(batch, laid_out), pickle.HIGHEST_PROTOCOL)
    return laid_out


def _stacked(samples: list[Any], laid_out: LaidOut, where: str) -> Any:
    first = samples[0]
    for sample in samples:
        _check_readable(sample, f"samples{where}")
    if isinstance(first, torch.Tensor):
        _check_alike(samples, where, torch.Tensor)
        shape = (len(samples), *first.shape)
        return laid_out.add(samples, str(first.dtype)[6:], shape, first.element_size(), True)
    if isinstance(first, np.ndarray | np.generic) and _is_plain(first.dtype):
        _check_alike(samples, where, type(first))
        shape = (len(samples), *first.shape)
        parts = samples if first.ndim else [np.stack(samples)]
        return laid_out.add(parts, _name(first.dtype), shape, first.itemsize, True)
    if isinstance(first, bool | int | float):
        dtype = torch.float64 if isinstance(first, float) else None
        return _whole(torch.tensor(samples, dtype=dtype, device="cpu"), laid_out)
    if isinstance(first, Mapping):
        if any(not isinstance(each, Mapping) or each.keys() != first.keys() for each in samples):
            raise ValueError(f"samples{where} are mappings of different keys; the first has {list(first)}")
        values = {key: _stacked([each[key] for each in samples], laid_out, f"{where}[{key!r}]") for key in first}
        return mapping_like(first, values)
    if isinstance(first, tuple | list):
        if any(not isinstance(each, type(first)) or len(each) != len(first) for each in samples):
            raise ValueError(f"samples{where} are sequences of different kinds or lengths; the first has {len(first)}")
        columns = enumerate(zip(*samples, strict=True))
        return like(first, [_stacked([*each], laid_out, f"{where}[{number}]") for number, each in columns])
    return samples


def _check_readable(value: Any, name: str) -> None:
    refuse_masked(value, name)
    if isinstance(value, torch.Tensor):
        check_dense(value, name)


def _check_alike(samples: list[Any], where: str, kind: Any) -> None:
    first: Any = samples[0]
    shape, dtype = first.shape, first.dtype
    if len(set(map(type, samples))) == 1 and all(each.shape == shape and each.dtype == dtype for each in samples):
        return  # nearly always, and this is the fastest way to see it
    for number, each in enumerate(samples):
        if not isinstance(each, kind) or each.shape != shape or each.dtype != dtype:
            found = f"{getattr(each, 'dtype', type(each).__name__)} of shape {[*getattr(each, 'shape', ())]}"
            raise ValueError(
                f"sample {number} of the batch{where and f', at {where},'} is {found}, and the first is {dtype} of "
                f"shape {[*shape]}; make them alike, or give Loader a function `collate`"
            )


def _whole(batch: Any, laid_out: LaidOut) -> Any:
    _check_readable(batch, "the batch")
    if isinstance(batch, torch.Tensor):
        return laid_out.add([batch], str(batch.dtype)[6:], tuple(batch.shape), batch.element_size(), False)
    if isinstance(batch, np.ndarray) and _is_plain(batch.dtype):
        return laid_out.add([batch], _name(batch.dtype), batch.shape, batch.itemsize, False)
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: _whole(value, laid_out) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        return like(batch, [_whole(value, laid_out) for value in batch])
    return batch


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether torch has it."""
    return dtype.isnative and isinstance(getattr(torch, _name(dtype), None), torch.dtype)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # takes NumPy several microseconds


def like(example: Sequence[Any], values: list[Any]) -> Any:
    """`values` in a list or tuple of the example's kind; in a plain one where that takes no such values."""
    make: Callable[..., Any] = type(example)
    try:
        return make(*values) if hasattr(example, "_fields") else make(values)
    except TypeError:  # torch.Size has integers only
        return tuple(values) if isinstance(example, tuple) else values


def mapping_like(example: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """`values` in a dict, or in a copy of the example if that is of another kind that can be written to."""
    if isinstance(example, dict) or not isinstance(example, MutableMapping):
        return values
    found = copy.copy(example)
    found.update(values)
    return found


def read(memory: Memory, end: int, total: int) -> Any:
    """The batch, whose description is between `end` and `total`; or a `Failure`."""
    return _with_tensors(pickle.loads(memory[end:total].data), memory)


def _with_tensors(tree: Any, memory: Memory) -> Any:
    if isinstance(tree, Leaf):
        return _tensor(tree, memory)
    if isinstance(tree, Failure):
        return tree
    if isinstance(tree, Mapping):
        return mapping_like(tree, {key: _with_tensors(value, memory) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return like(tree, [_with_tensors(value, memory) for value in tree])
    return tree


def _tensor(leaf: Leaf, memory: Memory) -> torch.Tensor:
    dtype, count = getattr(torch, leaf.dtype), math.prod(leaf.shape)
    if count == 0:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=leaf.offset).view(leaf.shape)
