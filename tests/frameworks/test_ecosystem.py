"""Frameworks above torch, on Gloo and in two ways on ringreduce, where they are installed: `make ecosystem`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from frameworks import ecosystem
from frameworks.launch import python


@pytest.mark.slow
@pytest.mark.parametrize("way", ecosystem.BACKENDS)
@pytest.mark.parametrize("name", ecosystem.JOBS)
def test_a_framework_agrees_with_one_process(name: str, way: str) -> None:
    package = ecosystem.JOBS[name].package
    if not find_spec(package):
        pytest.skip(f"{package} is not installed: make ecosystem")
    ecosystem.run(name, way)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: make ecosystem")
def test_a_parameter_server_of_ray_actors() -> None:
    output = python(ecosystem.SCRIPT, "actors", "name")
    assert "rank 0 agrees" in output and "rank 1 agrees" in output, output


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torchft"), reason="torchft is not installed: make ecosystem")
def test_torchft() -> None:
    """Its own tests for process groups, with ours."""
    output = python("tests/frameworks/torchft_suite.py")
    assert "test_collective_with_resiliency_09_reduce_scatter_tensor_coalesced" in output and "\nOK\n" in output, output
