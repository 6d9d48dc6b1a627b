"""The form of batches in memory: what arrives of samples whose kind is not plain."""

from __future__ import annotations

from collections import Counter, UserDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ringreduce.data.batches import LaidOut, lay_out, lay_out_whole, read
from ringreduce.errors import InvalidArgument


def arrived(laid_out: LaidOut) -> Any:
    memory = np.zeros(laid_out.bytes, np.uint8)
    laid_out.write(memory)
    return read(memory, laid_out.end, laid_out.bytes)


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return."""

    words = 7


def test_a_size_is_stacked_as_a_tuple() -> None:
    rows, columns = arrived(lay_out([torch.zeros(3, 4).shape, torch.zeros(5, 6).shape]))
    assert rows.tolist() == [3, 5] and columns.tolist() == [4, 6]
    assert arrived(lay_out_whole([torch.zeros(3, 4).shape])) == [torch.Size([3, 4])]


def test_mappings_are_stacked_by_their_keys() -> None:
    encoding = arrived(lay_out([Encoding(ids=torch.arange(2) + each, n=each) for each in (0, 5)]))
    assert type(encoding) is Encoding and encoding.words == 7
    assert encoding["ids"].tolist() == [[0, 1], [5, 6]] and encoding["n"].tolist() == [0, 5]
    assert {key: value.tolist() for key, value in arrived(lay_out([Counter(a=1), Counter(a=2)])).items()} == {
        "a": [1, 2]
    }
    assert arrived(lay_out([MappingProxyType({"a": 1})]))["a"].tolist() == [1]
    whole = arrived(lay_out_whole(Encoding(ids=torch.arange(2))))
    assert type(whole) is Encoding and whole["ids"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"mappings of different keys; the first has \['a'\]"):
        lay_out([Encoding(a=1), Encoding(b=1)])


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("whole", [False, True])
def test_tensors_that_are_not_dense_are_refused(whole: bool) -> None:
    name = "the batch" if whole else r"samples\['x'\]"
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    sparse = torch.ones(3).to_sparse()
    for value, what, instead in ((quantized, "is torch.quint8", "dequantize"), (sparse, "layout Sparse", "to_dense")):
        with pytest.raises(InvalidArgument, match=rf"{name}: a tensor .*{what}; .* its {instead}\(\)"):
            lay_out_whole({"x": value}) if whole else lay_out([{"x": torch.ones(3)}, {"x": value}])
        lay_out([{"x": getattr(value, instead)()}])
