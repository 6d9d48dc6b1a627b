"""What pyproject.toml and the Makefile say twice is the same, and what the Makefile makes of a Python."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

ROOT = Path(__file__).resolve().parents[2]


def tools(variable: str) -> set[str]:
    """The packages that a variable of the Makefile lists."""
    found = re.search(rf"^{variable} := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    return {re.split(r"[:=>]", word.strip("'"))[0] for word in found[1].replace("\\\n", " ").split()}


def group(name: str) -> set[str]:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return {re.split(r"[\[=>]", each)[0] for each in groups[name]}


def test_make_installs_what_the_groups_have() -> None:
    run = tools("RUN_TOOLS")
    assert group("test") <= tools("TEST_TOOLS") | run
    assert tools("TEST_TOOLS") <= group("test")
    assert tools("BENCH_TOOLS") <= group("bench") <= tools("BENCH_TOOLS") | run | tools("TEST_TOOLS")
    assert group("docs") == tools("DOCS_TOOLS")
    assert group("examples") <= run


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        (["2.13.1+cpu"], "torch>=2.13.dev0,<2.14.dev0"),
        (["2.15.0", "2.11.0", "2.14.0.dev20261101"], "torch>=2.11.dev0,<2.16.dev0,!=2.12.*,!=2.13.*"),
        (["2.10.0"], "torch>=2.11"),
    ],
)
def test_a_build_asks_for_the_torch_that_it_is_for(
    versions: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    build_module = importlib.import_module("build_module")
    for version in versions:
        (tmp_path / version).mkdir()
        (tmp_path / version / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setenv("RINGREDUCE_TORCHS", ":".join(str(tmp_path / version) for version in versions))
    assert build_module.requirement() == wanted


def test_a_tensor_of_ours_without_a_device_is_noticed() -> None:
    found = runpy.run_path(str(ROOT / ".ci" / "check_calls.py"))["tensors"]
    code = "a = torch.empty(3)\nb = torch.zeros(3, device='cpu')\nc = f(torch.as_tensor(a), torch.zeros_like(b))"
    assert [*found(ast.parse(code))] == [(1, "torch.empty"), (3, "torch.as_tensor")]


def test_users_get_no_tools_of_contributors() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"plan", "plot", "cuda", "cupy", "numba"}


def test_an_environment_that_a_python_with_torch_makes(tmp_path: Path) -> None:
    """It has that torch, and finds the packages of its parent once: a folder that names itself would find no end."""
    made = tmp_path / "made"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MAKEFLAGS": ""}
    subprocess.run(["make", f"VENV={made}", f"{made}/.python"], cwd=ROOT, env=environment, check=True, timeout=60)
    command = [f"{made}/bin/python", "-c", "import sys, torch; print(torch.__file__, len(sys.path) - len({*sys.path}))"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (found.stdout.split(), found.stderr) == ([torch.__file__, "0"], "")


def test_ci_names_what_has_become_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / ".ci/durations.py"))["main"]
    new, last = tmp_path / "durations.new", tmp_path / "durations.txt"
    runs = ("2.00 a[x y]\n9.00 b\n0.10 c\n", "4.00 a[x y]\n9.50 b\n0.90 c\n5.00 new\n")
    for run, failed, said in zip(runs, ("0", "1"), ((), ("2.0 s ->    4.0 s  a[x y]",)), strict=True):
        new.write_text(run)
        main(str(tmp_path), failed)
        found = capsys.readouterr().out.splitlines()[1:]
        assert [line.strip() for line in found] == list(said)
        assert last.read_text() == runs[0]
