"""What float32 values become on the wire between hosts, against torch and NumPy, on all instruction sets."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument

BLOCK = 32
KINDS = ("float32", "bfloat16", "int8", "int4")
BITS = {"int8": 8, "int4": 4}
DEFAULT = _C.instruction_set()
INSTRUCTION_SETS = [name for name in ("avx512", "avx2", "neon", "baseline") if _C.select_instruction_set(name)]
_C.select_instruction_set(DEFAULT)


@pytest.fixture(autouse=True)
def restore_instruction_set() -> Iterator[None]:
    yield
    assert _C.select_instruction_set(DEFAULT)


def pack(kind: str, values: np.ndarray, rest: np.ndarray | None = None) -> bytes:
    packed = np.full(_C.packed_bytes(kind, len(values)), 0x5A, np.uint8)
    at = 0 if rest is None else rest.ctypes.data
    _C.pack(kind, packed.ctypes.data, values.ctypes.data, len(values), at)
    return packed.tobytes()


def unpack(kind: str, packed: bytes, count: int) -> np.ndarray:
    values = np.full(count, 7, np.float32)
    _C.unpack(kind, values.ctypes.data, np.frombuffer(packed, np.uint8).ctypes.data, count)
    return values


def rounded(kind: str, values: np.ndarray) -> np.ndarray:
    return unpack(kind, pack(kind, values), len(values))


def reference(kind: str, values: np.ndarray) -> np.ndarray:
    """In float64, where nothing but the rounding that is meant takes place."""
    full = len(values) // BLOCK * BLOCK
    if kind == "float32":
        return values
    if kind == "bfloat16":
        nearest = torch.from_numpy(values).bfloat16().float().numpy()
        return np.concatenate((nearest[:full], values[full:]))
    most = 2 ** (BITS[kind] - 1) - 1
    result = values.astype(np.float64)
    for block in result[:full].reshape(-1, BLOCK):
        largest = np.abs(block).max()
        if not np.isfinite(largest):
            block[:] = np.nan
        elif largest > 0:
            unit = 2.0 ** (max(np.frexp(largest)[1] - 1, -127) - (BITS[kind] - 2))
            block[:] = np.clip(np.rint(block / unit), -most, most) * unit
    return result.astype(np.float32)


def samples(count: int, seed: int) -> np.ndarray:
    """Of all magnitudes, subnormal ones too, zeros among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * 2.0 ** random.integers(-150, 126, -(-count // 16)).repeat(16)[:count]
    values[random.random(count) < 0.1] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_as_it_should(kind: str, name: str) -> None:
    assert _C.select_instruction_set(name)
    for count in (*range(70), 1000, 100_003):
        values = samples(count, count)
        np.testing.assert_array_equal(rounded(kind, values), reference(kind, values))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_exponent(kind: str, name: str) -> None:
    assert _C.select_instruction_set(name)
    for exponent in range(-149, 128):
        values = (np.linspace(-1.999, 1.999, BLOCK) * 2.0**exponent).astype(np.float32)
        np.testing.assert_array_equal(rounded(kind, values), reference(kind, values), err_msg=f"2^{exponent}")


@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_give_the_same_bytes(kind: str) -> None:
    """Of any bits, NaNs and infinities among them, and of ties."""
    random = np.random.default_rng(4)
    ties = random.integers(-300, 300, 32_000).astype(np.float32) / 2
    values = np.concatenate((random.integers(0, 2**32, 32_011, np.uint32).view(np.float32), ties, samples(32_000, 5)))
    found = set()
    for name in INSTRUCTION_SETS:
        assert _C.select_instruction_set(name)
        rest = samples(len(values), 6)
        packed = pack(kind, values, rest)
        found.add((pack(kind, values), packed, unpack(kind, packed, len(values)).tobytes(), rest.tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_packing_and_unpacking(kind: str, name: str) -> None:
    assert _C.select_instruction_set(name)
    values = samples(1003, 7)
    wanted_rest = rest = samples(1003, 8) / 64
    for given in (None, rest):
        wanted_rest = None if given is None else given.copy()
        in_place = values.copy()
        _C.round(kind, in_place.ctypes.data, len(values), 0 if given is None else given.ctypes.data)
        if kind == "float32":
            assert np.array_equal(in_place, values)
            continue
        assert unpack(kind, pack(kind, values, wanted_rest), len(values)).tobytes() == in_place.tobytes()
        assert given is None or given.tobytes() == wanted_rest.tobytes()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_what_was_cut_off(kind: str, name: str) -> None:
    assert _C.select_instruction_set(name)
    values, before = samples(1003, 9), samples(1003, 10) / 64
    rest = before.copy()
    arrived = unpack(kind, pack(kind, values, rest), len(values))
    whole = values + before
    np.testing.assert_array_equal(arrived, reference(kind, whole))
    np.testing.assert_array_equal(rest, np.where(np.isfinite(whole - arrived), whole - arrived, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_that_is_not_finite_becomes_zero(kind: str) -> None:
    values = np.ones(2 * BLOCK, np.float32)
    values[5], values[7] = np.nan, np.inf
    rest = np.full(2 * BLOCK, 1 / 1024, np.float32)
    pack(kind, values, rest)
    assert np.isfinite(rest).all()
    assert rest[5] == rest[7] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_rounded_is_packed_without_loss(kind: str) -> None:
    once = rounded(kind, samples(100_000, 1))
    assert np.array_equal(rounded(kind, once), once)


def test_the_error_is_as_said() -> None:
    values = samples(320_000, 2).astype(np.float64)
    normal = np.abs(values) >= 2.0**-126
    error = np.abs(rounded("bfloat16", values.astype(np.float32)) - values)
    assert (error[normal] <= 2.0**-8 * np.abs(values[normal])).all()
    largest = np.abs(values).reshape(-1, BLOCK).max(axis=1)
    for kind, most in (("int8", 127), ("int4", 7)):
        error = np.abs(rounded(kind, values.astype(np.float32)) - values).reshape(-1, BLOCK)
        assert (error.max(axis=1) <= largest / most)[largest >= 2.0**-126].all()


def test_bytes() -> None:
    assert [_C.packed_bytes(kind, 96) for kind in KINDS] == [384, 192, 99, 51]
    assert [_C.packed_bytes(kind, 100) for kind in KINDS] == [400, 208, 115, 67]  # the last four as they are


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = np.ones(3 * BLOCK, np.float32)
    values[BLOCK + 5] = bad
    half = rounded("bfloat16", values)
    assert np.array_equal(half, values, equal_nan=True)
    for kind in BITS:
        found = rounded(kind, values)
        assert np.isnan(found[BLOCK : 2 * BLOCK]).all()
        assert (np.delete(found, range(BLOCK, 2 * BLOCK)) == 1).all()


def test_every_nan_stays_one_as_bfloat16() -> None:
    codes = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, *[0] * 27], np.uint32)
    assert np.isnan(rounded("bfloat16", codes.view(np.float32))[:5]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_needs_no_alignment(kind: str) -> None:
    values = samples(100, 3)
    room = np.zeros(4 * len(values) + 8, np.uint8)
    for shift in range(1, 4):
        room[shift : shift + 4 * len(values)] = values.view(np.uint8)
        packed = np.zeros(_C.packed_bytes(kind, len(values)), np.uint8)
        _C.pack(kind, packed.ctypes.data, room.ctypes.data + shift, len(values))
        assert packed.tobytes() == pack(kind, values)
        room[:] = 0x5A
        _C.unpack(kind, room.ctypes.data + shift, packed.ctypes.data, len(values))
        assert room[shift : shift + 4 * len(values)].tobytes() == rounded(kind, values).tobytes()
        assert (room[:shift] == 0x5A).all()
        assert (room[shift + 4 * len(values) :] == 0x5A).all()


def test_other_names() -> None:
    with pytest.raises(
        InvalidArgument, match=r"wire_dtype is 'int5'; it must be 'float32', 'bfloat16', 'int8' or 'int4'"
    ):
        _C.packed_bytes("int5", 0)
