"""Where nvcc may be. The build asks too (build_cuda.py), which loads this file alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def find_nvcc() -> str | None:
    """The path of RINGREDUCE_NVCC ("0": none), or the one of CUDA_HOME, on PATH, in /usr/local/cuda, or of NVIDIA's
    wheels; None if there is none."""
    named = os.environ.get("RINGREDUCE_NVCC", "")
    if named not in ("", "1"):
        return None if named == "0" else shutil.which(named)
    homes = [os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), None, "/usr/local/cuda"]
    spec = importlib.util.find_spec("nvidia")
    of_wheels = (spec and spec.submodule_search_locations) or ()
    wheels = sorted(str(path) for home in of_wheels for path in Path(home).glob("*/bin/nvcc"))
    places = [*(f"{home}/bin/nvcc" if home else "nvcc" for home in homes), *wheels]
    return next(filter(None, map(shutil.which, places)), None)
