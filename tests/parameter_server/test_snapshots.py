"""Snapshots: complete or absent, readable by others, and bit for bit on another number of servers."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodies.parameter_server import APART, NEAR, SMALL, gradient, join, placed
from distributed.harness import Rank, Ranks, on_ranks, run
from processes import no_memory

import ringreduce.parameter_server as ps
from ringreduce import _C
from ringreduce.errors import InvalidArgument, SystemFailure
from ringreduce.parameter_server.server import snapshots

COUNT, ROWS, DIM = 5000, 3000, 6
DENSE: dict[str, Any] = {
    "adam": ps.optimizer(torch.optim.AdamW, lr=0.01),
    "momentum": ps.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain": ps.reduce("sum"),
    "small": ps.optimizer(torch.optim.RMSprop, lr=0.01, centered=True),
}
TABLES: dict[str, Any] = {
    "t adam": ps.optimizer(torch.optim.Adam, lr=0.01),
    "t rowwise": ps.rowwise_adagrad(lr=0.1),
    "t sum": ps.reduce("sum"),
}
IDS = torch.arange(ROWS) * 65537 - 100_000_000


def make(kv: ps.KeyValue) -> dict[str, ps.Embedding]:
    for key, update in DENSE.items():
        shape = (3, 5) if key == "small" else (COUNT,)
        kv.init(key, torch.linspace(-1, 1, COUNT)[: int(np.prod(shape))].view(shape), update=update)
    return {key: ps.Embedding(kv, key, DIM, update=update, seed=5) for key, update in TABLES.items()}


def step(kv: ps.KeyValue, tables: dict[str, ps.Embedding], worker: int, number: int) -> None:
    pushes = {key: gradient(worker, number, COUNT) for key in DENSE}
    pushes["small"] = pushes["small"][:15].view(3, 5)
    pending = [kv.push(pushes)]
    ids = IDS[torch.randperm(ROWS, generator=torch.Generator().manual_seed(number))[: ROWS // 2]]
    values = gradient(worker, number, len(ids) * DIM).view(len(ids), DIM)
    pending += [table.push(ids, values) for table in tables.values()]
    kv.wait(*pending)


def state(kv: ps.KeyValue, tables: dict[str, ps.Embedding]) -> dict[str, Any]:
    values = {key: torch.empty((3, 5) if key == "small" else (COUNT,)) for key in DENSE}
    kv.pull(values)
    return {key: v.numpy() for key, v in values.items()} | {k: t.pull(IDS).numpy() for k, t in tables.items()}


def saves(me: Rank, path: str) -> tuple[Any, Any]:
    """What it is at the snapshot, and two steps later. The snapshot is written while the steps are made."""
    with join(me) as kv:
        tables = make(kv)
        for number in range(3):
            step(kv, tables, me.rank, number)
        at = state(kv, tables)
        saving = kv.snapshot(path) if me.rank == 0 else None
        for number in range(3, 5):
            step(kv, tables, me.rank, number)
        if saving is not None:
            assert saving.wait() == Path(path)
        kv.barrier()
        return at, state(kv, tables)


def restores(me: Rank, path: str, trains: bool) -> tuple[Any, Any]:
    with join(me) as kv:
        if me.rank == 0:
            assert sorted(kv.restore(path)) == sorted([*DENSE, *TABLES])
        me.meet("restored")
        tables = make(kv)
        at = state(kv, tables)
        kv.barrier()
        for number in range(3, 5) if trains else ():
            step(kv, tables, me.rank, number)
        return at, state(kv, tables)


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.tobytes() == right[key].tobytes(), key


@pytest.mark.parametrize(("hosts", "servers"), [(NEAR, 1), (NEAR, 3), (NEAR, 4), (APART, 3)])
def test_two_servers_loaded_on_others_bit_for_bit(hosts: tuple[int, ...], servers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    (at, _), (other, _) = run(placed, 2, hosts, saves, path)
    same(at, other)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    for found, _ in run(placed, servers, hosts, restores, path, False):
        same(found, at)


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    (_, later), _ = run(saves, 2, path)
    for _, found in run(restores, 2, path, True):
        same(found, later)


def read_by_the_format(path: Path) -> dict[str, np.ndarray]:
    """As its description says, without any of our code."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    tensors, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            assert all(isinstance(value, str) for value in entry.values())
            continue
        begin, stop = entry["data_offsets"]
        assert begin == end  # no holes
        end = stop
        kind = {"F32": np.float32, "I64": np.int64, "F64": np.float64}[entry["dtype"]]
        tensors[name] = np.frombuffer(data[8 + length + begin : 8 + length + stop], kind).reshape(entry["shape"])
    assert end == len(data) - 8 - length
    return tensors


def test_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    (at, _), _ = run(saves, 2, str(path))
    index = json.loads((path / "index.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for file in index["metadata"]["files"]:
        found = read_by_the_format(path / file)
        assert all(index["weight_map"][name] == file for name in found if not name.startswith("t "))
        for name, value in found.items():
            tensors[name] = np.concatenate([tensors[name], value]) if name in tensors else value
    assert tensors["small"].tobytes() == at["small"].tobytes()
    parts = sorted(
        (name for name in tensors if name.startswith("plain[")), key=lambda name: int(name[6:].split(":")[0])
    )
    assert np.concatenate([tensors[name] for name in parts]).tobytes() == at["plain"].tobytes()
    rows = dict(zip(tensors["t sum#ids"].tolist(), tensors["t sum"], strict=True))
    assert len(rows) == len(tensors["t sum#ids"]) > ROWS // 2
    pulled = dict(zip(IDS.tolist(), at["t sum"], strict=True))
    assert all(rows[i].tobytes() == pulled[i].tobytes() for i in rows)
    assert tensors["t rowwise#state0"].shape == (len(rows), 1)


def test_a_snapshot_under_asynchronous_pushes_is_of_one_moment(tmp_path: Path) -> None:
    """Every push adds 1 to all rows and elements, so a block or a server's rows of one moment are all equal."""
    rows = 120_000  # several slabs
    with ps.join(window=16 << 20, memory=128 << 20, block_bytes=1 << 20) as kv:
        kv.init("w", torch.zeros(1 << 20), update=ps.reduce("sum"), mode=ps.asynchronous())
        table = ps.Embedding(kv, "t", 16, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0, 0))
        ids, ones, w = torch.arange(rows), torch.ones(rows, 16), torch.ones(1 << 20)
        table.push(ids, ones).wait()
        for i in range(3):
            saving = kv.snapshot(tmp_path / str(i))
            begun = 1 + 4 * i
            for k in range(4):
                table.push(ids.flip(0), ones)
                kv.push("w", w)
                if k == 1:
                    more = torch.arange(rows + i * 1000, rows + (i + 1) * 1000)
                    table.push(more, torch.full((1000, 16), float(i + 7)))
            saving.wait()
            tensors = read_by_the_format(tmp_path / str(i) / "server-0-of-1.safetensors")
            assert len(tensors["t"]) == rows + i * 1000
            order = np.argsort(tensors["t#ids"])
            assert (tensors["t"][order][:rows] == begun).all()
            for name in tensors:
                if name.startswith("w"):
                    assert (tensors[name] == begun - 1).all()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def stopped(me: Rank, path: str) -> None:
    first = True
    real = snapshots.Writer.finish

    def finish(self: Any, *arguments: Any) -> None:
        nonlocal first
        if me.rank == 1 and not first:
            me.report("amid the snapshot")
            threading.Event().wait()
        first = False
        real(self, *arguments)

    snapshots.Writer.finish = finish  # type: ignore[method-assign]
    with join(me) as kv:
        tables = make(kv)
        step(kv, tables, me.rank, 0)
        if me.rank == 0:
            kv.snapshot(path + "/1").wait()
            kv.snapshot(path + "/2")
            me.report("begun")
        threading.Event().wait()


def test_a_server_killed_amid_a_snapshot_leaves_no_half_one(tmp_path: Path) -> None:
    with Ranks(stopped, 2, str(tmp_path)) as ranks:
        assert sorted(ranks.reports()) == ["amid the snapshot", "begun"]
        ranks.signal(1, signal.SIGKILL)
        ranks.signal(0, signal.SIGKILL)
    whole = [each.name for each in tmp_path.iterdir() if ".partial-" not in each.name]
    assert whole == ["1"] and (tmp_path / "1" / "index.json").exists()
    with ps.join(**SMALL) as kv:
        assert set(kv.restore(tmp_path / "1")) == {*DENSE, *TABLES}
        with pytest.raises(InvalidArgument, match="is no whole snapshot"):
            kv.restore(tmp_path / "2")


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    def nothing(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None: ...

    with ps.join(functions={"f": nothing}, **SMALL) as kv:
        with pytest.raises(InvalidArgument, match="there is something at"):
            kv.snapshot(tmp_path)
        kv.init("w", torch.ones(3))
        kv.snapshot(tmp_path / "one").wait()
        with pytest.raises(InvalidArgument, match=r"'w' has a value already: restore\(\) before init\(\)"):
            kv.restore(tmp_path / "one")
        (tmp_path / "file").write_text("")
        with pytest.raises(SystemFailure, match="file"):
            kv.snapshot(tmp_path / "file" / "x")
        kv.init("w#state0", torch.ones(3))
        kv.snapshot(tmp_path / "two").wait()  # w has no state, so the names differ
        kv.init("f", torch.ones(3), update=ps.function("f"))
        with pytest.raises(InvalidArgument, match="'f' is updated by Python"):
            kv.snapshot(tmp_path / "three")
        assert kv.push_pull("w", torch.full((3,), 2.0), out=torch.empty(3)).wait() == []  # and all goes on


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ps.join(**SMALL) as kv:
        kv.init("w", torch.ones(3))
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(snapshots.Writer, "finish", full)
            failed = kv.snapshot(tmp_path / "one")
            with pytest.raises(SystemFailure, match=r"of server 0: .*No space left on device"):
                failed.wait()
        with monkeypatch.context() as patched:
            patched.setattr(snapshots.Writer, "_write", full)
            with pytest.raises(SystemFailure, match="No space left on device"):
                kv.snapshot(tmp_path / "two")
        assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before
        handles = []
        for i in range(20):
            handles.append(kv.snapshot(tmp_path / str(i)))
            handles[-1].wait()
        assert all(handle.done() for handle in handles)  # the server knows the latest only


@pytest.mark.slow
@on_ranks(1)
def test_a_snapshot_without_memory_for_a_copy_fails_alone(me: Rank, tmp_path: Path) -> None:
    """A block is updated before it has been saved, and there is no memory to copy it."""
    goes_on, write = threading.Event(), snapshots._Saved.write

    def waits(self: Any, *arguments: Any) -> None:
        assert goes_on.wait(30)
        write(self, *arguments)

    snapshots._Saved.write = waits  # type: ignore[method-assign]
    with ps.join(me.store, rank=0, size=1, memory=160 << 20, window=72 << 20, block_bytes=72 << 20) as kv:
        w = torch.ones(17 << 20)  # more than malloc has in reserve for a thread
        kv.init("first", torch.ones(3))
        kv.init("w", w, update=ps.reduce("sum"))
        kv.push_pull("w", w, out=w).wait()
        saving = kv.snapshot(tmp_path / "one")
        with no_memory(16 << 20):
            kv.push_pull("w", w, out=w).wait()
        goes_on.set()
        with pytest.raises(SystemFailure, match="no memory to copy a block"):
            saving.wait()
        assert w.eq(4).all()
        kv.snapshot(tmp_path / "two").wait()


def test_a_key_that_is_being_made_is_left_out(tmp_path: Path) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("whole", torch.ones(3))
        value = torch.ones(COUNT * 20)
        spec = {"dtype": "float32", "shape": [COUNT * 20], "mode": ps.sync().as_json(), "update": ps.assign().as_json()}
        spec["wire"] = ["float32", "float32"]
        kv.calls.place("w", spec, time.monotonic() + 10)
        first = _C.ParameterParts(kv.calls.keys["w"].parts[:1])
        call = kv.calls.client.send("initialise", first, value.data_ptr(), timeout=10.0)
        kv.calls.finish("w", call, time.monotonic() + 10)
        assert len(kv.calls.keys["w"].parts) > 1
        kv.snapshot(tmp_path / "one").wait()
    with ps.join(**SMALL) as kv:
        assert kv.restore(tmp_path / "one") == ["whole"]
        kv.init("w", value)


def test_names_like_those_of_states(tmp_path: Path) -> None:
    with ps.join(**SMALL) as kv:
        with pytest.raises(InvalidArgument, match="key is '__metadata__'"):
            kv.init("__metadata__", torch.ones(3))
        kv.init("w", torch.ones(3))
        kv.init("w#state0", torch.full((3,), 2.0))
        kv.snapshot(tmp_path / "one").wait()
    with ps.join(**SMALL) as kv:
        assert set(kv.restore(tmp_path / "one")) == {"w", "w#state0"}
        found = {"w": torch.empty(3), "w#state0": torch.empty(3)}
        kv.pull(found)
        assert (found["w"] == 1).all() and (found["w#state0"] == 2).all()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{}",
        '{"metadata": {"format": "1", "files": {}}}',
        '{"metadata": {"format": "1", "files": {"x": 1}}}',
    ],
)
def test_a_wrong_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with ps.join(**SMALL) as kv, pytest.raises(InvalidArgument, match=r"index\.json"):
        kv.restore(tmp_path)


@pytest.mark.parametrize(
    "blocks",
    [
        "{",
        "[1]",
        "[{}]",
        '[{"key": "w"}]',
        '[{"key": "w", "begin": 1, "count": 3, "steps": 0, "rows": 0, "states": 0}]',
    ],
)
def test_wrong_metadata_is_refused(blocks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = snapshots.Writer.__init__

    def wrong(self: Any, path: Path, tensors: Any, metadata: dict[str, str]) -> None:
        real(self, path, tensors, metadata | {"blocks": blocks})

    monkeypatch.setattr(snapshots.Writer, "__init__", wrong)
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.ones(3))
        kv.snapshot(tmp_path / "one").wait()
    with ps.join(**SMALL) as kv, pytest.raises(InvalidArgument, match=r"does not say which|blocks of 'w'"):
        kv.restore(tmp_path / "one")


@pytest.mark.parametrize("at", (*range(0, 400, 23), *range(-1200, 0, 239)))  # in the header, in the tensors
def test_a_damaged_file_is_refused(at: int, tmp_path: Path) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.arange(100.0), update=ps.optimizer(torch.optim.Adam))
        kv.snapshot(tmp_path / "one").wait()
    (file,) = (tmp_path / "one").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 0x41
    file.write_bytes(data)
    with ps.join(**SMALL) as kv, pytest.raises(InvalidArgument, match="server-0-of-1"):
        kv.restore(tmp_path / "one")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.arange(100.0))
        kv.snapshot(tmp_path / "one").wait()
    (file,) = (tmp_path / "one").glob("*.safetensors")
    data = file.read_bytes()
    for length in (0, 4, 8, 100, len(data) - 1):
        file.write_bytes(data[:length])
        with ps.join(**SMALL) as kv, pytest.raises(InvalidArgument, match="server-0-of-1"):
            kv.restore(tmp_path / "one")
