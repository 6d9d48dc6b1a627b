"""CUDA's driver from Python, as far as probe.py asks it things that ringreduce itself would have hidden.

    gpu = Gpu(0)
    word, address = gpu.host_words(1)
    stream = gpu.stream()
    gpu.wait(stream, address, 1)
    word[0] = 1
    gpu.call("cuStreamSynchronize", stream)

Handles and addresses are plain numbers. On a stand-in the driver is the one that RINGREDUCE_LIBCUDA names.
"""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import device

Word = ctypes.c_uint64
NOT_READY = 600


class DriverError(Exception):
    """Which call failed, and the error's name."""


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class Probe(ctypes.Structure):
    """That of probe.cu."""

    _fields_ = (
        *((name, Word) for name in ("mine", "theirs", "rounds", "elapsed")),
        *((name, ctypes.c_uint32) for name in ("stage", "second")),
    )


class Gpu:
    """A device with its primary context, which is current in every thread that calls."""

    def __init__(self, ordinal: int) -> None:
        self._library = ctypes.CDLL(os.environ.get("RINGREDUCE_LIBCUDA") or "libcuda.so.1")
        self._thread = threading.local()
        self._context = None
        self.call("cuInit", 0)
        self.ordinal = ordinal
        self._context = self.made("cuDevicePrimaryCtxRetain", ordinal)

    def call(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        """The driver's status, 0 or `allowed`. Raises DriverError at any other. Numbers are passed as 64 bits; the
        driver takes the lower half where it wants less."""
        if self._context is not None and not getattr(self._thread, "current", False):
            self._thread.current = True
            self.call("cuCtxPushCurrent_v2", self._context)
        status: int = self._library[name](*(Word(a) if isinstance(a, int) else a for a in arguments))
        if status not in (0, allowed):
            text = ctypes.c_char_p()
            self._library["cuGetErrorName"](status, ctypes.byref(text))
            raise DriverError(f"{name}: {text.value.decode() if text.value else status}")
        return status

    def made(self, name: str, *arguments: Any) -> int:
        """What a call gives by its first parameter."""
        value = Word()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def memory(self, size: int) -> int:
        """Zeroed."""
        address = self.made("cuMemAlloc_v2", size)
        stream = self.stream()
        self.call("cuMemsetD8Async", address, 0, size, stream)
        self.call("cuStreamSynchronize", stream)
        return address

    def host_words(self, count: int) -> tuple[Any, int]:
        """Pinned words of the host, and where the GPU sees them."""
        pointer = self.made("cuMemHostAlloc", 8 * count, 3)  # portable, mapped
        words = (Word * count).from_address(pointer)
        ctypes.memset(words, 0, 8 * count)
        return words, self.made("cuMemHostGetDevicePointer_v2", pointer, 0)

    def stream(self) -> int:
        """One that the NULL stream does not hold up."""
        return self.made("cuStreamCreateWithPriority", 1, 0)

    def wait(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWaitValue64_v2", stream, address, value, 0)  # until at least that

    def write(self, stream: int, address: int, value: int) -> None:
        self.call("cuStreamWriteValue64_v2", stream, address, value, 0)

    def read(self, address: int, stream: int) -> int:
        value = Word()
        self.call("cuMemcpyAsync", ctypes.addressof(value), address, 8, stream)
        self.call("cuStreamSynchronize", stream)
        return value.value

    def done(self, stream: int) -> bool:
        return self.call("cuStreamQuery", stream, allowed=NOT_READY) == 0

    def handle(self, address: int) -> bytes:
        """For other processes."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        return self.made("cuIpcOpenMemHandle_v2", IpcHandle.from_buffer_copy(handle), 1)

    def kernels(self, image: bytes) -> Callable[..., None]:
        """launch(stream, name, probe, blocks=1, threads=1), for the kernels of probe.cu."""
        module = self.made("cuModuleLoadData", ctypes.c_char_p(image))
        names = ("probe_hand_over", "probe_nothing")
        found = {name: self.made("cuModuleGetFunction", module, ctypes.c_char_p(name.encode())) for name in names}

        def launch(stream: int, name: str, probe: Probe, blocks: int = 1, threads: int = 1) -> None:
            parameters = (ctypes.c_void_p * 2)(ctypes.addressof(probe), None)
            self.call("cuLaunchKernel", found[name], blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)

        return launch


def image(stand_in: bool, capability: tuple[int, int], folder: Path) -> bytes:
    """probe.cu as cuModuleLoadData takes it, made in `folder`. b"" if there is no nvcc."""
    if stand_in:
        sys.path.insert(0, str(device.ROOT / "tests"))
        from stand_in import build

        made = build.build(
            device.ROOT / "build/stand_in", {"probe.so": build.Target(("tests/stand_in/probe_kernels.cpp",))}
        )
        return f"so:{made / 'probe.so'}\0".encode()
    import build_cuda

    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        return b""
    target, architecture = folder / "probe.cubin", "".join(map(str, capability))
    command = [
        nvcc.path,
        *build_cuda.LANGUAGE,
        f"-arch=sm_{architecture}",
        "-O3",
        "-cubin",
        f"-I{device.ROOT}/csrc",
    ]
    subprocess.run([*command, str(device.ROOT / "bench/gpu/probe.cu"), "-o", str(target)], check=True)
    return target.read_bytes()
