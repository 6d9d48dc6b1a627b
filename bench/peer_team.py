"""The teams of processes that peers.py measures: how each backend is installed, started, given orders and ended.

What a rank of one does is in peer_worker.py.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import harness

FOLDER = Path(__file__).resolve().parent
VENVS = FOLDER / ".peers"


@dataclass(frozen=True)
class Mpi:
    """An MPI library of PyPI: its package, how its launcher starts ranks on one host, and what it finds set."""

    package: str
    launcher: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


# Each with the settings, of those documented, that were fastest over 64 B to 64 MB and 2 and 4 ranks on 2 Xeon cores.
# MPICH: its shared-memory collectives took 0.8 us at 64 B where the others take 1.9, but 10 ms at 16 MB instead of 3,
# and seconds with more ranks than cores. Open MPI: xhc changed nothing for 2 ranks, and made 4 ranks 10 to 25% faster
# from 256 KB; it yields by itself when oversubscribed.
MPIS = {
    "openmpi": Mpi(
        "openmpi",
        ("mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "coll_xhc_priority", "90"),
    ),
    "mpich": Mpi("mpich", ("mpiexec.hydra",), {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"}),
    "impi": Mpi("impi-rt", ("mpiexec.hydra",), {"I_MPI_FABRICS": "shm"}),
}

# Plain copies, by glibc's own choice of instructions, and by non-temporal stores from 64 KB on.
COPIES: dict[str, dict[str, str]] = {
    "memcpy": {},
    "memcpy-nt": {
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x10000:glibc.cpu.x86_rep_movsb_threshold=0x7fffffff"
    },
}


class BackendFailed(Exception):
    """A backend could not be installed, did not start, died, or did not answer in time."""


class Team:
    """The processes of one backend. They sleep until `run` gives an order; `close` ends them, whatever they do."""

    def __init__(self, name: str, ranks: int, folder: Path, timeout: float) -> None:
        self.name, self.ranks, self.timeout, self.version = name, ranks, timeout, ""
        self._path = folder / f"{name}-{ranks}-{time.monotonic_ns()}"  # names must not repeat: torch's store is a file
        self._log = self._path.with_suffix(".log")
        self._connections: dict[int, tuple[socket.socket, TextIO]] = {}
        self._pidfds: list[int] = []  # an MPI launcher's ranks are neither its process group's nor our children
        command, environment = launch_command(name, ranks, self._path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(ranks)
        with listener, self._log.open("w") as log:
            self._launcher = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                self._meet(listener)
            except BaseException:
                self.kill()
                raise

    def _meet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self.timeout
        listener.settimeout(0.2)
        while len(self._connections) < self.ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None:
                    raise self._failure(f"its launcher ended with status {self._launcher.returncode}") from None
                if time.monotonic() > deadline:
                    came = f"{len(self._connections)} of {self.ranks} ranks"
                    raise self._failure(f"{came} came within {self.timeout:g} s") from None
                continue
            lines = connection.makefile("rw")
            hello = json.loads(lines.readline())
            self._connections[hello["rank"]] = connection, lines
            self._pidfds.append(os.pidfd_open(hello["pid"]))
            self.version = hello["version"]

    def run(self, **order: Any) -> list[dict[str, Any]]:
        """Give the order to all ranks and return their answers, by rank. Raises BackendFailed after `timeout`."""
        text = json.dumps(order) + "\n"
        deadline = time.monotonic() + self.timeout
        what = f"{order['collective']} of {order['bytes']} B"
        answers = []
        try:
            for _, lines in self._connections.values():
                lines.write(text)
                lines.flush()
            for rank in range(self.ranks):
                connection, lines = self._connections[rank]
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                line = lines.readline()
                if not line:
                    raise self._failure(f"rank {rank} died in {what}")
                answers.append(json.loads(line))
        except TimeoutError:
            self.kill()
            raise self._failure(f"rank {rank} did not end {what} within {self.timeout:g} s") from None
        except OSError:  # the order could not be written
            self.kill()
            raise self._failure(f"a rank died before {what}") from None
        except BaseException:
            self.kill()
            raise
        if any("error" in answer for answer in answers):
            rank, error = next((r, a["error"]) for r, a in enumerate(answers) if "error" in a)
            raise self._failure(f"{what} raised on rank {rank}: {error}")
        return answers

    def _failure(self, reason: str) -> BackendFailed:
        said = self._log.read_text(errors="replace").strip()[-2000:]
        return BackendFailed(f"{self.name} with {self.ranks} ranks: {reason}" + (f"\n{said}" if said else ""))

    def close(self) -> None:
        """End the processes: they leave when their connection closes, and are killed if they do not."""
        for connection, lines in self._connections.values():
            with contextlib.suppress(OSError):
                lines.close()
            connection.close()
        self._connections.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the processes at once. The launcher may end those that have not said hello yet, then goes too."""
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds.clear()
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._launcher.pid, number)
                self._launcher.wait(patience)
                return


def launch_command(name: str, ranks: int, path: Path) -> tuple[list[str], dict[str, str]]:
    """What starts the team `name`, and its environment."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    worker = [str(FOLDER / "peer_worker.py"), name, str(path)]
    if name not in MPIS:
        return [sys.executable, *worker, str(ranks)], environment | COPIES.get(name, {})
    binaries = VENVS / name / "bin"
    launcher, *options = MPIS[name].launcher
    command = [str(binaries / launcher), *options, "-n", str(ranks), str(binaries / "python"), *worker]
    return command, environment | MPIS[name].environment


def install(name: str) -> None:
    """Put the MPI library, mpi4py and NumPy into a venv of their own, if they are not there. Raises BackendFailed."""
    venv, packages = VENVS / name, [MPIS[name].package, "mpi4py", "numpy"]
    python = venv / "bin" / "python"
    probe = f"from importlib.metadata import version; print(*map(version, {packages}))"

    def run(*command: str | Path) -> bool:
        result = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output.append(result.stdout.strip())
        return result.returncode == 0

    output: list[str] = []
    if python.exists() and run(python, "-c", probe):
        return
    shutil.rmtree(venv, ignore_errors=True)
    if not run(sys.executable, "-m", "venv", venv) or not run(python, "-m", "pip", "install", "-q", *packages):
        shutil.rmtree(venv, ignore_errors=True)
        raise BackendFailed(f"{name}: could not install {' '.join(packages)} in {venv}:\n{output[-1][-2000:]}")


def install_all(names: Sequence[str]) -> dict[str, str]:
    """Install each of `names`; those that failed, with the reason."""
    failed = {}
    with harness.Progress("setup", len(names), shown=bool(names)) as progress:
        for name in names:
            try:
                install(name)
            except BackendFailed as error:
                failed[name] = str(error)
            progress.advance(name)
    return failed
