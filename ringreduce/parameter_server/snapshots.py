"""Snapshots: a folder with a file for each server and an index, complete or absent.

    checkpoint/                          renamed from checkpoint.partial-<token> when all is in it
        index.json                       which file has which tensor
        server-0-of-2.safetensors        its blocks and rows, with their states

Every server writes its own file, in a thread, while it serves. The one that ends last writes the index and renames the
folder, so no worker has to wait for it, or live.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument, SystemFailure
from ringreduce.parameter_server.safetensors import NAMES, Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "1"
INDEX = "index.json"
_REST = 5
"""How long the thread that writes rests, in its own CPU time: workers' steps go on beside it, and need the cores."""
_STEPS = struct.Struct("=Q")


class Saving:
    """A server's part of a snapshot, which a thread of it writes."""

    def __init__(self, server: _C.ParameterServer, keys: dict[int, dict[str, Any]], folder: str, part: str) -> None:
        """`keys`: by block, its key, spec, first element and elements. `part`: such as "0-of-2"."""
        self.error = ""
        self.done = threading.Event()
        self.path = Path(folder)
        self._server, self._part = server, part
        self._rested = 0.0
        entries = server.begin_snapshot()
        try:
            self._blocks = {
                block: _Saved(keys[block], steps, rows, states) for block, _, steps, rows, states in entries
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
            self._writer = Writer(self.path / f"{self._name}.part", tensors, metadata)
        except OSError as error:
            server.end_snapshot()
            raise SystemFailure(f"the snapshot {folder}: {error}") from None
        except BaseException:
            server.end_snapshot()
            raise
        threading.Thread(target=self._run, name="ringreduce snapshot", daemon=True).start()

    @property
    def _name(self) -> str:
        return file_of(self._part)

    def _rest(self) -> None:
        """Called by the thread that writes."""
        worked = time.thread_time() - self._rested
        if worked > 0 and not self._server.holds_back():
            time.sleep(_REST * worked)
        self._rested += worked

    def _run(self) -> None:
        self._rested = time.thread_time()
        error = ""
        try:
            while (piece := self._server.next_piece()) is not None:
                self._blocks[piece[0]].write(self._writer, *piece[1:])
                self._rest()
            self._writer.finish(self._rest)
            (self.path / f"{self._name}.part").rename(self.path / self._name)
            _complete(self.path, int(self._part.rpartition("-")[2]))
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
            self._writer.remove()
        finally:
            self._writer.close()
            with contextlib.suppress(Exception):  # of a server that has been stopped
                self._server.end_snapshot()
            self.error = error  # told to whoever asks when another snapshot can begin
            self.done.set()


class _Saved:
    """A block of a snapshot: its tensors, and how its pieces become their bytes."""

    def __init__(self, about: dict[str, Any], steps: int, rows: int, states: int) -> None:
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
        if table is not None:
            width = table["width"]
            of_state = 1 if spec["update"]["kind"] == "rowwise_adagrad" else width
            self._columns = [(name, width if name == key else of_state) for name in _names(key, states)]
            self.tensors = {f"{key}#ids": ("int64", [rows], 8 * rows)}
            self.tensors |= {name: (dtype, [rows, n], rows * n * self._size) for name, n in self._columns}
            return
        shape = spec["shape"] if count == math.prod(spec["shape"]) else [count]
        self._names = _names_of_block(about, states)
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


def _complete(folder: Path, servers: int) -> None:
    """Makes the snapshot whole if this was the last of its files. Two servers may come here at once."""
    files = _files(servers)
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
        with open(part, "x") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(folder / INDEX)
        _sync(folder)
        folder.rename(final)
        _sync(final.parent)
    except (FileNotFoundError, InvalidArgument):
        if folder.exists():  # otherwise the other server has renamed it
            raise


def _files(servers: int) -> list[str]:
    return [file_of(f"{i}-of-{servers}") for i in range(servers)]


def file_of(part: str) -> str:
    return f"server-{part}.safetensors"


def _names(key: str, states: int) -> list[str]:
    """Of the tensors with the values of a key, then its states."""
    return [key, *(f"{key}#state{i}" for i in range(states))]


def _names_of_block(about: dict[str, Any], states: int) -> list[str]:
    """The same of a block: with its elements, unless it is all of the key."""
    begin, count = about["begin"], about["count"]
    part = "" if count == math.prod(about["spec"]["shape"]) else f"[{begin}:{begin + count}]"
    return [name + part for name in _names(about["key"], states)]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Loading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[tuple[Reader, list[dict[str, Any]]]]:
    """The files of a snapshot, and what each says of its blocks. A key of which blocks had no value yet, since a worker
    was about to make it, is left out."""
    try:
        index = json.loads((path / INDEX).read_text())
        files = {str(file): str(digest) for file, digest in index["metadata"]["files"].items()}
        if index["metadata"]["format"] != FORMAT:
            raise InvalidArgument(f"{path} has format {index['metadata']['format']!r}; this version reads {FORMAT!r}")
        if set(files) != set(_files(len(files))) or not files:
            raise InvalidArgument(f"{path / INDEX} does not have the files of all servers: {', '.join(files)!r:.200}")
    except InvalidArgument:
        raise
    except OSError as error:
        raise InvalidArgument(f"{path} is no whole snapshot: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{path / INDEX} is no index of a snapshot: {error!r}") from None
    readers = [Reader(path / file) for file in files]
    for reader, digest in zip(readers, files.values(), strict=True):
        if reader.digest != digest:
            raise InvalidArgument(f"{reader.path} is damaged: its header is not the one that {path / INDEX} knows")
        reader.check()
    found = [(reader, list(_blocks_of(reader))) for reader in readers]
    whole = _whole_keys(path, [block for _, blocks in found for block in blocks])
    return [(reader, [block for block in blocks if block["key"] in whole]) for reader, blocks in found]


def _blocks_of(reader: Reader) -> Iterator[dict[str, Any]]:
    """What the metadata says of each block, with its key's spec."""
    try:
        specs = json.loads(reader.metadata["keys"])
        for block in json.loads(reader.metadata["blocks"]):
            key, spec = str(block["key"]), specs[block["key"]]
            numbers = {name: int(block[name]) for name in ("begin", "count", "steps", "rows", "states")}
            known: dict[str, Any] = {
                "dtype": str(spec["dtype"]),
                "mode": dict(spec["mode"]),
                "update": dict(spec["update"]),
            }
            if known["dtype"] not in NAMES or min(numbers.values()) < 0:
                raise ValueError(f"block {block} of {known['dtype']}")
            if "table" in spec:
                known |= {"table": dict(spec["table"]), "shape": list(spec["shape"])}
            else:
                push_wire, pull_wire = spec.get("wire", ("float32", "float32"))
                known |= {
                    "per_block": max(1, int(spec["per_block"])),
                    "shape": [int(n) for n in spec["shape"]],
                    "wire": [str(push_wire), str(pull_wire)],
                }
            yield {"key": key, "spec": known, **numbers}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{reader.path} does not say which blocks it has: {error!r:.200}") from None


def _whole_keys(path: Path, blocks: list[dict[str, Any]]) -> set[str]:
    """Tables, and the tensors that have all their blocks."""
    places: dict[str, list[tuple[int, int]]] = {}
    specs: dict[str, dict[str, Any]] = {}
    for block in blocks:
        if specs.setdefault(block["key"], block["spec"]) != block["spec"]:
            raise InvalidArgument(f"{path}: files differ in what {block['key']!r} is")
        places.setdefault(block["key"], []).append((block["begin"], block["count"]))
    whole = {key for key, spec in specs.items() if "table" in spec}
    for key in specs.keys() - whole:
        there, elements, per_block = places[key], math.prod(specs[key]["shape"]), specs[key]["per_block"]
        if len(set(there)) < len(there) or any(
            begin % per_block or count != min(per_block, elements - begin) for begin, count in there
        ):
            raise InvalidArgument(f"{path}: blocks of {key!r} overlap, or are not those of its shape")
        if sum(n for _, n in there) == elements:
            whole.add(key)
    return whole


def payload_of_block(reader: Reader, block: dict[str, Any]) -> np.ndarray[Any, Any]:
    """As servers take it: the number of updates, the value, the states."""
    steps = np.frombuffer(_STEPS.pack(block["steps"]), np.uint8)
    return np.concatenate([steps, *(reader.bytes_of(name) for name in _names_of_block(block, block["states"]))])


def payloads_of_rows(
    reader: Reader, block: dict[str, Any], table: _C.ParameterTable, at_once: int
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """A server and what it takes of a table, about `at_once` bytes: the number of updates, ids, rows with states."""
    rows, key = block["rows"], block["key"]
    steps = np.frombuffer(_STEPS.pack(block["steps"]), np.uint8)
    if rows == 0:
        yield from ((server, steps) for server in range(len(table.blocks)))
        return
    columns = [reader.bytes_of(name).reshape(rows, -1) for name in _names(key, block["states"])]
    ids = reader.bytes_of(f"{key}#ids").view(np.int64)
    some = max(1, at_once // (8 + sum(column.shape[1] for column in columns)))
    for first in range(0, rows, some):
        part = torch.from_numpy(np.array(ids[first : first + some]))
        batch = table.rows(part.data_ptr(), len(part))
        if batch.distinct != len(part):
            raise InvalidArgument(f"{reader.path}: an id of {key!r} is there twice")
        positions = torch.empty_like(part)
        batch.copy_positions(positions.data_ptr())
        order = torch.argsort(positions).numpy()
        stored = np.concatenate([column[first : first + some] for column in columns], axis=1)[order]
        sorted_ids = part.numpy()[order]
        for server, (begin, end) in enumerate(zip(batch.begins, batch.begins[1:], strict=False)):
            mine = sorted_ids[begin:end].view(np.uint8), np.ascontiguousarray(stored[begin:end]).reshape(-1)
            yield server, np.concatenate([steps, *mine])


def check_absent(path: Path) -> None:
    if path.exists():
        raise InvalidArgument(f"there is something at {path} already: give a snapshot a name of its own")
