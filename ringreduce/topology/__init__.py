"""Topology: from a machine's real links to rings and trees, how fast they are, and how close to what is possible.

    read, live, presets  ->  graph  ->  routes  ->  bound, rings, trees  ->  decompose  ->  planner  ->  plan, verify

`graph` is what all readers make, `planner` what all users ask, `group_plans` what a process group makes of it,
`host_order` the order of hosts by measured bandwidth, `draw` pictures of all that.  No GPU, no CUDA and no torch
is needed.

The package can be called: ``ringreduce.topology(group)`` is ``ringreduce.topology_of(group)``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringreduce.topology.group_plans import GroupTopology


def topology(group: dist.ProcessGroup | None = None) -> GroupTopology:
    """See `ringreduce.topology_of`."""
    import ringreduce

    return ringreduce.topology_of(group)


def __getattr__(name: str) -> Any:
    if name not in {each.name for each in iter_modules(__path__)}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


class _Callable(ModuleType):
    __call__ = staticmethod(topology)


sys.modules[__name__].__class__ = _Callable
