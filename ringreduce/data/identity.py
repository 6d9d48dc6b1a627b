"""Which Loaders share servers: those whose names, jobs, datasets and functions are the same."""

from __future__ import annotations

import copyreg
import hashlib
import itertools
import multiprocessing
import os
import pickle
import types
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "MASTER_ADDR", "MASTER_PORT")
"""What launchers tell the ranks of a job, the same to all of them."""

MOST_BYTES = 64 << 20
"""Bytes of the pickle that are hashed, and of the arrays, of which later ones are only sampled.

They take a second of a CPU at most.
"""
MOST_OBJECTS = 30_000
"""How many objects are pickled, beside those of Python's own types; of later ones only the type is hashed.

Each takes some microseconds.
"""
SAMPLED = 4096
"""Elements that are compared of an array, when those before it have used up MOST_BYTES."""


def full_name(name: str, dataset: Any, *functions: Any) -> str:
    """The name of what Loaders share. A `name` that begins with "/" is of no job.

    Where datasets cannot be compared whole, the k-th Loader of a name shares with the k-th of other processes only.
    """
    digest, whole = _digest(dataset, *functions)
    place = "" if whole else str(next(_not_whole.setdefault(name, itertools.count())))
    return "\0".join(("" if name.startswith("/") else _job(), name, digest, place))


_not_whole: dict[str, itertools.count[int]] = {}
"""By name: how many Loaders of this process had datasets that could not be compared whole."""


def _job() -> str:
    """What the processes of one job have alike. Without a launcher, a process and those that it starts are a job."""
    told = [os.environ.get(each, "") for each in JOB]
    parent = multiprocessing.parent_process()
    return "\0".join(told) if any(told) else str(os.getpid() if parent is None else parent.pid)


def _digest(dataset: Any, *functions: Any) -> tuple[str, bool]:
    """Equal for equal datasets in all processes, as far as their pickles are equal; and whether all of it was compared.

    It must neither take long nor raise an error. So of what cannot be pickled it covers the type only, and the
    beginning of what is very large. The part that a `Subset` has comes first, as it is what differs between folds.
    """
    indices = []
    while type(dataset) is Subset:
        indices.append(dataset.indices)
        dataset = dataset.dataset
    found = _Hash()
    pickler = _Pickler(found)
    try:
        pickler.dump((indices, functions, dataset))
    except Exception as error:  # whatever the dataset's own code raises
        found.hash.update(type(error).__name__.encode())
        pickler.whole = False
    return found.hash.hexdigest(), pickler.whole


class _TooMuch(Exception):
    pass


class _Hash:
    """A file that keeps nothing."""

    def __init__(self) -> None:
        self.hash, self._left = hashlib.blake2b(digest_size=16), MOST_BYTES

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.hash.update(memoryview(data)[: self._left])
        self._left -= size
        if self._left <= 0:
            raise _TooMuch
        return size


class _Pickler(pickle.Pickler):
    """Writes what nobody will read: it need only differ where objects do."""

    def __init__(self, file: _Hash) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._objects, self._array_bytes = MOST_OBJECTS, MOST_BYTES
        self._kinds: dict[type, tuple[Any, ...]] = {}
        self.whole = True

    def reducer_override(self, value: Any) -> Any:
        if value is str:
            return NotImplemented
        kind = self._kind(type(value))
        rest: Any = ()
        self._objects -= 1
        if self._objects < 0:
            self.whole = False
            return str, (kind,)
        try:
            if (parts := self._parts(value)) is None:
                reduce = copyreg.dispatch_table.get(type(value))
                reduced = reduce(value) if reduce else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                parts, rest = ((reduced,), ()) if isinstance(reduced, str) else (reduced[:2], reduced[2:])
        except Exception:  # it cannot be pickled
            parts, self.whole = (), False
        return str, (kind, *parts), *rest

    def _kind(self, kind: type) -> tuple[Any, ...]:
        """A class. One of the program itself, or of a function, may be defined anew under its name: so what it does."""
        if kind not in self._kinds:
            functions: list[Any] = []
            for each in kind.__mro__:
                if each.__module__ == "__main__" or "<locals>" in each.__qualname__:
                    found = (getattr(part, "fget", getattr(part, "__func__", part)) for part in vars(each).values())
                    functions += (part for part in found if isinstance(part, types.FunctionType))
            self._kinds[kind] = _name_of(kind), *functions
        return self._kinds[kind]

    def _parts(self, value: Any) -> tuple[Any, ...] | None:
        """Of what is not left to pickle: functions, which need not have a name, and arrays, which may be large."""
        if isinstance(value, type):
            return (_name_of(value),)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            read = [value.__globals__.get(name) for name in value.__code__.co_names]
            plain = [each for each in read if isinstance(each, bool | int | float | str | bytes)]
            return _name_of(value), value.__code__, value.__defaults__, value.__kwdefaults__, cells, plain, vars(value)
        if isinstance(value, types.CodeType):
            # The order of a set of texts differs between processes.
            constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in value.co_consts]
            return value.co_code, constants, value.co_names
        if isinstance(value, np.memmap) and (file := getattr(value, "_mmap", None)) is not None:
            start = value.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
            return str(value.filename), start, value.strides, value.dtype.str, value.shape
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return str(value.dtype), tuple(value.shape), self._content(data)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, self._content(value)
        return None

    def _content(self, array: NDArray[Any]) -> bytes:
        self._array_bytes -= array.nbytes
        if self._array_bytes < 0 and array.size > SAMPLED:
            array, self.whole = array.flat[np.linspace(0, array.size - 1, SAMPLED).astype(np.int64)], False
        return hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def _name_of(what: Any) -> str:
    """Of a function or class. The same in all processes."""
    return f"{what.__module__}.{what.__qualname__}"
