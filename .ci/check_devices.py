"""Every tensor that the package makes says on which device: `make lint`.

A program may call `torch.set_default_device("cuda")`. A tensor that ringreduce makes for itself would be there, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parent.parent
NAMES = {function.__name__ for function in _device_constructors()}
"""torch's functions that make tensors on the default device."""


def without_device(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call that does not say where."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                if name in NAMES and all(each.arg != "device" for each in keywords):
                    yield node.lineno, name


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{line}: torch.{name}() needs device=, whatever torch's default device is"
        for path in sorted(ROOT.glob("ringreduce/**/*.py"))
        for line, name in without_device(path.read_text())
    ]
    print(*found, sep="\n", end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
