"""The process of the command `ringreduce`; also `python -m ringreduce`, for launchers that start modules, as torchrun
does."""

import signal
import sys

# An interrupt while modules are imported ends the process without a traceback; `run` has a handler of its own.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from ringreduce.cli import run


def command() -> None:
    sys.exit(run())


if __name__ == "__main__":
    command()
