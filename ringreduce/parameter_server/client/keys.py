"""What a worker knows about a key: its blocks, the servers that have them, and which of these are on this host."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

Part = tuple[int, int, int, int, int]  # server, block, first byte in the tensor, bytes, offset in the server's values


class Key:
    """A key whose blocks the servers have made."""

    def __init__(self, spec: dict[str, Any], parts: list[Part], client: _C.ParameterClient) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec["dtype"])
        self.shape = torch.Size(spec["shape"])
        self.parts = parts  # all blocks
        self.everywhere = self._for_client(parts)  # all blocks, as C++ has them
        self.like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        """A tensor without memory with the key's dtype and shape."""
        self.pushes = 0  # the number of this worker's pushes to the key
        self.split(client)

    def split(self, client: _C.ParameterClient) -> None:
        """Notes which blocks are served on this host now."""
        near, far = ([part for part in self.parts if client.is_near(part[0]) is it] for it in (True, False))
        self.near = near
        """The blocks of servers on this host."""
        self.here = self._for_client(near)
        """The same, as C++ has them."""
        self.requested = (
            self.everywhere if self.spec["mode"]["mode"] == "ssp" else self._for_client(far) if far else None
        )
        """The blocks for which a pull sends requests: those on other hosts; in ssp all, to learn when they may be
        read. None if there are no such blocks."""

    def _for_client(self, parts: list[Part]) -> _C.ParameterParts:
        push_wire, pull_wire = self.spec["wire"]
        return _C.ParameterParts(parts, push_wire=push_wire, pull_wire=pull_wire)

    def check_like(self, key: str, tensor: torch.Tensor) -> None:
        """Raises `InvalidArgument` if a tensor for `key` has another dtype or shape."""
        if tensor.dtype is not self.dtype or tensor.shape != self.shape:
            raise InvalidArgument(
                f"{key!r} is {self.dtype} of shape {tuple(self.shape)}; the tensor is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )


def parts_of_table(blocks: list[int]) -> _C.ParameterParts:
    return _C.ParameterParts([(server, block, 0, 0, 0) for server, block in enumerate(blocks)])
