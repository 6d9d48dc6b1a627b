"""Finds the ringreduce backend of a process group of torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper

from ringreduce._C import ProcessGroupRing
from ringreduce.errors import InvalidArgument

DEVICES = (torch.device("cpu"), torch.device("cuda"))


def found_in(group: dist.ProcessGroup) -> ProcessGroupRing | None:
    """The ringreduce backend of a process group; None if it has none."""
    for device in DEVICES:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # the group has none for it
            continue
        if isinstance(backend, _ProcessGroupWrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if isinstance(backend, ProcessGroupRing):
            return backend
    return None


def backend_of(group: dist.ProcessGroup | None) -> ProcessGroupRing:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise InvalidArgument(
            "there is no default group; call torch.distributed.init_process_group('ringreduce') first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"group is {group!r}; it must be a process group that this rank is in (torch gives other ranks "
            f"{dist.GroupMember.NON_GROUP_MEMBER})"
        )
    backend = found_in(group)
    if backend is None:
        raise InvalidArgument(f"group's backend is {group.name()!r}; it must be 'ringreduce' for CPU or CUDA tensors")
    return backend
