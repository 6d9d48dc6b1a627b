"""Every accumulate kernel on the device against the CPU's, bit for bit; then small collectives between two ranks.

    python -m bench.gpu.kernels
    compute-sanitizer --target-processes all --tool racecheck python -m bench.gpu.kernels --few

Random values, every code of the narrow floats, and all pairs of values at the edges of float types: so also conversions
by the GPU's instructions. Bits are compared, but any NaN counts as any other: which one comes out is not promised.
`--few`: one size and one alignment of each kernel, for a sanitizer, under which a kernel takes a hundred times as long.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.gpu import device, reports

DTYPES = {
    **{name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")},
    **{name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")},
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "uint8", "bool")},
    **{name: getattr(torch, name) for name in ("complex64", "complex128")},
}
OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")
COUNTS = (0, 1, 17, 1000, 100_003)
SOURCES = (1, 2, 3, 7)
MARGIN = 16  # bytes before and after a result, which must stay as they are


def cases(few: bool) -> Iterator[tuple[int, int, int]]:
    """Elements, sources, and by how many elements destination and sources start off a multiple of 16 bytes."""
    if few:
        yield 1000, 3, 1
        return
    for count in COUNTS:
        for number, sources in enumerate(SOURCES):
            yield count, sources, number


def operands(dtype: torch.dtype, count: int, sources: int) -> list[torch.Tensor]:
    """Random values around 0, on the CPU."""
    if dtype is torch.bool:
        return [torch.randint(2, (count,), dtype=torch.bool) for _ in range(sources)]
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.complex128 if dtype.is_complex else torch.float64
        return [torch.randn(count, dtype=real).to(dtype) for _ in range(sources)]
    low, high = (0, 256) if dtype is torch.uint8 else (-100, 100)
    return [torch.randint(low, high, (count,)).to(dtype) for _ in range(sources)]


def special(dtype: torch.dtype) -> list[torch.Tensor]:
    """Two operands with all pairs of a float type's edges: zeros, subnormals, the largest number, infinities, NaNs, and
    what lies half-way between codes. Of narrow floats then every code, next to another one."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.finfo(dtype)
    normal, eps = info.smallest_normal, info.eps
    numbers = [0.0, normal * eps, normal * eps * 3, normal * (1 - eps), normal, info.max, 1.0, 1 + eps, 1 - eps / 2]
    numbers += [eps / 2, eps / 4, eps * 3 / 2, info.max * eps / 4, float("inf"), float("nan")]
    edges = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float64).to(dtype)
    codes = edges.view(integer)
    codes = torch.cat([codes, codes[edges.double().isinf()] + 1])  # NaNs, signalling ones where there are such
    pair = [codes.repeat_interleave(codes.numel()), codes.repeat(codes.numel())]
    if dtype.itemsize <= 2:
        count = 2 ** (8 * dtype.itemsize)
        every = torch.arange(count).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
        pair = [torch.cat([pair[0], every]), torch.cat([pair[1], every[torch.arange(count) * 40503 % count]])]
    return [half.view(dtype) for half in pair]


def differing(dtype: torch.dtype, found: torch.Tensor, expected: torch.Tensor) -> int:
    """Bytes that differ where not both have a NaN."""
    differs = found != expected
    if dtype.is_floating_point or dtype.is_complex:
        numbers = [codes.view(dtype) for codes in (found, expected)]
        if dtype.is_complex:
            numbers = [torch.view_as_real(of).flatten() for of in numbers]
        nan = [of.double().isnan().repeat_interleave(of.itemsize) for of in numbers]
        differs &= ~(nan[0] & nan[1])
    return int(differs.sum())


def wrong_bytes(dtype_name: str, op: str, values: list[torch.Tensor], shift: int) -> int:
    """Bytes of the device's result, or next to it, that differ from the CPU's."""
    from ringreduce import _C

    dtype, count = DTYPES[dtype_name], values[0].numel()
    size, ahead = count * dtype.itemsize, MARGIN + shift * dtype.itemsize % MARGIN
    expected = torch.full((ahead + size + MARGIN,), 0x5A, dtype=torch.uint8)
    found = expected.cuda()
    pointers = [value.data_ptr() for value in values]
    _C.accumulate(dtype_name, op, [expected.data_ptr() + ahead], pointers, count)
    inputs = []
    for value in values:
        buffer = torch.zeros(ahead + size + MARGIN, dtype=torch.uint8, device="cuda")
        buffer[ahead : ahead + size].copy_(value.view(torch.uint8))
        inputs.append(buffer)
    _C.gpu_accumulate(
        *device.kernels(),
        dtype_name,
        op,
        found.data_ptr() + ahead,
        [buffer.data_ptr() + ahead for buffer in inputs],
        count,
        torch.cuda.current_stream().cuda_stream,
    )
    here = found.cpu()
    payload = slice(ahead, ahead + size)
    wrong = differing(dtype, here[payload].clone(), expected[payload].clone())
    here[payload] = expected[payload]
    return wrong + int((here != expected).sum())


def check_kernels(report: reports.Report, few: bool) -> None:
    """A row for each kernel: how many results were compared, and which differ."""
    from ringreduce import _C

    torch.manual_seed(0)
    for name, dtype in DTYPES.items():
        for op in OPS:
            if not _C.kernel_supports(name, op):
                continue
            tried = {
                f"{count} elements of {sources} sources, {shift} off": (operands(dtype, count, sources), shift)
                for count, sources, shift in cases(few)
            }
            if dtype.is_floating_point:
                pair = special(dtype)
                tried |= {"pairs of edges": (pair, 0), "edges, converted only": (pair[:1], 0)}
            faults = []
            for case, (values, shift) in tried.items():
                if wrong := wrong_bytes(name, op, values, shift):
                    faults.append(f"{op} of {name}, {case}: {wrong} bytes differ")
            line = f"{op} of {name}: {len(tried)} results compared, {len(faults)} wrong"
            report.row("\n".join([line, *faults]), dtype=name, op=op, faults=faults, wrong=len(faults))


def check_collectives(stand_in: bool) -> list[str]:
    """One rank of a group; what is wrong."""
    import ringreduce

    device.use(stand_in)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank if torch.cuda.device_count() >= ranks else 0)
    options: Any = ringreduce.Options(gpu_transport="peer")
    group = dist.new_group(backend="ringreduce", pg_options=options, timeout=harness.TIMEOUT)
    own = (torch.arange(10_007) % 31 + rank).float()
    total = sum((torch.arange(10_007) % 31 + r).float() for r in range(ranks))
    parts = [torch.full((1000,), float(r)) for r in range(ranks)]
    found = {}
    x = own.cuda()
    dist.all_reduce(x, group=group)
    found["all_reduce"] = (x.cpu(), total)
    x = own.cuda()
    dist.broadcast(x, 0, group=group)
    found["broadcast"] = (x.cpu(), (torch.arange(10_007) % 31).float())
    gathered = torch.empty(1000 * ranks, device="cuda")
    dist.all_gather_into_tensor(gathered, parts[rank].cuda(), group=group)
    found["all_gather"] = (gathered.cpu(), torch.cat(parts))
    scattered = torch.empty(1000, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.cat(parts).cuda(), group=group)
    found["reduce_scatter"] = (scattered.cpu(), parts[rank] * ranks)
    wrong = [f"rank {rank}: {name}" for name, (here, expected) in found.items() if not torch.equal(here, expected)]
    answers: list[Any] = [None] * ranks
    dist.all_gather_object(answers, wrong)
    return [fault for answer in answers for fault in answer]


def main() -> int:
    parser = reports.parser(__doc__)
    parser.add_argument("--few", action="store_true", help="one case of each kernel")
    args = parser.parse_args()
    report = reports.begin(args, "kernels of ringreduce, bit for bit against the CPU's")
    check_kernels(report, args.few)
    faults = harness.start_ranks(2, check_collectives, args.stand_in)
    report.row("\n".join([f"4 collectives between 2 ranks, {len(faults)} wrong", *faults]), wrong=len(faults))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
