"""Datasets that several test files read, and what they count."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch


class Rows:
    """Row k begins with k. Counts, for all processes, how often each row is prepared."""

    def __init__(self, n: int, width: int = 8) -> None:
        self.values = np.arange(n * width, dtype=np.int64).reshape(n, width)
        self.values[:, 0] = np.arange(n)
        self.counts = np.frombuffer(mmap.mmap(-1, n * 8), np.int64)  # memory that forked processes share

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> np.ndarray:
        self.counts[number] += 1
        return self.values[number]


class Noise(Rows):
    """Augmented by all three generators."""

    def __getitem__(self, number: int) -> np.ndarray:
        import random

        super().__getitem__(number)
        return np.array([number, random.random(), np.random.random(), torch.rand(()).item()])


def servers_of(supervisor: int) -> list[int]:
    """The pids of a supervisor's servers, by their number."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return sorted(map(int, children), key=lambda pid: Path(f"/proc/{pid}/comm").read_text())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
