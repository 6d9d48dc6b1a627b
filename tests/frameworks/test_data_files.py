"""Datasets that read Parquet, as docs/data.md has it, and safetensors, where these are installed: `make ecosystem`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ROOT

from ringreduce.data import Loader, Order

N = 1000


def dataset(kind: str, path: Path) -> Any:
    """The class of the page, made with a path."""
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"class {kind}" in each)
    known: dict[str, Any] = {}
    exec(code, known)
    return known[kind](path)


PAGE = (ROOT / "docs/data.md").read_text()


@pytest.mark.skipif(not find_spec("pyarrow"), reason="pyarrow is not installed: make ecosystem")
def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"x": [*range(N)], "name": [f"row {number}" for number in range(N)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    order = Order(N, 16)
    with Loader(dataset("Parquet", tmp_path / "rows.parquet"), order) as loader:
        for step in range(order.steps(1)):
            batch = loader.get(step)
            assert batch["x"].tolist() == order.ids(step).tolist()
            assert batch["name"] == [f"row {number}" for number in order.ids(step)]


class Safetensors:
    """Two tensors of a file, one row for each example. Only the rows that are used are read."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        file = safe_open(path, framework="np")
        self.images, self.labels = file.get_slice("images"), file.get_slice("labels")

    def __len__(self) -> int:
        return int(self.images.get_shape()[0])

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return self.images[number : number + 1][0], self.labels[number : number + 1][0]


@pytest.mark.skipif(not find_spec("safetensors"), reason="safetensors is not installed: make ecosystem")
def test_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    images = np.arange(N * 4, dtype=np.float32).reshape(N, 2, 2)
    save_file({"images": images, "labels": np.arange(N)}, tmp_path / "rows.safetensors")
    order = Order(N, 16)
    with Loader(Safetensors(tmp_path / "rows.safetensors"), order) as loader:
        for step in range(order.steps(1)):
            found, labels = loader.get(step)
            assert labels.tolist() == order.ids(step).tolist()
            assert np.array_equal(found, images[order.ids(step)])
