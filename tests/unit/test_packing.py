"""What float32 values become on the wire between hosts, against torch and NumPy."""

import numpy as np
import pytest
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument

BLOCK = 32
KINDS = ("float32", "bfloat16", "int8")


def pack(kind: str, values: np.ndarray) -> bytes:
    return _C.pack(kind, values.ctypes.data, len(values))


def unpack(kind: str, packed: bytes, count: int) -> np.ndarray:
    values = np.full(count, 7, np.float32)
    _C.unpack(kind, values.ctypes.data, packed, count)
    return values


def rounded(kind: str, values: np.ndarray) -> np.ndarray:
    return unpack(kind, pack(kind, values), len(values))


def reference(kind: str, values: np.ndarray) -> np.ndarray:
    """In float64, where nothing but the rounding that is meant takes place."""
    if kind == "float32":
        return values
    if kind == "bfloat16":
        return torch.from_numpy(values).bfloat16().float().numpy()
    result = np.zeros(-(-len(values) // BLOCK) * BLOCK)
    result[: len(values)] = values
    blocks = result.reshape(-1, BLOCK)
    for block in blocks:
        largest = np.abs(block).max()
        if not np.isfinite(largest):
            block[:] = np.nan
        elif largest > 0:
            unit = 2.0 ** (max(np.frexp(largest)[1] - 1, -127) - 6)
            block[:] = np.clip(np.rint(block / unit), -127, 127) * unit
    return result[: len(values)].astype(np.float32)


def samples(count: int, seed: int) -> np.ndarray:
    """Of all magnitudes, subnormal ones too, zeros among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * 2.0 ** random.integers(-150, 126, -(-count // 16)).repeat(16)[:count]
    values[random.random(count) < 0.1] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", (*range(70), 1000, 100_003))
def test_rounds_as_it_should(kind: str, count: int) -> None:
    values = samples(count, count)
    np.testing.assert_array_equal(rounded(kind, values), reference(kind, values))


@pytest.mark.parametrize("kind", KINDS)
def test_every_exponent(kind: str) -> None:
    for exponent in range(-149, 128):
        values = (np.linspace(-1.999, 1.999, BLOCK) * 2.0**exponent).astype(np.float32)
        np.testing.assert_array_equal(rounded(kind, values), reference(kind, values), err_msg=f"2^{exponent}")


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_rounded_is_packed_without_loss(kind: str) -> None:
    once = rounded(kind, samples(100_000, 1))
    assert np.array_equal(rounded(kind, once), once)


def test_the_error_is_as_said() -> None:
    values = samples(320_000, 2).astype(np.float64)
    normal = np.abs(values) >= 2.0**-126
    error = np.abs(rounded("bfloat16", values.astype(np.float32)) - values)
    assert (error[normal] <= 2.0**-8 * np.abs(values[normal])).all()
    error = np.abs(rounded("int8", values.astype(np.float32)) - values).reshape(-1, BLOCK)
    largest = np.abs(values).reshape(-1, BLOCK).max(axis=1)
    assert (error.max(axis=1) <= largest / 127)[largest >= 2.0**-126].all()


def test_bytes() -> None:
    values = np.ones(100, np.float32)
    assert [len(pack(kind, values)) for kind in KINDS] == [400, 200, 104]


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = np.ones(3 * BLOCK, np.float32)
    values[BLOCK + 5] = bad
    half = rounded("bfloat16", values)
    assert np.array_equal(half, values, equal_nan=True)
    eighth = rounded("int8", values)
    assert np.isnan(eighth[BLOCK : 2 * BLOCK]).all()
    assert (np.delete(eighth, range(BLOCK, 2 * BLOCK)) == 1).all()


def test_every_nan_stays_one_as_bfloat16() -> None:
    codes = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(rounded("bfloat16", codes)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_needs_no_alignment(kind: str) -> None:
    values = samples(100, 3)
    room = np.zeros(4 * len(values) + 8, np.uint8)
    for shift in range(1, 4):
        room[shift : shift + 4 * len(values)] = values.view(np.uint8)
        packed = _C.pack(kind, room.ctypes.data + shift, len(values))
        assert packed == pack(kind, values)
        room[:] = 0x5A
        _C.unpack(kind, room.ctypes.data + shift, packed, len(values))
        assert room[shift : shift + 4 * len(values)].tobytes() == rounded(kind, values).tobytes()
        assert (room[:shift] == 0x5A).all()
        assert (room[shift + 4 * len(values) :] == 0x5A).all()


def test_other_names() -> None:
    with pytest.raises(InvalidArgument, match=r"wire_dtype is 'int4'; it must be 'float32', 'bfloat16' or 'int8'"):
        _C.pack("int4", 0, 0)
    with pytest.raises(InvalidArgument, match="packed has 3 bytes; 2 values have 4"):
        _C.unpack("bfloat16", 0, b"abc", 2)
