"""examples/push_pull.py and examples/train_local_steps.py."""

from __future__ import annotations

import re

import pytest
from frameworks.launch import alone, python, ranks


def losses(output: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)]


def test_by_itself() -> None:
    output = alone("examples/push_pull.py")
    assert "worker 0: the bits of one process" in output
    assert all(after < before / 2 for before, after in losses(output))


@pytest.mark.parametrize("mode", ("sync", "asynchronous", "ssp"))
def test_on_two_ranks(mode: str) -> None:
    output = ranks("examples/push_pull.py", "--mode", mode)
    assert len(losses(output)) == 2 and all(after < before / 2 for before, after in losses(output))
    assert output.count("the bits of one process") == (2 if mode == "sync" else 0)


@pytest.mark.slow
def test_local_steps_with_a_worker_killed_and_one_that_joins() -> None:
    output = python("examples/train_local_steps.py")
    found = re.findall(r"(local steps|every step) +test loss (\d\.\d+), accuracy (\d+\.\d)%, (\d+\.\d) MB", output)
    (_, _, local, few), (_, _, every, many) = found
    assert output.index("is killed") < output.index("another one joins")
    assert float(local) > 90 and float(every) > 90 and float(few) < float(many) / 15
