"""Makes the backend known to torch.distributed, from the `torch.backends` entry point or from `import ringreduce`.

torch runs `register` inside every `import torch`, where an exception would break torch itself. So this module imports
nothing heavy, other modules by their names when they are needed, and what goes wrong is logged.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from importlib import import_module
from typing import Any

from ringreduce.common.names import AS_GLOO, NAME


def create(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Called by torch for each new group; the extension is loaded at the first."""
    return import_module("ringreduce.groups.make").create(dist_backend_opts, pg_options)


def register() -> None:
    """Registers backend `ringreduce`. Idempotent; never raises; does nothing where torch has no distributed package."""
    try:
        import torch
        import torch.distributed as dist

        # Inside the first import of torch, the line above may have come here through the entry point already.
        if dist.is_available() and NAME not in dist.Backend.backend_list:
            # A list, since torch walks a string letter by letter. No "cuda" where torch has none: torch puts what it
            # gathers on the first device that is not the CPU.
            devices = ["cpu", "cuda"] if torch.version.cuda or torch.version.hip else ["cpu"]
            dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)
            # Groups keep a flight record of their own. From 2.15 on torch would keep another, for 2 us a call or more.
            recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
            recording.add(NAME)
            _as_gloo(os.environ.get(AS_GLOO, "").strip())
    except Exception:
        logging.getLogger(__name__).debug("backend %s was not registered", NAME, exc_info=True)


def _as_gloo(value: str) -> None:
    """Problems are warnings, since the user has asked for it."""
    if value in ("", "0"):
        return
    try:
        if value != "1":
            raise ValueError(f"it is {value!r}; it must be 0 or 1")
        import_module("ringreduce.groups.as_gloo").as_gloo()
    except Exception as error:
        logging.getLogger(__name__).warning("%s has no effect, groups of gloo stay with Gloo: %s", AS_GLOO, error)


def register_if_needed() -> None:
    """Registers the backend, unless torch will ask for it when it is imported. So planning does not import torch."""
    if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" or not _is_installed():
        register()


def _is_installed() -> bool:
    """Whether torch finds the entry point: not where the package is a folder on PYTHONPATH."""
    try:
        points = importlib.metadata.distribution(NAME).entry_points
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(each.group == "torch.backends" for each in points)
