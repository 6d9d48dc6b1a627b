"""Checks the arguments of `KeyValue` and of tables. Errors name the argument, its value and what it must be."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ringreduce.common.checks import WHOLE, is_text, number, shown, whole
from ringreduce.errors import InvalidArgument
from ringreduce.groups.tensors import check_dense, from_numpy
from ringreduce.parameter_server.modes import Mode
from ringreduce.parameter_server.updates import UpdateRule

Timeout: TypeAlias = timedelta | float | None
"""Of a call, in seconds or as a timedelta; None: that of `join`."""
WIRES = ("float32", "bfloat16", "int8")
MOST_KEY = 1024
"""The most bytes of a key."""
MOST_SERVERS = 4096
"""The most servers of a parameter server. Each has a thread, and every worker is connected to each."""
MOST_WORKERS = 1 << 16
"""The most workers that a call waits for."""
_WHOLE_NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LONGEST = 1e7
"""The longest timeout in seconds; longer ones are shortened to it."""


def check_key(key: Any) -> None:
    if not isinstance(key, str) or not 0 < len(key.encode(errors="replace")) <= MOST_KEY or not is_text(key):
        raise InvalidArgument(f"key is {shown(key)}; it must be a string of 1 to {MOST_KEY} bytes")
    if key == "__metadata__":
        raise InvalidArgument("key is '__metadata__', which is no tensor's name in a snapshot: give it another one")


def check_priority(priority: Any) -> None:
    if not isinstance(priority, WHOLE) or not -(2**31) <= int(priority) < 2**31:
        raise InvalidArgument(f"priority is {shown(priority)}; it must be a whole number of 32 bits")


def check_mode(mode: Any) -> None:
    if not isinstance(mode, Mode):
        raise InvalidArgument(f"mode is {shown(mode)}; it must be made by ps.sync(), ps.asynchronous() or ps.ssp()")


def check_rule(mode: Any, update: Any) -> None:
    check_mode(mode)
    if not isinstance(update, UpdateRule):
        raise InvalidArgument(
            f"update is {shown(update)}; it must be made by ps.assign(), ps.reduce(), ps.optimizer() or ps.function()"
        )


def check_weight(weight: Any) -> None:
    if not 0 < number(weight) < math.inf:
        raise InvalidArgument(f"weight is {shown(weight)}; it must be a positive number that a float can hold")


def seconds(timeout: timedelta | float) -> float:
    """Returns a timeout as a float."""
    found = timeout.total_seconds() if isinstance(timeout, timedelta) else number(timeout)
    if not found >= 0:
        raise InvalidArgument(f"timeout is {shown(timeout)}; it must be seconds, 0 or more, or a timedelta")
    return min(found, _LONGEST)


def count_of_bytes(name: str, count: Any) -> int:
    return whole(name, count, 1, "bytes, a whole number above 0 and below 2**48", 2**48 - 1)


def path_of(path: Any) -> Path:
    try:
        return Path(path).absolute()
    except TypeError:
        raise InvalidArgument(f"path is {shown(path)}; it must be a string or an os.PathLike of one") from None


def _tensor(key: str, array: Any) -> torch.Tensor:
    if not isinstance(array, torch.Tensor):
        if not isinstance(array, np.ndarray | np.generic):
            raise InvalidArgument(f"{key!r} is a {type(array).__name__}; it must be a torch.Tensor or a NumPy array")
        array = from_numpy(array, repr(key), takes_op=False)
    tensor: torch.Tensor = array.detach() if array.requires_grad else array
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        raise InvalidArgument(
            f"{key!r} is on {tensor.device} with {tensor.numel()} elements; it must be on the CPU, with 1 or more"
        )
    check_dense(tensor, repr(key))
    there, needed = tensor.untyped_storage().nbytes(), _bytes_from_storage(tensor)
    if there < needed:
        raise InvalidArgument(
            f"{key!r} has {there} bytes of memory and needs {needed}: its storage was made smaller; pass another tensor"
        )
    return tensor


def _bytes_from_storage(tensor: torch.Tensor) -> int:
    """Returns the bytes from the beginning of the tensor's storage to the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def readable(key: str, array: Any) -> torch.Tensor:
    """Returns a contiguous CPU tensor with the values of a tensor or NumPy array. Raises `InvalidArgument`."""
    if not isinstance(array, torch.Tensor) and not getattr(getattr(array, "flags", None), "writeable", True):
        array = array.copy()  # torch has no read-only tensors
    return _tensor(key, array).resolve_neg().resolve_conj().contiguous()


def writable(key: str, array: Any) -> torch.Tensor:
    """Returns a CPU tensor that shares an array's memory. Raises `InvalidArgument` if it cannot be written to."""
    if isinstance(array, torch.Tensor) and (array.is_neg() or array.is_conj()):
        raise InvalidArgument(
            f"the tensor for {key!r} is a lazy conjugate or negative: pass its resolve_conj().resolve_neg()"
        )
    tensor = _tensor(key, array)
    if _overlaps(tensor):
        raise InvalidArgument(
            f"elements of the tensor for {key!r} share memory (strides {tensor.stride()}): pass its clone()"
        )
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(array if isinstance(array, torch.Tensor) else tensor)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_wire(key: str, tensor: torch.Tensor, wires: list[str]) -> None:
    for name, wire in zip(("push_wire", "pull_wire"), wires, strict=True):
        if not isinstance(wire, str) or wire not in WIRES:
            raise InvalidArgument(f"{name} of {key!r} is {shown(wire)}; it must be one of {', '.join(WIRES)}")
        if wire != "float32" and tensor.dtype is not torch.float32:
            raise InvalidArgument(
                f"{name} of {key!r} is {wire!r}, which rounds float32; the tensor is {tensor.dtype}: leave it out"
            )


def check_average(key: str, tensor: torch.Tensor, mode: Mode, update: UpdateRule) -> None:
    if tensor.dtype in _WHOLE_NUMBERS and mode.average and update.kind != "reduce":
        raise InvalidArgument(f"{key!r} is {tensor.dtype}, of which sync() takes no average: give sync(average=False)")
