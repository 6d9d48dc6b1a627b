"""The examples of the parameter server's pages run as they are written, however the servers have been started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bodies.parameter_server as one_host
import pytest
import test_serve
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks
from frameworks.launch import killed
from processes import deadline, free_ports
from torch import nn

import ringreduce.parameter_server as ps

WORKERS, SERVERS = 2, 2
PAGES = (Path(__file__).parents[2] / "docs").glob("parameter_server*.md")
BLOCKS = [block for page in PAGES for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)]


def block(about: str) -> str:
    """The only example that contains this text."""
    (found,) = (each for each in BLOCKS if about in each)
    return found


def join(me: Rank, way: str, port: int) -> ps.KeyValue:
    if way == "every rank":
        return one_host.join(me)
    store = me.store if way == "ps.serve" else dist.TCPStore("127.0.0.1", port, is_master=False)
    return ps.join(store, role="worker", workers=WORKERS, timeout=60.0)


def follows(me: Rank, way: str, port: int, folder: str, restores: bool) -> Any:
    """Trains and saves, or restores and goes on; returns the values at the end of that, and after a step."""
    if way == "ps.serve" and me.rank < SERVERS:
        with ps.serve(me.store, rank=me.rank, size=SERVERS, memory=16 << 20) as serving:
            while not serving.wait(0.1):
                pass
        return None
    os.chdir(folder)
    torch.manual_seed(me.rank)
    model = nn.Linear(3, 2)
    with join(me, way, port) as kv:
        if way != "every rank":
            assert kv.worker >= SERVERS
        known = {"kv": kv, "ps": ps, "model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}
        if restores:
            exec(block("kv.restore("), known)
        exec(block("ps.attach(").replace("ps.ssp(3)", "ps.sync()"), known)
        values = []
        for step in range(3):
            optimizer: Any = known["optimizer"]
            if step == 2 and not restores:
                kv.barrier()
                if kv.worker == (0 if way == "every rank" else SERVERS):
                    exec(block("kv.snapshot("), known)
                kv.barrier()
            optimizer.pull()
            values.append([p.detach().flatten().tolist() for p in model.parameters()])
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        optimizer.detach()
        values.append([p.detach().flatten().tolist() for p in model.parameters()])
    return values


@contextmanager
def servers(way: str, port: int) -> Iterator[None]:
    words = ["--store", f"127.0.0.1:{port}", "--memory", "16M", "--size", str(SERVERS)]
    there = [test_serve.start(*words, "--rank", str(n)) for n in range(SERVERS)] if way == "ringreduce serve" else []
    with killed(there):
        yield
        for each in there:
            assert each.wait(deadline()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["every rank", "ringreduce serve", "ps.serve"])
def test_a_snapshot_is_restored_by_every_worker_and_once(way: str, tmp_path: Path) -> None:
    found = []
    for restores in (False, True):
        (port,) = free_ports(1)
        size = WORKERS + (SERVERS if way == "ps.serve" else 0)
        with servers(way, port), Ranks(follows, size, way, port, str(tmp_path), restores) as ranks:
            found.append([each for each in ranks.results() if each is not None])
    (saved, other), (restored, its_other) = found
    assert saved == other and restored == its_other
    assert restored[:2] == saved[2:], "training goes on where the snapshot was made"


def test_the_working_loop() -> None:
    known: dict[str, Any] = {}
    exec(block('kv.push_pull("w", gradient, out=w).wait()'), known)
    assert known["kv"].has_left
