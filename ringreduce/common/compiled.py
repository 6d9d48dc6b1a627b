"""The way to the compiled module, `ringreduce._C`, which is made for one version of torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from ringreduce.common.files import text_of

PACKAGE = Path(__file__).resolve().parents[1]

ANEW = "build it anew: `make build` in a checkout, or `pip install --no-build-isolation --no-deps .` there"


def built_for() -> str:
    """The version of torch that the compiled module was built for; "" if setup.py did not say."""
    return text_of(PACKAGE / "_C.torch")


def load() -> ModuleType:
    """The module. Raises ImportError, which says what to do."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"there is no torch ({error}); pip install torch") from None
    if not list(PACKAGE.glob("_C.*so")):
        raise ImportError(f"{PACKAGE} has no compiled module; {ANEW}")
    # torch keeps its binary interface within a minor version only. A module of another one may load and then crash.
    if (built := built_for()) and _minor(built) != _minor(torch.__version__):
        raise ImportError(
            f"the compiled module was built for torch {built}, and this is torch {torch.__version__}; {ANEW}"
        )
    try:
        return import_module("ringreduce._C")
    except ImportError as error:
        raise ImportError(
            f"the compiled module, built for torch {built or 'of an unknown version'}, cannot be loaded with torch "
            f"{torch.__version__}: {error}; {ANEW}"
        ) from error


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def why_not() -> str:
    """Why the compiled module, without which no group can be made, cannot be used here; "" if it can."""
    try:
        load()
    except ImportError as error:
        return str(error)
    return ""
