"""The way to the compiled module, `ringreduce._C`. One file of it is made for each minor version of torch."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ringreduce.common.failures import SystemFailure

PACKAGE = Path(__file__).resolve().parents[1]

STEM = "_C_torch"
"""How the name of each file begins; torch's minor version and the suffix of this Python's modules follow."""

ANEW = "build it for this torch: `make build` in a checkout, or `pip install --no-deps -e .` there"


def name_for(torch_version: str) -> str:
    """The name of the file for this version of torch."""
    return f"{STEM}{'.'.join(torch_version.split('.')[:2])}{EXTENSION_SUFFIXES[0]}"


def open_module(name: str) -> ModuleType:
    """The file for the torch that is installed, as the module `name`. Raises ImportError, which says what to do."""
    if "t" in sys.abiflags:
        raise ImportError("ringreduce does not run on a free-threaded Python; use one with the GIL")
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"there is no torch ({error}); pip install torch") from None
    # torch keeps its binary interface within a minor version only. A module of another one may load and then crash.
    file = PACKAGE / name_for(torch.__version__)
    if not file.exists():
        raise ImportError(_no_file(torch.__version__))
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{file.name} cannot be loaded with torch {torch.__version__}: {error}; {ANEW}") from error
    return module


def load() -> ModuleType:
    """`ringreduce._C`. Raises ImportError, which says what to do."""
    return import_module("ringreduce._C")


def why_not() -> str:
    """Why the compiled module, without which no group can be made, cannot be used here; "" if it can."""
    try:
        load()
    except ImportError as error:
        return str(error)
    return ""


def require(what: str) -> None:
    """Raises `SystemFailure` that says `what` cannot be done here, and why, if the compiled module cannot be used."""
    if missing := why_not():
        raise SystemFailure(f"{what}: {missing}")


def _no_file(torch_version: str) -> str:
    suffix = EXTENSION_SUFFIXES[0]
    found = [path.name[len(STEM) : -len(suffix)] for path in PACKAGE.glob(f"{STEM}*{suffix}")]
    if found:
        versions = ", ".join(sorted(found, key=lambda version: [int(number) for number in version.split(".")]))
        return f"the compiled module was built for torch {versions}, and this is torch {torch_version}; {ANEW}"
    what = f"{PACKAGE} has no compiled module"
    for each in importlib.metadata.distributions(name="ringreduce"):
        folder = Path(str(each.locate_file("ringreduce")))
        if folder.is_dir() and not folder.samefile(PACKAGE):
            how = f"type `pip install -e .` in {PACKAGE.parent}, or put the program elsewhere and start it there"
            return f"{what}, and hides the package that is installed in {folder}: {how}"
    return f"{what}; {ANEW}"
