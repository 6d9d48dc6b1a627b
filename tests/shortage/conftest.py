"""What the tests of shortages have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortage.sweeps import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of requests.cpp."""
    return build(tmp_path_factory.mktemp("requests"))
