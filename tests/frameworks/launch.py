"""Starts scripts as users do, with torchrun, or as ranks that are forked with all they import, which is cheaper."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.harness import Rank, run
from processes import forking_context

from ringreduce import cli

ROOT = Path(__file__).parents[2]
DEADLINE = 150.0
"""Seconds; what is left then is killed, and the test fails."""


def environment() -> dict[str, str]:
    """In which this checkout is imported, and cores are not fought for."""
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: str, **variables: str) -> str:
    """What the ranks printed; an AssertionError with it unless all ended well. `variables`: of their environment."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments, **variables)


def ranks(program: str, *arguments: str) -> str:
    """The same as of `torchrun`, whose store is here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return _forked(program, arguments, [given | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")])


def alone(program: str, *arguments: str, **variables: str) -> str:
    """The same as of `python`."""
    return _forked(program, arguments, [variables])


def _forked(program: str, arguments: tuple[str, ...], variables: list[dict[str, str]]) -> str:
    with tempfile.NamedTemporaryFile() as file:
        run(_main, len(variables), program, arguments, variables, file.name)
        return file.read().decode()


def _main(me: Rank, program: str, arguments: tuple[str, ...], variables: list[dict[str, str]], output: str) -> None:
    opened = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.environ |= variables[me.rank]
    os.chdir(ROOT)
    sys.argv, sys.path[:0] = [program, *arguments], [str(Path(program).parent)]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    finally:
        sys.stdout.flush()


class Command:
    """`ringreduce` with these words, forked with all it imports; has what tests use of a subprocess.Popen."""

    def __init__(self, *words: str) -> None:
        self._process = forking_context().Process(target=_command, args=(words,))
        self._process.start()
        self.pid: int = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("ringreduce", timeout or 0.0)
        return int(self._process.exitcode)

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


@contextlib.contextmanager
def killed(processes: Iterable[Any]) -> Iterator[None]:
    """At the end, those that are left, of `Command` or subprocess.Popen."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _command(words: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    sys.exit(cli.main([*words]))


def python(*arguments: str, **variables: str) -> str:
    """The same for one process."""
    process = subprocess.Popen(
        (sys.executable, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment() | variables,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    return output
