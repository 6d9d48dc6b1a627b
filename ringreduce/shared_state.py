"""The state that all members of a changing group hold alike, and that joiners receive: see `elastic.World.state`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree


class State:
    """The parts that were given to `World.state`, as attributes. They can be set."""

    def __init__(self, parts: dict[str, Any]) -> None:
        vars(self).update(parts)

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
            mine = (
                tensors[number].contiguous() if dist.get_rank() == source else torch.empty(tensor[1], dtype=tensor[0])
            )
            dist.broadcast(mine, source)
            values.append(mine)
        if takes:
            self._load(pytree.tree_unflatten(values, shape))

    def _dump(self) -> Any:
        return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in vars(self).items()}

    def _load(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            part: Any = getattr(self, name, None)
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)
