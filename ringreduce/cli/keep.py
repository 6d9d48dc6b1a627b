"""`ringreduce keep`: runs one rank and starts it again when it dies, so the launcher sees no failure."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from ringreduce.cli.terminal import Help

LIFE = "RINGREDUCE_LIFE"
"""The environment variable that tells a rank how often it was started before."""
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def add(commands: Any, summary: str) -> None:
    parser = commands.add_parser(
        "keep",
        help=summary,
        description="Runs a command, which is one rank of a training with ringreduce.elastic, and runs it again when a "
        "signal ends it. So the launcher, which would end all ranks of the host, does not notice, and the rank joins "
        f"again. The variable {LIFE} tells the command how often it was run before. Signals to the keeper are passed "
        "on to the command. If the keeper ends, the command is killed.",
        epilog="examples:\n"
        "  ringreduce keep --errors python train.py\n"
        "  torchrun --nproc-per-node=8 --no-python ringreduce keep --errors python train.py",
        formatter_class=Help,
    )
    parser.add_argument("--again", type=int, default=3, metavar="N",
                        help="run it again at most N times, then end as it ended (default: 3)")  # fmt: skip
    parser.add_argument("--errors", action="store_true",
                        help="also run it again when it ends with an exit code other than 0")  # fmt: skip
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command with its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.program[:1] == ["--"]:
        del arguments.program[0]
    if arguments.again < 0:
        sys.stderr.write(f"error: keep: --again is {arguments.again}; it must be 0 or more\n")
        return 2
    if not arguments.program:
        sys.stderr.write("error: keep: no command is given; for example: ringreduce keep python train.py\n")
        return 2
    stopped: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            stopped.append(number)  # the command is not started again, however it ends now
        if child:
            child[0].send_signal(number)

    for number in FORWARDED:
        signal.signal(number, pass_on)
    for life in range(arguments.again + 1):
        child[:] = [_start(arguments.program, life)]
        if stopped:  # the signal came before there was a child to pass it on to
            child[0].send_signal(stopped[0])
        code = child[0].wait()
        died = code < 0 or (arguments.errors and code > 0)
        if not died or stopped or life == arguments.again:
            return code if code >= 0 else 128 - code
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        sys.stderr.write(f"ringreduce keep: {arguments.program[0]} (pid {child[0].pid}) ended with {how}; again\n")
        time.sleep(0.1 * life)
        if stopped:
            return 128 + stopped[0]
    raise AssertionError("the last life has ended above")


def _start(program: list[str], life: int) -> subprocess.Popen[bytes]:
    keeper, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def with_keeper() -> None:
        """Makes the kernel kill the command when its keeper ends, since the launcher may kill the keeper."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    return subprocess.Popen(program, env={**os.environ, LIFE: str(life)}, preexec_fn=with_keeper)  # noqa: PLW1509 (the keeper has one thread)
