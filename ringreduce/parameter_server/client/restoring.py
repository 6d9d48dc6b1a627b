"""Snapshots as a worker sees them: asking the servers for one, and restoring one on any number of servers.

To restore, all files are read and checked before anything is made. Each block is then sent to its server as one
request, and the rows of tables in parts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.common.checks import shown
from ringreduce.coordination.wait import every, wait_for
from ringreduce.errors import CollectiveTimeout, InvalidArgument, SystemFailure
from ringreduce.parameter_server.arguments import Timeout, check_key
from ringreduce.parameter_server.client.calls import Calls
from ringreduce.parameter_server.safetensors import Reader
from ringreduce.parameter_server.snapshot_files import INDEX, STEPS, names_of, names_of_block, read

_LOOK = 0.01
"""Seconds between checks whether another worker has restored a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is being written: what `KeyValue.snapshot` returns."""

    through: Calls
    path: Path
    """The folder of the complete snapshot."""
    folder: str
    """The folder until it is complete."""

    def done(self) -> bool:
        """Returns whether it is complete. Raises `ServerLost`, and `SystemFailure` if a part could not be written, once
        all parts have ended; then nothing is left of it."""
        question, deadline = {"ask": "snapshot state", "folder": self.folder}, self.through.deadline(None)
        try:
            states = [self.through.questions.ask(server, question, deadline) for server in range(self.through.servers)]
        except InvalidArgument:  # a server knows its latest snapshots only, and a backup only those it has begun itself
            if (self.path / INDEX).exists():
                return True
            raise SystemFailure(
                f"the snapshot {self.folder} stays incomplete: a server has ended while it wrote its part, or has "
                "written many others since; begin another one"
            ) from None
        if not all(state["done"] for state in states):  # of one that has failed, too
            return False
        for server, state in enumerate(states):
            if state["fault"]:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise SystemFailure(f"the snapshot {self.folder} of server {server}: {state['fault']}", server)
        return True

    def wait(self, timeout: Timeout = None) -> Path:
        """Waits until it is complete; returns its folder. `timeout` is in seconds (default: that of `join`). Raises
        `CollectiveTimeout`, and otherwise as `done`."""
        if not wait_for(self.done, every(0.01), self.through.until(timeout)):
            raise CollectiveTimeout(f"the snapshot {self.folder} was not written in time; the servers go on with it")
        return self.path


def begin(calls: Calls, path: Path, deadline: float) -> Snapshot:
    """Asks the servers for a snapshot at `path`. Raises as `KeyValue.snapshot`."""
    _check_absent(path)
    if not calls.client.drain(timeout=max(0.0, deadline - time.monotonic())):
        raise CollectiveTimeout("snapshot: what this worker has pushed was not applied in time")
    folder = f"{path}.partial-{secrets.token_hex(4)}"
    try:
        for server in range(calls.servers):
            question = {"ask": "snapshot", "folder": folder, "part": f"{server}-of-{calls.servers}"}
            calls.questions.ask(server, question, deadline)
    except BaseException:  # servers that have begun cannot complete it, since their files have no names any more
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Snapshot(calls, path, folder)


def _check_absent(path: Path) -> None:
    try:
        is_there = path.exists()
    except OSError as error:
        raise InvalidArgument(f"path is {shown(str(path))}, where nothing can be written: {error.strerror}") from None
    if is_there:
        raise InvalidArgument(f"there is something at {path} already: give a snapshot a name of its own")


def restore(calls: Calls, path: Path, deadline: float) -> list[str]:
    """Restores the snapshot at `path`, or waits until another worker has. Raises as `KeyValue.restore`."""
    try:
        snapshot = hashlib.sha256((path / INDEX).read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidArgument(f"{path} is no whole snapshot: {error}") from None
    store, mine = calls.store, f"{calls.entry.worker} {secrets.token_hex(4)}"
    first = store.compare_set(f"restore/{snapshot}", "", mine).decode()
    if first != mine:
        return _restored_by(calls, first.split()[0], path, f"restored/{snapshot}", deadline)
    try:
        names = _restore(calls, path, deadline)
    except BaseException as error:
        store.set(f"restored/{snapshot}", json.dumps({"error": str(error)[:1000] or repr(error)}))
        raise
    store.set(f"restored/{snapshot}", json.dumps({"names": names}))
    return names


def _restored_by(calls: Calls, worker: str, path: Path, key: str, deadline: float) -> list[str]:
    if not wait_for(lambda: calls.store.check([key]), every(_LOOK), deadline):
        raise CollectiveTimeout(f"restore: worker {worker}, which came first, has not restored {path} in time")
    found = json.loads(calls.store.get(key))
    if "error" in found:
        raise InvalidArgument(f"worker {worker} has tried to restore {path}: {found['error']}")
    return list(found["names"])


def _restore(calls: Calls, path: Path, deadline: float) -> list[str]:
    files = read(path)
    # Blocks of a key may have different rules for a moment, while workers change it; in the end one holds for all.
    specs = {block["key"]: block["spec"] | {"update": block["update"]} for _, blocks in files for block in blocks}
    for key in specs:
        check_key(key)
    tables = {key: _make(calls, key, spec, deadline) for key, spec in specs.items()}
    sent = []
    for reader, blocks in files:
        for block in blocks:
            sent += _send(calls, reader, block, tables[block["key"]], deadline)
    for key, call in sent:
        calls.finish(key, call, deadline)
        if any(outcome == "kept" for _, _, outcome, _ in call.answers):
            raise InvalidArgument(f"{key!r} has a value already: restore() before init() or Embedding()")
    return list(specs)


def _make(calls: Calls, key: str, spec: dict[str, Any], deadline: float) -> _C.ParameterTable | None:
    """Makes a key, and returns None; or makes a table, and returns it."""
    if "table" in spec:
        return calls.make_table(key, spec, deadline, restored=True)
    own = ("dtype", "shape", "mode", "update", "wire")
    same, more = ({name: spec[name] for name in spec if (name in own) is it} for it in (True, False))
    calls.place(key, same, deadline, **more, restored=True)
    return None


def _send(
    calls: Calls, reader: Reader, block: dict[str, Any], table: _C.ParameterTable | None, deadline: float
) -> list[tuple[str, _C.ParameterCall]]:
    key, sent = block["key"], []
    if table is None:
        known = calls.keys[key]
        first = block["begin"] * known.dtype.itemsize
        (part,) = (each for each in known.parts if each[2] == first)
        payloads = iter([(part[0], part[1], _payload_of_block(reader, block))])
    else:
        at_once = min(calls.entry.block_bytes, calls.client.window_bytes // 4)
        rows = _payloads_of_rows(reader, block, table, at_once)
        payloads = ((server, table.blocks[server], payload) for server, payload in rows)
    for server, number, payload in payloads:
        if payload.nbytes > calls.entry.window:
            raise InvalidArgument(
                f"a block of {key!r} has {payload.nbytes} bytes with its states, and the window of this worker "
                f"{calls.entry.window}: join with a larger window="
            )
        whole = _C.ParameterParts([(server, number, 0, payload.nbytes, 0)])
        left = deadline - time.monotonic()
        sent.append((key, calls.client.send("restore", whole, payload.ctypes.data, timeout=left)))
    return sent


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
