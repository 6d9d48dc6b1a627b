"""The command `ringreduce`. `ringreduce info` shows every knob, its value and where the value came from."""

from __future__ import annotations

import argparse
import platform
from dataclasses import fields

import torch
from rich.console import Console
from rich.table import Table

import ringreduce
from ringreduce import _C
from ringreduce.config import PREFIX, Options, resolve
from ringreduce.errors import RingReduceError


def main() -> int:
    parser = argparse.ArgumentParser(prog="ringreduce", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, instruction set, and every knob with its origin")
    parser.parse_args()
    console = Console()
    console.print(
        f"ringreduce {ringreduce.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()} with {_C.instruction_set()} kernels"
    )
    try:
        options, origins = resolve(None)
    except RingReduceError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    table = Table("option", "variable", "value", "from", "what it is")
    for knob in fields(Options):
        value = getattr(options, knob.name)
        table.add_row(knob.name, PREFIX + knob.name.upper(), repr(value), origins[knob.name], knob.metadata["help"])
    console.print(table)
    return 0
