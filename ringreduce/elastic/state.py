"""The state that all members of a changing group hold alike, and that joiners receive: see `elastic.World.state`."""

from __future__ import annotations

import enum
import logging
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringreduce.errors import InvalidArgument, TooFewRanks

PIECE = 64 << 20
"""Bytes of a tensor that are broadcast at once. A rank that takes no state holds no more of it than this."""
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, enum.Enum)
"""Types of values without parts, which mean the same on every rank. A bool is an int."""
_OF_ITS_RANK = (torch.utils.data.Sampler, torch.utils.data.DataLoader, torch.utils.data.Dataset)
"""Types of which each rank has its own."""

log = logging.getLogger(__name__)


class State:
    """The parts that were given to `World.state`, as attributes. They can be set.

    Setting one raises `InvalidArgument` if a joiner could not receive it.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            setattr(self, name, part)

    def __setattr__(self, name: str, part: Any) -> None:
        if hasattr(State, name):
            raise InvalidArgument(f"state: a part cannot be called {name!r}; choose another name")
        if isinstance(part, type):
            raise InvalidArgument(f"state: {name} is the class {part.__name__}; give an object")
        if isinstance(part, torch.nn.Module):
            for key, tensor in part.state_dict().items():
                _check_writable(f"{name}.{key}", tensor)
        elif not hasattr(part, "state_dict"):
            _check_plain(name, part)
        elif not hasattr(part, "load_state_dict"):
            raise InvalidArgument(
                f"state: {name} is a {type(part).__name__}, which has state_dict and no load_state_dict; give it one"
            )
        super().__setattr__(name, part)

    def share(self, source: int, takes: bool) -> None:
        """Sends the state of rank `source` to all ranks of the default group. Called on all of them.

        `takes`: whether this rank replaces its own state by it. It receives a tensor in place where it has one alike.
        So if this call fails, its state may be part old and part new: it must not be a source, but may take again, from
        any source. Objects are loaded, and parts replaced, once everything has come. If the source has something that
        cannot be sent, those that would take its state raise `InvalidArgument`, and the others go on.
        """
        sends = dist.get_rank() == source
        mine: dict[str, Any] = {}
        told: list[Any] = [None]
        try:
            mine = pytree.tree_map(_opened, self._dump()) if sends or takes else {}
            told = [_pickled(pytree.tree_map_with_path(_announced, mine)) if sends else None]
        except Exception as error:
            if not sends:
                raise
            log.warning("the state cannot be sent, so nobody can join: %s", error)
            told = [str(error)]
        dist.broadcast_object_list(told, source)
        if isinstance(told[0], str):
            if takes:
                raise InvalidArgument(f"{told[0]} (on the member whose state this one would take)")
            return
        theirs = pickle.loads(told[0])
        loads = takes and set(theirs) == set(mine)
        own = dict(pytree.tree_leaves_with_path({name: mine[name] for name in mine if sends or self._is_filled(name)}))
        filled: dict[int, int] = {}

        def pass_on(path: pytree.KeyPath, leaf: Any) -> Any:
            if not isinstance(leaf, _Announced):
                return _filled_in(leaf, own.get(path)) if loads else leaf
            if loads:
                return _receive(leaf, own.get(path), source, filled)
            return _broadcast(leaf, _bytes(own[path]) if sends else None, source)

        found = pytree.tree_map_with_path(pass_on, theirs)
        if loads:
            self._load(pytree.tree_map(_closed, found, is_leaf=lambda each: isinstance(each, _Opened)))
        elif takes:  # raised after the broadcasts, so that the other ranks complete theirs
            raise InvalidArgument(
                f"state: its parts are {sorted(mine)} here and {sorted(theirs)} on the members; give the same"
            )

    def _is_filled(self, name: str) -> bool:
        """Whether a part is received in place. The `load_state_dict` of an unknown class may clear what it is given."""
        part = vars(self)[name]
        return isinstance(part, torch.nn.Module | torch.optim.Optimizer) or not hasattr(part, "state_dict")

    def _dump(self) -> Any:
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in vars(self).items()}

    def _load(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            part: Any = getattr(self, name, None)
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)


class Holder:
    """Whether a member holds the state that all members hold alike."""

    def __init__(self, founder: bool) -> None:
        """`founder`: whether it is one of the first members."""
        self._founder, self._has_state = founder, False

    def share(self, state: State, unit: int) -> None:
        """Gives the state to the members that have none. Called on all; raises `TooFewRanks` if none has it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        flags = torch.zeros(size, dtype=torch.int64, device="cpu")
        flags[rank] = 2 if self._has_state else int(self._founder)
        dist.all_reduce(flags)
        if int(flags.min()) == 2:
            return
        # If no member has the state yet, nobody has taken a step, and the state of any founder that took none will do.
        if not all(bool(flags[first::unit].any()) for first in range(unit)):
            raise TooFewRanks("every member that had the state is lost; start again from a checkpoint")
        for first in range(unit):  # a member takes the state of the same position in another unit
            source = first + unit * int(flags[first::unit].argmax())
            takes = not self._has_state and rank != source and rank % unit == first
            self._founder = self._founder and not takes  # if sharing fails, its state is a mixture
            state.share(source, takes)
        self._has_state = True


@dataclass(frozen=True)
class _Announced:
    """Stands for a tensor whose values are sent later."""

    dtype: torch.dtype
    shape: torch.Size
    address: int
    """On the source, where tied weights have the same."""


@dataclass
class _Opened:
    """Stands for a tensor that consists of others, such as a quantized one, so that these are sent and received."""

    kind: Any
    rest: tuple[Any, ...]
    inner: dict[str, Any]


pytree.register_pytree_node(
    _Opened,
    lambda opened: ([opened.inner], (opened.kind, opened.rest)),
    lambda inner, outer: _Opened(*outer, *inner),
    flatten_with_keys_fn=lambda opened: ([(pytree.GetAttrKey("inner"), opened.inner)], (opened.kind, opened.rest)),
)


def _opened(leaf: Any) -> Any:
    if not is_traceable_wrapper_subclass(leaf) or _is_dtensor(leaf):
        return leaf
    names, context = leaf.__tensor_flatten__()
    inner = {name: _opened(getattr(leaf, name)) for name in names}
    return _Opened(type(leaf), (context, leaf.size(), leaf.stride()), inner)


def _closed(leaf: Any) -> Any:
    if not isinstance(leaf, _Opened):
        return leaf
    return leaf.kind.__tensor_unflatten__({name: _closed(each) for name, each in leaf.inner.items()}, *leaf.rest)


def _announced(path: pytree.KeyPath, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    _check_there(_named(path), leaf)
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
        return leaf  # pickled
    return _Announced(leaf.dtype, leaf.shape, leaf.data_ptr())


def _pickled(tree: Any) -> bytes:
    try:
        return pickle.dumps(tree)
    except Exception:
        for path, leaf in pytree.tree_leaves_with_path(tree):
            try:
                pickle.dumps(leaf)
            except Exception as error:
                raise InvalidArgument(
                    f"state: {_named(path)} is a {type(leaf).__name__}, which cannot be pickled: {error}"
                ) from None
        raise


def _named(path: pytree.KeyPath) -> str:
    """As a program would say it: optimizer.state.0.exp_avg."""
    return ".".join(str(each).strip("[].'") for each in path)


def _receive(sent: _Announced, own: Any, source: int, filled: dict[int, int]) -> torch.Tensor:
    """Returns `own`, with the values, if it is alike; else a new tensor.

    `filled`: what was received so far, as the address here and that on the source. Two names may share memory here and
    not on the source: then the second one gets a new tensor.
    """
    alike = (
        isinstance(own, torch.Tensor)
        and (own.is_cpu and own.dtype == sent.dtype and own.shape == sent.shape)
        and filled.setdefault(own.data_ptr(), sent.address) == sent.address
    )
    in_place = alike and own.is_contiguous() and not own.is_conj() and not own.is_neg()
    into = own if in_place else torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
    _broadcast(sent, _bytes(into), source)
    if alike and not in_place:
        own.detach().copy_(into)
    return own if alike else into


def _broadcast(sent: _Announced, values: torch.Tensor | None, source: int) -> None:
    """`values`: the tensor as bytes; None on a rank that only takes part."""
    size = sent.shape.numel() * sent.dtype.itemsize
    scratch = torch.empty(min(size, PIECE) if values is None else 0, dtype=torch.uint8, device="cpu")
    for first in range(0, size, PIECE):
        dist.broadcast(scratch[: size - first] if values is None else values[first : first + PIECE], source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as bytes, without a copy if it is contiguous."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _filled_in(value: Any, own: Any) -> Any:
    """Returns `own`, with the value, if it is a generator or an array that can take it; else the value."""
    if type(own) is not type(value):
        return value
    if isinstance(own, torch.Generator):
        return own.set_state(value.get_state())
    if isinstance(own, np.ndarray) and own.flags.writeable and (own.dtype, own.shape) == (value.dtype, value.shape):
        own[...] = value
        return own
    return value


def _is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"  # whose module takes long to import


def _check_there(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise InvalidArgument(f"state: {name} is on the meta device; give the module memory first, by to_empty()")
    if _is_dtensor(tensor):
        raise InvalidArgument(
            f"state: {name} is a DTensor, of which each rank has a part of its own; give its to_local()"
        )


def _check_writable(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return
    _check_there(name, tensor)
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            raise InvalidArgument(
                f"state: {name} has elements that share memory, as after expand(), so nothing can be received in it; "
                "give its contiguous() or clone()"
            )
        end += stride * (size - 1)


def _check_plain(name: str, part: Any) -> None:
    for leaf in [part] if isinstance(part, _PLAIN) else pytree.tree_leaves(part):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized or leaf.device.type != "cpu":
                raise InvalidArgument(
                    f"state: {name} has a tensor that is {leaf.layout}, {leaf.dtype}, on {leaf.device}; it must be "
                    "dense, neither nested nor quantized, on the CPU"
                )
            _check_writable(name, leaf)
        elif hasattr(leaf, "state_dict"):
            raise InvalidArgument(
                f"state: {name} contains a {type(leaf).__name__}, whose state would be copied, not loaded; give it as "
                "a part of its own, or several modules as one torch.nn.ModuleList"
            )
        elif isinstance(leaf, _OF_ITS_RANK):
            raise InvalidArgument(
                f"state: {name} contains a {type(leaf).__name__}, and each rank has its own: make it by world.rank and "
                "world.size, again in world.on_change, and give the numbers that say where it is, such as step=0"
            )
        elif not _is_plain(leaf):
            raise InvalidArgument(
                f"state: {name} contains a {type(leaf).__name__}, which is no plain value; give the values that all "
                "ranks hold alike, or an object with state_dict and load_state_dict"
            )


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject
    if isinstance(leaf, set | frozenset):
        return all(isinstance(each, _PLAIN) for each in leaf)
    return isinstance(leaf, (*_PLAIN, torch.Generator, torch.Size, range))
