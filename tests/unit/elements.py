"""What tests of kernels share: elements and their bytes, operands, references, buffers between guards.

References combine in the type that csrc/kernels/accumulate.h names, from left to right, with NumPy, and round once,
with torch.
"""

import functools
import zlib

import numpy as np
import pytest
import torch

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
    if op == "logaddexp":
        return dtype in FLOATS
    if op in ("band", "bor", "bxor"):
        return dtype in [*INTEGERS, "bool"]
    return op in ("sum", "product") or dtype not in COMPLEX


CASES = [(dtype, op) for dtype in TORCH for op in OPS if supported(dtype, op)]


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


@functools.cache
def operand(dtype, count, rank):
    """`count` elements that differ by rank: half are any code at all, half ordinary numbers of many magnitudes.

    All callers have the same tensor and must not change it.
    """
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


def edges(dtype):
    """Numbers at the edges of a float type and between its codes, each with both signs: zero, the least and the largest
    subnormal, the least normal and the largest number, infinity, a quiet and a signalling NaN, one, its neighbours, and
    halves of their distance. What a type lacks is left out."""
    size, info = TORCH[dtype].itemsize, torch.finfo(TORCH[dtype])
    unsigned = np.dtype(f"u{size}")
    sign = 1 << (8 * size - 1)

    def code(number):
        return int(as_bytes(torch.tensor([number], dtype=torch.float64).to(TORCH[dtype])).view(unsigned)[0])

    normal, largest, one = code(info.smallest_normal), code(info.max), code(1.0)
    codes = {0, 1, 2, 3, normal - 1, normal, normal + 1, largest - 1, largest, one - 1, one, one + 1, one + 2}
    codes |= {code(info.eps / 2), code(info.eps / 4), code(info.eps * 3 / 2), code(info.max / 2)}
    codes |= {sign - 1}  # a NaN with all bits set
    if dtype != "float8_e4m3fn":  # which has neither infinities nor other NaNs
        infinity = largest + 1
        codes |= {infinity, infinity + 1, infinity | normal >> 1}  # the least NaN is signalling, the last one quiet
    codes |= {code | sign for code in codes}
    return from_bytes(dtype, np.array(sorted(codes), unsigned).view(np.uint8))


def edge_pairs(dtype):
    """Two operands that have all pairs of `edges`."""
    codes = as_bytes(edges(dtype)).view(f"u{TORCH[dtype].itemsize}")
    pairs = (codes.repeat(codes.size), np.tile(codes, codes.size))
    return [from_bytes(dtype, half.view(np.uint8)) for half in pairs]


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


def expected(dtype, op, operands, divisor=1.0, weights=()):
    combine = (COMBINE_BOOL if dtype == "bool" else COMBINE)[op]
    if dtype in COMPLEX and op == "product":
        combine = complex_product
    with np.errstate(all="ignore"):
        given = [lanes(dtype, t) for t in operands]
        if weights:
            given = [each * np.float32(weight) for each, weight in zip(given, weights, strict=True)]
        values = functools.reduce(combine, given)
        if divisor != 1:
            values = values / values.dtype.type(divisor)
    return rounded(dtype, values)


def expected_scale(dtype, source, factor):
    values = lanes(dtype, source)
    with np.errstate(all="ignore"):
        return rounded(dtype, values * values.dtype.type(factor))


# ---- Buffers and comparisons -----------------------------------------------------------------------------------------

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
