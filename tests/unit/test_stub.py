"""ringreduce/_C.pyi against the module that the build has made."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import ringreduce
from ringreduce import _C

# What other functions take by keyword, member by member. Python never names these classes.
KEYWORDS = {"BlockSpec", "JoinedGpus", "Members", "PartnerSpec", "Rule", "ServerSpec", "WorkerSpec"}


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions, classes and attributes by their names."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg != "self"]


def public(compiled: Any) -> set[str]:
    return {name for name in vars(compiled) if not name.startswith("_")}


STUB = members(ast.parse((Path(ringreduce.__file__).parent / "_C.pyi").read_text()).body)
CLASSES = {name: node for name, node in STUB.items() if isinstance(node, ast.ClassDef)}


def test_the_stub_has_all_names() -> None:
    assert STUB.keys() | KEYWORDS == public(_C)


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_has_all_members(name: str) -> None:
    listed, compiled = members(CLASSES[name].body), getattr(_C, name)
    made = listed.get("__init__")
    keywords = arguments(made) if isinstance(made, ast.FunctionDef) else []
    assert public(compiled) <= listed.keys() | set(keywords)
    assert [member for member in listed if not hasattr(compiled, member)] == []  # it may be torch's


def test_the_stub_has_the_names_of_all_arguments() -> None:
    compared = 0
    for owner, listed in (_C, STUB), *((getattr(_C, name), members(node.body)) for name, node in CLASSES.items()):
        for name, node in listed.items():
            # pybind11 says `name(self: type, argument: type = value) -> type`, and "arg0" of what it has no name for.
            compiled = getattr(owner, name) if name in vars(owner) else None
            said = (compiled.__doc__ or "").partition("\n")[0].rpartition("->")[0]
            made = [argument for argument in re.findall(r"(\w+): ", said) if argument != "self"]
            if not isinstance(node, ast.FunctionDef) or not said or "*args" in said or "**" in said or "arg0" in made:
                continue
            assert arguments(node) == made, name
            compared += 1
    assert compared > 80
