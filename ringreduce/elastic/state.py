"""The state that all members of a changing group hold alike, and that joiners receive: see `elastic.World.state`."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ringreduce.errors import InvalidArgument

_PLAIN = (int, float, complex, str, bytes, type(None))  # bool is an int


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
        if not hasattr(part, "state_dict"):
            _check_plain(name, part)
        super().__setattr__(name, part)

    def share(self, source: int, takes: bool) -> None:
        """Sends the state of rank `source` to all ranks of the default group. Called on all of them.

        `takes`: whether this rank replaces its own state by it.
        """
        tensors, shape = pytree.tree_flatten(self._dump())
        plain = [None if isinstance(each, torch.Tensor) else each for each in tensors]
        described = [(each.dtype, each.shape) if isinstance(each, torch.Tensor) else None for each in tensors]
        told: list[Any] = [plain, described, shape]
        dist.broadcast_object_list(told, source)
        plain, described, shape = told
        values: list[Any] = []
        for number, (value, tensor) in enumerate(zip(plain, described, strict=True)):
            if tensor is None:
                values.append(value)
                continue
            dtype, form = tensor
            mine = torch.empty(form, dtype=dtype)
            if dist.get_rank() == source:
                mine.copy_(tensors[number].detach())
            dist.broadcast(mine.reshape(-1).view(torch.uint8), source)  # whatever its dtype
            values.append(mine)
        if takes:
            found = pytree.tree_unflatten(values, shape)
            if set(found) != set(vars(self)):
                raise InvalidArgument(
                    f"state: its parts are {sorted(vars(self))} here and {sorted(found)} on the members; give the same"
                )
            self._load(found)

    def _dump(self) -> Any:
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in vars(self).items()}

    def _load(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            part: Any = getattr(self, name, None)
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            elif isinstance(part, torch.Tensor) and part.shape == value.shape and part.dtype == value.dtype:
                part.detach().copy_(value)  # the program may hold it under another name
            else:
                setattr(self, name, value)


def _check_plain(name: str, part: Any) -> None:
    for leaf in [part] if isinstance(part, _PLAIN) else pytree.tree_leaves(part):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type != "cpu":
                raise InvalidArgument(
                    f"state: {name} has a tensor that is {leaf.layout}, {leaf.dtype}, on {leaf.device}; it must be "
                    "dense, not quantized, on the CPU"
                )
        elif hasattr(leaf, "state_dict"):
            raise InvalidArgument(
                f"state: {name} contains a {type(leaf).__name__}, whose state would be copied, not loaded; give it as "
                "a part of its own, or several modules as one torch.nn.ModuleList"
            )
        elif not isinstance(leaf, _PLAIN):
            try:
                pickle.dumps(leaf)
            except Exception as error:
                raise InvalidArgument(
                    f"state: {name} contains a {type(leaf).__name__}, which cannot be sent to a joiner: {error}"
                ) from None
