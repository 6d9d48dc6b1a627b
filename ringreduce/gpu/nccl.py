"""NCCL's library, and communicators that others made."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import operator
from collections.abc import Iterator

from ringreduce.common.failures import InvalidArgument

MOST = 2**64 - 1
"""The largest address."""


def places() -> list[str]:
    """Files that may be NCCL, best first, for the engine to open: those of NVIDIA's wheels, one of which torch for CUDA
    brings, then torch's own. It looks at RINGREDUCE_LIBNCCL and at what the process has loaded before them, and where
    the loader looks after them (csrc/nccl/library.h)."""
    folders = packages_folders(nvidia="nccl/lib", torch="lib")
    return [path for folder in folders for path in sorted(glob.glob(f"{glob.escape(folder)}/libnccl.so.2"))]


def packages_folders(**below: str) -> Iterator[str]:
    """Of these packages, as far as they are installed: the folders that fit the pattern `below` each."""
    for package, pattern in below.items():
        spec = importlib.util.find_spec(package)
        for home in (spec and spec.submodule_search_locations) or ():
            yield from glob.glob(f"{glob.escape(home)}/{pattern}")


def handle_of(communicator: object) -> int:
    """The ncclComm_t of a communicator, which must have been made by the same libnccl and remains its owner's.

    It may be the number itself, a ctypes.c_void_p, or an object that has it as

        .ptr          nccl4py's Communicator, an int; 0 once it is destroyed (bindings/nccl4py/nccl/core/communicator.py
                      in NVIDIA/nccl)
        .comm         CuPy's NcclCommunicator, an int; 0 once it is destroyed (cupy_backends/cuda/libs/nccl.pyx), and
                      vLLM's PyNcclCommunicator, a c_void_p (vllm/distributed/device_communicators/pynccl.py)
        ._comm_ptr()  torch's ProcessGroupNCCL, an int (torch/csrc/distributed/c10d/init.cpp)

    or anything that is an integer to Python (__index__). Raises InvalidArgument for others, and for null.
    """
    found = _address(communicator)
    for name in ("ptr", "comm", "_comm_ptr"):
        if found is None:
            member = getattr(communicator, name, None)
            found = _address(member() if callable(member) else member)
    if found is None:
        raise InvalidArgument(
            f"a {type(communicator).__name__} is no NCCL communicator; give one of nccl4py, CuPy or pynccl, or the "
            "ncclComm_t as an int"
        )
    if found == 0:
        raise InvalidArgument("the NCCL communicator is null: it was never made, or destroyed")
    if not 0 < found <= MOST:
        raise InvalidArgument(f"the NCCL communicator is {found}, which is no address")
    return found


def _address(value: object) -> int | None:
    """As an integer, if it is one."""
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
