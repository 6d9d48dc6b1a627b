"""Compiles all CUDA code, and compares what each kernel takes with .ci/kernels.txt: `make cuda`.

A kernel that spills registers fails; so does one that takes other registers or stack than the table says, and a sum of
float32 or bfloat16 that does not load and store 16 bytes at once. Nothing runs, so no GPU is needed. Where there is no
nvcc nothing is checked, and the last line says so.

    python .ci/check_cuda.py [--write]    # --write: make the table say what is
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_cuda  # noqa: E402

TABLE = ROOT / ".ci" / "kernels.txt"
REWRITE = "make cuda WRITE=1"
WIDE = ("accumulate_float32_sum", "accumulate_bfloat16_sum")


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


def table(found: list[Usage], version: str) -> str:
    """A line for each kernel: its registers, and its stack after a plus if it has one."""
    architectures = sorted({usage.architecture for usage in found})
    cells = {
        (usage.kernel, usage.architecture): f"{usage.registers}+{usage.stack}" if usage.stack else str(usage.registers)
        for usage in found
    }
    kernels = sorted({usage.kernel for usage in found})
    width = max(map(len, kernels), default=0)
    lines = [
        f"# Registers of every kernel, + bytes of stack where there are any, by nvcc {version}. To rewrite: {REWRITE}",
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


def narrow(sass: str, architectures: tuple[int, ...]) -> list[str]:
    """Which of WIDE lack a load or a store of 128 bits on which architecture, by what cuobjdump prints."""
    instructions: dict[tuple[str, int], str] = {}
    architecture = 0
    for part in re.split(r"^(?=arch = )|(?=Function : )", sass, flags=re.MULTILINE):
        if match := re.match(r"arch = sm_(\d+)", part):
            architecture = int(match[1])
        elif match := re.match(r"Function : (\w+)", part):
            instructions[match[1], architecture] = part
    wanted = {"load": r"\bLDG\.E[.\w]*\.128\b", "store": r"\bSTG\.E[.\w]*\.128\b"}
    return [
        f"{kernel} on sm_{number} has no {what} of 128 bits"
        for kernel in WIDE
        for number in architectures
        for what, pattern in wanted.items()
        if not re.search(pattern, instructions.get((kernel, number), ""))
    ]


def program(name: str) -> str:
    """A tool of the toolkit, from PATH or from NVIDIA's wheel of it."""
    if found := shutil.which(name):
        return found
    for file in metadata.files(f"nvidia-cuda-{name}") or ():
        if file.name == name:
            return str(file.locate())
    sys.exit(f"error: no {name}; pip install nvidia-cuda-{name}")


def disassemble(fatbin: Path) -> str:
    """The SASS of WIDE."""
    cuobjdump, nvdisasm = program("cuobjdump"), program("nvdisasm")
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ.get("PATH", os.defpath)])
    command = [cuobjdump, "--dump-sass", "--function", ",".join(WIDE), str(fatbin)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    write = parser.parse_args().write
    try:
        nvcc = build_cuda.find_nvcc()
        if nvcc is None:
            print("no nvcc on this machine: CUDA code was NOT compiled and NOT checked")
            return 0
        sources = build_cuda.sources(ROOT / "csrc")
        made = {
            stem: build_cuda.compile_text(nvcc, stem, build_cuda.flatten(path, ROOT / "csrc"), ROOT / "build/cuda")
            for stem, path in sources.items()
        }
    except build_cuda.BuildError as error:
        sys.exit(f"error: {error}")
    found = [usage for compiled in made.values() for usage in usages(compiled.log.read_text(encoding="utf-8"))]
    missing = [f"nvcc {nvcc.version} knows no sm_{n}" for n in build_cuda.ARCHITECTURES if n not in nvcc.architectures]
    faults = spilling(found)
    if "accumulate" in made:
        faults += narrow(disassemble(made["accumulate"].fatbin), nvcc.architectures)
    else:
        faults.append("there is no csrc/**/accumulate.cu")

    now = table(found, nvcc.version)
    if write:
        TABLE.write_text(now, encoding="utf-8")
    committed = TABLE.read_text(encoding="utf-8") if TABLE.exists() else now.partition("\n")[0]
    if changed := differences(committed, now):
        faults.append(f"{TABLE.relative_to(ROOT)} says otherwise; if that is meant: {REWRITE}")
        print("\n".join(changed))
    for fault in faults:
        print(f"error: {fault}")
    kernels = len({usage.kernel for usage in found})
    print(f"{kernels} kernels for {', '.join(f'sm_{n}' for n in nvcc.architectures)} by nvcc {nvcc.version}")
    if committed.partition("\n")[0] != now.partition("\n")[0]:
        missing.append(f"the table is not of nvcc {nvcc.version}")
    for reason in missing:
        print(f"NOT checked: {reason}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
