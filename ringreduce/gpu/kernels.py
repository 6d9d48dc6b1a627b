"""The kernels as the driver loads them: what nvcc made when the package was built, or else NVRTC now.

The folder of this file has, for every .cu of csrc, its text without includes of ours and, if nvcc was there, a fatbin
(build_cuda.py makes both). What NVRTC compiles is kept in `$XDG_CACHE_HOME/ringreduce/kernels`, which may be deleted at
any time. Its files are written as a whole or not at all, hold a digest of what they say, and count only if nobody but
this user could have written them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import logging
import os
import re
from pathlib import Path

from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.common.files import cache_folder, read_own, require_own, write_file
from ringreduce.gpu.nccl import packages_folders

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent

OLDEST = (7, 0)
"""Compute capability below which the kernels' memory orders cannot be expressed."""

OLDEST_PREBUILT = (8, 0)
"""The fatbins have PTX of it, so they run on whatever is newer (ARCHITECTURES in build_cuda.py)."""

OPTIONS = ("--std=c++17", "--fmad=false")
"""LANGUAGE of build_cuda.py, where the reason stands."""

FIX = (
    "`pip install nvidia-cuda-nvrtc` (-cu12 for drivers of CUDA 12), or build ringreduce where nvcc is, with "
    "RINGREDUCE_NVCC=1"
)


def image(stem: str, name: str, capability: tuple[int, int], *, prebuilt: bool = True) -> bytes:
    """A fatbin, cubin or PTX (with its closing zero), as cuModuleLoadData takes them, that has the kernel of row `name`
    of csrc/**/`stem`.cu for GPUs of this compute capability.

    A fatbin has the kernels of all rows and is the same object in every call. `prebuilt=False` leaves it out, for
    drivers that are older than the nvcc that made it. Raises InvalidArgument if there is no such .cu, SystemFailure if
    there is neither a fatbin for the GPU nor an NVRTC that can compile for it.
    """
    if capability < OLDEST:
        raise SystemFailure(
            f"the GPU has compute capability {dotted(capability)}; ringreduce's kernels need {dotted(OLDEST)} or more"
        )
    if prebuilt and capability >= OLDEST_PREBUILT and (fatbin := _fatbin(stem)):
        return fatbin
    try:
        source = (FOLDER / f"{stem}.cu").read_bytes()
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.cu")))
        raise InvalidArgument(
            f"stem is {stem!r}, but {FOLDER} has {known or 'no kernels; build the package (make build)'}"
        ) from None
    if not prebuilt:
        why = "the driver cannot load what ringreduce was built with"
    elif capability < OLDEST_PREBUILT:
        why = f"the GPU has compute capability {dotted(capability)}, for which ringreduce was not built"
    else:
        why = "ringreduce was built without nvcc"
    nvrtc = _nvrtc(why)
    target = nvrtc.target(capability)
    options = (*OPTIONS, f"--gpu-architecture={target}", f"-DRINGREDUCE_GPU_ONLY={name}")
    key = hashlib.sha256(b"\0".join([source, *map(str.encode, options), nvrtc.version.encode()])).digest()
    folder = _cache_folder()
    path = folder / f"{stem}-{name}-{target}-{key.hex()[:16]}" if folder else None
    if path and (kept := _load(path, key)):
        return kept
    made = nvrtc.compile(f"{stem}.cu", source, options)
    if path:
        _save(path, key, made)
    return made


def origin() -> tuple[str, str]:
    """How kernels come to be here, in words, or "" if they do not; and what to do then. Raises nothing."""
    found = [f"built with the package, for compute capability {dotted(OLDEST_PREBUILT)} and newer"]
    if not all(_fatbin(path.stem) for path in FOLDER.glob("*.cu")) or not any(FOLDER.glob("*.cu")):
        found.clear()
    nvrtc = _nvrtc_or_reason()
    if isinstance(nvrtc, Nvrtc):
        found.append(f"{'else ' if found else ''}compiled by NVRTC {nvrtc.version} at first use")
    return ", ".join(found), "" if found else FIX


class Nvrtc:
    """NVIDIA's run-time compiler, by its C interface."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the library cannot be loaded, AttributeError if it is older than CUDA 11.2."""
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        # NVRTC asks the loader for these by name alone, which finds them once they are loaded.
        builtins = Path(path).with_name(f"libnvrtc-builtins.so.{self.version}")
        if builtins.exists():
            ctypes.CDLL(str(builtins))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        self.architectures = sorted(known)

    def target(self, capability: tuple[int, int]) -> str:
        """What --gpu-architecture must be: "sm_90", or "compute_90" for GPUs that this NVRTC does not know, whose
        driver compiles the rest of the way. Raises SystemFailure if they are older than all that it knows."""
        wanted = capability[0] * 10 + capability[1]
        if wanted in self.architectures:
            return f"sm_{wanted}"
        older = [known for known in self.architectures if known < wanted]
        if not older:
            oldest = divmod(self.architectures[0], 10)
            raise SystemFailure(
                f"NVRTC {self.version} ({self.path}) compiles for GPUs of compute capability {dotted(oldest)} and "
                f"newer, this one has {dotted(capability)}; install an older one: `pip install nvidia-cuda-nvrtc-cu12`"
            )
        return f"compute_{older[-1]}"

    def compile(self, name: str, source: bytes, options: tuple[str, ...]) -> bytes:
        """A cubin, or PTX if the options say compute_XX. Raises SystemFailure with the compiler's messages."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
            if status := self._library.nvrtcCompileProgram(program, len(options), arguments):
                messages = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise SystemFailure(
                    f"NVRTC {self.version} ({self.path}) cannot compile {name} with {' '.join(options)}: "
                    f"{self._reason(status)}\n{messages}"
                )
            ptx = any("=compute_" in option for option in options)
            return self._read(program, "nvrtcGetPTX" if ptx else "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(what, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise SystemFailure(f"{function} of NVRTC ({self.path}): {self._reason(status)}")

    def _reason(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@functools.cache
def _fatbin(stem: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return (FOLDER / f"{stem}.fatbin").read_bytes()
    return None


@functools.cache
def _nvrtc_or_reason() -> Nvrtc | str:
    """The first NVRTC that can be loaded, or why those that were found cannot."""
    reasons = []
    for path in _places():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, SystemFailure) as error:
            if os.path.isabs(path):
                reasons.append(f"{path}: {error}")
    return "; ".join(reasons)


def _nvrtc(why: str) -> Nvrtc:
    found = _nvrtc_or_reason()
    if isinstance(found, str):
        state = f"none that is here can be loaded ({found})" if found else "no libnvrtc was found"
        raise SystemFailure(f"{why}, so NVRTC must compile the GPU kernels, and {state}; {FIX}")
    return found


def _places() -> list[str]:
    """Where libnvrtc may be, best first: NVIDIA's wheels, torch's own, a toolkit's, wherever the loader looks."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    folders = [*packages_folders(nvidia="*/lib", torch="lib"), *(f"{home}/lib64" for home in homes)]
    paths = []
    for folder in folders:
        found = glob.glob(f"{glob.escape(folder)}/libnvrtc[.-]*so*")
        found = [path for path in found if "builtins" not in path and ".alt." not in path]
        paths += sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path)], reverse=True)
    return [*dict.fromkeys(paths), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


def _cache_folder() -> Path | None:
    """The folder for what NVRTC made, made if it is missing; None, and the log says why, if it cannot be used."""
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_own(folder.stat())
    except OSError as error:
        _warn(f"compiled GPU kernels are not kept, so every process compiles them: {error}")
        return None
    return folder


def _load(path: Path, key: bytes) -> bytes | None:
    """What `_save` wrote under this key; None if it is not there or not what it was."""
    try:
        content = read_own(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"cannot use the GPU kernel in {path}: {error}; it is compiled anew")
        return None
    made = content[64:]
    return made if content[:64] == key + hashlib.sha256(made).digest() else None


def _save(path: Path, key: bytes, made: bytes) -> None:
    try:
        write_file(path, key + hashlib.sha256(made).digest() + made, private=True)
    except OSError as error:
        _warn(f"cannot keep a compiled GPU kernel in {path}: {error}")


@functools.cache
def _warn(message: str) -> None:
    """Once for each message."""
    log.warning("%s", message)
