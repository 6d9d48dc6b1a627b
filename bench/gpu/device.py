"""The GPU that a benchmark runs on, or the stand-in for one; what it is, and how its calls are timed.

The stand-in (tests/stand_in) lets the benchmarks themselves be tested where there is no GPU. Its figures say nothing.
"""

import ctypes
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bench import harness

ROOT = Path(__file__).resolve().parents[2]
Key = TypeVar("Key", bound=Hashable)

L2_UNKNOWN = 128 * 1024 * 1024  # bytes, where torch does not tell: more than any GPU of 2025 has


def use(stand_in: bool) -> None:
    """To be called first in every process: makes device "cuda" the stand-in, if that is asked for."""
    if stand_in:
        sys.path.insert(0, str(ROOT / "tests"))
        from stand_in import torch_cuda

        torch_cuda.activate()


def missing(stand_in: bool) -> list[str]:
    """What keeps device "cuda" from being used here, each with what to do; nothing if it can be."""
    if stand_in:
        if torch.version.cuda is None:
            return []
        return [f"torch {torch.__version__} is built for CUDA; the stand-in needs PyTorch's wheel for CPUs"]
    found = []
    if torch.version.cuda is None:
        found.append(
            f"torch {torch.__version__} of {sys.executable} is built without CUDA: name a Python whose torch is, "
            "make gpu PYTHON=python3 VENV=.venv-gpu"
        )
    driver = _driver_missing()
    if driver:
        found.append(driver)
    elif torch.version.cuda and not torch.cuda.is_available():
        found.append("torch sees no GPU although the driver is there: see CUDA_VISIBLE_DEVICES and torch.cuda.init()")
    return found


def _driver_missing() -> str:
    try:
        from ringreduce import _C
    except ImportError:  # not built yet
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"no CUDA driver: {error}; install the NVIDIA driver, or let the container have the GPUs"
        return ""
    return _C.cuda_unavailable()


def facts(stand_in: bool) -> dict[str, Any]:
    """The devices, and the versions of all that takes part. Of what is not there: None."""
    from ringreduce import _C
    from ringreduce.gpu import kernels

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gb": round(properties.total_memory / 1e9, 1),
                "l2_mb": round(l2_bytes(index) / 1e6, 1),
            }
        )
    nccl = None
    if torch.version.cuda and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "stand_in": stand_in,
        "devices": devices,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "driver_cuda": "{}.{}".format(*_C.cuda_version()),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "nccl": nccl,
        "nvcc": nvcc_version(),
        "kernels": sorted(path.name for path in Path(kernels.__file__).parent.glob("*.fatbin")) or "compiled by NVRTC",
    }


def nvcc_version() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    return first_line(nvcc, "--version", at=-1) if nvcc else None


def first_line(*command: str, at: int = 0) -> str | None:
    """Of what a command prints, or the line `at`; None if it fails."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip().splitlines()[at]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def l2_bytes(index: int = 0) -> int:
    if torch.version.cuda is None:  # a stand-in, which has none
        return 64 * 1024
    return int(getattr(torch.cuda.get_device_properties(index), "L2_cache_size", L2_UNKNOWN))


@functools.cache
def kernels(index: int = 0) -> tuple[Any, Any]:
    """The device as ringreduce sees it, and its kernels, for `_C.gpu_accumulate`."""
    from ringreduce import _C
    from ringreduce.gpu.kernels import image

    device = _C.CudaDevice(index)

    def images(stem: str, row: str, prebuilt: bool) -> bytes:
        return image(stem, row, device.capability, prebuilt=prebuilt)

    return device, _C.GpuKernels(device, images)


def median_us(calls: Mapping[Key, Sequence[harness.Call]], repetitions: int, batch: int) -> dict[Key, float]:
    """Microseconds of GPU time of a call, by events of the current stream: median over `repetitions` batches.

    A call is given as a sequence of equal ones on different memory, which take turns, so that none finds its data in
    the L2 cache. All keys take turns batch by batch, so that a drift of the clocks hits all alike. One batch of each
    goes before, untimed.
    """
    means: dict[Key, list[float]] = {key: [] for key in calls}
    turns = {key: itertools.cycle(of_one) for key, of_one in calls.items()}
    for repetition in range(repetitions + 1):
        for key in calls:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            next(turns[key])()  # keeps the launch of the first timed call out of the time
            begin.record()
            for _ in range(batch):
                next(turns[key])()
            end.record()
            end.synchronize()
            if repetition:
                means[key].append(begin.elapsed_time(end) * 1e3 / batch)
    return {key: statistics.median(values) for key, values in means.items()}


def copy_gbps(size: int, repetitions: int, batch: int, index: int = 0) -> float:
    """What copying from one place of the device to another moves: bytes read and written, GB/s (1e9)."""
    sets = copies(size, rotations(2 * size, index))
    return 2e-3 * size / median_us({"copy": sets}, repetitions, batch)["copy"]


def copies(size: int, sets: int) -> list[harness.Call]:
    """cudaMemcpyAsync between tensors of the device, which is what torch makes of a plain copy_."""
    buffers = [[torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]
    return [functools.partial(to.copy_, source) for to, source in buffers]


def rotations(working_set: int, index: int = 0) -> int:
    """How many sets of buffers together are four times the L2 cache, so that each is out of it when its turn comes."""
    return max(1, -(-4 * l2_bytes(index) // working_set))
