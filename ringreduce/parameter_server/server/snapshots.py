"""Writing snapshots: a folder with a file for each server and an index (`snapshot_files`).

Every server writes its own file, in a thread, while it serves. The server that finishes last writes the index and
renames the folder. So a snapshot is completed even if the worker that asked for it has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.common import system
from ringreduce.common.descriptors import above_streams, open_above_streams
from ringreduce.errors import InvalidArgument, RingReduceError, SystemFailure
from ringreduce.parameter_server.safetensors import NAMES, Reader, Writer
from ringreduce.parameter_server.snapshot_files import FORMAT, INDEX, file_of, files_of, names_of, names_of_block
from ringreduce.parameter_server.updates import CHANGEABLE, with_numbers

_REST = 16
"""The writing thread rests so many times as long as it has used the CPU, since workers need the cores meanwhile."""


class Saving:
    """A server's part of a snapshot. A thread writes it; `done` is set when it has ended, and `error` says how."""

    def __init__(self, server: _C.ParameterServer, keys: dict[int, dict[str, Any]], folder: str, part: str) -> None:
        """`keys` has, by block, its key, spec, first element and number of elements. `part` is such as "0-of-2". Raises
        `InvalidArgument` or `SystemFailure` if it cannot begin."""
        self.error = ""
        self.done = threading.Event()
        self.path = Path(folder)
        self._server, self._part = server, part
        self._rested = 0.0
        entries = server.begin_snapshot()
        try:
            self._blocks = {
                block: _Saved(keys[block], steps, rows, states, numbers)
                for block, _, steps, rows, states, numbers in entries
                if keys[block]["spec"].get("saved", True)
            }
            tensors: dict[str, tuple[str, list[int], int]] = {}
            for saved in self._blocks.values():
                for name, tensor in saved.tensors.items():
                    if name in tensors:
                        raise InvalidArgument(f"two tensors of the snapshot would be called {name!r}: rename a key")
                    tensors[name] = tensor
            self.bytes = sum(size for _, _, size in tensors.values())
            metadata = {
                "format": FORMAT,
                "keys": json.dumps(dict(saved.key_and_spec for saved in self._blocks.values())),
                "blocks": json.dumps([saved.described for saved in self._blocks.values()]),
            }
            self.path.mkdir(parents=True, exist_ok=True)
            # A server that was killed, or replaced while it writes, may have a file of this part here, too.
            self._unfinished = self.path / f"{self._name}.{secrets.token_hex(4)}.part"
            self._writer = Writer(self._unfinished, tensors, metadata)
            try:
                system.start(threading.Thread(target=self._run, name="ringreduce snapshot", daemon=True))
            except BaseException:
                self._writer.remove()
                self._writer.close()
                raise
        except (OSError, RuntimeError) as error:
            server.end_snapshot()
            with contextlib.suppress(OSError):  # other servers may have files in it
                self.path.rmdir()
            if isinstance(error, RingReduceError):
                raise
            raise SystemFailure(f"the snapshot {folder}: {system.explained(error)}") from None
        except BaseException:
            server.end_snapshot()
            raise

    @property
    def _name(self) -> str:
        return file_of(self._part)

    def _rest(self) -> None:
        """Lets the writing thread rest, unless the server takes no requests until more has been written."""
        worked = time.thread_time() - self._rested
        if worked > 0 and not self._server.holds_back():
            time.sleep(_REST * worked)
        self._rested += worked

    def _run(self) -> None:
        self._rested = time.thread_time()
        error = ""
        try:
            while (piece := self._server.next_piece()) is not None:
                if piece[0] in self._blocks:
                    self._blocks[piece[0]].write(self._writer, *piece[1:])
                self._rest()
            self._writer.finish(self._rest)
            self._unfinished.rename(self.path / self._name)
            complete(self.path, int(self._part.rpartition("-")[2]))
        except Exception as failed:
            error = system.explained(failed)
            self._writer.remove()
        finally:
            self._writer.close()
            with contextlib.suppress(Exception):  # the server may have been stopped
                self._server.end_snapshot()
            self.error = error  # set only now, when another snapshot can begin
            self.done.set()


class _Saved:
    """A block in a snapshot: the tensors that it becomes, and writing its pieces to them."""

    def __init__(self, about: dict[str, Any], steps: int, rows: int, states: int, numbers: list[float]) -> None:
        self._about = about
        key, spec, begin, count = about["key"], about["spec"], about["begin"], about["count"]
        dtype: str = spec["dtype"]
        if dtype not in NAMES:
            raise InvalidArgument(f"{key!r} is {dtype}, which files of safetensors do not have")
        if states < 0:
            raise InvalidArgument(
                f"{key!r} is updated by Python ({spec['update']['python']}), whose state snapshots do not have yet"
            )
        self._size = getattr(torch, dtype).itemsize
        table = spec.get("table")
        self.key_and_spec = key, {name: value for name, value in spec.items() if name != "servers"}
        self.described = {"key": key, "begin": begin, "count": count, "steps": steps, "rows": rows, "states": states}
        now = with_numbers(spec["update"], dict(zip(CHANGEABLE, numbers, strict=True)))
        if now != spec["update"]:
            self.described["update"] = now
        if table is not None:
            width = table["width"]
            of_state = 1 if spec["update"]["kind"] == "rowwise_adagrad" else width
            self._columns = [(name, width if name == key else of_state) for name in names_of(key, states)]
            self.tensors = {f"{key}#ids": ("int64", [rows], 8 * rows)}
            self.tensors |= {name: (dtype, [rows, n], rows * n * self._size) for name, n in self._columns}
            return
        shape = spec["shape"] if count == math.prod(spec["shape"]) else [count]
        self._names = names_of_block(about, states)
        self.tensors = {name: (dtype, shape, count * self._size) for name in self._names}

    def write(self, writer: Writer, first: int, rows: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if "table" not in self._about["spec"]:
            size = self._about["count"] * self._size
            for i, name in enumerate(self._names):
                writer.put(name, data[i * size : (i + 1) * size])
            return
        writer.put(f"{self._about['key']}#ids", data[: 8 * rows], 8 * first)
        stored = data[8 * rows :].reshape(rows, -1)
        begin = 0
        for name, width in self._columns:
            end = begin + width * self._size
            writer.put(name, np.ascontiguousarray(stored[:, begin:end]), first * width * self._size)
            begin = end


def complete(folder: Path, servers: int) -> None:
    """Completes the snapshot if all its files are there. Two servers may do this at the same time."""
    files = files_of(servers)
    final = folder.with_name(folder.name.rpartition(".partial-")[0])
    try:
        if not all((folder / file).exists() for file in files):
            return
        readers = {file: Reader(folder / file) for file in files}
        names = {name: file for file, reader in readers.items() for name in reader.names}
        size = sum((folder / file).stat().st_size for file in files)
        headers = {file: reader.digest for file, reader in readers.items()}
        index = {"metadata": {"format": FORMAT, "total_size": size, "files": headers}, "weight_map": names}
        part = folder / f"{INDEX}.{os.getpid()}.{threading.get_native_id()}"
        try:
            with open(part, "x", opener=open_above_streams) as file:
                json.dump(index, file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(folder / INDEX)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        for unfinished in folder.glob("*.part"):
            unfinished.unlink(missing_ok=True)
        _sync(folder)
        folder.rename(final)
        _sync(final.parent)
    except (FileNotFoundError, InvalidArgument):
        if folder.exists():  # otherwise another server has renamed it
            raise


def _sync(folder: Path) -> None:
    descriptor = above_streams(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
