"""One rank of a backend that is measured: it obeys orders from a socket and sleeps between them.

    worker.py BACKEND SOCKET RANKS   forks that many ranks (torch's backends and the plain copy)
    worker.py BACKEND SOCKET         is one rank, started by an MPI launcher

Each rank connects to the Unix socket and speaks JSON, an object a line. It opens with {rank, pid, version}; an order
{collective, dtype, bytes, iterations, call, inputs[, work_us]}, or {step, iterations} as steps.py explains, is answered
by {times_ns, wrong} or {error}; end of file ends it.

`inputs` is a .npy table of raw bits, shape [ranks + 1, period]: what each rank contributes, repeated over its buffer,
and in the last row the sum. The values are turned by `call`, so that those of an earlier call show. torch and mpi4py
are imported only by the backends that need them; all buffers are NumPy's, the same memory for every backend.
"""

import functools
import gc
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.generic]  # a buffer's elements as unsigned integers
Call = Callable[[], object]

BITS: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.uint32), "bfloat16": np.dtype(np.uint16)}
ALIGNMENT = 64  # bytes; torch's own
PERIOD = 65521  # elements of the inputs; prime, so that data in the wrong place shows


@dataclass(frozen=True)
class Layout:
    """Who contributes what to a collective of `count` elements in its largest buffer, and what comes out.

    `count` is a multiple of `ranks` where a buffer is divided: all_gather's output, reduce_scatter's input and both of
    all_to_all.
    """

    collective: str
    ranks: int
    count: int

    @property
    def in_place(self) -> bool:
        return self.collective in ("all_reduce", "broadcast")

    @property
    def inputs(self) -> int:
        """Elements of a rank's input."""
        return self.count // self.ranks if self.collective == "all_gather" else self.count

    @property
    def outputs(self) -> int:
        """Elements of a rank's output."""
        return self.count // self.ranks if self.collective == "reduce_scatter" else self.count

    def result(self, rank: int) -> list[tuple[int, int]]:
        """The output of `rank` as equal parts: for each, the row of `inputs` it comes from and the first element there.

        Row `ranks` is the sum.
        """
        part = self.count // self.ranks
        return {
            "all_reduce": [(self.ranks, 0)],
            "reduce_scatter": [(self.ranks, rank * part)],
            "all_gather": [(source, 0) for source in range(self.ranks)],
            "broadcast": [(0, 0)],
            "all_to_all": [(source, rank * part) for source in range(self.ranks)],
            "copy": [(rank, 0)],
        }[self.collective]


class Backend(Protocol):
    """One rank of a library."""

    rank: int
    ranks: int
    version: str

    def barrier(self) -> None: ...

    def empty(self, count: int, dtype: str) -> Bits:
        """An uninitialized buffer."""

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        """The collective on these buffers, ready to run; `output` is `source` where it works in place."""


class Copy:
    """No library: every process copies a private buffer."""

    version = f"NumPy {np.__version__}"

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def barrier(self) -> None:
        pass

    def empty(self, count: int, dtype: str) -> Bits:
        return private(count, dtype)

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        return functools.partial(np.copyto, output, source)


class Torch:
    """A backend of torch.distributed, through `dist.*`, or ringreduce's direct calls."""

    def __init__(self, name: str, rank: int, ranks: int, meeting: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        self.shared, self.allocated = name == "ringreduce-shared", name == "ringreduce-allocated"
        dist.init_process_group(
            "ringreduce" if name.startswith("ringreduce") else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=ranks,
        )
        self.version = f"torch {torch.__version__}"
        self.library: Any = dist
        if name.startswith("ringreduce"):
            import ringreduce
            from ringreduce import _C

            self.version = f"{ringreduce.__version__} ({_C.instruction_set()}), {self.version}"
            if not name.startswith("ringreduce-dist"):
                self.library = ringreduce
            if name == "ringreduce-allocated":
                ringreduce.share_allocations()

    def barrier(self) -> None:
        self.library.barrier()

    def empty(self, count: int, dtype: str) -> Bits:
        if not (self.shared or self.allocated):
            return private(count, dtype)
        import torch

        empty = torch.empty if self.allocated else self.library.empty
        bits: Bits = empty(count * BITS[dtype].itemsize, dtype=torch.uint8).numpy()
        return bits.view(BITS[dtype])

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        import torch

        a, b = (torch.from_numpy(bits.view(np.uint8)).view(self.tensor_type(dtype)) for bits in (source, output))
        library = self.library
        return {
            "all_reduce": functools.partial(library.all_reduce, a),
            "reduce_scatter": functools.partial(library.reduce_scatter_tensor, b, a),
            "all_gather": functools.partial(library.all_gather_into_tensor, b, a),
            "broadcast": functools.partial(library.broadcast, a, 0),
            "all_to_all": functools.partial(library.all_to_all_single, b, a),
        }[collective]

    @staticmethod
    def tensor_type(name: str) -> Any:
        import torch

        return getattr(torch, name)


class Mpi:
    """An MPI library through mpi4py's calls on buffers, initialized for one thread, which is the fastest."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "single"
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        self.version = f"{' '.join(library.split())}, mpi4py {mpi4py.__version__}"

    def barrier(self) -> None:
        self.world.Barrier()

    def empty(self, count: int, dtype: str) -> Bits:
        return private(count, dtype)

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        if dtype != "float32":
            raise ValueError(f"MPI has no {dtype}")
        mpi, world = self.mpi, self.world
        a, b = ([bits.view(np.float32), mpi.FLOAT] for bits in (source, output))
        return {
            "all_reduce": functools.partial(world.Allreduce, mpi.IN_PLACE, a),
            "reduce_scatter": functools.partial(world.Reduce_scatter_block, a, b),
            "all_gather": functools.partial(world.Allgather, a, b),
            "broadcast": functools.partial(world.Bcast, a, 0),
            "all_to_all": functools.partial(world.Alltoall, a, b),
        }[collective]


def private(count: int, dtype: str) -> Bits:
    """`count` elements of NumPy's memory, aligned as torch would."""
    size = count * BITS[dtype].itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(BITS[dtype])


def obey(backend: Backend, order: dict[str, Any]) -> dict[str, Any]:
    """Time the collective on zeros, which stay zeros, back to back; then call it on fresh inputs and check the result.

    Every rank starts together and makes one call before those timed.
    """
    if "step" in order:
        from ringreduce.cli.bench import steps

        return steps.obey(backend, order)
    dtype, iterations = order["dtype"], order["iterations"]
    layout = Layout(order["collective"], backend.ranks, order["bytes"] // BITS[dtype].itemsize)
    table = np.roll(inputs(order["inputs"]), order["call"], axis=1)
    source = backend.empty(layout.inputs, dtype)
    output = source if layout.in_place else backend.empty(layout.outputs, dtype)
    call = backend.call(layout.collective, dtype, source, output)

    source.fill(0)
    output.fill(0)
    times = times_ns(backend, call, iterations, round(order.get("work_us", 0) * 1000))

    output.fill(~BITS[dtype].type(0))
    for part, values in periods(source, table[backend.rank], 0):
        part[...] = values
    backend.barrier()
    call()
    parts = layout.result(backend.rank)
    wrong = 0
    for piece, (row, first) in zip(output.reshape(len(parts), -1), parts, strict=True):
        wrong += sum(int(np.count_nonzero(part != values)) for part, values in periods(piece, table[row], first))
    return {"times_ns": times, "wrong": wrong}


def times_ns(backend: Backend, call: Call, iterations: int, work_ns: int = 0) -> list[int]:
    """How long each of so many calls took, after a barrier and a call that is not timed: back to back, or each after
    work of so much CPU time."""
    backend.barrier()
    call()
    if work_ns:
        times = []
        for _ in range(iterations):
            end = time.thread_time_ns() + work_ns
            while time.thread_time_ns() < end:
                pass
            begun = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begun)
        return times
    marks = [time.perf_counter_ns()]
    for _ in range(iterations):
        call()
        marks.append(time.perf_counter_ns())
    return [b - a for a, b in itertools.pairwise(marks)]


def write_inputs(folder: Path, dtype: str, ranks: int) -> Path:
    """The table that orders name as `inputs`: integers so small that any partial sum is a number of the dtype."""
    bound = {"float32": 1 << 24, "bfloat16": 1 << 8}[dtype] // ranks
    values = np.random.default_rng(ranks).integers(-bound, bound + 1, (ranks, PERIOD))
    table = np.vstack([values, values.sum(axis=0)]).astype(np.float32).view(np.uint32)
    path = folder / f"inputs-{ranks}.npy"
    np.save(path, (table >> (32 - 8 * BITS[dtype].itemsize)).astype(BITS[dtype]))
    return path


@functools.lru_cache(maxsize=2)
def inputs(path: str) -> Bits:
    table: Bits = np.load(path)
    return table


def periods(buffer: Bits, row: Bits, first: int) -> Iterator[tuple[Bits, Bits]]:
    """`buffer` as whole periods and a rest, each with what stands there if `row`, from `first` on, repeats over it."""
    values = np.roll(row, -first)
    whole = buffer.size // row.size * row.size
    yield buffer[:whole].reshape(-1, row.size), values
    yield buffer[whole:], values[: buffer.size - whole]


def serve(backend: Backend, path: str) -> None:
    """Obey until the driver closes the connection."""
    gc.disable()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw")

        def say(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        say({"rank": backend.rank, "pid": os.getpid(), "version": backend.version})
        for line in lines:
            try:
                answer = obey(backend, json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            say(answer)


def fork_ranks(name: str, path: str, ranks: int) -> int:
    """Become `ranks` processes, after the slow imports; the exit status is 1 if any of them failed."""
    copies = name.startswith("memcpy")
    if not copies:
        import torch.distributed  # noqa: F401
    if name.startswith("ringreduce"):
        import ringreduce  # noqa: F401
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            serve(Copy(rank, ranks) if copies else Torch(name, rank, ranks, path + ".store"), path)
            return 0
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


def main() -> int:
    name, path, *ranks = sys.argv[1:]
    if ranks:
        sys.path[0] = str(Path(__file__).resolve().parents[3])  # ringreduce, where it is not installed
        return fork_ranks(name, path, int(ranks[0]))
    serve(Mpi(), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
