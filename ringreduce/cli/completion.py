"""`ringreduce completion`: what makes a shell complete the commands, their options and what these take.

Made from the parsers of the commands, so it knows all of them. Shells complete other words as names of files.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NamedTuple

from ringreduce.cli.terminal import put


class _Option(NamedTuple):
    names: tuple[str, ...]
    summary: str
    takes: bool
    """Whether a value follows."""
    choices: tuple[str, ...]
    """Of values; none where they are not listed."""


Commands = dict[str, tuple[str, list[_Option], tuple[str, ...]]]
"""By name: what it does, its options, and the words that it takes without an option, if they are listed."""


def add(command: Any) -> None:
    parser = command(
        description="Prints what makes a shell complete ringreduce's commands and options. Let the shell read it at "
        "its start.",
        epilog="examples:\n"
        '  eval "$(ringreduce completion bash)"              in ~/.bashrc\n'
        "  source <(ringreduce completion zsh)               in ~/.zshrc, after compinit\n"
        "  ringreduce completion fish > ~/.config/fish/completions/ringreduce.fish",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    put(SHELLS[arguments.shell](_commands()))
    return 0


def _commands() -> Commands:
    from ringreduce.cli import COMMANDS, Parser, add_command
    from ringreduce.topology.presets import PRESETS

    found: Commands = {}
    parsers = Parser().add_subparsers()
    for name, summary in COMMANDS.items():
        add_command(parsers, name)
        options: list[_Option] = []
        words: list[str] = []
        for action in parsers.choices[name]._actions:
            choices = tuple(map(str, action.choices or ()))
            if not action.option_strings:
                words += PRESETS if action.dest == "file" else choices
            elif action.help != argparse.SUPPRESS:
                summary_of = re.sub(r" \(default[^()]*\)$", "", (action.help or "").replace("%%", "%"))
                options.append(_Option(tuple(action.option_strings), summary_of, action.nargs != 0, choices))
        found[name] = summary, options, tuple(words)
    return found


def _bash(commands: Commands) -> str:
    cases = []
    for name, (_, options, words) in commands.items():
        by_values: dict[tuple[str, ...], list[str]] = {}
        for each in options:
            if each.takes:
                by_values.setdefault(each.choices, []).extend(f'"{name} {spelling}"' for spelling in each.names)
        cases += [f"    {' | '.join(at)}) known={shlex.quote(' '.join(of))} ;;" for of, at in by_values.items()]
        listed = " ".join([*words, *(spelling for each in options for spelling in each.names)])
        cases.append(f'    "{name} "*) known={shlex.quote(listed)} ;;')
    first = shlex.quote(" ".join([*commands, "--help", "--version"]))
    return "\n".join(
        [
            "_ringreduce() {",
            '  local known= here="${COMP_WORDS[COMP_CWORD]}"',
            f"  if ((COMP_CWORD == 1)); then known={first}; else",
            '    case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
            *cases,
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$known" -- "$here"))',
            "}",
            "complete -o default -F _ringreduce ringreduce",
        ]
    )


def _zsh(commands: Commands) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: Commands) -> str:
    lines = ["complete -c ringreduce -n __fish_use_subcommand -l version -d 'the version'"]
    for name, (summary, options, words) in commands.items():
        lines.append(f"complete -c ringreduce -f -n __fish_use_subcommand -a {name} -d {_fish_quoted(summary)}")
        within = f"complete -c ringreduce -n '__fish_seen_subcommand_from {name}'"
        if words:
            lines.append(f"{within} -a {_fish_quoted(' '.join(words))}")
        for each in options:
            kinds = [f"-{'l' if n.startswith('--') else 's'} {n.lstrip('-')}" for n in each.names]
            values = f"-x -a {_fish_quoted(' '.join(each.choices))}" if each.choices else "-r" if each.takes else ""
            lines.append(" ".join([within, *kinds, *([values] if values else []), "-d", _fish_quoted(each.summary)]))
    return "\n".join(lines)


def _fish_quoted(text: str) -> str:
    r"""Within quotes fish reads only \\ and \' in another way."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
