"""examples/push_pull.py, started as its first lines say."""

from __future__ import annotations

import re

import pytest
from frameworks.launch import python, torchrun


def losses(output: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)]


def test_by_itself() -> None:
    output = python("examples/push_pull.py")
    assert "worker 0: the bits of one process" in output
    assert all(after < before / 2 for before, after in losses(output))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("sync", "asynchronous", "ssp"))
def test_under_torchrun(mode: str) -> None:
    output = torchrun("examples/push_pull.py", "--mode", mode)
    assert len(losses(output)) == 2 and all(after < before / 2 for before, after in losses(output))
    assert output.count("the bits of one process") == (2 if mode == "sync" else 0)
