"""The last module that the server of tests' processes imports: whether it has initialised CUDA, which would leave every
process that is forked from it without.
"""

from __future__ import annotations

import ctypes
import gc
import os


def cuda_in_use(library: str = "libcuda.so.1") -> str:
    """How this process uses CUDA already, or "". Initialises nothing."""
    import torch

    if torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    try:
        driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # it is not loaded
        return ""
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return "" if status == 3 else f"cuInit was called: cuDeviceGetCount gives {status}"  # 3: not initialised


gc.freeze()  # a rank's collector would write to, and so copy, every page it has from the server
PID = os.getpid()
CUDA_IN_USE = cuda_in_use()


def check() -> None:
    """In a forked process: raises if it could not use CUDA because the server has."""
    if os.getpid() == PID:
        raise RuntimeError(
            "the server that forks the tests' ranks did not import fork_server, so nothing is known of it"
        )
    if CUDA_IN_USE:
        raise RuntimeError(f"the server that forks the tests' ranks: {CUDA_IN_USE}")
