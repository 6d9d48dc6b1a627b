"""`ringreduce bench` from end to end with tiny sizes, without MPI and with a stand-in for it; all kinds of steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ringreduce.cli import bench, main
from ringreduce.cli.bench import compare
from ringreduce.cli.bench.compare import ALONE, GLOO, OURS, Case, Comparison

TINY = [
    Case("convolutional", "DDP", batch=2, length=32, width=4, layers=1),
    Case("transformer", "DDP", batch=1, length=8, width=64, layers=1),
]
MPI4PY = """
import os
import numpy, torch, torch.distributed as dist
__version__ = "of the test"
class rc: pass
class World:
    def __init__(self):
        rank, size = int(os.environ["RANK"]), int(os.environ["SIZE"])
        dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=size)
        self.Get_rank, self.Get_size, self.Barrier = dist.get_rank, dist.get_world_size, dist.barrier
    def __getattr__(self, name):
        return print
    def Allreduce(self, place, message):
        dist.all_reduce(torch.from_numpy(message[0]))
class MPI:
    COMM_WORLD, IN_PLACE, FLOAT = World(), None, None
    Get_library_version = staticmethod(lambda: "MPI of the test")
"""
MPIEXEC = """#!/bin/sh
export SIZE=$2 MEETING=$0.$$
shift 2
RANK=1 "$@" &
RANK=0 exec "$@"
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", (64, 4096))
    monkeypatch.setattr(bench, "cases", lambda: TINY)


def programs(folder: Path, mpiexec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpi4py and an mpiexec that are found."""
    (folder / "mpi4py.py").write_text(MPI4PY)
    (folder / "mpiexec").write_text(mpiexec)
    (folder / "mpiexec").chmod(0o755)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_table_and_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: None)  # whether or not it is installed
    assert main(["bench", "--ranks", "2", "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    for text in ("64 B", "4 KB", "images of 32 px a rank", "8 tokens a rank", "of a step with Gloo was communication"):
        assert text in out
    assert "ringreduce pays here for" in out
    assert "MPI was left out: mpi4py is not installed\n" in out


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("works", [True, False])
def test_mpi(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, works: bool) -> None:
    programs(tmp_path, MPIEXEC if works else "#!/bin/sh\necho no such fabric\nexit 3\n", monkeypatch)
    monkeypatch.setattr(bench, "cases", lambda: [])
    assert main(["bench", "--ranks", "2", "--seconds", "1", "--json"]) == (0 if works else bench.NOT_WELL)
    found = json.loads(capsys.readouterr().out)
    assert [set(row["us"]) for row in found["all_reduce"]] == [{GLOO, OURS} | ({"mpi"} if works else set())] * 2
    assert found["notes"] == (
        [] if works else ["left out: mpi with 2 ranks: its launcher ended with status 3\nno such fabric"]
    )


@pytest.mark.slow
def test_all_kinds_of_steps_come_to_the_same(tmp_path: Path) -> None:
    decoder = Case("decoder", "tensor parallel", batch=1, length=3, width=512, layers=1)
    with Comparison(2, tmp_path, lambda what: None) as teams:
        teams.start(GLOO, OURS)
        for case in (*TINY, replace(TINY[1], by="FSDP2"), decoder):
            (found,) = teams.steps(case, 0)
            assert {name: len(times) for name, times in found.times_us.items()} == dict.fromkeys((GLOO, OURS, ALONE), 3)
        assert teams.failures == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_stays_behind(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "ringreduce", "bench", "--ranks", "2"]
    folder = Path(tempfile.mkdtemp())  # a short name, as sockets want it
    environment = os.environ | {"TMPDIR": str(folder)}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not list(folder.glob("*/ringreduce-dist*.log")):
            assert started.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        started.send_signal(number)
        _, said = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == code and "Traceback" not in said, said
    folder.rmdir()
    marks = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [mark for mark in marks if str(folder).encode() in mark]
