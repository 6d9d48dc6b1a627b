"""Builds the stand-in for the CUDA driver and the kernels it runs: `python tests/stand_in/build.py FOLDER`.

FOLDER then has libcuda.so.1, for RINGREDUCE_LIBCUDA, and kernels.so, for modules whose image is the text
"so:FOLDER/kernels.so". Needs a C++20 compiler ($CXX, or c++) and nothing of Python's but its standard library. CXXFLAGS
are added to all calls of the compiler. What is up to date stays as it is: processes that have it open go on. Sources in
csrc that the extension has compiled already are not compiled again, unless CXXFLAGS ask for something else.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/stand_in"

# Contraction is off as in build_module.py: a fused multiply-add rounds differently.
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("RINGREDUCE_WERROR") == "1" else [])]
FLAGS = ["-std=c++20", "-O1", "-g1", *WARNINGS, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
INCLUDES = [f"-I{ROOT / 'csrc'}", f"-I{STAND_IN}"]

LIBRARIES = {
    "libcuda.so.1": ["tests/stand_in/libcuda/*.cpp"],
    "kernels.so": ["tests/stand_in/interpreter_kernels.cpp"],
}
DRIVER_TEST = {
    "driver_test_kernels.so": ["tests/stand_in/driver/kernels.cpp"],
    "driver_test": [
        *(f"tests/stand_in/driver/{name}.cpp" for name in ("main", "one_process", "between_processes", "our_kernels")),
        *("csrc/core/*.cpp", "csrc/cuda/*.cpp", "csrc/stress/plans.cpp", "csrc/engine/program.cpp"),
        *("csrc/engine/gpu/batches.cpp", "csrc/engine/gpu/flat_program.cpp"),
    ],
}
NCCL = {
    "libnccl.so.2": ["tests/stand_in/libnccl.cpp", "csrc/cuda/driver.cpp"],
}
NCCL_TEST = {
    "libnccl_2_12.so": ["tests/stand_in/libnccl_2_12.cpp", "csrc/cuda/driver.cpp"],
    "nccl_test": [
        *("tests/stand_in/nccl_test.cpp", "csrc/stress/harness.cpp", "csrc/stress/plans.cpp"),
        *(f"csrc/{part}/*.cpp" for part in ("core", "cuda", "nccl", "engine", "engine/gpu", "kernels", "kernels/gpu")),
        "csrc/transport/*.cpp",
    ],
}


@functools.cache
def compiler() -> list[str]:
    """$CXX, or c++ behind ccache where there is one."""
    named = os.environ.get("CXX") or ("ccache c++" if shutil.which("ccache") else "c++")
    return [*shlex.split(named), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def build(folder: Path, targets: dict[str, list[str]] = LIBRARIES) -> Path:
    """Makes `targets` (the sources of each file to make, as globs) in `folder`, and returns it.

    Raises subprocess.CalledProcessError where something does not compile; the compiler has then said why.
    """
    folder = folder.resolve()
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    parts = {name: [path for glob in globs for path in sorted(ROOT.glob(glob))] for name, globs in targets.items()}
    with (objects / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = {source for sources in parts.values() for source in sources}
        compiling = {source: threads.submit(_compile, source, objects) for source in sources}
        for name, of_one in parts.items():
            linked = [compiling[source].result() for source in of_one]
            kind = ["-shared"] if ".so" in name else []
            _make(folder / name, [*compiler(), *kind, *map(str, linked), "-ldl"], objects, lambda linked=linked: linked)
    return folder


def _compile(source: Path, objects: Path) -> Path:
    if (compiled := _of_extension(source)) and not os.environ.get("CXXFLAGS"):
        return compiled
    name = "-".join(source.relative_to(ROOT).with_suffix("").parts)
    depends = objects / f"{name}.d"

    def inputs() -> list[Path]:  # depends: "target: source header \\ header ..."
        return [Path(word) for word in depends.read_text().partition(":")[2].replace("\\\n", " ").split()]

    command = [*compiler(), *INCLUDES, "-MMD", "-MF", str(depends), "-c", str(source)]
    _make(objects / f"{name}.o", command, objects, inputs)
    return objects / f"{name}.o"


def _of_extension(source: Path) -> Path | None:
    """The object that build_module.py has of it, if it is newer than the source and than every header."""
    if not source.is_relative_to(ROOT / "csrc"):
        return None
    newest = max(source.stat().st_mtime, _newest_header())
    place = ROOT / "build/engine" / source.relative_to(ROOT / "csrc").with_suffix(".o")
    return place if place.exists() and place.stat().st_mtime > newest else None


@functools.cache
def _newest_header() -> float:
    return max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh"))


def _make(target: Path, command: list[str], objects: Path, inputs: Callable[[], list[Path]]) -> None:
    """Runs `command` for `target`, unless it did so with these `inputs`, which it may tell when it has run."""
    made = objects / f"{target.name}.made"
    complete = target.exists() and made.exists() and all(path.exists() for path in inputs())
    if complete and made.read_text() == _digest(command, inputs()):
        return
    made.unlink(missing_ok=True)
    subprocess.run([*command, "-o", str(target)], check=True)
    made.write_text(_digest(command, inputs()))


def _digest(command: list[str], inputs: list[Path]) -> str:
    digest = hashlib.sha256("\0".join([_version(), *command]).encode())
    for path in inputs:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def _version() -> str:
    return subprocess.run([*compiler(), "--version"], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/stand_in/build.py FOLDER")
    print(build(Path(sys.argv[1])))
