"""Tests on device "cuda": on GPUs if torch has CUDA, else on stand-ins, which change torch for the whole process.

So they are no part of a run of other tests. Ranks of `distributed.harness` get the device by `torch_cuda.activated`.
"""

import pytest
import torch
from stand_in import torch_cuda


@pytest.fixture(scope="session", autouse=True)
def devices() -> int:
    """How many there are."""
    torch_cuda.activate()
    if not torch.cuda.is_available():
        pytest.exit(
            f"torch {torch.__version__} has CUDA but sees no GPU; take one without CUDA to test on stand-ins", 1
        )
    return torch.cuda.device_count()


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Every test begins with nothing queued."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
