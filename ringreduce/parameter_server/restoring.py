"""Restoring a snapshot (`KeyValue.restore`) on any number of servers.

All files are read and checked before anything is made. Each block is then sent to its server as one request, and the
rows of tables in parts.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument
from ringreduce.parameter_server.arguments import check_key
from ringreduce.parameter_server.placement import cut, place
from ringreduce.parameter_server.safetensors import NAMES, Reader
from ringreduce.parameter_server.snapshots import FORMAT, INDEX, STEPS, files_of, names_of, names_of_block

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import KeyValue


_LOOK = 0.01
"""Seconds between checks whether another worker has restored a snapshot."""


def restore(kv: KeyValue, path: Path, deadline: float) -> list[str]:
    """Restores the snapshot at `path`, or waits until another worker has; returns the names of its keys and tables.
    Raises as `KeyValue.restore`."""
    try:
        snapshot = hashlib.sha256((path / INDEX).read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidArgument(f"{path} is no whole snapshot: {error}") from None
    store, mine = kv._with.store, f"{kv.worker} {secrets.token_hex(4)}"
    first = store.compare_set(f"restore/{snapshot}", "", mine).decode()
    if first != mine:
        return _restored_by(kv, first.split()[0], path, f"restored/{snapshot}", deadline)
    try:
        names = _restore(kv, path, deadline)
    except BaseException as error:
        store.set(f"restored/{snapshot}", json.dumps({"error": str(error)[:1000] or repr(error)}))
        raise
    store.set(f"restored/{snapshot}", json.dumps({"names": names}))
    return names


def _restored_by(kv: KeyValue, worker: str, path: Path, key: str, deadline: float) -> list[str]:
    while not kv._with.store.check([key]):
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"restore: worker {worker}, which came first, has not restored {path} in time")
        time.sleep(_LOOK)
    found = json.loads(kv._with.store.get(key))
    if "error" in found:
        raise InvalidArgument(f"worker {worker} has tried to restore {path}: {found['error']}")
    return list(found["names"])


def _restore(kv: KeyValue, path: Path, deadline: float) -> list[str]:
    files = _read(path)
    # Blocks of a key may have different rules for a moment, while workers change it; in the end one holds for all.
    specs = {block["key"]: block["spec"] | {"update": block["update"]} for _, blocks in files for block in blocks}
    for key in specs:
        check_key(key)
    tables = {key: _make(kv, key, spec, deadline) for key, spec in specs.items()}
    calls = []
    for reader, blocks in files:
        for block in blocks:
            calls += _send(kv, reader, block, tables[block["key"]], deadline)
    for key, call in calls:
        kv._finish(key, call, deadline)
        if any(outcome == "kept" for _, _, outcome, _ in call.answers):
            raise InvalidArgument(f"{key!r} has a value already: restore() before init() or Embedding()")
    return list(specs)


def _make(kv: KeyValue, key: str, spec: dict[str, Any], deadline: float) -> _C.ParameterTable | None:
    """Makes a key, and returns None; or makes a table, and returns it."""
    if "table" in spec:
        return kv._make_table(key, spec, deadline, restored=True)
    same = {name: spec[name] for name in ("dtype", "shape", "mode", "update", "wire")}
    size = getattr(torch, spec["dtype"]).itemsize
    sizes = [count * size for _, count in cut(math.prod(spec["shape"]), spec["per_block"])]
    placed, _ = kv._agree(key, same, spec | {"servers": place(sizes, kv._with.loads), "restored": True})
    if placed["per_block"] != spec["per_block"]:
        raise InvalidArgument(f"{key!r} has been cut otherwise already: restore() before init()")
    kv._create(key, placed, deadline)
    return None


def _send(
    kv: KeyValue, reader: Reader, block: dict[str, Any], table: _C.ParameterTable | None, deadline: float
) -> list[tuple[str, ParameterCall]]:
    key, calls = block["key"], []
    if table is None:
        known = kv._keys[key]
        first = block["begin"] * known.dtype.itemsize
        (part,) = (each for each in known.parts if each[2] == first)
        payloads = iter([(part[0], part[1], _payload_of_block(reader, block))])
    else:
        at_once = min(kv._with.block_bytes, kv._client.window_bytes // 4)
        rows = _payloads_of_rows(reader, block, table, at_once)
        payloads = ((server, table.blocks[server], payload) for server, payload in rows)
    for server, number, payload in payloads:
        if payload.nbytes > kv._with.window:
            raise InvalidArgument(
                f"a block of {key!r} has {payload.nbytes} bytes with its states, and the window of this worker "
                f"{kv._with.window}: join with a larger window="
            )
        whole = _C.ParameterParts([(server, number, 0, payload.nbytes, 0)])
        left = deadline - time.monotonic()
        calls.append((key, kv._client.send("restore", whole, payload.ctypes.data, timeout=left)))
    return calls


def _read(path: Path) -> list[tuple[Reader, list[dict[str, Any]]]]:
    """Reads and checks a snapshot. Returns its files, and for each the descriptions of its blocks.

    Leaves out keys of which blocks are missing, because a worker was just making them. Raises `InvalidArgument`.
    """
    try:
        index = json.loads((path / INDEX).read_text())
        files = {str(file): str(digest) for file, digest in index["metadata"]["files"].items()}
        if index["metadata"]["format"] != FORMAT:
            raise InvalidArgument(f"{path} has format {index['metadata']['format']!r}; this version reads {FORMAT!r}")
        if set(files) != set(files_of(len(files))) or not files:
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
    """Yields the description of each block in the metadata, with its key's spec."""
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
            yield {"key": key, "spec": known, "update": dict(block.get("update", spec["update"])), **numbers}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{reader.path} does not say which blocks it has: {error!r:.200}") from None


def _whole_keys(path: Path, blocks: list[dict[str, Any]]) -> set[str]:
    """Returns the names of the tables, and of the tensors that have all their blocks."""
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


def _payload_of_block(reader: Reader, block: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Returns the payload of a restore request: the number of updates, the value, the states."""
    steps = np.frombuffer(STEPS.pack(block["steps"]), np.uint8)
    return np.concatenate([steps, *(reader.bytes_of(name) for name in names_of_block(block, block["states"]))])


def _payloads_of_rows(
    reader: Reader, block: dict[str, Any], table: _C.ParameterTable, at_once: int
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yields (server, payload) of restore requests for a table. A payload of about `at_once` bytes has the number of
    updates, ids, and rows with states."""
    rows, key = block["rows"], block["key"]
    steps = np.frombuffer(STEPS.pack(block["steps"]), np.uint8)
    if rows == 0:
        yield from ((server, steps) for server in range(len(table.blocks)))
        return
    columns = [reader.bytes_of(name).reshape(rows, -1) for name in names_of(key, block["states"])]
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
