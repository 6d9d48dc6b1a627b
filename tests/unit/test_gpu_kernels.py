"""The bodies of the GPU's accumulate kernels run on the CPU, against NumPy, torch and the CPU's kernels.

They are compiled by the C++ compiler, with its checks of undefined behaviour. What only a GPU runs, the kernels' launch
and the conversions of narrow floats by instruction, is not tested here.
"""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from stand_in import build
from unit.elements import (
    CASES,
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    NARROW,
    TORCH,
    Buffer,
    all_codes,
    as_bytes,
    assert_same,
    edge_pairs,
    edges,
    expected,
    expected_scale,
    from_bytes,
    operand,
)

from ringreduce import _C

MOST_SOURCES = 64
THREADS = [1, 7, 256, 1000]


class Job(ctypes.Structure):
    """`Accumulate` of csrc/kernels/gpu/job.h."""

    _fields_ = (
        ("dsts", ctypes.c_void_p * 2),
        ("srcs", ctypes.c_void_p * MOST_SOURCES),
        ("weights", ctypes.c_float * MOST_SOURCES),
        ("count", ctypes.c_uint64),
        ("factor", ctypes.c_double),
        ("divisor", ctypes.c_double),
        ("copies", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("scaled", ctypes.c_int32),
        ("weighs", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def gpu():
    folder = build.build(build.ROOT / "build/stand_in", build.GPU_KERNELS)
    found = ctypes.CDLL(str(folder / "gpu_kernels.so"))
    found.run.argtypes = (ctypes.c_char_p, ctypes.POINTER(Job), ctypes.c_uint64, ctypes.c_uint)
    found.run.restype = ctypes.c_bool
    found.kernel.argtypes = (ctypes.c_size_t,)
    found.kernel.restype = ctypes.c_char_p
    found.kernel_for_names.restype = ctypes.c_uint32
    found.job_bytes.restype = ctypes.c_size_t
    found.packs.restype = ctypes.c_uint64
    found.narrow_to_float8_e5m2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    return found


# ---- Running and comparing -------------------------------------------------------------------------------------------


def kernel_for(gpu, dtype, op):
    name = ctypes.create_string_buffer(64)
    parts = gpu.kernel_for_names(dtype.encode(), op.encode(), name)
    return name.value, parts


def run(gpu, kernel, dsts, srcs, count, *, threads=256, divisor=1.0, scaled=-1, factor=1.0, weights=()):
    """Runs all `threads` on pointers, in an order that depends on their number."""
    job = Job(count=count, factor=factor, divisor=divisor, copies=len(dsts), n=len(srcs), scaled=scaled)
    job.weighs = bool(weights)
    job.weights[: len(weights)] = weights
    job.dsts[: len(dsts)] = dsts
    job.srcs[: len(srcs)] = srcs
    assert gpu.run(kernel, ctypes.byref(job), threads, threads), f"no kernel {kernel.decode()}"


def on_cpu(dtype, op, operands, divisor, weights=()):
    """What the CPU's kernel gives."""
    sources = [as_bytes(t).copy() for t in operands]
    dst = np.empty_like(sources[0])
    _C.accumulate(dtype, op, [dst.ctypes.data], [s.ctypes.data for s in sources], len(operands[0]), divisor, weights)
    return from_bytes(dtype, dst)


def check(gpu, dtype, op, operands, *, wanted=None, misalignments=None, alias=None, copies=1, **how):
    """Compares the kernel's results with `wanted`, the CPU's by default, and checks that it wrote nothing else.

    `misalignments` are those of the destinations, as many as copies, then of the sources.
    """
    wanted = on_cpu(dtype, op, operands, how.get("divisor", 1.0), how.get("weights", ())) if wanted is None else wanted
    misalignments = misalignments or [0] * (copies + len(operands))
    sources = [Buffer(as_bytes(t), m) for t, m in zip(operands, misalignments[copies:], strict=True)]
    dsts = [Buffer(np.full_like(sources[0].payload, 0x5A), m) for m in misalignments[:copies]]
    if alias is not None:
        dsts[0] = sources[alias]
    kernel, parts = kernel_for(gpu, dtype, op)
    run(gpu, kernel, [d.pointer for d in dsts], [s.pointer for s in sources], parts * len(operands[0]), **how)
    note = f"{kernel.decode()}, {len(operands)} operands of {len(wanted)} {dtype}, at {misalignments}, {how}"
    for dst in dsts:
        assert dst.unchanged(but_payload=True), note
        assert_same(dtype, from_bytes(dtype, dst.payload), wanted, note)
    assert all(s.unchanged() for s in sources if s not in dsts), note


# ---- The table -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_job_is_what_the_kernels_expect(gpu):
    assert gpu.job_bytes() == ctypes.sizeof(Job)


def test_each_case_has_a_kernel_and_each_kernel_a_case(gpu):
    table = list(itertools.takewhile(lambda name: name is not None, map(gpu.kernel, itertools.count())))
    used = {kernel_for(gpu, dtype, op)[0] for dtype, op in CASES}
    assert len(set(table)) == len(table)
    assert set(table) == used


def test_kernels_see_as_many_bytes_as_there_are(gpu):
    for dtype, op in CASES:
        name, parts = kernel_for(gpu, dtype, op)
        elements = name.decode().rsplit("_", 1)[0]
        seen = 1 if elements == "bits" else getattr(torch, elements).itemsize
        assert parts * seen == TORCH[dtype].itemsize, (dtype, op)


def test_unknown_kernels_do_not_run(gpu):
    assert not gpu.run(b"float32_sums", ctypes.byref(Job()), 1, 0)


# ---- Every dtype and operation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_any_number_of_sources(gpu, dtype, op):
    for n, threads in zip([1, 2, 3, 5, 8, 64], itertools.cycle(THREADS)):
        for count, copies in zip([0, 1, 7, 127, 256, 1031], itertools.cycle([1, 2])):
            operands = [operand(dtype, count, rank) for rank in range(n)]
            divisor = n if op == "avg" else 1.0
            wanted = on_cpu(dtype, op, operands, divisor)
            assert_same(dtype, wanted, expected(dtype, op, operands, divisor), f"{dtype} {op} on the CPU", op)
            check(gpu, dtype, op, operands, wanted=wanted, threads=threads, copies=copies, divisor=divisor)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_any_alignment_of_each_pointer(gpu, dtype, op):
    operands = [operand(dtype, 203, rank) for rank in range(2)]
    wanted = on_cpu(dtype, op, operands, 1.0)
    for k in range(16):
        for pointers in ([k, k, k, k], [k, 0, 0, 0], [0, k, 0, 0], [0, 0, k, 0], [0, 0, 0, k], [k, 16 - k, 3 * k, k]):
            check(gpu, dtype, op, operands, wanted=wanted, misalignments=pointers, copies=2, threads=7)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_pointers_that_are_alike_are_accessed_by_packs(gpu, dtype, op):
    """All but the bytes before the first pack and after the last: the right results do not tell."""
    count, sources, copies = 203, 3, 2
    operands = [operand(dtype, count, rank) for rank in range(sources)]
    wanted = on_cpu(dtype, op, operands, 1.0)
    _, parts = kernel_for(gpu, dtype, op)
    element, size = TORCH[dtype].itemsize // parts, count * TORCH[dtype].itemsize
    for k in range(16):
        ahead = -k % 16
        packs = (size - ahead) // 16 if ahead % element == 0 else 0  # else elements lie across packs
        gpu.packs()
        check(gpu, dtype, op, operands, wanted=wanted, misalignments=[k] * (copies + sources), copies=copies)
        assert gpu.packs() == packs * (copies + sources), k
        check(gpu, dtype, op, operands, wanted=wanted, misalignments=[k, k, k, k, k + 4], copies=copies)
        assert gpu.packs() == 0, k


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_any_number_of_threads(gpu, dtype, op):
    for count in (5003, 100_003):
        operands = [operand(dtype, count, rank) for rank in range(2)]
        wanted = on_cpu(dtype, op, operands, 1.0)
        for threads in THREADS:
            skew = TORCH[dtype].itemsize
            check(gpu, dtype, op, operands, wanted=wanted, threads=threads, misalignments=[skew] * 3)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_destination_is_a_source(gpu, dtype, op):
    operands = [operand(dtype, 333, rank) for rank in range(3)]
    for alias, dst, threads in itertools.product(range(3), [0, 3, 8], THREADS):
        skew = [dst, 0, 0, 0, 0]
        skew[2 + alias] = dst
        check(gpu, dtype, op, operands, misalignments=skew, alias=alias, copies=2, threads=threads)


@pytest.mark.parametrize("dtype", TORCH)
def test_any_size(gpu, dtype):
    """From nothing to several packs, wherever in one they begin."""
    for count in range(70):
        operands = [operand(dtype, count, rank) for rank in range(2)]
        wanted = on_cpu(dtype, "sum", operands, 1.0)
        for skew in (0, 1, 4, 8, 15):
            check(gpu, dtype, "sum", operands, wanted=wanted, misalignments=[skew] * 3, threads=3)


def test_one_buffer_for_all(gpu):
    source = operand("int32", 99, 0)
    buffer = Buffer(as_bytes(source), 4)
    run(gpu, b"uint32_sum", [buffer.pointer], [buffer.pointer] * 3, 99, threads=5)
    assert torch.equal(from_bytes("int32", buffer.payload), 3 * source)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("moved", [False, True])
def test_copy(gpu, moved, threads):
    name = ctypes.create_string_buffer(64)
    gpu.copy_kernel_name(name)
    kernel = b"move_bytes" if moved else name.value
    skews = ((0, 0, 0), (5, 5, 5), (4, 0, 12), (1, 9, 5), (3, 7, 8), (1, 0, 9))  # alike modulo 16, 4 and 1
    for count, skew in itertools.product((0, 1, 3, 15, 16, 17, 1000, 100_003), skews):
        source = Buffer(as_bytes(operand("uint8", count, 1)), skew[0])
        dsts = [Buffer(np.full(count, 0x5A, np.uint8), k) for k in skew[1:]]
        run(gpu, kernel, [d.pointer for d in dsts], [source.pointer], count, threads=threads)
        for dst in dsts:
            assert dst.unchanged(but_payload=True)
            assert np.array_equal(dst.payload, source.payload)
        assert source.unchanged()


def test_no_destination(gpu):
    source = Buffer(as_bytes(operand("int32", 9, 0)))
    run(gpu, b"uint32_sum", [], [source.pointer], 9)
    assert source.unchanged()


@pytest.mark.parametrize("op", ["sum", "band", "bxor"])
def test_any_byte_but_zero_is_true(gpu, op):
    codes = torch.arange(256, dtype=torch.uint8)
    for n in (1, 2):
        operands = [codes, codes.flip(0)][:n]
        check(gpu, "bool", op, operands, wanted=expected("bool", op, operands))


# ---- Floats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [2.0, 3.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_divisor(gpu, dtype, divisor):
    for n in (1, 2, 3):
        operands = [operand(dtype, 517, rank) for rank in range(n)]
        check(gpu, dtype, "avg", operands, wanted=expected(dtype, "avg", operands, divisor), divisor=divisor)


@pytest.mark.parametrize("dtype", NARROW)
def test_weights(gpu, dtype):
    for weights in ([0.5], [0.25, 0.5], [0.625, 0.125, 0.25], [2.0**-4] * 9):
        operands = [operand(dtype, 517, rank) for rank in range(len(weights))]
        check(gpu, dtype, "avg", operands, weights=weights, divisor=sum(weights))


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3, -(2.0**20), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_scaled_source_is_rounded_before_it_is_added(gpu, dtype, factor):
    for n, scaled in [(1, 0), (3, 0), (3, 1), (3, 2), (3, -1)]:
        operands = [operand(dtype, 517, rank) for rank in range(n)]
        scaled_ones = [expected_scale(dtype, t, factor) if k == scaled else t for k, t in enumerate(operands)]
        wanted = expected(dtype, "sum", scaled_ones)
        check(gpu, dtype, "premul_sum", operands, wanted=wanted, scaled=scaled, factor=factor)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scaled_and_divided(gpu, dtype):
    operands = [operand(dtype, 517, rank) for rank in range(3)]
    wanted = expected(dtype, "avg", [operands[0], expected_scale(dtype, operands[1], 0.3), operands[2]], 3.0)
    check(gpu, dtype, "avg", operands, wanted=wanted, scaled=1, factor=0.3, divisor=3.0)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_pair_of_float8_codes(gpu, dtype, op):
    codes = np.arange(256, dtype=np.uint8)
    pair = [from_bytes(dtype, codes.repeat(256)), from_bytes(dtype, np.tile(codes, 256))]
    check(gpu, dtype, op, pair)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_code(gpu, dtype, op):
    codes = all_codes(dtype)
    for partner in (0.0, 1.0, -1.5, 2.0**-14, 65504.0, float("inf"), float("nan")):
        check(gpu, dtype, op, [codes, torch.full_like(codes, partner)])
    check(gpu, dtype, op, [codes, from_bytes(dtype, as_bytes(codes)[::-1])])


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_of_float32(gpu, dtype):
    """The quotients of all codes lie anywhere between them, and half-way where the divisor is a power of two."""
    codes = all_codes(dtype)
    for divisor in (2.0, 4.0, 512.0, 2.0**14, 2.0**-1, 2.0**-14, 3.0, 0.7, 1.0 / 449, 7e-5, 7e5):
        check(gpu, dtype, "avg", [codes], wanted=expected(dtype, "avg", [codes], divisor), divisor=divisor)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_there_and_back(gpu, dtype):
    """To float32 and back: the same code, or any NaN for a NaN."""
    codes = all_codes(dtype)
    for op in ("sum", "product", "min", "max"):
        check(gpu, dtype, op, [codes], wanted=codes)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 0.1, 2.0**-20])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_edges(gpu, dtype, divisor):
    """The CPU's bits, also the sign of zeros. Any NaN counts as any other: its sign and payload are not promised."""
    pair = edge_pairs(dtype)
    for op in ("sum", "product", "min", "max") if divisor == 1 else ("avg",):
        check(gpu, dtype, op, pair, divisor=divisor)


@pytest.mark.parametrize("factor", [0.5, 1 / 3, -3.0, 2.0**20, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_edges_scaled(gpu, dtype, factor):
    pair = edge_pairs(dtype)
    for scaled in range(2):
        operands = [expected_scale(dtype, t, factor) if k == scaled else t for k, t in enumerate(pair)]
        wanted = on_cpu(dtype, "sum", operands, 1.0)
        check(gpu, dtype, "premul_sum", pair, wanted=wanted, scaled=scaled, factor=factor)


def test_edges_are_what_they_should_be():
    """Of each type: signed zeros, subnormals, infinities, and NaNs of both kinds."""
    for dtype in FLOATS:
        values = edges(dtype).to(torch.float64)
        least = torch.finfo(TORCH[dtype]).smallest_normal
        assert {0.0, 1.0, least, torch.finfo(TORCH[dtype]).max} <= set(values.tolist())
        assert ((values.abs() < least) & (values != 0)).sum() >= 6
        assert values.isinf().sum() == (0 if dtype == "float8_e4m3fn" else 2)
        assert values.isnan().sum() == (2 if dtype == "float8_e4m3fn" else 6)


# ---- What the PTX ISA says of the instructions that GPUs convert with ------------------------------------------------


def test_the_instruction_for_float8_e5m2_and_what_is_added_to_it(gpu):
    """cvt.rn.satfinite.e5m2x2.f32 "clamps to MAX_NORM" what is too large; the kernels then make it infinity."""
    halves = all_codes("float16").to(torch.float32)
    bounds = torch.tensor([57344.0, 61439.996, 61440.0, 61440.004, 65504.0, 65536.0, 1e30])
    values = torch.cat([halves, bounds, -bounds]).contiguous()
    codes = np.empty(values.numel(), np.uint8)
    gpu.narrow_to_float8_e5m2(values.data_ptr(), codes.ctypes.data, values.numel())
    assert_same("float8_e5m2", from_bytes("float8_e5m2", codes), values.to(torch.float8_e5m2), "by instruction")


def test_codes_of_float8_e5m2_are_upper_halves_of_float16():
    """The kernels widen them so: cvt.f32.f16 is exact, and float16 has the same exponents."""
    codes = np.arange(256, dtype=np.uint16)
    widened = torch.from_numpy((codes << 8).view(np.float16).astype(np.float32))
    wanted = all_codes("float8_e5m2").to(torch.float32)
    assert torch.equal(widened.nan_to_num(1.5), wanted.nan_to_num(1.5))


def test_float16_has_all_float8_e4m3fn():
    """cvt.rn.f16x2.e4m3x2 therefore is exact, subnormals included."""
    wanted = all_codes("float8_e4m3fn").to(torch.float32)
    assert torch.equal(wanted.to(torch.float16).to(torch.float32).nan_to_num(1e3), wanted.nan_to_num(1e3))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounds_once(gpu, dtype):
    """One and many half-units in its last place: rounded after each sum, the result would stay one."""
    half_unit = torch.finfo(TORCH[dtype]).eps / 2
    operands = [torch.tensor([x] * 70).to(TORCH[dtype]) for x in [1.0] + [half_unit] * 8]
    check(gpu, dtype, "sum", operands, wanted=torch.full((70,), 1 + 8 * half_unit).to(TORCH[dtype]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_keep_nan(gpu, dtype, op):
    operands = [torch.full((9,), float(rank)).to(TORCH[dtype]) for rank in range(3)]
    nan = torch.full((9,), float("nan")).to(TORCH[dtype])
    for rank in range(3):
        check(gpu, dtype, op, [nan if k == rank else t for k, t in enumerate(operands)], wanted=nan)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(gpu, dtype):
    info = torch.iinfo(TORCH[dtype])
    largest = torch.full((77,), info.max, dtype=TORCH[dtype])
    one = torch.ones_like(largest)
    check(gpu, dtype, "sum", [largest, one], wanted=torch.full_like(one, info.min))
    check(gpu, dtype, "product", [largest, largest], wanted=one)
