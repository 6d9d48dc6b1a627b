"""Which datasets are taken for the same: equal ones in all processes, and no others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import ROOT
from torch.utils.data import Subset, TensorDataset

from ringreduce.data import identity


class Of:
    """A dataset of one attribute."""

    def __init__(self, what: Any) -> None:
        self.what = what


class Unwilling:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


def itself(value: int) -> Of:
    found = Of(value)
    found.what = [found, value]
    return found


def times(factor: int) -> Callable[[int], int]:
    return lambda value: value * factor


PAIRS: dict[str, Callable[[int], Any]] = {
    "numbers": Of,
    "arrays": lambda k: Of(np.arange(k, 5 + k)),
    "records": lambda k: np.zeros(2, [(f"field {k}", np.int64)]),
    "constants that are sets": lambda k: eval(f"lambda text: text in {{'a', 'b', 'c', '{k}'}}"),
    "arrays of objects": lambda k: np.array([Of(k)], object),
    "scalars": lambda k: Of((np.array(k), torch.tensor(k))),
    "tensors": lambda k: Of(torch.full((3,), k, dtype=torch.bfloat16)),
    "transposed": lambda k: Of(torch.full((3, 2), k).T),
    "closures": times,
    "partials": lambda k: functools.partial(times, k),
    "bound methods": lambda k: Of(k).__init__,
    "beside what cannot be pickled": lambda k: Of([Unwilling(), threading.Lock(), sys, k]),
    "cycles": itself,
    "folds": lambda k: Subset(TensorDataset(torch.arange(100)), range(50 * k, 50 * k + 50)),
    "folds of folds": lambda k: Subset(Subset(Of(3), range(90)), range(50 * k, 50 * k + 50)),
}


def digest(dataset: Any) -> str:
    return identity._digest(dataset, None)[0]


@pytest.mark.parametrize("kind", PAIRS)
def test_datasets_are_told_apart(kind: str) -> None:
    make = PAIRS[kind]
    assert digest(make(1)) == digest(make(1)) != digest(make(0))


def scaled(by: int) -> Any:
    class Scaled:
        def __getitem__(self, number: int) -> int:
            return number * by

    return Scaled()


FACTOR = 1


def by_factor(value: int) -> int:
    return value * FACTOR


def test_functions_are_told_apart_by_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digest(scaled(1)) == digest(scaled(1)) != digest(scaled(2))
    before = digest(by_factor)
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert digest(by_factor) != before
    assert digest(lambda value: value + 2) != digest(lambda value: value + 3)
    assert identity._digest(None, times(1)) != identity._digest(None, times(2))


def test_files_in_memory_are_told_apart_by_their_parts(tmp_path: Path) -> None:
    def part(begin: int) -> np.ndarray:
        return np.memmap(tmp_path / "rows", np.uint8, "r")[begin : begin + 4]

    (tmp_path / "rows").write_bytes(bytes(10_000))
    assert digest(part(5000)) == digest(part(5000)) != digest(part(5001))


def test_of_what_is_very_large_a_part_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_BYTES", 10_000)
    monkeypatch.setattr(identity, "MOST_OBJECTS", 100)
    for large in (
        np.zeros(10_000),
        torch.zeros(10_000),
        [f"{each}" for each in range(10_000)],
        [Of(1)] * 3 + [*map(Of, range(500))],
    ):
        assert digest(Of(large)) == digest(Of(large)) != digest(Subset(Of(large), range(5)))
        assert digest(Subset(Of(large), range(5))) != digest(Subset(Of(large), range(5, 10)))
    assert digest(np.zeros(10_000)) != digest(np.arange(10_000))


def test_loaders_whose_datasets_cannot_be_compared_whole_share_in_the_order_in_which_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "MOST_OBJECTS", 100)
    monkeypatch.setattr(identity, "MOST_BYTES", 10_000)
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    parts = (Of([*map(Of, range(500))]), np.arange(10_000), Unwilling(), torch.eye(3).to_sparse(), deep)
    first = [identity.full_name("rows", Of(part), None) for part in parts]
    again = [identity.full_name("rows", Of(part), None) for part in parts]
    assert len({*first, *again}) == 2 * len(parts)
    monkeypatch.setattr(identity, "_not_whole", {})  # as in another process
    assert [identity.full_name("rows", Of(part), None) for part in parts] == first
    assert identity.full_name("rows", Of(3), None) == identity.full_name("rows", Of(3), None)


def test_all_processes_find_the_same() -> None:
    program = "from unit import test_data_identity as t; print([t.digest(make(1)) for make in t.PAIRS.values()])"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    from unit import test_data_identity  # as the other process names it

    assert ran.stdout == f"{[test_data_identity.digest(make(1)) for make in test_data_identity.PAIRS.values()]}\n", (
        ran.stderr
    )


def test_a_name_is_of_a_job_unless_it_begins_with_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in identity.JOB:
        monkeypatch.delenv(variable, raising=False)
    names = {identity.full_name("rows", None, None)}  # without a launcher: of this process
    assert str(os.getpid()) in names.pop()
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT"):
        monkeypatch.setenv(variable, "29511")
        names.add(identity.full_name("rows", None, None))
        names.add(identity.full_name("/rows", None, None))
    assert len(names) == 4
