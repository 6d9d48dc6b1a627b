"""What `make lint` says of imports: none goes up, and one that did would be noticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parents[2]
CONTRACT, *_ = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; "
    code += "raise SystemExit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True, timeout=100
    )


def test_there_are_at_most_seven_floors() -> None:
    assert len(CONTRACT["layers"]) <= 7


def test_no_import_goes_up() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("plan/ring.py", "from ringreduce.topology.graph import LinkGraph\n"),
        ("topology/live.py", "def late() -> None:\n    from ringreduce import tuning\n"),
        ("tuning/record.py", "import ringreduce.gpu.kernels\n"),
        ("new.py", ""),
        (
            "parameter_server/control.py",
            "if TYPE_CHECKING:\n    from ringreduce.parameter_server.client.keys import Key\n",
        ),
    ],
    ids=["up", "up, within a function", "beside", "a module without a floor", "a circle inside, for types only"],
)
def test_one_that_did_would_be_noticed(tmp_path: Path, module: str, text: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.fatbin", "*.cu")
    shutil.copytree(ROOT / "ringreduce", tmp_path / "ringreduce", ignore=ignored)
    with (tmp_path / "ringreduce" / module).open("a") as file:
        file.write(text)
    done = lint(tmp_path)
    assert done.returncode != 0 and "imports only go down" in done.stdout, done.stdout
