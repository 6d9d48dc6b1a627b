"""How the servers of a Loader start: forked, or as new processes, where libraries have threads."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodies.data import Noise, Rows, is_alive, servers_of
from processes import until

from ringreduce.data import Loader, Order, supervisor
from ringreduce.errors import InvalidArgument, SampleFailed

_pool = ThreadPoolExecutor(1)


class InAThread(Rows):
    """Its rows come from a thread that a forked process lacks, as Polars' do."""

    def __getitem__(self, number: int) -> np.ndarray:
        return _pool.submit(super().__getitem__, number).result()


def test_a_dataset_that_waits_for_threads_of_another_process() -> None:
    order = Order(40, 2, shuffle=False)
    _pool.submit(int).result()
    with Loader(InAThread(40), order, timeout=0.5) as loader:
        (server,) = servers_of(supervisor.started[-1])
        with pytest.raises(SampleFailed) as failed:
            loader.get(1, 0, 1)
    known = rf"server 0 \(process {server}, in dataset\[\d\]\) has not prepared ids 2, 3 in timeout=0.5 s"
    advice = r"forked from a process with \d+ threads, .* give multiprocessing_context='spawn'"
    assert re.search(rf"{known}; see where it is: py-spy dump --pid {server}\. .*{advice}", str(failed.value))
    with Loader(InAThread(40), order, multiprocessing_context="spawn") as loader:
        assert loader.get(1, 0, 1)[:, 0].tolist() == [2, 3]
        before = servers_of(supervisor.started[-1])
        os.kill(before[0], signal.SIGKILL)
        assert [loader.get(step, 0, 1)[:, 0].tolist() for step in range(7, 20)] == [
            [n, n + 1] for n in range(14, 40, 2)
        ]
        servers = servers_of(supervisor.started[-1])
        assert servers != before
        os.kill(supervisor.started[-1], signal.SIGKILL)
        until(lambda: not any(map(is_alive, servers)))
        assert loader.get(1, 0, 1)[:, 0].tolist() == [2, 3]


def test_new_processes_prepare_what_forked_ones_do() -> None:
    order = Order(20, 4, seed=3)
    context = multiprocessing.get_context("spawn")
    with Loader(Noise(20), order) as one, Loader(Noise(20), order, multiprocessing_context=context) as other:
        for step in range(8):
            assert torch.equal(one.get(step, 0, 1), other.get(step, 0, 1))


def test_wrong_contexts() -> None:
    rows, order = Rows(10), Order(10, 2)
    with pytest.raises(InvalidArgument, match="multiprocessing_context is 'forkserver'; give 'fork' or 'spawn'"):
        Loader(rows, order, multiprocessing_context="forkserver")
    with pytest.raises(InvalidArgument, match=r"dataset, collate or seeded cannot be pickled, .*lambda"):
        Loader(rows, order, collate=lambda samples: samples, multiprocessing_context="spawn")
    with (
        Loader(rows, order, name="contexts"),
        pytest.raises(InvalidArgument, match=r"multiprocessing_context is spawn, and a Loader named .* has fork"),
    ):
        Loader(rows, order, name="contexts", multiprocessing_context="spawn")


PROGRAM = """
from ringreduce import data
class Squares:
    def __getitem__(self, number):
        return number ** 2
def main():
    with data.Loader(Squares(), data.Order(8, 4, shuffle=False), timeout=60, multiprocessing_context="spawn") as loader:
        print(loader.get(1).tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("if __name__ == '__main__':\n    main()", r"\[16, 25, 36, 49\]"),
        ("main()", "forgotten to use the proper idiom"),
    ],
)
def test_classes_of_the_program_itself(tmp_path: Path, end: str, said: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + end)
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    found: Any = re.search(said, ran.stdout + ran.stderr)
    assert found and (ran.returncode == 0) == (end != "main()"), ran.stderr
