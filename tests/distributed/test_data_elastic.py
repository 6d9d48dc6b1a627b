"""Exactly once: what a world commits in an epoch, whoever dies and joins in it."""

from __future__ import annotations

import pytest
from distributed.data_trials import run_trial


@pytest.mark.parametrize("seed", range(4))
def test_each_id_is_committed_once(seed: int) -> None:
    """`python -m distributed.data_trials` runs more."""
    run_trial(seed)
