"""`ringreduce keep`: runs one rank and starts it again when it dies, so the launcher sees no failure."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from ringreduce.cli.terminal import complain
from ringreduce.common.system import fork, starting

LIFE = "RINGREDUCE_LIFE"
"""The environment variable that tells a rank how often it was started before."""
PR_SET_PDEATHSIG = 1
_DELIVERY = 0.02
"""Seconds after which a signal has come to all processes of its group."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST = 1e6
"""Seconds."""


def add(command: Any) -> None:
    parser = command(
        description="Runs one rank of a training that uses ringreduce.elastic. If a signal kills the rank, `keep` runs "
        "the command again, and the new process joins the training again. The launcher does not notice, so it does not "
        f"end the other ranks of the host. The variable {LIFE} tells the command how often it was run before. "
        "`keep` passes each signal that it receives on to the command, except those sent to the whole process group, "
        "which the command has received already. If `keep` itself is killed, the command is killed, too.",
        epilog="examples:\n"
        "  ringreduce keep --errors python train.py\n"
        "  torchrun --nproc-per-node=8 --no-python ringreduce keep --errors python train.py",
    )
    parser.add_argument("--again", type=int, default=3, metavar="N",
                        help="run it again at most N times, then exit as its last run did (default: 3)")  # fmt: skip
    parser.add_argument("--errors", action="store_true",
                        help="also run the command again when its exit code is not 0")  # fmt: skip
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command with its arguments")


def run(arguments: argparse.Namespace) -> int:
    if arguments.program[:1] == ["--"]:
        del arguments.program[0]
    if arguments.again < 0:
        complain(f"error: keep: --again is {arguments.again}; it must be 0 or more")
        return 2
    if not arguments.program:
        complain("error: keep: no command is given; for example: ringreduce keep python train.py")
        return 2
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Those that are ignored, as SIGHUP after nohup, stay so for the command.
    signals = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    with _witness() as witness:
        return _run_lives(arguments, signals, witness)


def _run_lives(arguments: argparse.Namespace, signals: set[signal.Signals], witness: socket.socket) -> int:
    stopped = False
    for life in range(arguments.again + 1):
        child, may_lack_it = _start(arguments.program, life), True
        while (code := child.poll()) is None:
            found = signal.sigtimedwait(signals | {signal.SIGCHLD}, 0 if may_lack_it else _LONGEST)
            if found is None:  # whatever comes from here on comes to the command, too, if it comes to all
                may_lack_it = False
            elif found.si_signo != signal.SIGCHLD:
                stopped |= found.si_signo in ENDING  # the command is not started again, however it ends now
                if not _came_to_all(found.si_signo, witness) or may_lack_it:
                    child.send_signal(found.si_signo)
        died = code < 0 or (arguments.errors and code > 0)
        if not died or stopped or life == arguments.again:
            return code if code >= 0 else 128 - code
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        complain(f"ringreduce keep: {arguments.program[0]} (pid {child.pid}) ended with {how}; again")
        time.sleep(0.1 * life)
    raise AssertionError("the last life has ended above")


@contextlib.contextmanager
def _witness() -> Iterator[socket.socket]:
    """A process that gets the signals of the keeper's process group, and not those of the keeper alone.

    The keeper has blocked the signals, so one that comes stays pending there until the keeper asks for it.
    """
    ours, its = socket.socketpair()
    pid = fork()
    if not pid:
        try:
            ours.close()
            while asked := its.recv(1):
                its.send(bytes([signal.sigtimedwait(asked, 0) is not None]))
        finally:
            os._exit(0)
    its.close()
    try:
        yield ours
    finally:  # nobody else may: the first process of a container often waits for no orphans
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _came_to_all(number: int, witness: socket.socket) -> bool:
    """Whether a signal came to the whole process group, as those of a terminal do. Then the command has got it, too."""
    time.sleep(_DELIVERY)
    with contextlib.suppress(OSError):  # the witness has been killed
        witness.send(bytes([number]))
        return witness.recv(1) == b"\1"
    return False


def _start(program: list[str], life: int) -> subprocess.Popen[bytes]:
    keeper, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def with_keeper() -> None:
        """Makes the kernel kill the command when its keeper ends, since the launcher may kill the keeper."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # not Python's handler, which the command would not have
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))

    environment = {**os.environ, LIFE: str(life)}
    return starting(lambda: subprocess.Popen(program, env=environment, preexec_fn=with_keeper))  # noqa: PLW1509 (the keeper has one thread)
