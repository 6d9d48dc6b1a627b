"""Every kernel against NumPy and torch, on each instruction set that this CPU runs, bit for bit.

References combine in the type that the contract names, from left to right, with NumPy, and round once, with torch.
"""

import functools
import zlib

import numpy as np
import pytest
import torch

from ringreduce import _C

TORCH = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128"),
    )
}
FLOATS = [d for d, t in TORCH.items() if t.is_floating_point]
COMPLEX = ["complex64", "complex128"]
NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]

OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"]


def supported(dtype, op):
    """The table in accumulate.h, written down a second time."""
    if op in ("avg", "premul_sum"):
        return dtype in FLOATS + COMPLEX
    if op in ("band", "bor", "bxor"):
        return dtype in [*INTEGERS, "bool"]
    return op in ("sum", "product") or dtype not in COMPLEX


CASES = [(dtype, op) for dtype in TORCH for op in OPS if supported(dtype, op)]

DEFAULT = _C.instruction_set()
INSTRUCTION_SETS = [name for name in ("avx512", "avx2", "neon", "baseline") if _C.select_instruction_set(name)]
_C.select_instruction_set(DEFAULT)


@pytest.fixture(autouse=True)
def restore_instruction_set():
    yield
    assert _C.select_instruction_set(DEFAULT)


# ---- Elements and their bytes ----------------------------------------------------------------------------------------


def as_bytes(tensor):
    if len(tensor) == 0:  # torch changes no empty tensor's element size
        return np.empty(0, np.uint8)
    return tensor.contiguous().view(torch.uint8).numpy()


def from_bytes(dtype, codes):
    if codes.size == 0:
        return torch.empty(0, dtype=TORCH[dtype])
    return torch.from_numpy(np.ascontiguousarray(codes)).view(TORCH[dtype])


def all_codes(dtype):
    size = TORCH[dtype].itemsize
    return from_bytes(dtype, np.arange(2 ** (8 * size), dtype=f"u{size}").view(np.uint8))


# ---- Operands --------------------------------------------------------------------------------------------------------


def operand(dtype, count, rank):
    """`count` elements that differ by rank: half are any code at all, half ordinary numbers of many magnitudes."""
    rng = np.random.default_rng([zlib.crc32(dtype.encode()), count, rank])
    size = TORCH[dtype].itemsize
    codes = rng.integers(0, 256, count * size, dtype=np.uint8)
    if dtype == "bool":
        return torch.from_numpy(codes & 3)  # left as bytes: 2 and 3 are true as well
    codes = from_bytes(dtype, codes)
    if dtype in INTEGERS:
        return codes
    parts = 2 if dtype in COMPLEX else 1
    numbers = rng.standard_normal(count * parts) * 2.0 ** rng.integers(-9, 9, count * parts)
    special = rng.random(numbers.size) < 0.1
    numbers[special] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.count_nonzero(special))
    numbers = torch.from_numpy(numbers.view(np.complex128) if parts == 2 else numbers).to(TORCH[dtype])
    return from_bytes(dtype, np.where(rng.random(count).repeat(size) < 0.5, as_bytes(numbers), as_bytes(codes)))


# ---- References ------------------------------------------------------------------------------------------------------

COMBINE = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
COMBINE_BOOL = {**COMBINE, "sum": np.logical_or, "product": np.logical_and}


def complex_product(a, b):
    """The schoolbook formula; NumPy's own may use fused operations."""
    return np.stack([a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]])


def lanes(dtype, tensor):
    """The operand as elements are combined; complex numbers as a pair of rows."""
    if dtype in NARROW:
        return tensor.to(torch.float32).numpy()
    if dtype in COMPLEX:
        return tensor.numpy().view(tensor.real.numpy().dtype).reshape(-1, 2).T
    return tensor.numpy() != 0 if dtype == "bool" else tensor.numpy()


def rounded(dtype, values):
    if dtype in COMPLEX:
        return from_bytes(dtype, np.ascontiguousarray(values.T).reshape(-1).view(np.uint8))
    if dtype == "float8_e4m3fn":
        values = values.clip(-448, 448)  # torch 2.11 gives NaN for what is too large, later ones saturate
    return torch.from_numpy(values).to(TORCH[dtype])


def expected(dtype, op, operands, divisor=1.0):
    combine = (COMBINE_BOOL if dtype == "bool" else COMBINE)[op]
    if dtype in COMPLEX and op == "product":
        combine = complex_product
    with np.errstate(all="ignore"):
        values = functools.reduce(combine, [lanes(dtype, t) for t in operands])
        if divisor != 1:
            values = values / values.dtype.type(divisor)
    return rounded(dtype, values)


def expected_scale(dtype, source, factor):
    values = lanes(dtype, source)
    with np.errstate(all="ignore"):
        return rounded(dtype, values * values.dtype.type(factor))


# ---- Running and comparing -------------------------------------------------------------------------------------------

GUARD = 64


class Buffer:
    """Bytes at a chosen distance from 64-byte alignment, between guards."""

    def __init__(self, content, misalignment=0):
        self.size = content.size
        self.memory = np.full(self.size + 2 * GUARD + 128, 0xA5, np.uint8)
        self.start = GUARD + (-self.memory.ctypes.data) % 64 + misalignment
        self.payload[:] = content
        self.before = self.memory.copy()

    @property
    def payload(self):
        return self.memory[self.start : self.start + self.size]

    @property
    def pointer(self):
        return self.memory.ctypes.data + self.start

    def unchanged(self, *, but_payload=False):
        differs = self.memory != self.before
        if but_payload:
            differs[self.start : self.start + self.size] = False
        return not differs.any()


def accumulate(dtype, op, operands, divisor=1.0, misalignments=None, alias=None):
    """What the kernel gives, after a check that it wrote its result and nothing else."""
    misalignments = misalignments or [0] * (len(operands) + 1)
    sources = [Buffer(as_bytes(t), m) for t, m in zip(operands, misalignments[1:], strict=True)]
    dst = Buffer(np.full_like(sources[0].payload, 0x5A), misalignments[0]) if alias is None else sources[alias]
    second = Buffer(np.full_like(sources[0].payload, 0x5A), misalignments[0])
    _C.accumulate(dtype, op, [dst.pointer, second.pointer], [s.pointer for s in sources], len(operands[0]), divisor)
    assert dst.unchanged(but_payload=True)
    assert second.unchanged(but_payload=True)
    assert np.array_equal(dst.payload, second.payload)
    assert all(s.unchanged() for s in sources if s is not dst)
    return from_bytes(dtype, dst.payload)


def comparable(dtype, tensor, op):
    """The elements' codes without what is not promised: which NaN comes out, and of min and max the sign of zeros."""
    codes = as_bytes(tensor)
    if dtype not in FLOATS + COMPLEX:
        return codes.view(f"u{tensor.element_size()}")
    codes = codes.view(f"u{tensor.real.element_size() if dtype in COMPLEX else tensor.element_size()}")
    nan = np.isnan(lanes(dtype, tensor).T.reshape(-1))
    codes = np.where(nan, np.iinfo(codes.dtype).max, codes)
    return np.where(codes == np.iinfo(codes.dtype).max // 2 + 1, 0, codes) if op in ("min", "max") else codes


def assert_same(dtype, actual, wanted, note, op=None):
    actual, wanted = comparable(dtype, actual, op), comparable(dtype, wanted, op)
    if not np.array_equal(actual, wanted):
        wrong = (actual != wanted).nonzero()[0]
        i = wrong[0]
        pytest.fail(
            f"{note}: {wrong.size} of {wanted.size} are wrong; [{i}] is {actual[i]:#x}, should be {wanted[i]:#x}"
        )


def check(dtype, op, operands, divisor=1.0, misalignments=None, alias=None):
    """Compares with the reference, and all instruction sets' results with the first one's."""
    wanted = expected(dtype, op, operands, divisor)
    first = None
    for name in INSTRUCTION_SETS:
        assert _C.select_instruction_set(name)
        actual = accumulate(dtype, op, operands, divisor, misalignments, alias)
        note = f"{dtype} {op} on {name}, {len(operands)} operands of {len(wanted)} elements"
        assert_same(dtype, actual, wanted, note, op)
        first = actual if first is None else first
        assert_same(dtype, actual, first, f"{note}, against {INSTRUCTION_SETS[0]}")  # signs of zeros as well


# ---- Tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_accumulate(dtype, op, n):
    for count in (0, 1, 7, 127, 256, 1031):
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


@pytest.mark.parametrize("dtype", TORCH)
def test_any_alignment(dtype):
    for k in range(1, 16):
        operands = [operand(dtype, 203 + k, rank) for rank in range(3)]
        check(dtype, "sum", operands, misalignments=[k, 5 * k % 16, 3 * k % 16, 0])
        check(dtype, "sum", operands[:1], misalignments=[k, 16 - k])


@pytest.mark.parametrize("alias", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_destination_is_a_source(dtype, op, alias):
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


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", TORCH)
def test_supports(dtype, op):
    assert _C.kernel_supports(dtype, op) == supported(dtype, op)


def test_instruction_sets():
    assert INSTRUCTION_SETS[0] == DEFAULT
    for name in INSTRUCTION_SETS:
        assert _C.select_instruction_set(name)
        assert _C.instruction_set() == name
    assert not _C.select_instruction_set("mmx")
    assert _C.instruction_set() == INSTRUCTION_SETS[-1]
