"""Builds what tests have in C++, once: the stand-ins for CUDA, NCCL and torch's device, and what they call by ctypes.

    python tests/stand_in/build.py FOLDER [all]

FOLDER then has libcuda.so.1, for RINGREDUCE_LIBCUDA, kernels.so, for modules whose image is the text
"so:FOLDER/kernels.so", and the rest that `make test` needs; with `all` also what `make test-rest` does. Needs a C++20
compiler ($CXX, or c++). CXXFLAGS are added to all calls of the compiler. What is up to date stays as it is: processes
that have it open go on. What the extension has compiled of csrc already is not compiled again, unless CXXFLAGS or the
flags of the target ask for something else.
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
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/stand_in"

# Contraction is off as in build_module.py: a fused multiply-add rounds differently.
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("RINGREDUCE_WERROR") == "1" else [])]
FLAGS = ["-std=c++20", "-O1", "-g1", *WARNINGS, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
INCLUDES = [f"-I{ROOT / 'csrc'}", f"-I{STAND_IN}"]


@dataclass(frozen=True)
class Target:
    sources: tuple[str, ...]
    """Globs. A folder of csrc is one piece, as in build_module.py."""

    flags: tuple[str, ...] = ()
    """More of them, for compiling and for linking."""

    libraries: tuple[str, ...] = ()


Targets = dict[str, Target]

LIBRARIES = {
    "libcuda.so.1": Target(("tests/stand_in/libcuda/*.cpp",)),
    "kernels.so": Target(("tests/stand_in/interpreter_kernels.cpp",)),
}
DRIVER_TEST = {
    "driver_test_kernels.so": Target(("tests/stand_in/driver/kernels.cpp",)),
    "driver_test": Target(
        (
            *(f"tests/stand_in/driver/{name}.cpp" for name in ("main", "one_process", "between_processes")),
            *("tests/stand_in/driver/our_kernels.cpp", "csrc/core", "csrc/cuda", "csrc/stress/plans.cpp"),
            *(f"csrc/engine/{name}.cpp" for name in ("program", "gpu/batches", "gpu/flat_program")),
        )
    ),
}
NCCL = {
    "libnccl.so.2": Target(("tests/stand_in/libnccl.cpp", "csrc/cuda/driver.cpp")),
}
NCCL_TEST = {
    "libnccl_2_12.so": Target(("tests/stand_in/libnccl_2_12.cpp", "csrc/cuda/driver.cpp")),
    "nccl_test": Target(
        (
            *("tests/stand_in/nccl_test.cpp", "csrc/stress/harness.cpp", "csrc/stress/plans.cpp"),
            *(f"csrc/{part}" for part in ("core", "cuda", "nccl", "engine", "engine/gpu", "kernels/gpu", "transport")),
            "csrc/kernels/*.cpp",
        )
    ),
}
INTERPRETER = {
    "interpreter.so": Target(
        (
            *("csrc/stress/interpreter_on_cpu.cpp", "csrc/engine/program.cpp"),
            *(f"csrc/engine/gpu/{name}.cpp" for name in ("batches", "flat_program")),
        )
    ),
}
TURNS = {
    "turns.so": Target(
        (
            *("tests/unit/turns.cpp", "csrc/engine/program.cpp"),
            *(f"csrc/engine/gpu/{name}.cpp" for name in ("batches", "turns")),
        )
    ),
}
GPU_KERNELS = {
    # An address that is not aligned as the access to it demands ends the program.
    "gpu_kernels.so": Target(
        ("tests/unit/gpu_kernels.cpp", "csrc/kernels/gpu/accumulate.cpp"),
        ("-std=c++17", "-fvisibility=default", "-fno-strict-aliasing", "-fsanitize=undefined", "-fno-sanitize-recover"),
    ),
}


@functools.cache
def torch_cuda() -> Targets:
    """The stand-in for torch's device, for the torch that is here."""
    import torch
    from torch.utils import cpp_extension

    system = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return {
        "torch_cuda_stand_in.so": Target(
            ("tests/stand_in/torch_cuda.cpp", "csrc/cuda/device.cpp", "csrc/cuda/driver.cpp"),
            (f"-DBUILT_FOR_TORCH={torch.__version__}", *(f"-isystem{path}" for path in system)),
            (
                *(f"-L{path}" for path in cpp_extension.library_paths()),
                *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
            ),
        )
    }


@functools.cache
def compiler() -> list[str]:
    """$CXX, or c++ behind ccache where there is one."""
    named = os.environ.get("CXX") or ("ccache c++" if shutil.which("ccache") else "c++")
    return [*shlex.split(named), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def build(folder: Path, targets: Targets = LIBRARIES) -> Path:
    """Makes `targets` in `folder`, and returns it.

    Raises subprocess.CalledProcessError where something does not compile; the compiler has then said why.
    """
    folder = folder.resolve()
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    parts = {
        name: [(path, target.flags) for glob in target.sources for path in sorted(ROOT.glob(glob))]
        for name, target in targets.items()
    }
    with (objects / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = {source for sources in parts.values() for source in sources}
        compiling = {source: threads.submit(_compile, *source, objects) for source in sources}
        for name, of_one in parts.items():
            linked = [compiling[source].result() for source in of_one]
            kind = [*targets[name].flags, *(["-shared"] if ".so" in name else [])]
            libraries = [*targets[name].libraries, "-ldl"]
            command = [*compiler(), *kind, *map(str, linked), *libraries]
            _make(folder / name, command, objects, lambda linked=linked: linked)
    return folder


def _compile(source: Path, flags: tuple[str, ...], objects: Path) -> Path:
    if not flags and not os.environ.get("CXXFLAGS") and (compiled := _of_extension(source)):
        return compiled
    name = "-".join(source.relative_to(ROOT).with_suffix("").parts)
    if flags:
        name += f"-{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"
    if source.is_dir():
        members = sorted(source.glob("*.cpp"))
        source = objects / f"{name}.cpp"
        source.write_text("".join(f'#include "{member}"\n' for member in members))
    depends = objects / f"{name}.d"

    def inputs() -> list[Path]:  # depends: "target: source header \\ header ..."
        return [Path(word) for word in depends.read_text().partition(":")[2].replace("\\\n", " ").split()]

    command = [*compiler(), *flags, *INCLUDES, "-MMD", "-MF", str(depends), "-c", str(source)]
    _make(objects / f"{name}.o", command, objects, inputs)
    return objects / f"{name}.o"


def _of_extension(source: Path) -> Path | None:
    """The object that build_module.py has of it, if it is newer than its source or sources and than every header."""
    if not source.is_relative_to(ROOT / "csrc"):
        return None
    sources = source.glob("*.cpp") if source.is_dir() else [source]
    newest = max(_newest_header(), *(each.stat().st_mtime for each in sources))
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
    if sys.argv[2:] not in ([], ["all"]) or len(sys.argv) < 2:
        sys.exit("usage: python tests/stand_in/build.py FOLDER [all]")
    wanted: Targets = LIBRARIES | INTERPRETER | TURNS | GPU_KERNELS
    if sys.argv[2:]:
        wanted |= DRIVER_TEST | NCCL | NCCL_TEST | torch_cuda()
    build(Path(sys.argv[1]), wanted)
