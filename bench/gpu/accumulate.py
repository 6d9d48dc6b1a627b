"""Sums of 2 and 4 sources by the accumulate kernels, next to copies on the same device and to torch's own sums.

    python -m bench.gpu.accumulate --json accumulate.json

`--json`: see reports.py. A row has dtype, sources, bytes (of a source), blocks (0: as the engine), and for
"ringreduce", "copy" and "torch" the median microseconds and GB/s; share is ringreduce's GB/s over copy's.
"""

import functools
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch

from bench import harness
from bench.gpu import device, reports

BAR = 0.9  # of the copy ceiling, for JUDGED sums of JUDGED_BYTES
JUDGED = ("float32", "bfloat16")
JUDGED_BYTES = 256 * 1024**2

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32")
SOURCES = (2, 4)
CHECKED = 1 << 24  # elements compared at once

METHOD = (
    "ringreduce: one launch of the accumulate kernel, dst = src0 + ... in the kernel's order, none of them dst.",
    "copy: cudaMemcpyAsync from device to device, of as many bytes as one source. torch: torch.add(out=) of two, "
    "torch.sum(out=) over a stack of four.",
    "GB/s counts bytes read and written, GB = 1e9: (sources + 1) x bytes for a sum, 2 x bytes for a copy.",
    "Times are of CUDA events around batches of calls; medians over batches, in which all take turns.",
    "Each call is on other memory than the one before; together four times the L2 cache or more.",
)


@dataclass
class Buffers:
    """Tensors of one call: `sources` rows and a result, which start at a multiple of 256 bytes."""

    dtype: torch.dtype
    sources: torch.Tensor
    result: torch.Tensor

    @classmethod
    def filled(cls, dtype: torch.dtype, sources: int, count: int) -> "Buffers":
        """Source k repeats k + 1 zeros and k + 1 ones, so sums are at most `sources`, which all dtypes have."""
        index = torch.arange(count, dtype=torch.int32, device="cuda")
        stack = torch.empty(sources, count, dtype=dtype, device="cuda")
        for k in range(sources):
            stack[k].copy_(index.div(k + 1, rounding_mode="floor").remainder(2))
        return cls(dtype, stack, torch.empty(count, dtype=dtype, device="cuda"))

    def accumulate(self, blocks: int) -> None:
        from ringreduce import _C

        stride = self.result.numel() * self.dtype.itemsize
        first = self.sources.data_ptr()
        _C.gpu_accumulate(
            *device.kernels(),
            str(self.dtype).removeprefix("torch."),
            "sum",
            self.result.data_ptr(),
            [first + k * stride for k in range(len(self.sources))],
            self.result.numel(),
            torch.cuda.current_stream().cuda_stream,
            blocks,
        )

    def torch_sum(self) -> harness.Call | None:
        if self.dtype.itemsize == 1:  # torch adds no float8
            return None
        if len(self.sources) == 2:
            return functools.partial(torch.add, self.sources[0], self.sources[1], out=self.result)
        return functools.partial(torch.sum, self.sources, 0, dtype=self.dtype, out=self.result)

    def wrong(self) -> int:
        """How many elements of the result are not the sum."""
        differ = 0
        for begin in range(0, self.result.numel(), CHECKED):
            part = slice(begin, begin + CHECKED)
            expected = sum(row[part].float() for row in self.sources)
            differ += int((self.result[part].float() != expected).sum())
        return differ


def measure(
    dtype_name: str, sources: int, size: int, blocks: int, repetitions: int, batch_bytes: int
) -> dict[str, Any]:
    dtype = getattr(torch, dtype_name)
    sets = device.rotations((sources + 1) * size)
    buffers = [Buffers.filled(dtype, sources, size // dtype.itemsize) for _ in range(sets)]
    calls: dict[str, list[harness.Call]] = {
        "ringreduce": [functools.partial(one.accumulate, blocks) for one in buffers],
        "copy": device.copies(size, device.rotations(2 * size)),
    }
    if all(torchs := [one.torch_sum() for one in buffers]):
        calls["torch"] = [call for call in torchs if call is not None]
    for one in buffers:
        one.result.fill_(1)
        one.accumulate(blocks)
    wrong = sum(one.wrong() for one in buffers)
    median = device.median_us(calls, repetitions, max(2, batch_bytes // size))
    moved = {name: (2 if name == "copy" else sources + 1) * size for name in calls}
    gbps = {name: moved[name] / median[name] / 1e3 for name in calls}
    row = {"dtype": dtype_name, "sources": sources, "bytes": size, "blocks": blocks, "median_us": median, "gbps": gbps}
    return {**row, "share": gbps["ringreduce"] / gbps["copy"], "wrong": wrong}


def main() -> int:
    parser = reports.parser(__doc__)
    option = parser.add_argument
    option("--sizes", type=harness.parse_bytes, nargs="+", default=[JUDGED_BYTES, 64 << 20, 16 << 20], metavar="SIZE")
    option("--blocks", type=int, nargs="+", metavar="N", help="thread blocks; 0: as the engine (default: 0; then "
           "float32 and bfloat16 with 1 to 8 for each multiprocessor)")  # fmt: skip
    option("--repetitions", type=int, default=15, help="batches of each call (default 15)")
    option("--batch-bytes", type=harness.parse_bytes, default="1G", help="of sources in a batch (default 1G)")
    args = parser.parse_args()
    report = reports.begin(args, "accumulate kernels of ringreduce, next to copies and to torch", method=list(METHOD))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    sweep = [] if args.blocks else [each * multiprocessors for each in (1, 2, 3, 4, 6, 8)]
    cells = [
        (*cell, blocks) for blocks in args.blocks or [0] for cell in itertools.product(args.sizes, DTYPES, SOURCES)
    ]
    cells += [(args.sizes[0], *cell) for cell in itertools.product(JUDGED, SOURCES, sweep)]
    for size, dtype, sources, blocks in cells:
        row = measure(dtype, sources, size, blocks, args.repetitions, args.batch_bytes)
        report.row(**row)
        if dtype in JUDGED and size == JUDGED_BYTES and blocks == 0:
            report.bar(f"{dtype}, {sources} sources of 256 MB, of a copy's GB/s", row["share"], at_least=BAR)
        torch.cuda.empty_cache()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
