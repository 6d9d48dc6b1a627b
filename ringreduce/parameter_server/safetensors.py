"""Reading and writing safetensors files: 8 bytes with the length of the header, the header as JSON, then the tensors.

A file is written piece by piece, in any order, and read through a mapping. The format is described at
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.common.descriptors import above_streams
from ringreduce.common.system import explained
from ringreduce.errors import InvalidArgument

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The format's names of torch's dtypes."""
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100 << 20
"""The most bytes of a header, which is the limit of other readers."""
_CHECKSUM = "crc32"
"""The key in a file's metadata for the checksum of everything after the header."""
_PIECE = 1 << 20
"""Bytes that are read at once for the checksum."""


def _checksum(pieces: Iterable[Any]) -> str:
    return f"{functools.reduce(lambda found, piece: zlib.crc32(piece, found), pieces, 0):08x}"


class Writer:
    """Writes a file with tensors of known shapes, whose bytes may come in any order. `finish` ends it."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, list[int], int]], metadata: dict[str, str]) -> None:
        """`tensors` has, by name, dtype, shape and size in bytes. A checksum is added to the metadata. Raises
        `OSError`, and `InvalidArgument` if the header is too long."""
        header: dict[str, Any] = {"__metadata__": metadata | {_CHECKSUM: _checksum(())}}
        end = 0
        self._begins = {}
        for name, (dtype, shape, size) in tensors.items():
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [end, end + size]}
            self._begins[name] = end
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MOST_HEADER:
            raise InvalidArgument(
                f"{path}: a header of {len(text)} bytes for {len(tensors)} tensors; readers take {_MOST_HEADER}"
            )
        self._header, self._length = header, len(text)
        self._data, self._path = _LENGTH.size + len(text), path
        self._file = above_streams(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        try:
            os.truncate(self._file, self._data + end)
            self._write(_LENGTH.pack(len(text)) + text, 0)
        except BaseException:
            self.close()
            self.remove()
            raise

    def put(self, name: str, data: Any, offset: int = 0) -> None:
        """Writes bytes of a tensor, beginning at byte `offset`."""
        self._write(data, self._data + self._begins[name] + offset)

    def _write(self, data: Any, at: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written

    def finish(self, rest: Callable[[], None] = lambda: None) -> None:
        """Writes the checksum of the whole file to its header, and syncs the file. Calls `rest` after each piece."""

        def pieces() -> Iterator[bytes]:
            while piece := file.read(_PIECE):
                yield piece
                rest()

        with open(self._path, "rb") as file:
            file.seek(self._data)
            self._header["__metadata__"][_CHECKSUM] = _checksum(pieces())
        text = json.dumps(self._header).encode()
        self._write(text.ljust(self._length), _LENGTH.size)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        """Deletes the file, and its folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()


class Reader:
    """Reads a file's tensors, as bytes that are loaded when they are used. Raises `InvalidArgument`."""

    def __init__(self, path: Path) -> None:
        try:
            whole = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path} cannot be read: {explained(error)}") from None
        length = _LENGTH.unpack(whole[: _LENGTH.size].tobytes())[0] if len(whole) >= _LENGTH.size else _MOST_HEADER + 1
        begin = _LENGTH.size + length
        if length > _MOST_HEADER or begin > len(whole):
            raise InvalidArgument(f"{path} is no file of safetensors: its header does not end within it")
        try:
            header = json.loads(whole[_LENGTH.size : begin].tobytes())
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._places = {name: self._place(entry, len(whole) - begin) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{path} is no file of safetensors: {type(error).__name__} in its header") from None
        self._data, self.path = whole[begin:], path
        self.digest = hashlib.sha256(whole[:begin].tobytes()).hexdigest()  # the SHA-256 of the header

    def check(self) -> None:
        """Reads all tensors. Raises `InvalidArgument` if their checksum is wrong."""
        pieces = (self._data[begin : begin + _PIECE] for begin in range(0, len(self._data), _PIECE))
        if self.metadata.get(_CHECKSUM) != _checksum(pieces):
            raise InvalidArgument(f"{self.path} is damaged: the bytes of its tensors are not those that were written")

    @staticmethod
    def _place(entry: Any, room: int) -> tuple[int, int]:
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= room or min(entry["shape"], default=0) < 0 or math.prod(entry["shape"]) > room:
            raise ValueError("a tensor does not lie within it")
        return begin, end

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def bytes_of(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if name not in self._places:
            raise InvalidArgument(f"{self.path} has no tensor {name!r}, of which its metadata speaks")
        begin, end = self._places[name]
        return self._data[begin:end]
