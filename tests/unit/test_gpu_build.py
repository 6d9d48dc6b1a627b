"""How GPU kernels are compiled: the text that compilers get, NVRTC at first use and what is kept, the CI check."""

import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from ringreduce.errors import InvalidArgument, SystemFailure
from ringreduce.gpu import kernels

ROOT = Path(__file__).resolve().parents[2]
CXX = shlex.split(os.environ.get("CXX", "c++"))


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_cuda = module_at(ROOT / "build_cuda.py")
check_cuda = module_at(ROOT / ".ci" / "check_cuda.py")


# ---- one text from many files ----------------------------------------------------------------------------------------


@pytest.fixture
def csrc(tmp_path: Path) -> Callable[..., Path]:
    """Makes csrc/ with these files, written with __ for /."""

    def make(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / "csrc" / (name.replace("__", "/") + (".cu" if name == "main" else ".h"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "csrc"

    return make


def preprocessed(text: str, *macros: str) -> list[str]:
    """The lines of the text that a compiler sees."""
    command = [*CXX, "-E", "-P", "-x", "c++", *(f"-D{macro}" for macro in macros), "-"]
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line]


def test_includes_come_once_and_in_order(csrc: Callable[..., Path]) -> None:
    root = csrc(
        main='#include <stddef.h>\n#include "sub/b.h"\n#include "sub/c.h"\nmain;\n',
        sub__b='#pragma once\n#include "c.h"\nb;\n',
        sub__c="#pragma once\nc;\n",
    )
    text = build_cuda.flatten(root / "main.cu", root)
    assert "#include <stddef.h>" in text
    assert '#include "' not in text and "pragma" not in text
    assert [line for line in text.splitlines() if line.endswith(";")] == ["c;", "b;", "main;"]
    assert preprocessed(text)[-3:] == ["c;", "b;", "main;"]


def test_a_file_included_under_a_condition_is_there_whatever_is_defined(csrc: Callable[..., Path]) -> None:
    root = csrc(
        main='#ifdef HOST\n#include "a.h"\n#endif\n#include "b.h"\n#include "a.h"\n',
        a='#pragma once\n#include "b.h"\na;\n',
        b="#pragma once\nb;\n",
    )
    text = build_cuda.flatten(root / "main.cu", root)
    assert preprocessed(text, "HOST") == ["b;", "a;"]
    assert preprocessed(text) == ["b;", "a;"]


def test_files_without_pragma_once_come_as_often_as_they_are_included(csrc: Callable[..., Path]) -> None:
    root = csrc(main='#define X 1\n#include "rows.h"\n#define X 2\n#include "rows.h"\n', rows="X;\n#undef X\n")
    assert preprocessed(build_cuda.flatten(root / "main.cu", root)) == ["1;", "2;"]


def test_headers_may_include_each_other(csrc: Callable[..., Path]) -> None:
    root = csrc(main='#include "a.h"\n', a='#pragma once\n#include "b.h"\na;\n', b='#pragma once\n#include "a.h"\nb;\n')
    assert preprocessed(build_cuda.flatten(root / "main.cu", root)) == ["b;", "a;"]


def test_compilers_name_the_line_where_it_was(csrc: Callable[..., Path]) -> None:
    root = csrc(main='\n#include "a.h"\n\n#error here\n', a="#pragma once\n\nint a;\n")
    text = build_cuda.flatten(root / "main.cu", root)
    result = subprocess.run([*CXX, "-E", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=False)
    assert result.returncode
    assert "csrc/main.cu:4:" in result.stderr


def test_what_cannot_be_one_text_is_named(csrc: Callable[..., Path]) -> None:
    root = csrc(main='a;\n#include "none.h"\n', self='#include "self.h"\n')
    with pytest.raises(build_cuda.BuildError, match=r'csrc/main.cu:2: no file for #include "none.h"'):
        build_cuda.flatten(root / "main.cu", root)
    with pytest.raises(build_cuda.BuildError, match=r"self.h includes itself and has no #pragma once"):
        build_cuda.flatten(root / "self.h", root)


def test_two_sources_of_one_name_are_refused(csrc: Callable[..., Path]) -> None:
    root = csrc(main="a;\n", sub__x="")
    assert build_cuda.sources(root) == {"main": root / "main.cu"}
    shutil.copy(root / "main.cu", root / "sub")
    with pytest.raises(build_cuda.BuildError, match=r"would both become main.fatbin"):
        build_cuda.sources(root)


# ---- nvcc, by a program in its place ---------------------------------------------------------------------------------

NVCC = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release 99.1, V99.1.2" ;;
*--list-gpu-arch*) echo compute_75; echo compute_80; echo compute_90 ;;
*) echo "$*" >> "$0.calls"
   for last; do :; done
   if grep -q wrong build/cuda/one.cu; then echo "one.cu(1): error: wrong"; exit 1; fi
   echo compiled > "$last" ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with csrc/one.cu and an nvcc in the environment."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cu").write_text("one;\n")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("RINGREDUCE_NVCC", str(nvcc))
    monkeypatch.setattr(build_cuda, "ROOT", tmp_path)
    monkeypatch.setattr(build_cuda, "STRICT", False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(project: Path) -> tuple[list[str], int]:
    """The files that the package then has, and how often nvcc has compiled."""
    build_cuda.build(project / "package", Path("build/cuda"))
    calls = project / "nvcc.calls"
    found = sorted(path.name for path in (project / "package" / "gpu").iterdir())
    return found, len(calls.read_text().splitlines()) if calls.exists() else 0


def test_nvcc_compiles_what_changed(project: Path) -> None:
    assert build(project) == (["one.cu", "one.fatbin"], 1)
    command = (project / "nvcc.calls").read_text()
    for option in (
        "--generate-code=arch=compute_80,code=[sm_80,compute_80] --generate-code=arch=compute_90,code=sm_90",
        "--std=c++17",
        "--fmad=false",
    ):
        assert option in command
    assert "--Werror" not in command
    assert "100" not in command  # this nvcc does not know it
    assert build(project) == (["one.cu", "one.fatbin"], 1)
    (project / "csrc" / "one.cu").write_text("other;\n")
    (project / "csrc" / "two.cu").write_text("two;\n")
    assert build(project) == (["one.cu", "one.fatbin", "two.cu", "two.fatbin"], 3)
    assert len(list((project / "build" / "cuda").glob("one-*.fatbin"))) == 1


def test_without_nvcc_no_old_fatbin_stays(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(project)
    capsys.readouterr()
    monkeypatch.setenv("RINGREDUCE_NVCC", "0")
    assert build(project) == (["one.cu"], 1)
    assert capsys.readouterr().err == "no nvcc: GPU kernels will be compiled at first use by NVRTC\n"
    (project / "csrc" / "one.cu").unlink()
    assert build(project) == ([], 1)


def test_what_nvcc_refuses_is_left_to_nvrtc(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(project)
    (project / "csrc" / "one.cu").write_text("wrong;\n")
    for calls in (2, 3):  # what failed is not kept as if it had been compiled
        capsys.readouterr()
        assert build(project) == (["one.cu"], calls)
        said = capsys.readouterr().err
        assert said.startswith("warning: ") and "\none.cu(1): error: wrong\n" in said
        assert said.endswith("could not compile one.cu: GPU kernels will be compiled at first use by NVRTC\n")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo release 9.1, V9.1.2; echo compute_70", "cannot compile for sm_80; install the nvcc of CUDA 11 or newer"),
        ("exit 7", "returned non-zero exit status 7"),
    ],
    ids=["too old", "does not run"],
)
def test_an_nvcc_that_is_of_no_use_is_left_alone(
    project: Path, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    (project / "nvcc").write_text(f"#!/bin/sh\n{script}\n")
    assert build(project) == (["one.cu"], 0)
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and why in said and "compiled at first use by NVRTC" in said


def test_an_nvcc_of_a_wheel_is_found(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = project / "site" / "nvidia" / "cu99" / "bin" / "nvcc"
    wheel.parent.mkdir(parents=True)
    shutil.copy(project / "nvcc", wheel)
    monkeypatch.syspath_prepend(project / "site")
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("RINGREDUCE_NVCC")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda path: which(path) if str(path).startswith(str(project)) else None)
    found = build_cuda.find_nvcc()
    assert found and found.path == str(wheel) and found.version == "99.1.2"


@pytest.mark.parametrize("driver", (True, False))
def test_without_a_driver_nvcc_runs_only_if_asked(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], driver: bool
) -> None:
    monkeypatch.setattr(build_cuda, "has_driver", lambda: driver)
    monkeypatch.setenv("CUDA_HOME", str(project / "cuda"))
    (project / "cuda" / "bin").mkdir(parents=True)
    (project / "nvcc").rename(project / "cuda" / "bin" / "nvcc")
    monkeypatch.delenv("RINGREDUCE_NVCC")
    assert ("one.fatbin" in build(project)[0]) == driver
    assert ("no NVIDIA driver" in capsys.readouterr().err) != driver
    monkeypatch.setenv("RINGREDUCE_NVCC", "1")
    assert "one.fatbin" in build(project)[0]


def test_in_ci_what_nvcc_refuses_fails_the_build(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cuda, "STRICT", True)
    build(project)
    assert "--Werror all-warnings" in (project / "nvcc.calls").read_text()
    (project / "csrc" / "one.cu").write_text("wrong;\n")
    with pytest.raises(build_cuda.BuildError, match=r"one.cu\(1\): error: wrong\n"):
        build(project)


def test_an_nvcc_that_is_named_must_be_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGREDUCE_NVCC", "/none")
    with pytest.raises(build_cuda.BuildError, match="RINGREDUCE_NVCC=/none is not a program"):
        build(project)


def test_both_compilers_get_the_same_language() -> None:
    assert build_cuda.LANGUAGE == kernels.OPTIONS
    assert divmod(build_cuda.ARCHITECTURES[0], 10) == kernels.OLDEST_PREBUILT


# ---- NVRTC, by a library in its place --------------------------------------------------------------------------------

NVRTC = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
struct Program { std::string source, made, log; };
#define API extern "C" int
API nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = 4; return 0; }
API nvrtcGetNumSupportedArchs(int* n) { *n = 3; return 0; }
API nvrtcGetSupportedArchs(int* known) { known[0] = 75; known[1] = 80; known[2] = 90; return 0; }
API nvrtcCreateProgram(Program** p, const char* source, const char*, int, const char**, const char**) {
  *p = new Program{source, "", ""}; return 0;
}
API nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return 0; }
API nvrtcCompileProgram(Program* p, int n, const char** options) {
  FILE* calls = std::fopen(CALLS, "a");
  for (int i = 0; i < n; ++i) { p->made += options[i]; p->made += ' '; }
  std::fprintf(calls, "%s\n", p->made.c_str());
  std::fclose(calls);
  p->made += p->source;
  p->log = p->source.find("wrong") == std::string::npos ? "" : "one.cu(1): error: wrong";
  return p->log.empty() ? 0 : 6;
}
#define READ(name, text) \
  API name##Size(Program* p, size_t* size) { *size = text.size() + 1; return 0; } \
  API name(Program* p, char* out) { std::memcpy(out, text.c_str(), text.size() + 1); return 0; }
READ(nvrtcGetCUBIN, ("cubin " + p->made))
READ(nvrtcGetPTX, ("ptx " + p->made))
READ(nvrtcGetProgramLog, p->log)
extern "C" const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
"""


def make_nvrtc(path: Path, calls: Path, major: int = 98) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [*CXX, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path), f'-DCALLS="{calls}"', f"-DMAJOR={major}"]
    subprocess.run(command, input=NVRTC, text=True, check=True)
    return path


class Runtime:
    """The package's folder, an NVRTC and a cache, all of this test alone."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "package"
        self.package.mkdir()
        (self.package / "one.cu").write_text("one;\n")
        self.calls = folder / "calls"
        self.library = str(make_nvrtc(folder / "libnvrtc.so.98", self.calls))
        self.cache = folder / "cache" / "ringreduce" / "kernels"

    def compilations(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def kept(self) -> Path:
        (path,) = self.cache.iterdir()
        return path


def forget() -> None:
    for function in (kernels._fatbin, kernels._nvrtc_or_reason, kernels._warn):
        function.cache_clear()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "FOLDER", made.package)
    monkeypatch.setattr(kernels, "_places", lambda: [made.library])
    forget()
    yield made
    forget()


def test_a_fatbin_serves_what_is_newer_than_its_ptx(runtime: Runtime) -> None:
    (runtime.package / "one.fatbin").write_bytes(b"fatbin")
    for capability in ((8, 0), (8, 9), (9, 0), (12, 1)):
        assert kernels.image("one", "x", capability) == b"fatbin"
    assert kernels.image("one", "x", (9, 0)) is kernels.image("one", "y", (8, 0))
    assert runtime.compilations() == 0
    assert kernels.image("one", "x", (7, 5)).startswith(b"cubin ")
    assert kernels.image("one", "x", (9, 0), prebuilt=False).startswith(b"cubin ")


def test_nvrtc_compiles_one_kernel_for_the_gpu(runtime: Runtime) -> None:
    options = "--std=c++17 --fmad=false --gpu-architecture={} -DRINGREDUCE_GPU_ONLY=float32_sum one;\n\0"
    assert kernels.image("one", "float32_sum", (9, 0)).decode() == "cubin " + options.format("sm_90")
    # What this NVRTC does not know runs the PTX of the next older one.
    assert kernels.image("one", "float32_sum", (8, 6)).decode() == "ptx " + options.format("compute_80")
    assert kernels.image("one", "float32_sum", (12, 0)).decode() == "ptx " + options.format("compute_90")


def test_what_was_compiled_is_kept(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernels.image("one", "x", (9, 0))
    assert kernels.image("one", "x", (9, 0)) == first
    assert runtime.compilations() == 1
    assert runtime.kept().stat().st_mode & 0o777 == 0o600
    assert runtime.cache.stat().st_mode & 0o777 == 0o700

    for change in (
        lambda: kernels.image("one", "y", (9, 0)),
        lambda: kernels.image("one", "x", (8, 0)),
        lambda: (runtime.package / "one.cu").write_text("other;\n") and kernels.image("one", "x", (9, 0)),
    ):
        before = runtime.compilations()
        assert change() != first
        assert runtime.compilations() == before + 1
    (runtime.package / "one.cu").write_text("one;\n")
    newer = str(make_nvrtc(Path(runtime.library).with_suffix(".99"), runtime.calls, major=99))
    monkeypatch.setattr(kernels, "_places", lambda: [newer])
    forget()
    before = runtime.compilations()
    kernels.image("one", "x", (9, 0))
    assert runtime.compilations() == before + 1


@pytest.mark.parametrize("damage", [b"", b"\0" * 10, None], ids=["empty", "short", "one bit"])
def test_a_damaged_file_is_compiled_anew(runtime: Runtime, damage: bytes | None) -> None:
    first = kernels.image("one", "x", (9, 0))
    good = runtime.kept().read_bytes()
    runtime.kept().write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if damage is None else damage)
    assert kernels.image("one", "x", (9, 0)) == first
    assert runtime.compilations() == 2
    assert runtime.kept().read_bytes() == good


def test_a_file_of_another_kernel_does_not_count(runtime: Runtime) -> None:
    kernels.image("one", "x", (9, 0))
    x = runtime.kept()
    y = kernels.image("one", "y", (9, 0))
    (other,) = set(runtime.cache.iterdir()) - {x}
    shutil.copy(x, other)
    assert kernels.image("one", "y", (9, 0)) == y


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_another_user_may_write_does_not_count(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    kernels.image("one", "x", (9, 0))
    path = runtime.kept() if whose == "file" else runtime.cache
    path.chmod(path.stat().st_mode | 0o022)
    with caplog.at_level(logging.WARNING):
        kernels.image("one", "x", (9, 0))
    assert runtime.compilations() == 2
    assert "others may write to it; chmod go-w" in caplog.text


def test_a_folder_of_another_user_does_not_count(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.image("one", "x", (9, 0))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernels.image("one", "x", (9, 0))
    assert runtime.compilations() == 3
    assert f"it belongs to user {user}; this process runs as user {user + 1}" in caplog.text


def test_a_cache_that_cannot_be_written_is_told_once(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime.cache.parent.parent).write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        for name in ("x", "y"):
            assert kernels.image("one", name, (9, 0)).startswith(b"cubin ")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "compiled GPU kernels are not kept, so every process compiles them"
    ]


def test_what_nvrtc_says_is_in_the_error(runtime: Runtime) -> None:
    (runtime.package / "one.cu").write_text("wrong;\n")
    with pytest.raises(SystemFailure, match=r"NVRTC 98.4 .* cannot compile one.cu with .*sm_90(.|\n)*error: wrong"):
        kernels.image("one", "x", (9, 0))
    assert not list(runtime.cache.iterdir())


def test_without_nvrtc_the_error_says_what_to_install(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_places", lambda: ["libnvrtc-that-is-not-there.so"])
    with pytest.raises(
        SystemFailure, match=r"built without nvcc, .* no libnvrtc was found; `pip install nvidia-cuda-n"
    ):
        kernels.image("one", "x", (9, 0))
    with pytest.raises(SystemFailure, match="the driver cannot load what ringreduce was built with, so NVRTC"):
        kernels.image("one", "x", (9, 0), prebuilt=False)
    broken = runtime.package / "libnvrtc.so"
    broken.write_text("no library")
    monkeypatch.setattr(kernels, "_places", lambda: [str(broken)])
    forget()
    with pytest.raises(SystemFailure, match=rf"none that is here can be loaded \({broken}: "):
        kernels.image("one", "x", (9, 0))


def test_gpus_that_are_too_old_and_names_that_are_unknown(runtime: Runtime) -> None:
    with pytest.raises(SystemFailure, match=r"compute capability 6.1; ringreduce's kernels need 7.0"):
        kernels.image("one", "x", (6, 1))
    with pytest.raises(SystemFailure, match=r"NVRTC 98.4 .* of compute capability 7.5 and newer, this one has 7.0"):
        kernels.image("one", "x", (7, 0))
    with pytest.raises(InvalidArgument, match=r"stem is 'two', but .* has one"):
        kernels.image("two", "x", (9, 0))


def test_where_nvrtc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, toolkit = tmp_path / "site" / "nvidia", tmp_path / "cuda"
    for path in (
        wheels / "cu13/lib/libnvrtc.so.9",
        wheels / "cu13/lib/libnvrtc.so.13",
        wheels / "cu13/lib/libnvrtc.alt.so.13",
        wheels / "cu13/lib/libnvrtc-builtins.so.13.0",
        wheels / "cuda_nvrtc/lib/libnvrtc.so.12",
        toolkit / "lib64/libnvrtc.so.13",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    found = kernels._places()
    ours = [path.removeprefix(f"{tmp_path}/") for path in found if path.startswith(str(tmp_path))]
    assert sorted(ours[:3]) == sorted(
        f"site/nvidia/{name}"
        for name in ("cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc.so.9", "cuda_nvrtc/lib/libnvrtc.so.12")
    )
    assert ours.index("site/nvidia/cu13/lib/libnvrtc.so.13") < ours.index("site/nvidia/cu13/lib/libnvrtc.so.9")
    assert ours[3:] == ["cuda/lib64/libnvrtc.so.13"]
    assert found[-1] == "libnvrtc.so"


SOURCES = sorted(build_cuda.sources(ROOT / "csrc"))


@pytest.mark.parametrize("stem", SOURCES)
def test_the_real_nvrtc_compiles_the_real_kernels(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(nvrtc := kernels._nvrtc_or_reason(), str):
        pytest.skip(f"no NVRTC that can be loaded {nvrtc or '(pip install nvidia-cuda-nvrtc)'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    (tmp_path / f"{stem}.cu").write_text(build_cuda.flatten(build_cuda.sources(ROOT / "csrc")[stem], ROOT / "csrc"))
    made = kernels.image(stem, "float32_sum", (9, 0))
    assert made.startswith(b"\x7fELF")
    assert b"_float32_sum\0" in made
    assert kernels.image(stem, "float32_sum", (99, 0)).startswith(b"//")
    with pytest.raises(SystemFailure, match=f"{stem}.cu.*error"):
        kernels.image(stem, "no_such_row", (9, 0))


# ---- the CI check ----------------------------------------------------------------------------------------------------

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'accumulate_b' for 'sm_80'
ptxas info    : Function properties for accumulate_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'accumulate_a' for 'sm_80'
ptxas info    : Function properties for called
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for accumulate_a
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'accumulate_b' for 'sm_90'
ptxas info    : Function properties for accumulate_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
"""


def test_the_table_of_kernels() -> None:
    found = check_cuda.usages(LOG)
    assert check_cuda.spilling(found) == ["accumulate_a spills registers on sm_80: 16 bytes stored and loaded"]
    table = check_cuda.table(found, "13.0.1", "0123abcd")
    assert "0123abcd" in table
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["#", "kernel", "sm_80", "sm_90"],
        ["accumulate_a", "255+16", "-"],
        ["accumulate_b", "40", "24"],
    ]
    assert check_cuda.differences(table, table) == []
    assert any(line.startswith("-accumulate_b") for line in check_cuda.differences(table.replace("40", "41"), table))
    assert any(
        line.startswith("+accumulate_b") for line in check_cuda.differences(table.split("accumulate_b")[0], table)
    )
    assert check_cuda.differences(table.replace("13.0.1", "13.1.0").replace("40", "41"), table) == []
    with pytest.raises(ValueError, match="nothing of accumulate_b on sm_80"):
        check_cuda.usages("\n".join(LOG.splitlines()[:3]))


def test_narrow_loads_are_found() -> None:
    bfloat16, float32 = (f"\t\tFunction : accumulate_{name}_sum\n" for name in ("bfloat16", "float32"))
    wide = "LDG.E.128.CONSTANT R4, [R2.64] ;\n STG.E.128 [R2.64], R4 ;\n"
    sass = "".join(
        f"arch = sm_{number}\n{bfloat16}{wide}{float32}{last}"
        for number, last in ((80, wide), (90, wide.replace("LDG.E.128", "LDG.E.64")))
    )
    assert check_cuda.narrow(sass, (80, 90)) == ["accumulate_float32_sum on sm_90 has no load of 128 bits"]
    assert len(check_cuda.narrow(sass, (80, 90, 100))) == 5


def test_unsafe_accesses_of_peers_memory_are_found() -> None:
    good = (
        "LDG.E.64.STRONG.SYS R2, [R2.64] ;\n LDG.E.128 R4, [R2.64] ;\n LD.E.64 R6, [R2.64] ;\n STG.E.U16 [R2.64], R4;"
    )
    sass = f"arch = sm_90\n\t\tFunction : run_float32_sum\n{good}"
    assert check_cuda.unsafe(sass) == []
    for bad, why in (
        ("LDG.E.128.CONSTANT R4, [R2.64] ;", "LDG.E.128.CONSTANT: .* cache for constants"),
        ("@P0 LDG.E.U8.CONSTANT R4, [R2.64] ;", "LDG.E.U8.CONSTANT: .* cache for constants"),
        ("LD.E.128 R4, [R2.64] ;", "LD.E.128: .* payloads"),
        ("ST.E.U16 [R2.64], R4 ;", "ST.E.U16: .* payloads"),
        ("LD.E.64.STRONG.SYS R4, [R2.64] ;", "LD.E.64.STRONG: .* flags"),
        ("ST.E.STRONG.SYS [R2.64], R4 ;", "ST.E.STRONG: .* flags"),
    ):
        (fault,) = check_cuda.unsafe(sass + bad)
        assert re.match(f"run_float32_sum on sm_90 has {why}", fault), fault


class NoProcesses:
    """Runs jobs at once, in this process."""

    def submit(self, function: Callable[..., str], *arguments: object) -> Future[str]:
        job: Future[str] = Future()
        job.set_result(function(*arguments))
        return job


def test_rows_are_compiled_for_all_gpus_that_an_nvrtc_knows(runtime: Runtime) -> None:
    newer = str(make_nvrtc(Path(runtime.library).with_suffix(".99"), runtime.calls, major=99))
    made = check_cuda.start_nvrtc([newer, runtime.library, "libnvrtc-none.so"], {"one": "one;"}, NoProcesses())
    assert made.faults() == []
    assert sorted(made.jobs) == [("98.4", 75), ("98.4", 80), ("98.4", 90), ("99.4", 75)]
    assert made.unknown == (70, 100)
    assert runtime.compilations() == 4
    wrong = check_cuda.start_nvrtc([runtime.library], {"one": "wrong;"}, NoProcesses())
    assert len(wrong.faults()) == 3
    assert all("error: wrong" in fault for fault in wrong.faults())


@pytest.mark.parametrize("stem", SOURCES)
def test_no_nvrtc_compiles_an_instruction_that_an_old_gpu_lacks(stem: str) -> None:
    """That the check can fail: with the first row, whatever it is, since each has all conversions."""
    if isinstance(nvrtc := kernels._nvrtc_or_reason(), str):
        pytest.skip(f"no NVRTC that can be loaded {nvrtc or '(pip install nvidia-cuda-nvrtc)'}")
    text = build_cuda.flatten(build_cuda.sources(ROOT / "csrc")[stem], ROOT / "csrc")
    row = (*kernels.OPTIONS, "--gpu-architecture=sm_75", "-DRINGREDUCE_GPU_ONLY=uint8_sum")
    assert nvrtc.compile(f"{stem}.cu", text.encode(), row).startswith(b"\x7fELF")
    guard = "#define RINGREDUCE_HAS_PAIRS (__CUDA_ARCH__ >= 800)"
    assert guard in text
    with pytest.raises(SystemFailure, match=r"'cvt.f16x2.f32' requires .target sm_80"):
        nvrtc.compile(f"{stem}.cu", text.replace(guard, "#define RINGREDUCE_HAS_PAIRS 1").encode(), row)
