"""Compiles all CUDA code, and compares what each kernel takes with .ci/kernels.txt: `make cuda`.

nvcc compiles every row of the kernels' table for ARCHITECTURES of build_cuda.py, and NVRTC for SUPPORTED, which has
older GPUs too. A kernel that spills registers fails; so does one that takes other registers or stack than the table
says, a sum of float32 or bfloat16 that does not load and store 16 bytes at once, and a kernel of the interpreter that
reads what peers write in a way that may miss it (SHARED). Nothing runs, so no GPU is needed. The last lines name what
could not be checked.

The table begins with a digest of what it was made from: the code, nvcc's version and flags, and this file. Where that
is still the same, the result is known, and nothing is compiled.

    python .ci/check_cuda.py [--write]    # --write: compile in any case, and make the table say what is
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["RINGREDUCE_WERROR"] = "1"  # what gave warnings must not count as checked

import build_cuda  # noqa: E402
from ringreduce.errors import SystemFailure  # noqa: E402
from ringreduce.gpu import kernels  # noqa: E402

TABLE = ROOT / ".ci" / "kernels.txt"
REWRITE = "make cuda WRITE=1"
WIDE = ("accumulate_float32_sum", "accumulate_bfloat16_sum")
SUPPORTED = (70, 75, 80, 90, 100)
"""Where every row of the kernels' table must compile: the oldest GPU, and those whose instructions differ."""


@dataclass(frozen=True)
class Usage:
    """What ptxas gave one kernel on one architecture; stack and spills are bytes of a thread."""

    kernel: str
    architecture: int
    registers: int
    stack: int
    spills: int


def usages(log: str) -> list[Usage]:
    """What `ptxas --verbose` says of each kernel. Raises ValueError if a kernel's part is not complete."""
    found = []
    parts = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", log)[1:]
    for kernel, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        properties = rf"Function properties for {kernel}\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)"
        stack, registers = re.search(properties, text), re.search(r"Used (\d+) registers", text)
        if stack is None or registers is None:
            raise ValueError(f"ptxas says nothing of {kernel} on sm_{architecture}:\n{text}")
        spills = int(stack[2]) + int(stack[3])
        found.append(Usage(kernel, int(architecture), int(registers[1]), int(stack[1]), spills))
    return found


def digest(nvcc: build_cuda.Nvcc, texts: dict[str, str]) -> str:
    """Of all that the table follows from."""
    how = [nvcc.version, str(nvcc.architectures), *build_cuda.FLAGS, Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join([*how, *texts, *texts.values()]).encode()).hexdigest()[:16]


def table(found: list[Usage], version: str, made_from: str) -> str:
    """A line for each kernel: its registers, and its stack after a plus if it has one. `made_from`: a `digest`."""
    architectures = sorted({usage.architecture for usage in found})
    cells = {
        (usage.kernel, usage.architecture): f"{usage.registers}+{usage.stack}" if usage.stack else str(usage.registers)
        for usage in found
    }
    kernels = sorted({usage.kernel for usage in found})
    width = max(map(len, kernels), default=0)
    lines = [
        f"# Registers of every kernel, + bytes of stack where there are any, by nvcc {version}. To rewrite: {REWRITE}",
        f"# Digest of what they were compiled from: {made_from}",
        "# kernel".ljust(width) + "".join(f"  sm_{architecture}".rjust(9) for architecture in architectures),
    ]
    for kernel in kernels:
        row = [cells.get((kernel, architecture), "-") for architecture in architectures]
        lines.append(kernel.ljust(width) + "".join(cell.rjust(9) for cell in row))
    return "\n".join(lines) + "\n"


def spilling(found: list[Usage]) -> list[str]:
    return [
        f"{usage.kernel} spills registers on sm_{usage.architecture}: {usage.spills} bytes stored and loaded"
        for usage in found
        if usage.spills
    ]


def differences(committed: str, now: str) -> list[str]:
    """The table's lines that changed; nothing if another nvcc made the committed one, since numbers are its own."""
    if committed.partition("\n")[0] != now.partition("\n")[0]:
        return []
    return list(difflib.unified_diff(committed.splitlines(), now.splitlines(), "committed", "now", lineterm="", n=0))


def kernels_in(sass: str) -> dict[tuple[str, int], str]:
    """The instructions of each kernel on each architecture, by what cuobjdump prints."""
    found: dict[tuple[str, int], str] = {}
    architecture = 0
    for part in re.split(r"^(?=arch = )|(?=Function : )", sass, flags=re.MULTILINE):
        if match := re.match(r"arch = sm_(\d+)", part):
            architecture = int(match[1])
        elif match := re.match(r"Function : (\w+)", part):
            found[match[1], architecture] = part
    return found


def narrow(sass: str, architectures: tuple[int, ...]) -> list[str]:
    """Which of WIDE lack a load or a store of 128 bits on which architecture, by what cuobjdump prints."""
    instructions = kernels_in(sass)
    wanted = {"load": r"\bLDG\.E[.\w]*\.128\b", "store": r"\bSTG\.E[.\w]*\.128\b"}
    return [
        f"{kernel} on sm_{number} has no {what} of 128 bits"
        for kernel in WIDE
        for number in architectures
        for what, pattern in wanted.items()
        if not re.search(pattern, instructions.get((kernel, number), ""))
    ]


SHARED = {
    r"\bLDG\.[.\w]*CONSTANT\b": "by the cache for constants, which does not see what peers write",
    r"\b(?:LD|ST)\.[.\w]*(?:128|U16)\b": "in no particular memory; payloads lie in global memory (in_global_memory)",
    r"\b(?:LD|ST)\.[.\w]*STRONG\b": "in no particular memory; flags lie in global memory (memory.cuh)",
}
"""What a kernel of the interpreter must not do, and why. Its functions that are compiled apart access their job and
stack as generic memory too, by other widths: packs, halves and ordered words are those of peers."""


def unsafe(sass: str) -> list[str]:
    """What kernels of the interpreter do with peers' memory that they must not, by what cuobjdump prints."""
    return [
        f"{kernel} on sm_{number} has {match[0]}: it accesses memory {why}"
        for (kernel, number), instructions in sorted(kernels_in(sass).items())
        for pattern, why in SHARED.items()
        if (match := re.search(pattern, instructions))
    ]


def compile_by_nvrtc(path: str, stem: str, text: str, number: int) -> str:
    """Compiles all rows for sm_<number>; why it could not, or "". ptxas leaves out what takes time: it refuses the same
    instructions."""
    options = (*kernels.OPTIONS, f"--gpu-architecture=sm_{number}", "--ptxas-options=-O0")
    try:
        kernels.Nvrtc(path).compile(f"{stem}.cu", text.encode(), options)
    except SystemFailure as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class ByNvrtc:
    """What the NVRTCs compile while nvcc does: jobs, by version and architecture, and SUPPORTED that none knows."""

    jobs: dict[tuple[str, int], list[Future[str]]]
    unknown: tuple[int, ...]

    def faults(self) -> list[str]:
        return [fault for jobs in self.jobs.values() for job in jobs if (fault := job.result())]

    def describe(self) -> str:
        versions = sorted({version for version, _ in self.jobs})
        each = [(v, ", ".join(f"sm_{n}" for version, n in sorted(self.jobs) if version == v)) for v in versions]
        return "; ".join(f"{names} by NVRTC {version}" for version, names in each)


def start_nvrtc(places: list[str], texts: dict[str, str], processes: ProcessPoolExecutor) -> ByNvrtc:
    """Compiles every text for SUPPORTED with the first NVRTC of each major version in `places`: the oldest of them for
    all that it knows, others for what the older ones do not know and for their own oldest."""
    found: dict[int, kernels.Nvrtc] = {}
    for path in places:
        try:
            nvrtc = kernels.Nvrtc(path)
        except (OSError, AttributeError, SystemFailure):
            continue
        found.setdefault(int(nvrtc.version.partition(".")[0]), nvrtc)
    jobs: dict[tuple[str, int], list[Future[str]]] = {}
    done: set[int] = set()
    for _, nvrtc in sorted(found.items()):
        known = [number for number in SUPPORTED if number in nvrtc.architectures]
        for number in {*known[:1], *known} - (done - set(known[:1])):
            jobs[nvrtc.version, number] = [
                processes.submit(compile_by_nvrtc, nvrtc.path, stem, text, number) for stem, text in texts.items()
            ]
        done.update(known)
    return ByNvrtc(jobs, tuple(number for number in SUPPORTED if number not in done))


def program(name: str) -> str:
    """A tool of the toolkit, from PATH or from NVIDIA's wheel of it."""
    if found := shutil.which(name):
        return found
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(f"nvidia-cuda-{name}") or ():
            if file.name == name:
                return str(file.locate())
    sys.exit(f"error: no {name}; pip install nvidia-cuda-{name}")


def disassemble(fatbin: Path, only: tuple[str, ...] = ()) -> str:
    """The SASS of a fatbin's kernels."""
    cuobjdump, nvdisasm = program("cuobjdump"), program("nvdisasm")
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ.get("PATH", os.defpath)])
    command = [cuobjdump, "--dump-sass", *(("--function", ",".join(only)) if only else ()), str(fatbin)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    ).stdout


def check_nvcc(nvcc: build_cuda.Nvcc, texts: dict[str, str]) -> tuple[list[str], list[str], str]:
    """Compiles the texts; what is wrong, what could not be checked, and the table."""
    made = {stem: build_cuda.compile_text(nvcc, stem, text, ROOT / "build/cuda") for stem, text in texts.items()}
    found = [usage for compiled in made.values() for usage in usages(compiled.log.read_text(encoding="utf-8"))]
    missing = [f"nvcc {nvcc.version} knows no sm_{n}" for n in build_cuda.ARCHITECTURES if n not in nvcc.architectures]
    faults = spilling(found)
    faults += narrow(disassemble(made["accumulate"].fatbin, WIDE), nvcc.architectures)
    faults += unsafe(disassemble(made["interpreter"].fatbin))
    names = len({usage.kernel for usage in found})
    print(f"{names} kernels for {', '.join(f'sm_{n}' for n in nvcc.architectures)} by nvcc {nvcc.version}")
    return faults, missing, table(found, nvcc.version, digest(nvcc, texts))


def check_table(now: str) -> tuple[list[str], list[str]]:
    """What is wrong with the committed table, and what could not be checked."""
    committed = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    if committed.partition("\n")[0] != now.partition("\n")[0]:
        return [], ["the registers: the table is of another nvcc"]
    changed = differences(committed, now)
    print("\n".join(changed), end="\n" * bool(changed))
    return [f"{TABLE.relative_to(ROOT)} says otherwise; if that is meant: {REWRITE}"] if changed else [], []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    write = parser.parse_args().write
    try:
        nvcc = build_cuda.find_nvcc()
        texts = {
            stem: build_cuda.flatten(path, ROOT / "csrc") for stem, path in build_cuda.sources(ROOT / "csrc").items()
        }
        if nvcc and not write and TABLE.exists() and digest(nvcc, texts) in TABLE.read_text(encoding="utf-8"):
            print(f"nothing has changed since {TABLE.relative_to(ROOT)} was made, by nvcc {nvcc.version}")
            return 0
        with ProcessPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as processes:
            nvrtc = start_nvrtc(kernels._places(), texts, processes)
            faults, missing, now = (
                check_nvcc(nvcc, texts) if nvcc else ([], ["registers and SASS: no nvcc is here"], "")
            )
            faults += nvrtc.faults()
    except build_cuda.BuildError as error:
        sys.exit(f"error: {error}")
    if write and now and not faults:
        TABLE.write_text(now, encoding="utf-8")
    elif now:
        changed, unknown = check_table(now)
        faults += changed
        missing += unknown
    missing += [f"the rows for sm_{number}: no NVRTC here knows it" for number in nvrtc.unknown]
    for fault in faults:
        print(f"error: {fault}")
    if nvrtc.jobs:
        print(f"every row compiles for {nvrtc.describe()}" if not nvrtc.faults() else "not every row compiles")
    for reason in missing:
        print(f"NOT checked: {reason}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
