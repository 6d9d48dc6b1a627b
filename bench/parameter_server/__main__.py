"""What the parameter server takes, a scenario at a time; docs/parameter_server_how.md has the tables.

    python -m bench.parameter_server steps --peers all --sizes 64M --json steps.json
    python -m bench.parameter_server kills --help

Prints a header and a table, and with --json writes them to a file. Exit code: 0, 1 if a result was wrong, 2 if the
request makes no sense here.
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from bench import harness
from bench.parameter_server import costs, kills, lines, modes, rows, steps

SCENARIOS: tuple[Callable[..., Any], ...] = (
    steps.steps,
    rows.rows,
    modes.modes,
    lines.lines,
    lines.moves,
    costs.readers,
    costs.snapshots,
    costs.backups,
    costs.late,
    kills.kills,
)
"""Each gives its rows, one by one. Its parameters are its options, and its docstring is their description."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="SCENARIO", dest="scenario")
    for scenario in SCENARIOS:
        text = inspect.getdoc(scenario) or ""
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(
            scenario.__name__, help=text.splitlines()[0], description=text, formatter_class=form
        )
        for name, parameter in inspect.signature(scenario, eval_str=True).parameters.items():
            command.add_argument(f"--{name.replace('_', '-')}", **described(parameter))
        command.add_argument("--json", type=Path, metavar="FILE")
        command.set_defaults(run=scenario)
    options = vars(parser.parse_args())
    scenario, name, path = (options.pop(each) for each in ("run", "scenario", "json"))
    try:
        return harness.report(f"parameter_server {name}", scenario(**options), path)
    except harness.CannotRun as error:
        parser.error(str(error))


def described(parameter: inspect.Parameter) -> dict[str, Any]:
    """A parameter as argparse wants an option."""
    default, kind = parameter.default, parameter.annotation
    if default is False:
        return {"action": "store_true"}
    found: dict[str, Any] = {"default": default, "help": f"(default {default})"}
    if get_origin(kind) is tuple:
        found |= {"nargs": "+", "help": f"(default {' '.join(map(str, default))})" if default else None}
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return {**found, "choices": get_args(kind)}
    if get_origin(kind) is Annotated:
        return {**found, "type": kind.__metadata__[0], "metavar": "SIZE"}
    return {**found, "type": kind, "metavar": kind.__name__.upper()}


if __name__ == "__main__":
    sys.exit(main())
