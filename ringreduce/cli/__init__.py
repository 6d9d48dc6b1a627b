"""The command `ringreduce`: one module a command, each with `add` (its arguments and help) and `run`.

Only the module of the command that is given is imported, so that others' libraries cost no time and need not be there.

Results go to standard output, messages to standard error.  Exit codes: 0, 2 for what the user can put right (a message
names it, never a traceback), 130 after an interrupt, 141 when nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from ringreduce.cli.terminal import Help, printable
from ringreduce.common.failures import PlanError, RingReduceError

COMMANDS = {
    "topo": "what joins the GPUs of this machine, or of a file",
    "plan": "the rings and trees of a collective on given GPUs",
    "simulate": "how long each algorithm takes, over size or ranks",
    "calibrate": "what to expect of a machine, from a log of nccl-tests or rccl-tests",
    "doctor": "what this machine, or the network between hosts, can and cannot do",
    "info": "versions, every knob with its origin, and what runs for which size",
    "keep": "run a rank, and again when it dies, without the launcher's knowing",
    "serve": "serve tensors by name to workers, as one of the servers of a parameter server",
    "tune": "measure what runs best for which size, and keep it for this machine",
}
"""And what each does, in a line."""

LIBRARIES = ("numpy", "rich", "scipy")
"""What groups do without, but not all commands."""

INTERRUPTED = 130
NOBODY_READS = 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints end with an example that works: the first line of its epilog's."""

    def error(self, message: str) -> NoReturn:
        example = next((line.strip() for line in (self.epilog or "").splitlines() if line.startswith("  ")), "")
        self.print_usage(sys.stderr)
        sys.stderr.write(f"{self.prog}: error: {printable(message)}\n")
        if example:
            sys.stderr.write(f"for example: {example}\n")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default the one that the process was started with.  Returns the exit code."""
    parser = Parser(
        prog="ringreduce",
        description="Collectives over a machine's real links: what these are, what is planned on them, and how fast.",
        epilog="examples:\n"
        "  ringreduce topo                                   this machine's links and rings\n"
        "  ringreduce plan dgx1-v100 --gpus 0-3 --size 160MB\n"
        "  ringreduce COMMAND --help                         what a command can do",
        formatter_class=Help,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else arguments
    for name, summary in COMMANDS.items():
        if name in words:
            import_module(f"ringreduce.cli.{name}").add(commands, summary)
        else:
            commands.add_parser(name, help=summary)
    given = parser.parse_args(words)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names of files, and for terminals without Unicode
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return _failed(named)
    except (RingReduceError, PlanError) as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        return _failed(f"this command needs {error.name}; pip install '.[plan]' in the checkout")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _failed(message: str) -> int:
    sys.stderr.write(f"error: {printable(message)}\n")
    return 2
