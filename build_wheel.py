"""Makes a wheel and an sdist in dist/. The wheel has the module for each minor version of torch that is named.

`python build_wheel.py 2.11.0 2.13.0` gets those wheels of torch with pip, for their headers and libraries. Without a
version it takes the torch of this Python. It needs `auditwheel`, `patchelf`, a C++ compiler and ninja.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LARGEST = 10_000_000
"""Bytes that a wheel may have."""


def unpacked(version: str) -> Path:
    """The part of this version of torch that a compiler needs, in build/torch/<version>/torch."""
    folder = ROOT / "build/torch" / f"{sys.implementation.cache_tag}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
            get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", temporary, f"torch=={version}"]
            subprocess.run(get, check=True)
            (wheel,) = Path(temporary).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(temporary, "all"), filter(needed, archive.namelist()))
            folder.parent.mkdir(exist_ok=True)
            Path(temporary, "all").rename(folder)  # whole or not at all
    return folder / "torch"


def needed(name: str) -> bool:
    libraries = [f"torch/lib/lib{library}.so" for library in ("c10", "torch", "torch_cpu", "torch_python")]
    return name.startswith("torch/include/") or name in (*libraries, "torch/version.py")


def run(*words: str, **settings: str) -> None:
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env={**os.environ, **settings})


def make(what: str, folder: Path, **settings: str) -> None:
    """Calls a function of setuptools, as pip does, in a process of its own."""
    run("-c", f"import sys; from setuptools import build_meta; build_meta.{what}(sys.argv[1])", str(folder), **settings)


def main(versions: list[str]) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folders = os.pathsep.join(str(unpacked(version)) for version in versions)
    settings = {"RINGREDUCE_TORCHS": folders} if versions else {}
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        make("build_wheel", Path(temporary), **settings)
        (made,) = Path(temporary).glob("*.whl")
        tag = made.stem.split("-")[2]
        for earlier in dist.glob(f"ringreduce-*-{tag}-*.whl"):  # pip might prefer one that is for fewer torches
            earlier.unlink()
        # torch's libraries are there when the module is opened. What the rest needs of Linux becomes the wheel's name.
        excluded = [word for library in ("c10", "torch*") for word in ("--exclude", f"lib{library}.so")]
        run("-m", "auditwheel", "repair", "--strip", "--wheel-dir", str(dist), *excluded, str(made))
    make("build_sdist", dist)
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size:12,} bytes  {path.relative_to(ROOT)}")
        if path.suffix == ".whl" and path.stat().st_size > LARGEST:
            sys.exit(f"error: {path} has more than {LARGEST:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
