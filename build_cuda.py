"""Compiles csrc/**/*.cu, for setup.py and for .ci/check_cuda.py. Standard library only.

Every .cu becomes one text without includes of ours, since that is all that NVRTC gets where kernels are compiled at
first use; nvcc compiles the same text, to one fatbin. Both land in ringreduce/gpu, see ringreduce/gpu/kernels.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# By its path: the package itself would import torch.
_spec = importlib.util.spec_from_file_location("nvcc_places", ROOT / "ringreduce/gpu/nvcc.py")
assert _spec is not None and _spec.loader is not None
nvcc_places = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nvcc_places)

# Cubins run on GPUs of the same major version. All others newer than the first run its PTX, which the driver compiles.
# It is the PTX of the first because the kernels need no newer instructions, and every nvcc that we know of makes it.
ARCHITECTURES = (80, 90, 100)

# As in ringreduce/gpu/kernels.py. A fused multiply-add rounds differently: CPUs and GPUs must give the same bits.
LANGUAGE = ("--std=c++17", "--fmad=false")

FLAGS = (*LANGUAGE, "-O3", "-Xcompiler", "-Wall,-Wextra", "-Xptxas", "--verbose")

STRICT = os.environ.get("RINGREDUCE_WERROR") == "1"
"""CI: what nvcc warns about, or cannot compile, fails the build. Elsewhere NVRTC is there to do without nvcc."""

DIRECTIVE = re.compile(
    r'\s*#\s*(?:(?P<opens>if)|(?P<closes>endif\b)|(?P<once>pragma\s+once\b)|include\s*"(?P<file>[^"]+)")'
)


class BuildError(Exception):
    """The message says what cannot be compiled, and what to do."""


class NvccError(BuildError):
    """An nvcc that cannot do it. NVRTC may."""


def sources(csrc: Path) -> dict[str, Path]:
    """Every .cu by its stem, which names what is made of it. Raises BuildError if two have the same."""
    found: dict[str, Path] = {}
    for path in sorted(csrc.rglob("*.cu")):
        if path.stem in found:
            raise BuildError(f"{path} and {found[path.stem]} would both become {path.stem}.fatbin; rename one")
        found[path.stem] = path
    return found


def flatten(source: Path, csrc: Path) -> str:
    """The text of `source` with every #include "..." replaced by the file, for which the folder of the including file
    and `csrc` are searched. <...> includes stay.

    A file with `#pragma once` is there once; if an #include within an #if comes first, then again, under a macro that
    keeps the compiler from seeing it twice. Raises BuildError for a file that is missing or endlessly includes itself.
    """
    always: set[Path] = set()  # have `#pragma once` and are in the text whatever macros are defined

    def expand(path: Path, above: tuple[Path, ...], conditional: bool) -> list[str]:
        name = path.relative_to(csrc.parent).as_posix()
        text = path.read_text(encoding="utf-8").splitlines()
        once = any(match["once"] for match in map(DIRECTIVE.match, text) if match)
        if once and (path in always or path in above):
            return []
        if path in above:
            raise BuildError(f"{name} includes itself and has no #pragma once")
        if once and not conditional:
            always.add(path)
        depth = 0
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(text, 1):
            match = DIRECTIVE.match(line)
            depth += bool(match and match["opens"]) - bool(match and match["closes"])
            if match and match["file"]:
                places = [folder / match["file"] for folder in (path.parent, csrc)]
                found = next((place.resolve() for place in places if place.is_file()), None)
                if found is None:
                    raise BuildError(f'{name}:{number}: no file for #include "{match["file"]}"')
                lines += expand(found, (*above, path), conditional or depth > 0)
                lines.append(f'#line {number + 1} "{name}"')
            else:
                lines.append("" if match and match["once"] else line)
        if not once:
            return lines
        macro = "RINGREDUCE_INCLUDED_" + re.sub(r"\W", "_", name)
        return [f"#ifndef {macro}", f"#define {macro}", *lines, "#endif"]

    csrc = csrc.resolve()
    return "\n".join(expand(source.resolve(), (), False)) + "\n"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler, and those of ARCHITECTURES that it knows."""

    path: str
    version: str
    architectures: tuple[int, ...]


def find_nvcc() -> Nvcc | None:
    """RINGREDUCE_NVCC ("0": none), or the one of CUDA_HOME, on PATH, in /usr/local/cuda, or of NVIDIA's wheels ("1").

    Raises BuildError if what RINGREDUCE_NVCC names is missing, NvccError if it does not run or cannot compile for the
    oldest of ARCHITECTURES.
    """
    named = os.environ.get("RINGREDUCE_NVCC", "")
    path = nvcc_places.find_nvcc()
    if path is None:
        if named not in ("", "0", "1"):
            raise BuildError(f"RINGREDUCE_NVCC={named} is not a program; give nvcc's path, or 0 to build without")
        return None
    try:
        version = re.search(r"release ([\d.]+), V([\d.]+)", _run([path, "--version"]))
        known = {int(number) for number in re.findall(r"compute_(\d+)", _run([path, "--list-gpu-arch"]))}
    except (OSError, subprocess.CalledProcessError) as error:
        raise NvccError(f"{path}: {error}") from None
    if version is None or ARCHITECTURES[0] not in known:
        raise NvccError(f"{path} cannot compile for sm_{ARCHITECTURES[0]}; install the nvcc of CUDA 11 or newer")
    return Nvcc(path, version[2], tuple(number for number in ARCHITECTURES if number in known))


@dataclass(frozen=True)
class Compiled:
    """What nvcc made of a text: the fatbin, and what ptxas said of each kernel."""

    fatbin: Path
    log: Path


def compile_text(nvcc: Nvcc, stem: str, text: str, folder: Path) -> Compiled:
    """Compiles unless `folder` has the result of the same text, options and compiler. Raises NvccError."""
    first, *others = nvcc.architectures
    targets = [f"arch=compute_{first},code=[sm_{first},compute_{first}]"]
    targets += [f"arch=compute_{number},code=sm_{number}" for number in others]
    options = [
        *FLAGS,
        *(("--Werror", "all-warnings") if STRICT else ()),
        *(f"--generate-code={target}" for target in targets),
    ]
    key = hashlib.sha256("\0".join([nvcc.version, *options, text]).encode()).hexdigest()[:16]
    made = Compiled(folder / f"{stem}-{key}.fatbin", folder / f"{stem}-{key}.log")
    if made.fatbin.exists() and made.log.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(f"{stem}-*.fatbin"), *folder.glob(f"{stem}-*.log")]:
        old.unlink()
    print(
        f"nvcc {nvcc.version}: {stem}.fatbin with {', '.join(f'sm_{n}' for n in nvcc.architectures)} and PTX",
        flush=True,
    )
    source = folder / f"{stem}.cu"
    source.write_text(text, encoding="utf-8")
    jobs = min(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1), len(nvcc.architectures))
    partial = folder / f"{stem}.partial"
    command = [nvcc.path, "-fatbin", *options, f"--threads={jobs}", str(source), "-o", str(partial)]
    try:
        log = _run(command)
    except subprocess.CalledProcessError as error:
        raise NvccError(f"{' '.join(command)}\n{error.stdout}nvcc {nvcc.version} could not compile {stem}.cu") from None
    made.log.write_text(log, encoding="utf-8")
    partial.replace(made.fatbin)
    return made


def build(package: Path, folder: Path) -> None:
    """Makes `package`/gpu have the flattened text and, where there is an nvcc, the fatbin of every .cu, and none that
    are not up to date. `folder` keeps what was compiled. Raises BuildError; where nvcc fails, only if STRICT."""
    texts = {stem: flatten(path, ROOT / "csrc") for stem, path in sources(ROOT / "csrc").items()}
    files = {f"{stem}.cu": text.encode() for stem, text in texts.items()}
    files |= {f"{stem}.fatbin": fatbin for stem, fatbin in _fatbins(texts, folder).items()}
    target = package / "gpu"
    target.mkdir(parents=True, exist_ok=True)
    for path in [*target.glob("*.cu"), *target.glob("*.fatbin")]:
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def _fatbins(texts: dict[str, str], folder: Path) -> dict[str, bytes]:
    """What nvcc makes of all texts; nothing, and standard error says why, where it is not asked to, missing or fails.

    It takes a minute, which nobody needs where there is no driver and nobody has asked."""
    asked = bool(os.environ.get("RINGREDUCE_NVCC"))
    why = "no nvcc" if asked or has_driver() else "no NVIDIA driver, and RINGREDUCE_NVCC=1 is not set"
    try:
        if texts and why == "no nvcc" and (nvcc := find_nvcc()):
            return {stem: compile_text(nvcc, stem, text, folder).fatbin.read_bytes() for stem, text in texts.items()}
    except NvccError as error:
        if STRICT:
            raise
        why = f"warning: {error}"
    if texts:
        print(f"{why}: GPU kernels will be compiled at first use by NVRTC", file=sys.stderr, flush=True)
    return {}


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _run(command: list[str]) -> str:
    """What the program printed. Raises subprocess.CalledProcessError, which has it too, or OSError."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


if __name__ == "__main__":
    sys.exit(find_nvcc() is None)  # for the Makefile: 0 if kernels would be compiled
