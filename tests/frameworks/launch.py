"""Starts scripts as users do, with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 150.0
"""Seconds; what is left then is killed, and the test fails."""


def environment() -> dict[str, str]:
    """In which this checkout is imported, and cores are not fought for."""
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: str, **variables: str) -> str:
    """What the ranks printed; an AssertionError with it unless all ended well. `variables`: of their environment."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments, **variables)


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
