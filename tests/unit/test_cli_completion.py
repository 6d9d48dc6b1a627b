"""`ringreduce completion`: what a shell offers after its script. Shells that are not installed are left out."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from ringreduce import cli

Captured = pytest.CaptureFixture[str]


def offered(shell: str, script: str, line: str) -> set[str]:
    """The words that the shell offers where `line` ends."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "fish":
        program = f"{script}\ncomplete -C {shlex.quote(line)}"
        words = [shell, "--no-config", "-c", program]
    else:
        at = [*line.split(), ""] if line.endswith(" ") else line.split()
        told = f"COMP_WORDS=({' '.join(map(shlex.quote, at))}); COMP_CWORD={len(at) - 1}; _ringreduce"
        words = [shell, "--norc", "-c", f'{script}\n{told}\nprintf "%s\\n" "${{COMPREPLY[@]}}"']
    ended = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    return {each.partition("\t")[0] for each in ended.stdout.splitlines() if each}


@pytest.mark.parametrize("shell", ("bash", "fish"))
def test_what_a_shell_offers(shell: str, capsys: Captured) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert set(cli.COMMANDS) <= offered(shell, script, "ringreduce ")
    assert offered(shell, script, "ringreduce com") == {"completion"}
    assert {"--collective", "--algorithm", "--gpus"} <= offered(shell, script, "ringreduce plan --")
    assert "--interval" not in offered(shell, script, "ringreduce plan --")
    assert "--interval" in offered(shell, script, "ringreduce top --")
    assert offered(shell, script, "ringreduce plan --peer-access ") == {"yes", "no"}
    assert {"bash", "zsh", "fish"} <= offered(shell, script, "ringreduce completion ")
    assert {"dgx1-v100", "dgx1-p100"} <= offered(shell, script, "ringreduce topo dgx1")


IN_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -U compinit && compinit -D -u; source <(cat <<"SCRIPT"
'"$1"'
SCRIPT
)'
zpty -w shell 'print re''ady'
zpty -r -m shell heard "*ready*"
zpty -w -n shell $'ringreduce com\t'
zpty -r -m shell heard "*completion*"
print -r -- ok
"""


def test_zsh(capsys: Captured) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert cli.main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    command = ["zsh", "-f", "-c", IN_ZSH, "zsh", script]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "ok\n"


def test_another_shell_is_named(capsys: Captured) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
