"""Finds what belongs to a process group of torch: its ringreduce backend, its links to other hosts, users' plans.

`between_hosts` is not imported here: groups on one host never import it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper

from ringreduce._C import ProcessGroupRing
from ringreduce.errors import InvalidArgument

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Links

registered: dict[str, list[str]] = {}
"""The plans that users have registered, in words, the latest last, by the name that torch knows a group by."""

_living: weakref.WeakValueDictionary[str, Links] = weakref.WeakValueDictionary()


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


def remember(name: str, links: Links) -> None:
    """For `all_links`: these are the links of the group that torch knows by this name."""
    _living[name] = links


def all_links() -> dict[str, Links]:
    """Of the groups of this process that have ranks on other hosts, by name."""
    return {name: links for name, links in list(_living.items()) if links.group is not None}


def links_of(group: Any) -> Links | None:
    """None if all ranks of the group are on one host."""
    return next((links for links in all_links().values() if links.group is group), None)
