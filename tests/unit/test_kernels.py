"""Every kernel against NumPy and torch, on each instruction set that this CPU runs, bit for bit."""

import itertools

import numpy as np
import pytest
import torch
from unit.elements import (
    CASES,
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    NARROW,
    OPS,
    TORCH,
    Buffer,
    all_codes,
    as_bytes,
    assert_same,
    edge_pairs,
    expected,
    expected_scale,
    from_bytes,
    lanes,
    operand,
    supported,
)

from ringreduce import _C

DEFAULT = _C.instruction_set()
INSTRUCTION_SETS = [name for name in ("avx512", "avx2", "neon", "baseline") if _C.select_instruction_set(name)]
_C.select_instruction_set(DEFAULT)


@pytest.fixture(autouse=True)
def restore_instruction_set():
    yield
    assert _C.select_instruction_set(DEFAULT)


# ---- Running and comparing -------------------------------------------------------------------------------------------


def accumulate(dtype, op, operands, divisor=1.0, misalignments=None, alias=None, weights=()):
    """What the kernel gives, after a check that it wrote its result and nothing else."""
    misalignments = misalignments or [0] * (len(operands) + 1)
    sources = [Buffer(as_bytes(t), m) for t, m in zip(operands, misalignments[1:], strict=True)]
    dst = Buffer(np.full_like(sources[0].payload, 0x5A), misalignments[0]) if alias is None else sources[alias]
    second = Buffer(np.full_like(sources[0].payload, 0x5A), misalignments[0])
    pointers = [s.pointer for s in sources]
    _C.accumulate(dtype, op, [dst.pointer, second.pointer], pointers, len(operands[0]), divisor, weights)
    assert dst.unchanged(but_payload=True)
    assert second.unchanged(but_payload=True)
    assert np.array_equal(dst.payload, second.payload)
    assert all(s.unchanged() for s in sources if s is not dst)
    return from_bytes(dtype, dst.payload)


def check(dtype, op, operands, divisor=1.0, misalignments=None, alias=None, weights=()):
    """Compares with the reference, and all instruction sets' results with the first one's."""
    wanted = expected(dtype, op, operands, divisor, weights)
    first = None
    for name in INSTRUCTION_SETS:
        assert _C.select_instruction_set(name)
        actual = accumulate(dtype, op, operands, divisor, misalignments, alias, weights)
        note = f"{dtype} {op} on {name}, {len(operands)} operands of {len(wanted)} elements"
        assert_same(dtype, actual, wanted, note, op)
        first = actual if first is None else first
        assert_same(dtype, actual, first, f"{note}, against {INSTRUCTION_SETS[0]}")  # signs of zeros as well


# ---- Tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_accumulate(dtype, op):
    for n, count in itertools.product((1, 2, 3, 5, 9), (0, 1, 7, 127, 256, 1031)):
        check(dtype, op, [operand(dtype, count, rank) for rank in range(n)], n if op == "avg" else 1.0)


@pytest.mark.parametrize("dtype", TORCH)
def test_large_ones_are_walked_in_parts(dtype):
    size = torch.empty(0, dtype=TORCH[dtype]).element_size()
    for count in (128 * 1024 // size, 128 * 1024 // size + 1, 201_023 // size):
        check(dtype, "sum", [operand(dtype, count, rank) for rank in range(2)])


@pytest.mark.parametrize("divisor", [2.0, 3.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_divisor(dtype, divisor):
    for n in (1, 2, 3):
        check(dtype, "avg", [operand(dtype, 517, rank) for rank in range(n)], divisor)


@pytest.mark.parametrize("dtype", NARROW)
def test_weights(dtype):
    for weights in ([0.5], [0.25, 0.5], [0.625, 0.125, 0.25], [2.0**-4] * 9):
        for count in (1, 517):
            operands = [operand(dtype, count, rank) for rank in range(len(weights))]
            check(dtype, "avg", operands, divisor=sum(weights), weights=weights)


@pytest.mark.parametrize("n", [2, 3, 5, 64, 100])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_mean_has_the_bits_of_the_sum_divided_and_does_not_overflow(dtype, n):
    """All codes, and the largest and least numbers beside themselves: weights change nothing but what is too large."""
    codes = all_codes(dtype)
    shifted = [from_bytes(dtype, np.roll(as_bytes(codes), 37 * k * codes.element_size())) for k in range(n)]
    power = 1 << (n - 1).bit_length()
    for operands in ([codes] * n, shifted):
        mean = accumulate(dtype, "avg", operands, n / power, weights=[1 / power] * n)
        finite = torch.stack([each.float().isfinite() for each in operands]).all(0)
        assert mean.float()[finite].isfinite().all()
        divided = accumulate(dtype, "avg", operands, n).float()
        kept = divided.isfinite() | ~finite
        assert torch.equal(mean.float()[kept].nan_to_num(7), divided[kept].nan_to_num(7))


@pytest.mark.parametrize("dtype", TORCH)
def test_any_alignment(dtype):
    for k in range(1, 16):
        operands = [operand(dtype, 203 + k, rank) for rank in range(3)]
        check(dtype, "sum", operands, misalignments=[k, 5 * k % 16, 3 * k % 16, 0])
        check(dtype, "sum", operands[:1], misalignments=[k, 16 - k])


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_destination_is_a_source(dtype, op):
    for alias in range(3):
        check(dtype, op, [operand(dtype, 333, rank) for rank in range(3)], alias=alias)


def test_one_buffer_for_all():
    source = operand("int32", 99, 0)
    buffer = Buffer(as_bytes(source))
    _C.accumulate("int32", "sum", [buffer.pointer], [buffer.pointer] * 3, 99)
    assert torch.equal(from_bytes("int32", buffer.payload), 3 * source)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_streamed_copies(name):
    assert _C.select_instruction_set(name)
    for count in (0, 1, 63, 64, 65, 1000, 128 * 1024, 300_007):
        for misalignment in (0, 1, 15, 48):
            source = Buffer(as_bytes(operand("uint8", count, 1)), 7)
            dst = Buffer(np.full(count, 0x5A, np.uint8), misalignment)
            _C.stream(dst.pointer, source.pointer, count)
            assert dst.unchanged(but_payload=True)
            assert np.array_equal(dst.payload, source.payload)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_pair_of_float8_codes(dtype, op):
    codes = np.arange(256, dtype=np.uint8)
    pair = [from_bytes(dtype, codes.repeat(256)), from_bytes(dtype, np.tile(codes, 256))]
    check(dtype, op, pair)
    check(dtype, op, pair, divisor=3.0)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_code(dtype, op):
    codes = all_codes(dtype)
    for partner in (0.0, 1.0, -1.5, 2.0**-14, 65504.0, float("inf"), float("nan")):
        check(dtype, op, [codes, torch.full_like(codes, partner)])
    check(dtype, op, [codes, from_bytes(dtype, as_bytes(codes)[::-1])])


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_of_float32(dtype):
    """The quotients of all codes lie anywhere between them, and half-way where the divisor is a power of two."""
    codes = all_codes(dtype)
    others = from_bytes(dtype, np.roll(as_bytes(codes), 9 * codes.element_size()))
    for divisor in (2.0, 4.0, 512.0, 2.0**14, 2.0**-1, 2.0**-14, 3.0, 0.7, 1.0 / 449, 7e-5, 7e5):
        check(dtype, "avg", [codes], divisor)
        check(dtype, "avg", [codes, others], divisor)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounds_once(dtype):
    """One and many half-units in its last place: rounded after each sum, the result would stay one."""
    half_unit = torch.finfo(TORCH[dtype]).eps / 2
    operands = [torch.tensor([x] * 70).to(TORCH[dtype]) for x in [1.0] + [half_unit] * 8]
    check(dtype, "sum", operands)
    assert accumulate(dtype, "sum", operands)[0].item() == 1 + 8 * half_unit


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_keep_nan(dtype, op):
    operands = [torch.full((9,), float(rank)).to(TORCH[dtype]) for rank in range(3)]
    nan = torch.full((9,), float("nan")).to(TORCH[dtype])
    for rank in range(3):
        poisoned = [nan if k == rank else operand for k, operand in enumerate(operands)]
        for name in INSTRUCTION_SETS:
            assert _C.select_instruction_set(name)
            assert torch.isnan(accumulate(dtype, op, poisoned).to(torch.float32)).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype):
    info = torch.iinfo(TORCH[dtype])
    largest = torch.full((77,), info.max, dtype=TORCH[dtype])
    one = torch.ones_like(largest)
    assert (accumulate(dtype, "sum", [largest, one]) == info.min).all()
    assert (accumulate(dtype, "product", [largest, largest]) == 1).all()


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3, -(2.0**20), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_scale(dtype, factor):
    for count in (0, 1, 63, 1031):
        source = all_codes(dtype) if dtype in NARROW and count > 1 else operand(dtype, count, 0)
        wanted = expected_scale(dtype, source, factor)
        for name in INSTRUCTION_SETS:
            assert _C.select_instruction_set(name)
            src = Buffer(as_bytes(source), 3)
            dst = Buffer(np.zeros_like(src.payload), 1)
            _C.scale(dtype, dst.pointer, src.pointer, len(source), factor)
            assert src.unchanged() and dst.unchanged(but_payload=True)
            _C.scale(dtype, src.pointer, src.pointer, len(source), factor)
            assert src.unchanged(but_payload=True)
            for result in (dst, src):
                assert_same(dtype, from_bytes(dtype, result.payload), wanted, f"{dtype} times {factor} on {name}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_logaddexp(dtype):
    """Within the promised distance of NumPy's, which is exact here, and the same bits on all instruction sets."""
    pairs = [[operand(dtype, count, rank) for rank in range(2)] for count in (1, 7, 1031, 40_000)]
    near = torch.randn(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs += [[(scale * each).to(TORCH[dtype]) for each in (near, near.flip(0))] for scale in (1e-3, 1.0, 30.0)]
    for pair in [*pairs, edge_pairs(dtype)]:
        exact = np.longdouble if dtype == "float64" else np.float64
        with np.errstate(all="ignore"):
            a, b = (lanes(dtype, each).astype(exact) for each in pair)
            wanted = np.where(a == b, a + np.log(exact(2)), np.logaddexp(a, b))  # NumPy has NaN for equal infinities
            largest = np.fmax(np.fmax(abs(a), abs(b)), abs(wanted))
        first = None
        for name in INSTRUCTION_SETS:
            assert _C.select_instruction_set(name)
            result = accumulate(dtype, "logaddexp", pair)
            first = result if first is None else first
            assert_same(dtype, result, first, f"{dtype} on {name}, against {INSTRUCTION_SETS[0]}")
        info = torch.finfo(TORCH[dtype])
        with np.errstate(all="ignore"):
            values = lanes(dtype, first).astype(exact)
            limit = 6 * np.fmax(largest * info.eps, info.tiny)
            right = (values == wanted) | (np.isnan(values) & np.isnan(wanted)) | (abs(values - wanted) <= limit)
            right |= (abs(wanted) > info.max * (1 - info.eps)) & (abs(values) >= info.max)  # rounded to infinity or 448
        assert right.all(), [(a[i], b[i], values[i], wanted[i]) for i in np.flatnonzero(~right)[:5]]


def test_supports():
    for dtype, op in itertools.product(TORCH, (*OPS, "logaddexp")):
        assert _C.kernel_supports(dtype, op) == supported(dtype, op), (dtype, op)


def test_instruction_sets():
    assert INSTRUCTION_SETS[0] == DEFAULT
    for name in INSTRUCTION_SETS:
        assert _C.select_instruction_set(name)
        assert _C.instruction_set() == name
    assert not _C.select_instruction_set("mmx")
    assert _C.instruction_set() == INSTRUCTION_SETS[-1]
