"""What a program finds after `import ringreduce`: every name, with annotations that can be read."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ringreduce
from ringreduce import data, elastic, parameter_server


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of the package and of its packages, and the public methods of their classes."""
    for where in (ringreduce, data, elastic, parameter_server):
        names = getattr(where, "__all__", None) or [name for name in vars(where) if not name.startswith("_")]
        for name in names:
            value = getattr(where, name)
            if not getattr(value, "__module__", "").startswith("ringreduce"):
                continue  # torch's own
            if inspect.isroutine(value):
                yield f"{where.__name__}.{name}", value
            for member, function in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{where.__name__}.{name}.{member}", function


@pytest.mark.parametrize(
    ("name", "function"), [*callables()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_annotations_can_be_read(name: str, function: Callable[..., Any]) -> None:
    typing.get_type_hints(function)


def test_packages_and_lazy_names_are_there_after_one_import() -> None:
    code = """
import ringreduce
public = {name for name in dir(ringreduce) if not name.startswith("__")}
assert public == {*ringreduce.__all__, "data", "elastic", "errors", "hooks", "ops", "parameter_server"}
assert ringreduce.elastic.start and ringreduce.parameter_server.join and ringreduce.errors.PeerLost
assert "elastic" not in ringreduce.__all__
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_stub_has_the_same_names() -> None:
    stub = ast.parse(Path(ringreduce.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    listed = {str(node.module): {each.name for each in node.names if each.asname} for node in imports}
    listed["ringreduce.api"] |= {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    listed["ringreduce.api"] |= {
        ast.unparse(each) for node in stub.body if isinstance(node, ast.Assign) for each in node.targets
    }
    listed = {module: names for module, names in listed.items() if names}
    assert listed == {module: set(names.split()) for module, names in ringreduce._NAMES_OF.items()}


def test_overloads_have_the_parameters_of_the_calls() -> None:
    stub = ast.parse(Path(ringreduce.__file__).with_suffix(".pyi").read_text())
    calls = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert len(calls) == 2 * 13
    for call in calls:
        ours = {
            name: each.annotation for name, each in inspect.signature(getattr(ringreduce, call.name)).parameters.items()
        }
        given = {each.arg: ast.unparse(each.annotation or call) for each in (*call.args.args, *call.args.kwonlyargs)}
        assert {**given, "async_op": "bool"} == {name: text.replace("_C.", "") for name, text in ours.items()}, (
            call.name
        )


@pytest.mark.slow
def test_what_a_call_returns_depends_on_async_op(tmp_path: Path) -> None:
    program = tmp_path / "typed.py"
    program.write_text("""import ringreduce, torch

x = torch.ones(3)
ringreduce.all_reduce(x, async_op=True).wait()
ringreduce.all_gather_into_tensor(x, x, async_op=True).wait()
ringreduce.barrier(async_op=True).wait()
ringreduce.all_reduce(x)
ringreduce.all_reduce(x).wait()
ringreduce.all_reduce(x, operator="sum", async_op=True)
""")
    mypy = [sys.executable, "-m", "mypy", str(program)]  # with the configuration and the cache of `make lint`
    root = Path(ringreduce.__file__).parents[1]
    done = subprocess.run(mypy, check=False, cwd=root, capture_output=True, text=True, timeout=170)
    errors = [line for line in done.stdout.splitlines() if "typed.py" in line and "error" in line]
    assert [int(line.split(":")[1]) for line in errors] == [8, 9, 9], done.stdout


def test_torch_can_be_imported_where_most_of_the_package_is_missing(tmp_path: Path) -> None:
    """As where a packager has left out the stubs, or what it saw no import of."""
    (tmp_path / "ringreduce" / "common").mkdir(parents=True)
    for name in ("__init__.py", "_autoload.py", "common/__init__.py", "common/names.py"):
        shutil.copy(Path(ringreduce.__file__).parent / name, tmp_path / "ringreduce" / name)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch, ringreduce
assert ringreduce.__file__.startswith({str(tmp_path)!r}) and "ringreduce" in torch.distributed.Backend.backend_list
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
