"""A share of the runs of `tests/fuzz_cli.py`, and all that have failed once."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).resolve().parents[1] / "fuzz_cli.py"


@pytest.mark.slow
def test_the_command_line_under_a_fuzzer() -> None:
    command = [sys.executable, str(FUZZER), "--kept", "--runs", "60", "--first", "100000", "--jobs", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_fuzzer_notices_failures() -> None:
    sys.path.insert(0, str(FUZZER.parent))
    import fuzz_cli

    case = fuzz_cli.Case(["topo"])
    wrong = fuzz_cli._wrong
    assert wrong(case, 0, "", 1 << 20, set()) == ""
    assert "Traceback" in wrong(case, 1, "Traceback (most recent call last):", 1 << 20, set())
    assert "exit code -11" in wrong(case, -11, "", 1 << 20, set())
    assert "exit code 1" in wrong(case, 1, "", 1 << 20, set())
    assert "2048 MB" in wrong(case, 0, "", 2 << 30, set())
    late = fuzz_cli.Case(["keep", "sleep", "60"], limit=1.0, process=True)
    assert "did not end within 1 s" in fuzz_cli.run(late)
