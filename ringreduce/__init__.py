"""ringreduce: a torch.distributed backend that is fast on the machine you have and says what went wrong.

    import torch.distributed as dist, ringreduce
    dist.init_process_group("ringreduce")
    dist.all_reduce(tensor)              # or ringreduce.all_reduce(tensor), also for NumPy arrays

Names are loaded at first use, since torch imports this package inside `import torch` to register the backend, and since
planning needs no torch. They are listed in `__init__.pyi`.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ringreduce._autoload import register_if_needed

__version__ = "0.1.0"

_names = ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
_MODULE_OF = {each.name: node.module for node in _names if isinstance(node, ast.ImportFrom) for each in node.names}
__all__ = [name for name, module in _MODULE_OF.items() if module != __name__]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


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
    value = getattr(import_module(str(_MODULE_OF[name])), name)
    globals()[name] = value
    return value


register_if_needed()
