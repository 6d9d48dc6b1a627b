"""Types the blocks of README's sections on installing, as newcomers do: in a checkout, in an empty environment.

`python .ci/type_readme.py [TORCH]`, in a built checkout. With TORCH, such as torch==2.13.0, pip gets that in place of
README's line for torch, which names an index that not every machine reaches. The rest is typed as it stands: by this
user, who then goes make's way as well, and, if this user is root, by two ordinary users at the same time.

The first copy of the checkout compiles, which takes seconds where ccache is: the commands are those of this checkout.
The others get its objects; ninja goes by times and commands, and compiles again what would become another object. Of
`make demo` it does `make build`. The rest of it, a training and benchmarks, would take longer than all of this.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("Install", "In 30 seconds")
SUMS = "tensor([3., 3., 3., 3.])"

# Python's, pip's and make's own ways of being told about other packages, and what `make` has exported for itself.
FORGOTTEN = re.compile(
    r"PYTHON.*|VIRTUAL_ENV|XDG_.*|M(AKE)?FLAGS|MAKE.*|VENV|TMPDIR|USER|LOGNAME|RINGREDUCE_(?!WERROR).*"
)

MORE = """
python -m ringreduce doctor
torchrun --nproc-per-node 2 -m ringreduce doctor --peers
python -c 'import ringreduce; ringreduce.empty(2); print(ringreduce.__file__, ringreduce._C.__file__)'
"""


@dataclass(frozen=True)
class Newcomer:
    """A user with a home, a checkout in it, and an empty virtual environment that is active."""

    name: str
    home: Path
    python: Path = Path(sys._base_executable)
    ccache: str = ""

    @property
    def checkout(self) -> Path:
        return self.home / "ringreduce"

    def type(self, script: str) -> str:
        """What the lines print, in one shell. Ends this program if one of them fails."""
        done = self.try_to_type(script)
        if done.returncode:
            sys.exit(f"{done.stdout}\nerror: {self.name} typed\n{script}\nand got exit code {done.returncode}")
        return done.stdout

    def try_to_type(self, script: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not FORGOTTEN.fullmatch(name)}
        path = [
            str(self.home / "venv/bin"),
            *(p for p in os.environ["PATH"].split(":") if not Path(p).is_relative_to(ROOT)),
        ]
        # Without .pyc files of what is never imported, pip needs half the time for torch.
        ours = {"HOME": str(self.home), "PATH": ":".join(path), "OMP_NUM_THREADS": "1", "PIP_NO_COMPILE": "1"}
        if self.ccache:
            ours["CCACHE_DIR"] = self.ccache
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=False,
            cwd=self.checkout,
            env={**kept, **ours, "VIRTUAL_ENV": str(self.home / "venv")},
            user=self.name,
            group=pwd.getpwnam(self.name).pw_gid,
            extra_groups=[] if os.getuid() == 0 else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )

    def settle(self, objects: Path | None = None) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
            if (ROOT / name).exists():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.checkout / name)
        if objects:
            shutil.copytree(
                objects, self.checkout / "build", symlinks=True, ignore=shutil.ignore_patterns("lib.*", "bdist.*")
            )
        owner = pwd.getpwnam(self.name)
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
        self.type(f"{self.python} -m venv ~/venv")

    def follow_readme(self, blocks: list[tuple[str, str]]) -> None:
        for language, text in blocks:
            if language == "python":
                self.save(text)
            elif "first.py" in text:
                self.expect(self.type(text), SUMS, 2)
            else:
                self.type(text)
        ours, theirs = self.type(MORE).splitlines()[-1].split()
        if not all(Path(each).is_relative_to(self.checkout) for each in (ours, theirs)):
            sys.exit(f"error: {ours} and {theirs} must be of the checkout")

    def save(self, text: str) -> None:
        (self.checkout / "first.py").write_text(text)

    def forget_e(self, blocks: list[tuple[str, str]]) -> None:
        """Leaves -e out of README's line. The command that the message then names must mend it."""
        for language, text in blocks:
            if language == "python":
                self.save(text)
            elif "first.py" not in text:
                self.type(text.replace(" -e .", " ."))
            else:
                refused = self.try_to_type(text)
                said = re.search(r"hides the package .* in (\S+): type `(.+)` in (\S+), or", refused.stdout)
                if not refused.returncode or not said or not Path(said[1]).is_relative_to(self.home / "venv"):
                    sys.exit(f"{refused.stdout}\nerror: it must say that the checkout hides the installed package")
                self.type(f"cd {said[3]}; {said[2]}")
                self.expect(self.type(text), SUMS, 2)

    def expect(self, output: str, text: str, times: int) -> None:
        if output.count(text) != times:
            sys.exit(f"{output}\nerror: {self.name} must see {text!r} {times} times")


def python_of_all() -> Path:
    """A Python of this one's version that every user may start. Ends this program if there is none."""
    own = Path(sys._base_executable).resolve()
    if all(folder.stat().st_mode & 0o001 for folder in own.parents):
        return own
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if other := shutil.which(name, path=os.defpath):
        return Path(other)
    sys.exit(f"error: ordinary users cannot start {own}, and there is no {name} in {os.defpath}")


def blocks_of(readme: str, torch: str) -> list[tuple[str, str]]:
    """The language and text of each block. Ends this program unless there is one line for torch, and one program."""
    found = []
    for section in SECTIONS:
        text = readme.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        found += re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
    line = re.compile(r"^pip install torch\b.*$", re.M)
    if len(line.findall("".join(text for _, text in found))) != 1:
        sys.exit("error: README must have one line that begins with `pip install torch`")
    if [language for language, _ in found].count("python") != 1 or "Save it as `first.py`" not in readme:
        sys.exit("error: README must have one program, to be saved as first.py")
    return [(language, line.sub(f"pip install {torch}", text) if torch else text) for language, text in found]


@contextlib.contextmanager
def ordinary_users(count: int) -> Iterator[list[str]]:
    names = [f"newcomer{os.getpid()}{letter}" for letter in "abcdefgh"[:count]]
    made = []
    try:
        for name in names:
            subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/bash", name], check=True)
            made.append(name)
        yield names
    finally:
        for name in made:
            subprocess.run(["userdel", name], check=False)  # what it says is seen


def main(torch: str = "") -> None:
    blocks = blocks_of((ROOT / "README.md").read_text(), torch)
    print(f"README's line for torch {f'is `pip install {torch}` here' if torch else 'as it stands'}", flush=True)
    (run,) = (text for language, text in blocks if language == "bash" and "first.py" in text)
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        os.chmod(folder, 0o755)
        start = time.monotonic()

        def told(what: str) -> None:
            print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)

        cache = shutil.which("ccache") and subprocess.check_output(["ccache", "-k", "cache_dir"], text=True).strip()
        me = Newcomer(pwd.getpwuid(os.getuid()).pw_name, Path(folder, "first"), ccache=cache or "")
        me.settle()
        me.forget_e(blocks)
        told(f"{me.name}: README's blocks without -e, and what the message then says")
        me.follow_readme(blocks)
        told(f"{me.name}: README's blocks, and other commands in the checkout")
        me.type("pip install -q ninja 'setuptools>=77'\nmake build PYTHON=python")
        me.expect(me.type(f"PATH=$PWD/.venv/bin:$PATH\n{run}"), SUMS, 2)
        told(f"{me.name}: `make build` on top of that environment, which has a ninja of its own")
        if os.getuid():
            print("ordinary users besides this one NOT tried: only root can make them")
            return
        with ordinary_users(2) as names, ThreadPoolExecutor() as at_once:
            newcomers = [Newcomer(name, Path(folder, name), python_of_all()) for name in names]
            list(at_once.map(lambda each: each.settle(me.checkout / "build"), newcomers))
            list(at_once.map(lambda each: each.follow_readme(blocks), newcomers))
            told("two ordinary users at once: the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
