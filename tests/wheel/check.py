"""Installs the wheel of dist/ where there is no compiler, and trains with it on 2 ranks, beside each torch named.

`python tests/wheel/check.py 2.11.0 2.13.0` installs those versions of torch with pip, one after the other, each in a
new environment. Without a version the torch of this Python is used. A torch that the wheel has no module for must be
refused in one sentence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("train.py")


def the_wheel() -> tuple[Path, list[str]]:
    """The newest wheel of dist/ for this Python, and the minor versions of torch that it has a module for."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = sorted((ROOT / "dist").glob(f"ringreduce-*-{tag}-{tag}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("error: dist/ has no wheel for this Python; make wheel")
    names = zipfile.ZipFile(wheels[-1]).namelist()
    found = [re.fullmatch(rf"ringreduce/_C_torch([\d.]+){re.escape(EXTENSION_SUFFIXES[0])}", name) for name in names]
    return wheels[-1], [match[1] for match in found if match]


class Environment:
    """A fresh virtual environment with one torch, in which no compiler can be found."""

    def __init__(self, torch: str | None) -> None:
        self.folder = ROOT / "build/wheel-check"
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        if torch:
            self.pip("install", "-q", f"torch=={torch}", "numpy")
        else:
            spec = find_spec("torch")
            assert spec is not None and spec.origin is not None
            (site,) = self.folder.glob("lib/python*/site-packages")
            others = {str(Path(spec.origin).parents[1]), sysconfig.get_path("purelib")}
            (site / "torch_of_another.pth").write_text("".join(f"{path}\n" for path in sorted(others)))

    def run(self, *words: str | Path, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        settings = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "OMP_NUM_THREADS": "1", **more}
        return subprocess.run(
            [self.folder / "bin/python", *words],
            check=check,
            cwd=self.folder,
            env=settings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=None if check else subprocess.PIPE,
            timeout=300,
        )

    def pip(self, *words: str | Path) -> None:
        """With this process's environment, which says where packages come from."""
        subprocess.run([self.folder / "bin/python", "-m", "pip", *words], check=True)


def check(wheel: Path, minors: list[str], torch: str | None) -> None:
    environment = Environment(torch)
    try:
        asked = "import torch; print(torch.__version__)"
        version = environment.run("-c", asked, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip()
        fits = ".".join(version.split(".")[:2]) in minors
        start = time.monotonic()
        environment.pip("install", "-q", "--no-index", "--no-deps", wheel)
        installed = time.monotonic() - start
        if fits:
            said = environment.run(
                "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM
            ).stdout
        else:
            ran = environment.run("-c", "import torch, ringreduce._C", check=False)
            said = ran.stderr.strip().splitlines()[-1]
            have = f"built for torch {', '.join(minors)}, and this is torch {version}"
            if ran.returncode == 0 or have not in said:
                sys.exit(f"error: torch {version} must be refused, and was not: {ran.stdout}{ran.stderr}")
    finally:
        shutil.rmtree(environment.folder)
    print(f"torch {version}: wheel installed in {installed:.1f} s; {said.strip()}", flush=True)


def main(versions: list[str]) -> None:
    wheel, minors = the_wheel()
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, for torch {', '.join(minors)}", flush=True)
    for version in versions or [None]:
        check(wheel, minors, version)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # nothing of the checkout
    main(sys.argv[1:])
