"""Lightning Fabric, Hugging Face Accelerate, Ray Train and torchft, where they are installed: `make ecosystem`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from frameworks.launch import python, torchrun

SCRIPT = "tests/frameworks/ecosystem.py"


def agree(output: str) -> None:
    assert "rank 0 agrees" in output and "rank 1 agrees" in output, output


@pytest.mark.skipif(not find_spec("lightning_fabric"), reason="Lightning Fabric is not installed: make ecosystem")
def test_lightning_fabric() -> None:
    agree(torchrun(SCRIPT, "fabric"))


@pytest.mark.skipif(not find_spec("accelerate"), reason="Accelerate is not installed: make ecosystem")
def test_accelerate() -> None:
    agree(torchrun(SCRIPT, "accelerate"))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: make ecosystem")
def test_ray_train() -> None:
    agree(python(SCRIPT, "ray"))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: make ecosystem")
def test_a_parameter_server_of_ray_actors() -> None:
    agree(python(SCRIPT, "actors"))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torchft"), reason="torchft is not installed: make ecosystem")
def test_torchft() -> None:
    """Its own tests for process groups, with ours."""
    output = python("tests/frameworks/torchft_suite.py")
    assert "test_collective_with_resiliency_09_reduce_scatter_tensor_coalesced" in output and "\nOK\n" in output, output
