"""The teams of processes that are measured: how they are started, given orders and ended.

What a rank of one does is in worker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

WORKER = Path(__file__).with_name("worker.py")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class BackendFailed(Exception):
    """A backend could not be installed, did not start, died, or did not answer in time."""


class Team:
    """The processes of one backend. They sleep until `run` gives an order; `close` ends them, whatever they do."""

    def __init__(
        self,
        name: str,
        ranks: int,
        folder: Path,
        timeout: float,
        launcher: Sequence[str | Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`launcher` starts `ranks` processes, and ends in their Python; without it worker.py forks them itself."""
        self.name, self.ranks, self.timeout, self.version = name, ranks, timeout, ""
        self._path = folder / f"{name}-{ranks}-{time.monotonic_ns()}"  # names must not repeat: torch's store is a file
        self._log = self._path.with_suffix(".log")
        self._connections: dict[int, tuple[socket.socket, TextIO]] = {}
        self.ended = False
        self._pidfds: list[int] = []  # an MPI launcher's ranks are neither its process group's nor our children
        how = [*launcher, WORKER, name, self._path] if launcher else [sys.executable, WORKER, name, self._path, ranks]
        command, variables = [str(word) for word in how], os.environ | ONE_THREAD | dict(environment or {})
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(ranks)
        with listener, self._log.open("w") as log:
            self._launcher = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
            if hello["rank"] in self._connections:
                raise self._failure(f"rank {hello['rank']} came twice; is the launcher of another MPI than mpi4py?")
            self._connections[hello["rank"]] = connection, lines
            self._pidfds.append(os.pidfd_open(hello["pid"]))
            self.version = hello["version"]

    def run(self, **order: Any) -> list[dict[str, Any]]:
        """Give the order to all ranks and return their answers, by rank. Raises BackendFailed after `timeout`."""
        text = json.dumps(order) + "\n"
        deadline = time.monotonic() + self.timeout
        step = order.get("step", {})
        what = f"a step of {step['net']} by {step['by']}" if step else f"{order['collective']} of {order['bytes']} B"
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
        self.ended = True
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
