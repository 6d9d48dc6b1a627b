"""Compiles csrc to ringreduce/_C_torch<minor>...so, one file for each torch, for setup.py. It needs only ninja.

Most of csrc knows neither torch nor Python and is compiled once. Only process_group/ and the bindings are compiled for
each torch. Compilers spend most of their time on headers, ten seconds on torch's. So the sources of a folder are
compiled in one piece, a file that includes them, and those that know torch in two pieces: two sources of a piece must
not use one name for two things. Those of kernels/ stay apart, as each sets the instructions it is for.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).resolve().parent

# Seen from ROOT, where the compilers run: messages name no folder of this machine, and another checkout that gets these
# objects need not compile again.
CSRC = Path("csrc")
BUILD = Path("build")
MACHINES = ("x86_64", "aarch64")
OLDEST_TORCH = (2, 11)

# By its path: the package itself would look for torch.
name_for = run_path(str(ROOT / "ringreduce/common/compiled.py"))["name_for"]

# torch's headers need C++17 today and its own default is C++20, which every compiler that can build them has.
# Contraction is off because a fused multiply-add rounds differently: all instruction sets must give the same bits. Sums
# of integers wrap around, as torch's do.
# A warning fails the build in CI only (RINGREDUCE_WERROR=1): other compilers warn about other things.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-fwrapv",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
]

SETTINGS = """
rule compile
  command = $cxx $flags $headers -MMD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d
  description = $what
rule link
  command = $cxx -shared -pthread $in -o $out $libraries -ldl
  description = $what
"""


class BuildError(Exception):
    """The message says what cannot be built, and what to do."""


@dataclass(frozen=True)
class Torch:
    """A torch to compile for: a folder with torch's headers, its libraries and version.py."""

    folder: Path

    @property
    def minor(self) -> str:
        version = self.folder / "version.py"
        if not version.exists():
            raise BuildError(f"{self.folder} is not the folder of a torch: it has no version.py")
        found = re.search(r"__version__ = '((\d+)\.(\d+))", version.read_text())
        if not found or (int(found[2]), int(found[3])) < OLDEST_TORCH:
            raise BuildError(
                f"torch in {self.folder} is older than {'.'.join(map(str, OLDEST_TORCH))}; install a newer one"
            )
        return found[1]

    @property
    def build(self) -> Path:
        """Where what is compiled for it goes."""
        return BUILD / f"{sys.implementation.cache_tag}-torch{self.minor}"

    def headers(self) -> list[str]:
        """torch's and Python's, as system headers, so that warnings are about our code only."""
        include = link(self.build / "torch", self.folder) / "include"
        python = link(self.build / "python", Path(sysconfig.get_path("include")))
        place = f"-ffile-prefix-map={self.build}/="  # in torch's messages
        return [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}", f"-isystem{python}", place]

    def libraries(self) -> list[str]:
        return [f"-L{self.build / 'torch/lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def link(path: Path, target: Path) -> Path:
    """A link at `path`: commands and objects are the same wherever what they are made with lies."""
    if not path.is_symlink() or path.readlink() != target:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    return path


def torches() -> list[Torch]:
    """Those in the folders of RINGREDUCE_TORCHS, joined by ":", or the one that is installed."""
    if named := os.environ.get("RINGREDUCE_TORCHS"):
        return [Torch(Path(folder).absolute()) for folder in named.split(os.pathsep)]
    # pip hides what is installed from what it builds, by variables for Python (-E ignores them). It would build for
    # another torch instead, the newest, which nobody has asked for.
    find = "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
    for options in ([], ["-E"]):
        found = subprocess.run([sys.executable, *options, "-c", find], check=False, capture_output=True, text=True)
        if found.returncode == 0:
            return [Torch(Path(found.stdout.strip()))]
    raise BuildError(
        f"there is no torch in {sys.executable}; install torch first. A tool that builds in an environment of its own, "
        "as uv does, needs --no-build-isolation"
    )


def minors() -> list[tuple[int, int]]:
    """The minor versions of torch that there will be modules for, lowest first. Raises BuildError without a torch."""
    return sorted((int(major), int(minor)) for major, minor in (torch.minor.split(".") for torch in torches()))


def requirement() -> str:
    """The versions of torch that this build has modules for, in pip's words; without a torch, those that will do."""
    try:
        made = minors()
    except BuildError:
        return f"torch>={'.'.join(map(str, OLDEST_TORCH))}"
    (major, first), (_, last) = made[0], made[-1]
    missing = [f",!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in made]
    return f"torch>={major}.{first}.dev0,<{major}.{last + 1}.dev0{''.join(missing)}"


def compiler() -> list[str]:
    """The command of the C++ compiler, after ccache where that is there. Raises BuildError if this machine has none."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        here = f"{platform.system()} on {platform.machine()}"
        raise BuildError(f"it runs on Linux on {' and '.join(MACHINES)}; this is {here}")
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise BuildError(f"a C++20 compiler is needed: {command[0]} was not found (install g++, or set CXX)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(
            f"Python's headers are needed: no Python.h in {sysconfig.get_path('include')} (install python3-dev)"
        )
    return ["ccache", *command] if "CXX" not in os.environ and shutil.which("ccache") else command


def ninja() -> str:
    """pip's, which need not be on PATH, or another one."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        BIN_DIR = ""
    found = shutil.which("ninja", path=BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise BuildError("ninja was not found; pip install ninja")
    return found


def knows_torch(source: Path) -> bool:
    return source.parent.name == "process_group" or source.name == "bindings.cpp"


class NinjaFile:
    """What ninja makes, and from what."""

    def __init__(self, cxx: list[str]) -> None:
        self.lines = [
            f"builddir = {BUILD / sys.implementation.cache_tag}",
            f"cxx = {shlex.join(cxx)}",
            f"flags = {shlex.join(flags())}",
            SETTINGS,
        ]

    def add(self, rule: str, made: Path, sources: list[Path], what: str, **variables: list[str]) -> Path:
        escaped = [re.sub(r"([$ :])", r"$\1", str(path)) for path in (made, *sources)]
        self.lines.append(f"build {escaped[0]}: {rule} {' '.join(escaped[1:])}\n  what = {what}")
        self.lines += [f"  {name} = {shlex.join(words)}" for name, words in variables.items()]
        return made


def flags() -> list[str]:
    strict = ["-Werror"] if os.environ.get("RINGREDUCE_WERROR") == "1" else []
    return [*FLAGS, *strict, f"-I{CSRC}", "-iquote.", "-ffile-prefix-map=./="]


def piece(path: Path, sources: list[Path]) -> Path:
    """A file that includes `sources`. It is written only if it is another one: ninja goes by its time."""
    text = "".join(f'#include "{source}"\n' for source in sources)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def build(package: Path) -> None:
    """Makes the files in `package`. Those of earlier builds go: they may be of another csrc. Raises BuildError."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("it does not run on a free-threaded Python; use one with the GIL")
    os.chdir(ROOT)
    file = NinjaFile(compiler())
    sources = sorted(path for path in CSRC.rglob("*.cpp") if "stress" not in path.parts)
    bindings, calls = [], []
    units = defaultdict[Path, list[Path]](list)
    for source in sources:
        if knows_torch(source):
            (bindings if "bindings" in source.name else calls).append(source)
        else:
            units[source if source.parent.name == "kernels" else source.parent].append(source)
    engine = []
    for unit, members in units.items():
        made_of_it = BUILD / "engine" / unit.relative_to(CSRC).with_suffix(".o")
        source = members[0] if len(members) == 1 else piece(made_of_it.with_suffix(".cpp"), members)
        engine.append(file.add("compile", made_of_it, [source], str(unit)))
    made = set[Path]()
    for torch in torches():
        pieces = [
            file.add(
                "compile",
                torch.build / f"{name}.o",
                [piece(torch.build / f"{name}.cpp", members)],
                f"csrc for torch {torch.minor}: {name}",
                headers=torch.headers(),
            )
            for name, members in (("bindings", bindings), ("calls", calls))
        ]
        module = package / name_for(torch.minor)
        made.add(file.add("link", module, [*pieces, *engine], module.name, libraries=torch.libraries()))
    BUILD.mkdir(exist_ok=True)
    written = BUILD / f"{sys.implementation.cache_tag}.ninja"
    written.write_text("\n".join(file.lines) + "\n")
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    if subprocess.run([ninja(), "-f", str(written), *jobs], check=False).returncode:
        raise BuildError("csrc could not be compiled; the compiler says why above")
    for earlier in set(package.glob("_C*.so")) - made:
        earlier.unlink()
