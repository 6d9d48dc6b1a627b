"""`ringreduce doctor`: what this machine lets ringreduce do, and what would let it do more."""

from __future__ import annotations

import argparse
from typing import Any

from ringreduce.cli.terminal import Help, console


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can and cannot do, and why",
        description="Looks at what ringreduce needs and could use here: torch, a compiler, shared memory, GPUs and "
        "their links, NCCL, the network, limits. Says why each matters and what to do where something is missing.",
        epilog="example:\n  ringreduce doctor",
        formatter_class=Help,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ringreduce import doctor

    shown = doctor.render(doctor.examine())
    for column in shown.columns:
        column.overflow = "fold"
    console().print(shown)
    return 0
