"""ringreduce: a torch.distributed backend that is fast on the machine you have and says what went wrong.

    import torch.distributed as dist, ringreduce
    dist.init_process_group("ringreduce")
    dist.all_reduce(tensor)              # or ringreduce.all_reduce(tensor), also for NumPy arrays

Names are loaded at first use, since torch imports this package inside `import torch` to register the backend, and since
planning needs no torch. What fails here fails `import torch`, so nothing is needed but this file,
`_autoload.py` and `common/names.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ringreduce._autoload import register_if_needed

__version__ = "0.1.0"

_NAMES_OF = {
    "torch.distributed": "all_gather_object batch_isend_irecv broadcast_object_list gather_object recv_object_list "
    "scatter_object_list send_object_list",
    "ringreduce": "data elastic errors hooks ops parameter_server",
    "ringreduce._C": "Feedback",
    "ringreduce.api": "P2POp all_gather all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier broadcast gather irecv isend monitored_barrier recv reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor register_plan scatter send use_nccl",
    "ringreduce.config": "Options",
    "ringreduce.groups.arena": "arena_stats share_allocations",
    "ringreduce.groups.as_gloo": "as_gloo",
    "ringreduce.groups.stats": "dump_flight_record stats topology_of",
    "ringreduce.groups.survivors": "Agreement agree",
    "ringreduce.groups.tensors": "empty empty_like share zeros",
    "ringreduce.operators": "Op exscan scan",
    "ringreduce.plan": "Plan Step verify",
    "ringreduce.topology": "topology",
}
"""Module: its names in this package. `__init__.pyi` has the same for type checkers."""

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = [name for name, module in _MODULE_OF.items() if module != __name__]


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_MODULE_OF})


def __getattr__(name: str) -> Any:
    if name == "_C":
        return import_module("ringreduce._C")
    if name == "errors":  # where planning has raised one already, its class must be among these
        return import_module("ringreduce.errors" if "torch" in sys.modules else "ringreduce.common.failures")
    if _MODULE_OF.get(name) == "ringreduce.topology":
        return import_module("ringreduce.topology")  # a package that can be called
    if _MODULE_OF.get(name) == __name__:
        return import_module(f"ringreduce.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ringreduce' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


register_if_needed()
