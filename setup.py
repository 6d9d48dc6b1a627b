"""Builds `ringreduce._C` and the GPU kernels from csrc/. Everything else about the package is in pyproject.toml."""

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
MACHINES = ("x86_64", "aarch64")

# torch's headers need C++17 today and its own default is C++20, which every compiler that can build them has.
# Contraction is off because a fused multiply-add rounds differently: all instruction sets must give the same bits.
# A warning fails the build in CI only (RINGREDUCE_WERROR=1): other compilers warn about other things.
COMPILE_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off"]
if os.environ.get("RINGREDUCE_WERROR") == "1":
    COMPILE_FLAGS.append("-Werror")


def require_toolchain() -> None:
    """Ends with one clear line where this machine cannot build the extension."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        sys.exit(
            f"ringreduce runs on Linux on {' and '.join(MACHINES)}; this is {platform.system()} on {platform.machine()}"
        )
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        sys.exit(f"ringreduce needs a C++20 compiler to build: {compiler} was not found (install g++, or set CXX)")
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        sys.exit(f"ringreduce needs Python's headers to build: no Python.h in {headers} (install python3-dev)")


def prefer_ninja_and_ccache(cpp_extension) -> None:
    """Puts pip's ninja on PATH, where torch looks for it, and ccache before the compiler where torch does not."""
    try:
        import ninja
    except ImportError:
        pass  # one on PATH will do; without any, torch says so and compiles file by file
    else:
        os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    torch_adds_ccache = hasattr(cpp_extension, "_wrap_compiler")  # and then takes CXX for a single word
    if "CXX" not in os.environ and shutil.which("ccache") and not torch_adds_ccache:
        os.environ["CXX"] = "ccache c++"


def extension(cpp_extension):
    """The extension: all of csrc except csrc/stress, a program of its own."""
    sources = [p for p in Path("csrc").rglob("*.cpp") if "stress" not in p.parts]
    ext = cpp_extension.CppExtension("ringreduce._C", sorted(map(str, sources)))
    # torch's headers as system headers, so that warnings are about our code only.
    ext.extra_compile_args = [*COMPILE_FLAGS, *(f"-isystem{d}" for d in ext.include_dirs)]
    ext.include_dirs = [str(ROOT / "csrc")]  # absolute, since ninja runs elsewhere
    return ext


os.chdir(ROOT)
sys.path.insert(0, str(ROOT))  # pip does not
require_toolchain()
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a broken ringreduce, if installed, must not stop its next build

from torch import __version__ as torch_version  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

import build_cuda  # noqa: E402

prefer_ninja_and_ccache(cpp_extension)


class build_ext(cpp_extension.BuildExtension):
    """torch's, with one lasting folder for objects, where pip would start from an empty one every time."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch_version}"

    def run(self) -> None:
        super().run()
        package = Path("." if self.inplace else self.build_lib, "ringreduce")
        (package / "_C.torch").write_text(torch_version)  # ringreduce/common/compiled.py reads it
        try:
            build_cuda.build(package, Path("build/cuda"))
        except build_cuda.BuildError as error:
            sys.exit(f"ringreduce: {error}")

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except RuntimeError as error:  # the compiler has said what is wrong; a traceback would only hide it
            sys.exit(f"ringreduce: {error}")


setup(ext_modules=[extension(cpp_extension)], cmdclass={"build_ext": build_ext})
