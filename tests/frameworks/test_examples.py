"""The examples, started as their first lines say. Each compares itself with one process, and fails if it differs."""

from __future__ import annotations

import re

import pytest
from frameworks.launch import torchrun

TINY = r"by \d\.\de-1[1-9]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("fsdp", "tensor_parallel", "pipeline"))
def test_example(name: str) -> None:
    assert re.search(rf"a single process's {TINY}", torchrun(f"examples/{name}.py"))


@pytest.mark.slow
def test_elastic_restart() -> None:
    """Both go on where they had saved, to the same result."""
    output = torchrun("--max-restarts=1", "examples/elastic.py")
    assert "(exitcode: -9) local_rank: 1" in output
    for rank in (0, 1):
        assert f"rank {rank}, attempt 1: goes on at step 8" in output
        assert re.search(rf"rank {rank}, attempt 1: parameters differ from a single process's {TINY}", output)
