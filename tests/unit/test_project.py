"""What pyproject.toml and the Makefile say twice is the same."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

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


def test_users_get_no_tools_of_contributors() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"plan", "plot", "cuda", "cupy", "numba"}
