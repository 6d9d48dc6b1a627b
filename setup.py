"""Builds `ringreduce._C` and the GPU kernels from csrc/. Everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext as setuptools_build_ext
from setuptools.command.dist_info import dist_info as setuptools_dist_info

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip does not

import build_cuda  # noqa: E402
import build_module  # noqa: E402


class build_ext(setuptools_build_ext):
    """A file of the module for each torch, which build_module.py and ninja make, and the kernels."""

    def run(self) -> None:
        package = Path(ROOT if self.inplace else self.build_lib, "ringreduce").absolute()
        try:
            build_module.build(package)
            build_cuda.build(package, ROOT / "build/cuda")
        except (build_module.BuildError, build_cuda.BuildError) as error:
            sys.exit(f"ringreduce: {error}")

    def get_outputs(self) -> list[str]:
        return []  # what `run` has made lies in the package already

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class dist_info(setuptools_dist_info):
    """pip asks for it first. If there is no torch to build for, it would download gigabytes of one, and then fail."""

    def run(self) -> None:
        try:
            build_module.minors()
        except build_module.BuildError as error:
            sys.exit(f"ringreduce: {error}")
        super().run()


# Without sources: it says only that this package is made for one machine and one Python.
setup(
    ext_modules=[Extension("ringreduce._C", [])],
    cmdclass={"build_ext": build_ext, "dist_info": dist_info},
    install_requires=[build_module.requirement(), "numpy", "rich"],
)
