"""The command `ringreduce`: one module a command, each with `add` (its help and arguments) and `run`.

Only the module of the command that is given is imported, so that others' libraries cost no time and need not be there.

Results go to standard output, messages to standard error.  Exit codes:

    0    done; also where standard output is closed, which counts as /dev/null
    1    done, but not all is well: `doctor` found something missing, or hosts that cannot connect; a server
         ends though nobody serves what it did
    2    what the user can put right: a message names it, never a traceback
    130  an interrupt; while modules are still imported the signal itself ends the process
    141  nobody reads the output any more

`keep` ends as its command did.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import ringreduce
from ringreduce.cli.terminal import OUTPUT, Help, complain, flushed, open_streams, printable
from ringreduce.common.failures import PlanError, RingReduceError
from ringreduce.common.system import NO_THREAD, WANTS, explained

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

COMMANDS = {
    "topo": "what joins the GPUs of this machine, or of a file",
    "plan": "the rings and trees of a collective on given GPUs",
    "simulate": "how long each algorithm takes, over size or ranks",
    "calibrate": "what to expect of a machine, from a log of nccl-tests or rccl-tests",
    "doctor": "what this machine, or the network between hosts, can and cannot do",
    "bench": "whether ringreduce pays on this machine: Gloo, ringreduce and MPI in turns, and a verdict",
    "info": "versions, every knob with its origin, and what runs for which size",
    "keep": "run a rank, and again when it dies, without the launcher's knowing",
    "serve": "serve tensors by name to workers, as one of the servers of a parameter server",
    "top": "what each rank of this host does now, and whom the others wait for",
    "trace": "the flight records of all ranks as one trace, and who was waited for",
    "tune": "measure what runs best for which size, and keep it for this machine",
    "completion": "what makes bash, zsh or fish complete these commands and their options",
}
"""And what each does, in a line."""

LIBRARIES = ("numpy", "rich", "scipy")
"""What groups do without, but not all commands."""

INTERRUPTED = 130
NOBODY_READS = 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints end with an example that works: the first line of its epilog's."""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Of help and versions, too, all errors of standard output are reported; argparse drops them."""
        if file is sys.stdout:
            OUTPUT.write(message)
        else:
            complain(message.rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        examples = [line for line in (self.epilog or "").splitlines() if line.startswith("  ")]
        complain(f"{self.format_usage()}{self.prog}: error: {printable(message)}")
        if examples:
            complain(f"for example: {examples[0].strip().partition('   ')[0]}")  # without what it is for
        raise SystemExit(2)


def run() -> int:
    """`main` for a process of its own: an interrupt ends it without a traceback, whatever it is doing."""
    taken = signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # else it is ignored, as behind nohup
    try:
        if taken:
            sys.unraisablehook = _unraisable
            signal.signal(signal.SIGINT, _interrupt)
        code = main()
        if taken:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python and the libraries clean up
        return code
    except KeyboardInterrupt:  # before or after the command itself
        _end_interrupted()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but ends the process at once in the middle of an import: libraries in C may swallow it
    or make another error of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that a second one always ends the process
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(what: UnraisableHookArgs) -> None:
    if issubclass(what.exc_type, KeyboardInterrupt):  # in a finalizer, which would only print it
        _end_interrupted()
    sys.__unraisablehook__(what)


def _end_interrupted() -> NoReturn:
    complain("interrupted")
    os._exit(INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default the one that the process was started with.  Returns the exit code."""
    open_streams()
    try:
        try:
            code = _command(sys.argv[1:] if arguments is None else arguments)
        except SystemExit as ended:  # argparse has printed help, or what is wrong
            code = ended.code if isinstance(ended.code, int) else 2
        OUTPUT.flush()
    except BrokenPipeError:
        code = NOBODY_READS
    except OSError as error:
        if error.filename is None and error.errno in WANTS:
            code = _failed(explained(error))
        else:
            where = f"{error.filename}: " if error.filename is not None else ""
            code = _failed(f"{where}{error.strerror or error}")
    except (RingReduceError, PlanError) as error:
        code = _failed(str(error))
    except MemoryError:
        code = _failed("there is not enough memory for this; raise the limit (`ulimit -v`), or ask for less")
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        code = _failed(f"this command needs {error.name}; pip install {error.name}")
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        code = _failed(f"{error}; {NO_THREAD}")
    except KeyboardInterrupt:
        complain("interrupted")
        code = INTERRUPTED
    flushed(sys.stdout)
    flushed(sys.stderr)
    return code


def _command(words: Sequence[str]) -> int:
    parser = Parser(
        prog="ringreduce",
        description="Collectives over a machine's real links: what these are, what is planned on them, and how fast.",
        epilog="examples:\n"
        "  ringreduce topo                                   this machine's links and rings\n"
        "  ringreduce plan dgx1-v100 --gpus 0-3 --size 160MB\n"
        "  ringreduce COMMAND --help                         what a command can do",
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"ringreduce {ringreduce.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name in words:
            add_command(commands, name)
        else:
            commands.add_parser(name, help=summary)
    given, unknown = parser.parse_known_args(words)
    if unknown:  # the usage and the example of the command that was given, not of all
        at: argparse.ArgumentParser = commands.choices[given.command] if given.command else parser
        at.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.command is None:
        complain(parser.format_help())
        return 2
    code: int = given.run(given)
    return code


def add_command(commands: Any, name: str) -> None:
    """Adds the parser of a command to the others' (`ArgumentParser.add_subparsers`)."""
    module = import_module(f"ringreduce.cli.{name}")
    module.add(partial(commands.add_parser, name, help=COMMANDS[name], formatter_class=Help))
    commands.choices[name].set_defaults(run=module.run)


def _failed(message: str) -> int:
    complain(f"error: {printable(message)}")
    return 2
