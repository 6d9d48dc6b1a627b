"""Processes that use the GPU and may be killed, each with a pipe to this one.

def main(pipe, number): pipe.send(number + 1)
with Processes(stand_in, [(main, 1), (main, 2)]) as processes:
    processes.hear(0)
"""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu import device

KILL_SECONDS = 10.0  # for which a killed process is waited for: one that is stuck in the GPU's driver may never end


class Processes:
    """They end with this object."""

    def __init__(self, stand_in: bool, mains: Sequence[tuple[Any, ...]]) -> None:
        """Each runs `main(its end of the pipe, *arguments)`, where mains has (main, *arguments)."""
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for main, *arguments in mains:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(stand_in, main, theirs, arguments))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for index in range(len(self._processes)):
            self.kill(index)

    def hear(self, index: int, seconds: float = 60) -> Any:
        """What a process says next; raises RuntimeError with what it raised, or TimeoutError."""
        if not self._pipes[index].poll(seconds):
            raise TimeoutError(f"process {index} said nothing for {seconds:.0f} s")
        said = self._pipes[index].recv()
        if isinstance(said, RuntimeError):
            raise said
        return said

    def tell(self, index: int, what: Any) -> None:
        self._pipes[index].send(what)

    def kill(self, index: int) -> None:
        """Raises TimeoutError if the process does not end."""
        process = self._processes[index]
        process.kill()
        process.join(KILL_SECONDS)
        if process.is_alive():
            raise TimeoutError(f"process {index}, pid {process.pid}, still runs {KILL_SECONDS:.0f} s after SIGKILL")


def _run(stand_in: bool, main: Callable[..., None], pipe: Any, arguments: Sequence[Any]) -> None:
    try:
        device.use(stand_in)
        main(pipe, *arguments)
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
