"""The MPI libraries that peers.py measures: how each is installed, and how its ranks are started."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringreduce.cli.bench.team import BackendFailed

FOLDER = Path(__file__).resolve().parent
VENVS = FOLDER / ".peers"


@dataclass(frozen=True)
class Mpi:
    """An MPI library of PyPI: its package, how its launcher starts ranks on one host, and what it finds set."""

    package: str
    launcher: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # packages


# Each with the settings, of those documented, that were fastest over 64 B to 64 MB and 2 and 4 ranks on 2 Xeon cores.
# MPICH: its shared-memory collectives took 0.8 us at 64 B where the others take 1.9, but 10 ms at 16 MB instead of 3,
# and seconds with more ranks than cores. Open MPI: xhc changed nothing for 2 ranks, and made 4 ranks 10 to 25% faster
# from 256 KB; it yields by itself when oversubscribed.
MPIS = {
    "openmpi": Mpi(
        "openmpi",
        ("mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "coll_xhc_priority", "90"),
    ),
    "mpich": Mpi("mpich", ("mpiexec.hydra",), {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"}),
    "impi": Mpi("impi-rt", ("mpiexec.hydra",), {"I_MPI_FABRICS": "shm"}, ("impi-devel",)),
    "oneccl": Mpi(
        "impi-rt",
        ("mpiexec.hydra",),
        {"CCL_ATL_TRANSPORT": "mpi", "CCL_LOG_LEVEL": "error", "I_MPI_FABRICS": "shm"},
        ("oneccl-devel",),
    ),
}
"""oneCCL is no MPI; its ranks are started by one, and talk through it."""

# Plain copies, by glibc's own choice of instructions, and by non-temporal stores from 64 KB on.
COPIES: dict[str, dict[str, str]] = {
    "memcpy": {},
    "memcpy-nt": {
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x10000:glibc.cpu.x86_rep_movsb_threshold=0x7fffffff"
    },
}


def start_of(name: str, ranks: int) -> tuple[list[str | Path], dict[str, str]]:
    """What starts the ranks of the team `name`, if not worker.py, and what they find set."""
    if name not in MPIS:
        return [], COPIES.get(name, {})
    command, environment = launch(name, ranks)
    return [*command, *([FOLDER / "oneccl.py"] if name == "oneccl" else [])], environment


def launch(name: str, ranks: int) -> tuple[list[str | Path], dict[str, str]]:
    """The launcher of an MPI library, up to the Python of its ranks, and what they find set."""
    binaries = VENVS / name / "bin"
    launcher, *options = MPIS[name].launcher
    command: list[str | Path] = [binaries / launcher, *options, "-n", str(ranks), binaries / "python"]
    return command, MPIS[name].environment | ({"CCL_ROOT": str(VENVS / name)} if name == "oneccl" else {})


def install(name: str) -> None:
    """Put the MPI library, mpi4py and NumPy into a venv of their own, if they are not there. Raises BackendFailed."""
    venv, packages = VENVS / name, [MPIS[name].package, *MPIS[name].more, "mpi4py", "numpy"]
    python = venv / "bin" / "python"
    probe = f"from importlib.metadata import version; print(*map(version, {packages}))"

    def run(*command: str | Path) -> bool:
        result = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output.append(result.stdout.strip())
        return result.returncode == 0

    output: list[str] = []
    if not python.exists() or not run(python, "-c", probe):
        shutil.rmtree(venv, ignore_errors=True)
        if not run(sys.executable, "-m", "venv", venv) or not run(python, "-m", "pip", "install", "-q", *packages):
            shutil.rmtree(venv, ignore_errors=True)
            raise BackendFailed(f"{name}: could not install {' '.join(packages)} in {venv}:\n{output[-1][-2000:]}")
    library, source = venv / "oneccl.so", FOLDER / "oneccl.cpp"
    made = library.exists() and library.stat().st_mtime > source.stat().st_mtime
    if name == "oneccl" and not made and not run(*compiler_call(venv, library)):
        raise BackendFailed(f"{name}: could not compile {source}:\n{output[-1][-2000:]}")


def compiler_call(venv: Path, library: Path) -> list[str | Path]:
    """What makes a library of oneccl.cpp and of oneCCL's CPU library, which is static."""
    linked = ("mpi", "svml", "imf", "intlc", "irng", "hwloc", "pthread", "dl", "rt")
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wl,--no-undefined", "-Wl,-rpath,$ORIGIN/lib"]
    files = [FOLDER / "oneccl.cpp", venv / "lib/ccl/cpu/lib/libccl.a", f"-I{venv}/include", f"-L{venv}/lib"]
    return [os.environ.get("CXX", "c++"), *options, *files, *(f"-l{name}" for name in linked), "-o", library]


def install_all(names: Sequence[str]) -> dict[str, str]:
    """Install each of `names`; those that failed, with the reason."""
    failed = {}
    for name in names:
        try:
            install(name)
        except BackendFailed as error:
            failed[name] = str(error)
    return failed
