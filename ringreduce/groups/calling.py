"""How a direct call reaches its group's backend: arrays as tensors, arguments as torch's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ringreduce.errors import InvalidArgument
from ringreduce.gpu import arrays
from ringreduce.groups.lookup import backend_of
from ringreduce.groups.tensors import copy_values, from_numpy

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
Group: TypeAlias = dist.ProcessGroup | None
Work: TypeAlias = dist.Work | None


def rank_in(group: Group, name: str, rank: int | None, group_rank: int | None, required: bool = False) -> int:
    """The rank in `group` that a call means by its arguments `name` (a rank of the world) and `group_` + `name`."""
    for which, value in ((name, rank), (f"group_{name}", group_rank)):
        if value is not None and not isinstance(value, SupportsIndex):
            raise InvalidArgument(f"{which} is {value!r:.60}; it must be a whole number, a rank")
    if group_rank is not None:
        if rank is not None:
            raise InvalidArgument(f"{name} is {rank!r} and group_{name} is {group_rank!r}; give one of the two")
        return group_rank
    if rank is None:
        if required:
            raise InvalidArgument(f"{name} is None; give a global rank, or group_{name}")
        rank = 0
    ranks = backend_of(group).options.global_ranks_in_group
    if rank in ranks:
        return int(ranks.index(rank))
    raise InvalidArgument(f"{name} is {rank!r}; it must be the global rank of a member: {ranks}; or use group_{name}")


def lists_of_root(group: Group, root: int, name: str, given: Sequence[Array] | None) -> Many:
    """What gather and scatter hand on of the list `name`, which the root alone gives."""
    if given is not None:
        return Many((Many(given),))
    backend = backend_of(group)
    if backend.rank() == root:
        raise InvalidArgument(
            f"{name} is None on rank {root} of the group, the root; it must have a tensor for each of the "
            f"{backend.size()} ranks"
        )
    return Many()


def options_of(kind: Callable[[], Any], async_op: bool, **values: Any) -> Any:
    options = kind()
    for name, value in {"asyncOp": async_op, **values}.items():
        try:
            setattr(options, name, value)
        except TypeError:
            meant = value.upper() if isinstance(value, str) else ""
            known = meant if meant in dist.ReduceOp.RedOpType.__members__ else "SUM"
            operation = f"torch.distributed.ReduceOp.{known}, another ReduceOp, or a ringreduce.Op, such as Op.torch(f)"
            names = {"reduceOp": ("op", operation), "asyncOp": ("async_op", "True or False")}
            ours, wanted = names.get(name, (name, "a whole number"))
            raise InvalidArgument(f"{ours} is {value!r:.60}; it must be {wanted}") from None
    return options


class Many(tuple[Any, ...]):
    """What a backend takes a list for, unlike a list that a user has given in place of an array."""


def call_backend(group: Group, method: str, *given: Any, options: Any, others: tuple[Any, ...] = ()) -> Work:
    """Makes the call of the group's backend on arrays and `Many` of them, the first of which it writes, and on
    `others`."""
    guests = arrays.Guests()
    backend = backend_of(group)
    tensors = [_tensors(each, guests) for each in given]
    if method not in _ROOTED or _ROOTED[method] == (options.rootRank == backend.rank()):
        increment_version(_flat(tensors[:1]))
    work = getattr(backend, method)(*tensors, *others, options)
    if options.asyncOp:
        return guests.work(work)
    guests.order()  # a synchronous call has ended, or is in its stream, or has raised
    return None


_ROOTED = {"reduce": True, "broadcast": False}
"""Calls that write on the root alone, or everywhere else."""


def _flat(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else [each for part in tensors for each in _flat(part)]


def message(group: Group, method: str, tensor: Array, *peer_and_tag: int) -> dist.Work:
    guests = arrays.Guests()
    function = getattr(backend_of(group), method)
    tensors = [tensor_of(tensor, guests)]
    if method != "send":
        increment_version(tensors)
    return guests.work(function(tensors, *peer_and_tag))


def copied(tensor: Array, out: Array) -> Array:
    """`out`, with the values of `tensor`."""
    guests = arrays.Guests()
    copy_values(tensor_of(tensor, guests), tensor_of(out, guests))
    guests.order()
    return out


def _tensors(given: Any, guests: arrays.Guests) -> Any:
    """`given`, an array or `Many`, with tensors in place of arrays and lists in place of `Many`."""
    return [_tensors(each, guests) for each in given] if isinstance(given, Many) else tensor_of(given, guests)


def tensor_of(array: Array, guests: arrays.Guests | None) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if guests is not None and hasattr(array, "__cuda_array_interface__"):
        return guests.borrow(array)
    if not isinstance(array, np.ndarray | np.generic):
        raise InvalidArgument(
            f"tensor is a {type(array).__name__}; it must be a torch.Tensor, a NumPy array, or a GPU array with "
            "__cuda_array_interface__, such as CuPy's"
        )
    return from_numpy(array)
