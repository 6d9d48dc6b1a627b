"""What replaces functions of SGLang: those of its groups on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringreduce import ops


def is_shm_available(dtype: torch.dtype, world_size: int, local_size: int) -> bool:
    """Whether SGLang's own shared memory is used: never."""
    return False


def all_reduce(original: Callable[..., torch.Tensor], group: Any, input_: torch.Tensor) -> torch.Tensor:
    """`GroupCoordinator.all_reduce`, which may be compiled."""
    if not input_.is_cpu or group.world_size == 1:
        return original(group, input_)
    ops.all_reduce_(input_, group.device_group.group_name)
    return input_
