"""Makes the backend known to torch.distributed, from the `torch.backends` entry point or from `import ringreduce`.

torch runs `register` inside every `import torch`, where an exception would break torch itself. So this module imports
nothing heavy, and what goes wrong is logged at debug level.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "ringreduce"


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    """Called by torch for each new group; the extension is loaded at the first."""
    from ringreduce.backend import create

    return create(dist_backend_opts, pg_options)


def register() -> None:
    """Registers backend `ringreduce`. Idempotent; never raises; does nothing where torch has no distributed package."""
    try:
        import torch.distributed as dist

        # Inside the first import of torch, the line above may have come here through the entry point already.
        if dist.is_available() and NAME not in dist.Backend.backend_list:
            # devices must be a list: torch walks a string letter by letter to find the device's default backend.
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            # Groups keep a flight record of their own. From 2.15 on torch would keep another, for 2 us a call or more.
            recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
            recording.add(NAME)
    except Exception:
        logging.getLogger(__name__).debug("backend %s was not registered", NAME, exc_info=True)
