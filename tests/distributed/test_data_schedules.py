"""Loaders: what a random schedule of readers finds."""

from __future__ import annotations

from distributed.data_schedules import run_schedule


def test_each_sample_is_of_its_readers_dataset() -> None:
    """`python -m distributed.data_schedules` runs more."""
    did = run_schedule(seed=0, steps=150)
    assert all(did[each] for each in ("read", "interrupts", "broken samples", "kill", "close_beside", "child")), did
