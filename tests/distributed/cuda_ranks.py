"""Ranks of a group whose tensors are on device "cuda": `distributed.harness` with the devices, and where each rank is.

run(work, 4, "steps", 0.5)  # work(me, "steps", 0.5) on 4 ranks that share device 0
run(work, 2, "run", 0.5)    # on 2 ranks with a device each
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import harness
from distributed.harness import Rank
from stand_in import torch_cuda

from ringreduce import Options

MODES = ("steps", "run")


def run(function: Callable[..., Any], size: int, mode: str, *arguments: Any) -> list[Any]:
    """What `function(me, mode, *arguments)` returned on each of `size` ranks. Skips where GPUs are too few."""
    if mode == "run" and torch.version.cuda is not None and torch.cuda.device_count() < size:
        pytest.skip(f"{size} ranks with a GPU each need more than {torch.cuda.device_count()}")
    return harness.run(_with_device, size, function, mode, *arguments)


def on_ranks(*sizes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As the harness's, in each of MODES: the functions take `me`, `mode` and what pytest gives."""

    def start(function: Callable[..., Any], size: int, mode: str, **given: Any) -> list[Any]:
        return run(functools.partial(function, **given), size, mode)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return pytest.mark.parametrize("mode", MODES)(harness.on_ranks(*sizes, start=start)(function))

    return decorate


def _with_device(me: Rank, function: Callable[..., Any], mode: str, *arguments: Any) -> Any:
    os.environ["RINGREDUCE_STAND_IN_DEVICES"] = str(max(2, me.size))
    torch_cuda.activate()
    torch.cuda.set_device(me.rank if mode == "run" else 0)
    return function(me, mode, *arguments)


def options(mode: str, **parts: int) -> Options:
    """Of a group that must not fall back to the host's memory. `parts`: of its engine."""
    engine = {"gpu_mode": mode, **parts}
    return Options(gpu_transport="peer", engine=",".join(f"{name}={value}" for name, value in engine.items()))
