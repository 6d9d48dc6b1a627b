"""ringreduce: a torch.distributed backend that is fast on the machine you have and says what went wrong.

    import torch.distributed as dist, ringreduce
    dist.init_process_group("ringreduce")
    dist.all_reduce(tensor)              # or ringreduce.all_reduce(tensor), also for NumPy arrays

Names are loaded at first use, since torch imports this package inside `import torch` to register the backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringreduce._autoload import register

if TYPE_CHECKING:
    from ringreduce.api import (
        all_gather,
        all_gather_into_tensor,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        empty,
        gather,
        monitored_barrier,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        register_plan,
        scatter,
        send,
        share,
        use_nccl,
    )
    from ringreduce.config import Options
    from ringreduce.memory import arena_stats, share_allocations
    from ringreduce.plan import Plan, Step, verify
    from ringreduce.report import dump_flight_record, stats
    from ringreduce.topology import topology

__version__ = "0.1.0"

_HOME = {
    "ringreduce.api": (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "empty",
        "gather",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "register_plan",
        "scatter",
        "send",
        "share",
        "use_nccl",
    ),
    "ringreduce.config": ("Options",),
    "ringreduce.memory": ("arena_stats", "share_allocations"),
    "ringreduce.report": ("dump_flight_record", "stats"),
    "ringreduce.plan": ("Plan", "Step", "verify"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Options",
    "Plan",
    "Step",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "arena_stats",
    "barrier",
    "broadcast",
    "dump_flight_record",
    "empty",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_plan",
    "scatter",
    "send",
    "share",
    "share_allocations",
    "stats",
    "topology",
    "use_nccl",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "topology":
        return import_module("ringreduce.topology")  # a package that can be called
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ringreduce' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


register()
