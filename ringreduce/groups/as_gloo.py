"""`as_gloo`: who asks torch for backend "gloo" gets this one, and `dist.get_backend` still says "gloo".

Only Python's tables say so. torch's C++ takes a backend of type GLOO for a `ProcessGroupGloo` and reads its members, as
DDP does for its log, so there the type stays CUSTOM.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import Backend

from ringreduce.common.names import NAME
from ringreduce.errors import CollectiveTimeout, InvalidArgument

GLOO, CUSTOM = "gloo", ProcessGroup.BackendType.CUSTOM
_replaced: list[Any] = []
"""While "gloo" is ringreduce, what torch had: Gloo's plugin and type, or before 2.14 the function that makes groups."""


def as_gloo(enabled: bool = True) -> None:
    """Lets new groups of backend "gloo" run on ringreduce; `torch.distributed.get_backend` still says "gloo".

    It is for programs and libraries that name Gloo and have no setting for another backend. Call it on all ranks before
    `init_process_group`, or set RINGREDUCE_AS_GLOO=1. In a group of several backends, such as "cpu:gloo,cuda:nccl", the
    others stay. Who constructs `ProcessGroupGloo` still gets Gloo. Groups that there are already do not change.

    Args:
        enabled: False lets new groups of backend "gloo" run on Gloo again.

    Raises:
        InvalidArgument: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise InvalidArgument(f"enabled is {enabled!r}; it must be True or False")
    if enabled == bool(_replaced):
        return
    if hasattr(Backend, "_ensure_backend_registered"):  # from torch 2.14 on Gloo is a plugin, as this backend is
        Backend._ensure_backend_registered(GLOO)
        plugins, types, name = Backend._plugins, Backend.backend_type_map, GLOO.upper()
        if enabled:
            _replaced.append((plugins[name], types[GLOO]))
            plugins[name] = plugins[name]._replace(creator_fn=_creator(plugins[name].creator_fn))
            types[GLOO] = CUSTOM
        else:
            plugins[name], types[GLOO] = _replaced.pop()
    elif enabled:
        _replaced.append(c10d._new_process_group_helper)
        c10d._new_process_group_helper = _helper(c10d._new_process_group_helper)
    else:
        c10d._new_process_group_helper = _replaced.pop()


@contextlib.contextmanager
def _hint() -> Iterator[None]:
    """A rank that has not called `as_gloo` waits for the others as one of Gloo, so they do not meet."""
    try:
        yield
    except CollectiveTimeout as error:
        why = "if it has not called as_gloo, or set RINGREDUCE_AS_GLOO=1, its group is one of Gloo; do so on all ranks"
        raise CollectiveTimeout(f"{error}; {why}", error.culprit) from None


def _creator(gloo: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What makes the backend of a group of "gloo", in place of torch's function `gloo`."""

    def creator(opts: Any, options: Any) -> Any:
        if getattr(opts, "enable_reconfigure", False):  # only Gloo can
            return gloo(opts, options)
        from ringreduce.groups.make import create  # loads the extension

        with _hint():
            made = create(opts, options)
        made.show_as_gloo()
        return made

    return creator


def _helper(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a group, in place of torch's function `make`, which knows Gloo by its name."""

    @functools.wraps(make)
    def helper(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **named: Any) -> Any:
        config = c10d.BackendConfig(Backend(backend))
        devices = config.get_device_backend_map()
        if devices.get("cpu") != GLOO:
            return make(size, rank, ranks, backend, *args, **named)
        from ringreduce.groups.lookup import found_in

        others = {device: name for device, name in devices.items() if name != GLOO}
        ours = ",".join(f"{device}:{name}" for device, name in {"cpu": NAME, **others}.items())
        with _hint():
            group, store = make(size, rank, ranks, Backend(ours), *args, **named)
        # Not where this rank is not in the group, or where torch has found one of Gloo that it had made before.
        if store is not None and (its := found_in(group)) is not None:
            its.show_as_gloo()
            made = group._get_backend(torch.device("cpu"))
            for device in devices.keys() - others.keys():
                group._register_backend(torch.device(device), CUSTOM, made)
            if Backend.NCCL not in others.values():
                group._set_default_backend(CUSTOM)
            c10d._world.pg_map[group] = backend, store
            c10d._world.pg_backend_config[group] = str(config)
        return group, store

    return helper
