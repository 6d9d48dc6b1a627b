"""A rank of differences.py: makes the calls that FOLDER orders, and leaves there what came.

    differences_rank.py NAME FOLDER [RANK RANKS]     the last two where no launcher says them

orders.json has a list [method, argument, ...] for each call, and N.npy the values that call N is given, a row a rank.
The result, or the text of an error, becomes N.RANK.npy.
"""

import ctypes
import functools
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from oneccl import OneCcl, worker

Values = np.ndarray[Any, np.dtype[Any]]
PIECES: list[int] = []
"""How many elements each call of `compose` got."""


class NotOffered(Exception):
    """The library has no such name."""


def compose(left: Values, right: Values) -> Values:
    """Maps x -> a x + b on 32-bit integers, one after the other. That is associative, and does not commute."""
    PIECES.append(len(left))
    (a, b), (c, d) = (each.view(np.uint32).reshape(-1, 2).T for each in (left, right))
    return np.stack([a * c, a * d + b], axis=1).view(np.int64).reshape(-1)


class Gloo(worker.Torch):
    def tensor(self, values: Values, dtype: str) -> Any:
        import torch

        return torch.from_numpy(values.view(np.uint8)).view(self.tensor_type(dtype))

    def all_reduce(self, values: Values, dtype: str, op: str) -> Values:
        self.library.all_reduce(self.tensor(values, dtype), getattr(self.library.ReduceOp, op))
        return values

    def argmax(self, pairs: Values) -> Values:
        return self.all_reduce(pairs, "uint8", "MAXLOC")

    def combine(self, values: Values) -> Values:
        self.library.all_reduce(self.tensor(values, "int64"), compose)
        return values

    def strided(self, values: Values, call: str) -> Values:
        getattr(self.library, call)(self.tensor(values, "float32")[::2], *([0] if call == "broadcast" else []))
        return values


class RingReduce(Gloo):
    """The same calls, and the direct ones where those of torch.distributed take no operator."""

    def argmax(self, pairs: Values) -> Values:
        import ringreduce

        ringreduce.all_reduce(pairs, op=ringreduce.Op.argmax())
        return pairs

    def combine(self, values: Values) -> Values:
        import torch

        import ringreduce

        f = ringreduce.Op.torch(lambda a, b: torch.from_numpy(compose(a.numpy(), b.numpy())), name="compose")
        ringreduce.all_reduce(values, op=f)
        return values


class Mpi(worker.Mpi):
    def datatype(self, dtype: str) -> Any:
        """By its name in mpi4py, or bfloat16 by its number in the library's own header."""
        number = re.search(r"MPIX_(?:BFLOAT16|C_BF16) .*(0x\w+)", Path(sys.prefix, "include/mpi.h").read_text())
        if dtype == "bfloat16" and number:
            return self.mpi.Datatype.fromhandle(int(number[1], 16))
        found = getattr(self.mpi, "FLOAT" if dtype == "float32" else f"{dtype}_T".upper())
        if found == self.mpi.DATATYPE_NULL:
            raise NotOffered(f"mpi.h has no {dtype}, and in mpi4py it is DATATYPE_NULL")
        return found

    def all_reduce(self, values: Values, dtype: str, op: str) -> Values:
        self.world.Allreduce(self.mpi.IN_PLACE, [values, values.size, self.datatype(dtype)], getattr(self.mpi, op))
        return values

    def argmax(self, pairs: Values) -> Values:
        self.world.Allreduce(self.mpi.IN_PLACE, [pairs, self.mpi.DOUBLE_INT], self.mpi.MAXLOC)
        return pairs

    def combine(self, values: Values) -> Values:
        def f(a: Any, b: Any, _: Any) -> None:
            right = np.frombuffer(b, np.int64)
            right[:] = compose(np.frombuffer(a, np.int64), right)

        self.world.Allreduce(self.mpi.IN_PLACE, values, self.mpi.Op.Create(f, commute=False))
        return values

    def strided(self, values: Values, call: str) -> Values:
        if call == "all_reduce":  # by the array's strides: MPI's operations take its own datatypes only
            self.world.Allreduce(self.mpi.IN_PLACE, values[::2])
        else:
            self.world.Bcast([values, 1, self.mpi.FLOAT.Create_vector(values.size // 2, 1, 2).Commit()], 0)
        return values


class Ccl(OneCcl):
    COMBINE = ctypes.CFUNCTYPE(
        ctypes.c_int, *(ctypes.c_void_p, ctypes.c_size_t) * 2, ctypes.c_int, ctypes.c_void_p
    )  # ccl::reduction_fn; a size_t has the form of the fourth, a pointer

    @functools.cached_property
    def header(self) -> str:
        return "".join(path.read_text() for path in Path(sys.prefix, "include/oneapi/ccl").rglob("*.hpp"))

    def number(self, kind: str, name: str) -> int:
        """Of a name in an enum, which begins with 0."""
        text = self.header.partition(f"enum class {kind} : int {{")[2].partition("}")[0]
        names = re.findall(r"^ +(\w+)", text, re.M)
        if name not in names:
            raise NotOffered(f"ccl::{kind} has no {name}")
        return int(names.index(name))

    def all_reduce(self, values: Values, dtype: str, op: str, combine: Any = None) -> Values:
        out, function = np.empty_like(values), self.library.all_reduce_by
        numbers = self.number("datatype", dtype), self.number("reduction", op.lower())
        function.restype = ctypes.c_char_p
        places = (ctypes.c_void_p(each.ctypes.data) for each in (values, out))
        if error := function(*places, ctypes.c_size_t(values.size), *numbers, combine):
            raise RuntimeError(error.decode())
        return out

    def argmax(self, pairs: Values) -> Values:
        return self.all_reduce(pairs, "float64", "MAXLOC")

    def combine(self, values: Values) -> Values:
        def f(a: int, count: int, b: int, *_: Any) -> int:
            left, right = (np.frombuffer((ctypes.c_int64 * count).from_address(each), np.int64) for each in (a, b))
            right[:] = compose(left, right)
            return 0

        return self.all_reduce(values, "int64", "CUSTOM", self.COMBINE(f))

    def strided(self, values: Values, call: str) -> Values:
        if "stride" in self.header:
            raise RuntimeError("oneCCL has got strides: write this call")
        raise NotOffered("calls take an address and a count; no header has the word stride")


def pieces(peer: Any, values: Values) -> Values:
    PIECES.clear()
    peer.combine(values)
    return np.array(PIECES, np.int64)


def killed(peer: Any, values: Values) -> Values:
    """The last rank ends in its 100th call, and leaves the time in a file. On others the error, and when it came."""
    dies = peer.rank == peer.ranks - 1
    death = np.memmap(Path(sys.argv[2], "death"), np.float64, "w+", shape=(1,)) if dies else np.zeros(1)
    for call in itertools.count():
        if call == 99 and dies:
            death[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            peer.all_reduce(values.copy(), "float32", "SUM")
        except Exception as error:
            return np.array([f"{type(error).__name__}: {error}", str(time.monotonic())])
    raise AssertionError


def main() -> None:
    name, folder, *place = sys.argv[1:]
    rank, ranks = map(int, place or (0, 0))
    kinds: dict[str, Callable[[], Any]] = {
        "gloo": lambda: Gloo(name, rank, ranks, folder + "/store"),
        "ringreduce": lambda: RingReduce("ringreduce-dist", rank, ranks, folder + "/store"),
        "oneccl": Ccl,
    }
    peer = kinds.get(name, Mpi)()
    Path(folder, "version").write_text(peer.version)
    others: dict[str, Callable[[Any, Values], Values]] = {"pieces": pieces, "killed": killed}
    for number, (method, *arguments) in enumerate(json.loads(Path(folder, "orders.json").read_text())):
        given = np.load(Path(folder, f"{number}.npy"))[peer.rank]
        try:
            found = others.get(method, getattr(type(peer), method, None))(peer, given, *arguments)
        except Exception as error:
            found = np.array([f"{type(error).__name__}: {error}"])
        np.save(Path(folder, f"{number}.{peer.rank}.npy"), found)
        if method == "killed":
            signal.pause()  # or else the others would notice this rank's end


if __name__ == "__main__":
    main()
