"""The keeper of a rank, and the example that survives a death under torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from frameworks.launch import environment, torchrun
from processes import until

KEEP = ("-m", "ringreduce", "keep")


def keep(*command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, *KEEP, *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        **options,
    )


def test_a_command_has_the_streams_that_its_keeper_was_started_without() -> None:
    check = "import os; assert [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)] == [os.devnull] * 3"
    for closed in ("<&- >&- 2>&-", "<&- >/dev/null 2>&-", "</dev/null >&- 2>/dev/null"):
        shell = ("bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, *KEEP, sys.executable, "-c", check)
        assert subprocess.run(shell, env=environment(), timeout=60, check=False).returncode == 0, closed


DIES = "import os, signal; print('life', os.environ['RINGREDUCE_LIFE'], flush=True); os.kill(os.getpid(), signal.SIG{})"


def test_a_command_that_ends_well_is_run_once() -> None:
    process = keep(sys.executable, "-c", "print('once')")
    assert process.communicate(timeout=60)[0] == "once\n" and process.returncode == 0


def test_a_command_that_dies_is_run_again_and_at_last_given_up() -> None:
    process = keep("--again", "2", sys.executable, "-c", DIES.format("KILL"))
    output = process.communicate(timeout=60)[0]
    assert re.findall(r"life (\d)", output) == ["0", "1", "2"]
    assert output.count("ended with signal 9; again") == 2 and process.returncode == 128 + 9


@pytest.mark.parametrize(("option", "lives"), [((), 1), (("--errors",), 2)])
def test_exit_codes(option: tuple[str, ...], lives: int) -> None:
    process = keep(*option, "--again", "1", sys.executable, "-c", "print('life'); raise SystemExit(7)")
    assert process.communicate(timeout=60)[0].count("life\n") == lives and process.returncode == 7


def test_a_command_ends_with_its_keeper_and_hears_its_signals(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        f"signal.signal(signal.SIGUSR1, lambda *_: Path({str(heard)!r}).touch())\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    process = keep(sys.executable, "-c", code)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGUSR1)
    until(heard.exists)
    process.kill()
    until(lambda: not Path(f"/proc/{child}").exists())
    process.communicate(timeout=60)


def test_a_keeper_leaves_no_process_behind() -> None:
    """This process takes over what its descendants leave behind, as the first process of a container does."""
    code = (
        "import ctypes, os, subprocess, sys\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER\n"
        "subprocess.run((sys.executable, '-m', 'ringreduce', 'keep', 'true'), check=True)\n"
        "try:\n    print(os.waitpid(-1, 0))\nexcept ChildProcessError:\n    print('none')\n"
    )
    found = subprocess.run(
        (sys.executable, "-c", code), env=environment(), capture_output=True, check=False, text=True, timeout=60
    )
    assert found.stdout == "none\n", found.stdout + found.stderr


def test_a_command_that_is_told_to_end_is_not_run_again() -> None:
    process = keep(sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    assert "again" not in process.communicate(timeout=60)[0] and process.returncode == 128 + 15


COUNTS = """import signal, time
heard = []
signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
print("here", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(1)  # for a second one
print("heard", len(heard), flush=True)
"""


@pytest.mark.parametrize("to_all", [True, False])
def test_a_command_gets_a_signal_once(to_all: bool) -> None:
    """That to all of the process group as well, as Ctrl-C in a terminal sends it."""
    process = keep(sys.executable, "-c", COUNTS, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "heard 1\n" and process.returncode == 0


def test_signals_that_are_ignored_stay_so() -> None:
    """As SIGHUP after nohup."""
    hang_up = (
        "import os, signal; os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGHUP); print('on')"
    )
    process = keep(sys.executable, "-c", hang_up, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.communicate(timeout=60)[0] == "on\n" and process.returncode == 0


def test_no_command() -> None:
    process = keep()
    assert "no command is given" in process.communicate(timeout=60)[0] and process.returncode == 2


@pytest.mark.slow
def test_a_training_survives() -> None:
    output = torchrun(
        "--nproc-per-node=3", "--no-python", sys.executable, *KEEP, sys.executable, "examples/elastic_live.py"
    )
    assert "ended with signal 9; again" in output
    lines = re.findall(r"rank (\d) of 3, life (\d), epoch \d: from step (\d+) on; parameters .* by (\S+)", output)
    assert sorted((rank, life) for rank, life, _, _ in lines) == [("0", "0"), ("1", "0"), ("2", "1")]
    for _, life, began, _ in lines:
        assert (int(began) > 0) == (life == "1")
