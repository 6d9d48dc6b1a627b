"""Which Loaders share servers: those whose names, jobs, datasets and `collate` are the same."""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
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
"""Of a pickle, and of all arrays in it, that are compared whole. A second of a CPU at most."""
MOST_OBJECTS = 30_000
"""Not of Python's own types, of which more than the type is compared. Each takes some microseconds."""
SAMPLED = 4096
"""Elements that are compared of an array, when those before it have used up MOST_BYTES."""


def full_name(name: str, dataset: Any, collate: Any) -> str:
    """The name of what Loaders share. A `name` that begins with "/" is of no job."""
    job = "" if name.startswith("/") else "\0".join(os.environ.get(each, "") for each in JOB)
    return "\0".join((job, name, _digest(dataset, collate)))


def _digest(dataset: Any, collate: Any) -> str:
    """Equal for equal datasets in all processes, as far as their pickles are equal. For others it differs.

    It must neither take long nor raise an error. So of what cannot be pickled it covers the type only, and of what is
    very large the beginning. The part that a `Subset` has comes first, as it is what differs between folds.
    """
    indices = []
    while type(dataset) is Subset:
        indices.append(dataset.indices)
        dataset = dataset.dataset
    found = _Hash()
    with contextlib.suppress(Exception):  # _TooMuch, and whatever the dataset's own code raises
        pickler = _Pickler(found)
        for each in (_name_of(type(dataset)), indices, collate, dataset):
            pickler.dump(each)
    return found.hash.hexdigest()


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

    def reducer_override(self, value: Any) -> Any:
        if value is str:
            return NotImplemented
        kind = _name_of(type(value))
        rest: Any = ()
        self._objects -= 1
        if self._objects < 0:
            return str, (kind,)
        try:
            if (parts := self._parts(value)) is None:
                reduce = copyreg.dispatch_table.get(type(value))
                reduced = reduce(value) if reduce else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                parts, rest = ((reduced,), ()) if isinstance(reduced, str) else (reduced[:2], reduced[2:])
        except Exception:  # it cannot be pickled
            parts = ()
        return str, (kind, *parts), *rest

    def _parts(self, value: Any) -> tuple[Any, ...] | None:
        """Of what is not left to pickle: functions, which need not have a name, and arrays, which may be large."""
        if isinstance(value, type):
            return (_name_of(value),)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return _name_of(value), value.__code__, value.__defaults__, value.__kwdefaults__, cells
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_consts, value.co_names
        if isinstance(value, np.memmap) and (file := getattr(value, "_mmap", None)) is not None:
            start = value.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
            return str(value.filename), start, value.strides, value.dtype.str, value.shape
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return str(value.dtype), tuple(value.shape), self._content(data)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.dtype.str, value.shape, self._content(value)
        return None

    def _content(self, array: NDArray[Any]) -> bytes:
        self._array_bytes -= array.nbytes
        if self._array_bytes < 0 and array.size > SAMPLED:
            array = array.flat[np.linspace(0, array.size - 1, SAMPLED).astype(np.int64)]
        return hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def _name_of(what: Any) -> str:
    """Of a function or class. The same in all processes."""
    return f"{what.__module__}.{what.__qualname__}"
