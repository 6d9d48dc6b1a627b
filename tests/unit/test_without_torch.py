"""Planning and most commands need neither torch nor the compiled module; `doctor` says what is wrong with either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringreduce
from ringreduce.common import compiled

PACKAGE = Path(ringreduce.__file__).parent

HIDDEN = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {names!r} else find(name, path, target)
PathFinder.find_spec = find_others
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is in a checkout where nothing has been compiled."""
    folder = tmp_path_factory.mktemp("planning")
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.fatbin", "*.cu")
    shutil.copytree(PACKAGE, folder / "ringreduce", ignore=ignored)
    return folder


def python(folder: Path, code: str, *hidden: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python that has the package in `folder`, and not the modules `hidden`."""
    return subprocess.run(
        [sys.executable, "-c", HIDDEN.format(names=hidden) + code],
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )


def command(folder: Path, *words: str, hidden: tuple[str, ...] = ("torch", "networkx")) -> str:
    """What a command prints. It must succeed, or be the doctor, which finds something missing."""
    ran = python(folder, f"from ringreduce.cli import main\nsys.exit(main({words!r}))", *hidden)
    assert (ran.returncode, ran.stderr) == (words[0] == "doctor", ""), ran.stderr
    return ran.stdout


def test_planning_works(copy: Path) -> None:
    code = """
import ringreduce, ringreduce.plan, ringreduce.topology
from ringreduce.topology import planner, presets
planned = planner.plan_for(presets.preset("dgx1-v100"), "all_reduce", 160_000_000)
ringreduce.verify(planned.plan)
ringreduce.plan.lower(planned.plan)
try:
    ringreduce.topology.host_order.ring_order([])
except ringreduce.errors.TopologyError as error:
    print(isinstance(error, RuntimeError), error)
print(planned.plan.size)
"""
    ran = python(copy, code, "torch")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True the bandwidth matrix is empty; give a row and a column for each host\n8\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan dgx1-v100", "planned"),
        ("plan dgx1-v100 --json", '"time_s"'),
        ("topo", "core"),
        ("topo dgx1-v100", "ring"),
        ("simulate dgx1-v100 --algorithm rings", "the fastest"),
        ("simulate --ranks 8 --link-gbps 10", "the fastest"),
        ("info", "there is no torch"),
        ("doctor", "pip install torch"),
    ],
)
def test_commands_work(copy: Path, words: str, said: str) -> None:
    assert said in " ".join(command(copy, *words.split()).split())


@pytest.mark.parametrize("words", [("bench",), ("tune",), ("doctor", "--peers"), ("top",)], ids=" ".join)
def test_commands_that_run_ranks_say_what_is_missing(copy: Path, words: tuple[str, ...]) -> None:
    ran = python(copy, f"from ringreduce.cli import main\nsys.exit(main({words!r}))", "torch")
    assert ran.returncode == 2
    missing = "there is no torch (No module named 'torch'); pip install torch"
    cannot = "groups cannot be looked at" if words == ("top",) else "no ranks can be run"
    assert ran.stderr == f"error: {cannot} here: {missing}\n"


@pytest.mark.parametrize("library", ["scipy", "rich"])
def test_a_library_that_only_planning_needs_is_named(library: str) -> None:
    words = ["plan", "dgx1-v100", "--gpus", "0-4"]  # no rings reach the bound there: trees are packed
    ran = python(PACKAGE.parent, f"from ringreduce.cli import main\nsys.exit(main({words}))", library)
    assert ran.returncode == 2
    assert ran.stderr == f"error: this command needs {library}; pip install {library}\n"


def test_help_and_plan_load_no_more_than_they_need(copy: Path) -> None:
    """Also where torch is: these decide how long the commands take to start (bench/micro measures it)."""
    heavy = "print([name for name in ('numpy', 'rich', 'scipy', 'torch', 'networkx') if name in sys.modules])"
    code = "from ringreduce import cli\ntry:\n    cli.main({!r})\nexcept SystemExit: pass\n" + heavy
    for folder in (copy, PACKAGE.parent):
        for words in (["--help"], ["plan", "--help"], ["doctor", "--help"]):
            assert python(folder, code.format(words)).stdout.splitlines()[-1] == "[]", words
        loaded = python(folder, code.format(["plan", "dgx1-v100"])).stdout.splitlines()[-1]
        assert loaded == "['numpy', 'rich']"


def test_a_transport_needs_no_planning_libraries() -> None:
    """Making a group and calling it, with torch and nothing else."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("ringreduce", store=dist.HashStore(), rank=0, world_size=1)
import ringreduce
x = torch.ones(3)
ringreduce.all_reduce(x)
print(x.tolist(), ringreduce.stats()["0"]["all_reduce"].calls)
"""
    ran = python(PACKAGE.parent, code, "scipy", "networkx", "rich")
    assert ran.stdout == "[1.0, 1.0, 1.0] 1\n", ran.stderr


@pytest.mark.slow
def test_a_module_that_cannot_be_loaded_says_why(copy: Path, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "other"
    shutil.copytree(copy, folder)
    source = tmp_path / "module.c"
    source.write_text("void only_in_another_torch(void); void *PyInit__C(void) { only_in_another_torch(); return 0; }")
    file = folder / "ringreduce" / compiled.name_for(torch.__version__)
    compiler = shutil.which(os.environ.get("CC", "cc")) or "c++"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
    assert f"{file.name} cannot be loaded" in " ".join(command(folder, "doctor", hidden=()).split())
    assert "undefined symbol: only_in_another_torch" in python(folder, "import ringreduce._C").stderr
    assert json.loads(command(folder, "plan", "dgx1-v100", "--json", hidden=()))["time_s"] > 0


@pytest.mark.slow
def test_a_module_for_another_minor_version_of_torch_is_not_loaded(copy: Path, tmp_path: Path) -> None:
    """Whether or not it would load: what it calls may mean something else there. This one ends the process."""
    import torch

    folder = tmp_path / "other"
    shutil.copytree(copy, folder)
    source = tmp_path / "module.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) void opened(void) { _Exit(77); }")
    compiler = shutil.which(os.environ.get("CC", "cc")) or "c++"
    for version in ("2.99.1", "2.100.0", "1" + torch.__version__):
        file = folder / "ringreduce" / compiled.name_for(version)
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
    minor = ".".join(("1" + torch.__version__).split(".")[:2])
    said = f"the compiled module was built for torch 2.99, 2.100, {minor}, and this is torch {torch.__version__}; "
    imports = (
        "import ringreduce._C",
        "from ringreduce import _C",
        "from ringreduce.common import compiled; compiled.load()",
    )
    ran = python(folder, "".join(f"\ntry: {each}\nexcept ImportError as error: print(error)" for each in imports))
    assert [line.startswith(said) for line in ran.stdout.splitlines()] == [True] * len(imports), ran
    assert "was built for torch 2.99, 2.100," in " ".join(command(folder, "doctor", hidden=()).split())


def test_a_checkout_says_which_installed_package_it_hides(copy: Path, tmp_path: Path) -> None:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    shutil.copytree(copy, checkout)
    shutil.copytree(copy / "ringreduce", site / "ringreduce")
    information = site / "ringreduce-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ringreduce\nVersion: 0.1.0\n")
    ran = python(tmp_path, "import ringreduce._C", PYTHONPATH=os.pathsep.join(map(str, (checkout, site))))
    hides = (
        f"{checkout}/ringreduce has no compiled module, and hides the package that is installed in {site}/ringreduce"
    )
    assert f"{hides}: type `pip install -e .` in {checkout}, or put the program elsewhere" in ran.stderr, ran


def test_a_free_threaded_python_is_refused(copy: Path) -> None:
    code = """
import sys
sys.abiflags += "t"
import ringreduce._C
"""
    refused = "ImportError: ringreduce does not run on a free-threaded Python; use one with the GIL\n"
    assert python(copy, code).stderr.endswith(refused)


def test_the_module_is_of_one_process_however_it_is_imported() -> None:
    code = """
import sys, pickle, ringreduce._C, ringreduce
from ringreduce import _C
from ringreduce.common import compiled
print(_C is ringreduce._C is compiled.load() is sys.modules["ringreduce._C"], _C.ProcessGroupRing.__module__)
"""
    assert python(PACKAGE.parent, code).stdout == "True ringreduce._C\n"


@pytest.mark.slow
def test_the_backend_is_registered_whichever_comes_first() -> None:
    """torch asks an installed package when it is imported, unless it is told not to."""
    shown = "print('ringreduce' in torch.distributed.Backend.backend_list)"
    for settings in ({}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):
        for first, second in (("torch", "ringreduce"), ("ringreduce", "torch")):
            ran = python(PACKAGE.parent, f"import {first}\nimport {second}\nimport torch\n{shown}", **settings)
            assert ran.stdout == "True\n", (settings, first, ran.stderr)


def test_a_name_of_the_machine_means_the_same_everywhere(copy: Path, tmp_path: Path) -> None:
    """To RINGREDUCE_TOPO_FILE and to FILE: a file of that name, else the preset."""

    def named(*file: str, **settings: str) -> str:
        code = f"from ringreduce.cli import main\nsys.exit(main({['topo', '--json', *file]!r}))"
        ran = python(tmp_path, code, **{"PYTHONPATH": str(copy), **settings})
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    preset = named(RINGREDUCE_TOPO_FILE="dgx1-v100")
    assert preset == named("dgx1-v100")
    (tmp_path / "dgx1-v100").write_text(preset.replace("GPU7", "GPU9"))
    mine = named(RINGREDUCE_TOPO_FILE="dgx1-v100")
    assert mine == named("dgx1-v100") != preset


def test_a_file_of_hosts_that_cannot_be_written_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringreduce.topology.hosts_file import HostsFile, save

    path = tmp_path / "hosts.json"
    others = tmp_path / f"hosts.json.{os.getpid()}"
    others.write_text("somebody else's")
    save(HostsFile("today", ("a",), ((0.0,),), ((0.0,),)), str(path))
    assert others.read_text() == "somebody else's" and json.loads(path.read_text())["hosts"] == ["a"]
