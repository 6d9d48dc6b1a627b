"""Makes device "cuda" work in a torch without CUDA, on the stand-ins for the driver and for torch's device.

    torch_cuda.activate()  # in every process that is to use it, after its last fork
    x = torch.ones(4, device="cuda") + 1

torch_cuda.cpp says what is as on a GPU. RINGREDUCE_STAND_IN_DEVICES (2) is the number of devices. Where torch has CUDA
and a GPU, `activate` does nothing and `delay` delays the GPU, so tests need not know what they run on.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stand_in import build as stand_in

from ringreduce.gpu import kernels

_stand_in: Any = None


def activate() -> None:
    """Builds what is missing, and gives this process its devices. Does nothing where torch has CUDA, or twice."""
    global _stand_in  # noqa: PLW0603 - a process has one
    if torch.version.cuda is not None or _stand_in is not None:
        return
    folder = build()
    os.environ["RINGREDUCE_LIBCUDA"] = str(folder / "libcuda.so.1")
    kernels.image = lambda *_, **__: f"so:{folder / 'kernels.so'}\0".encode()  # type: ignore[assignment]
    _stand_in = _load(folder / "torch_cuda_stand_in.so")
    _patch(_stand_in)
    # Streams that still run while the process takes itself apart would use what is gone.
    atexit.register(lambda: [torch.cuda.synchronize(device) for device in range(torch.cuda.device_count())])


def delay(milliseconds: float) -> None:
    """Lets the current stream do nothing for about so long; on a GPU, counted in cycles at 2 GHz."""
    if _stand_in is None:
        torch.cuda._sleep(int(milliseconds * 2e6))  # type: ignore[no-untyped-call]
    else:
        _stand_in.delay(milliseconds)


def activated(me: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(me, *arguments)` returns on a rank that has devices: `harness.run(activated, 2, function)`."""
    activate()
    return function(me, *arguments)


def build() -> Path:
    """The folder with libcuda.so.1, kernels.so and torch_cuda_stand_in.so."""
    return stand_in.build(stand_in.ROOT / "build/stand_in", stand_in.LIBRARIES | stand_in.torch_cuda())


def _load(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("torch_cuda_stand_in", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _patch(stand_in: Any) -> None:
    """Gives torch._C what a build with CUDA has, and lets torch's own Python be defined again on top of it."""

    class StreamBase(torch.Stream):
        def __new__(cls, priority: int = 0, stream_ptr: int = 0, **data: int) -> StreamBase:
            if stream_ptr:
                raise NotImplementedError("the stand-in for CUDA has no external streams")
            if data:
                return super().__new__(cls, **data)
            return super().__new__(cls, device=torch.device("cuda", torch.cuda.current_device()), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return stand_in.stream_handle(self.stream_id, self.device_index)

    class EventBase(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: bool) -> EventBase:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end: torch.Event) -> float:  # torch's takes no subclass
            return stand_in.milliseconds(self.event_id, end.event_id)

    torch._C._has_cuda = True
    torch.distributed.Backend.backend_capability["ringreduce"] = ["cpu", "cuda"]
    torch._C._CudaStreamBase = StreamBase
    torch._C._CudaEventBase = EventBase
    for name, value in vars(stand_in).items():
        if name.startswith("_") and not name.startswith("__"):
            setattr(torch._C, name, value)

    _patch_storage(stand_in)
    cuda = torch.cuda
    for module in (cuda.streams, cuda.graphs):
        importlib.reload(module)
        for name in vars(module).keys() & vars(cuda).keys() - {"__name__"}:
            if getattr(vars(module)[name], "__module__", None) == module.__name__:
                setattr(cuda, name, vars(module)[name])
    cuda._exchange_device = stand_in._cuda_exchangeDevice
    cuda._maybe_exchange_device = stand_in._cuda_maybeExchangeDevice
    cuda.default_generators = (torch.default_generator,) * stand_in._cuda_getDeviceCount()
    cuda._queued_calls.clear()  # checks of the architecture
    cuda._initialized = True
    cuda.get_device_properties = lambda device=None: _properties(stand_in, cuda._utils._get_device_index(device, True))


def _patch_storage(stand_in: Any) -> None:
    """What torch.load and FSDP do with storages; torch leaves it out of builds without CUDA."""
    make, resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new(cls: type, *arguments: Any, device: Any = None, **others: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *arguments, **others, **({} if device is None else {"device": device}))
        return torch.empty(*arguments, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        stand_in.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.__new__ = new
    torch.UntypedStorage.resize_ = resize_


def _properties(stand_in: Any, device: int) -> types.SimpleNamespace:
    name, capability, multiprocessors = stand_in.device_facts(device)
    return types.SimpleNamespace(
        name=name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        total_memory=int(os.environ.get("RINGREDUCE_STAND_IN_MEMORY", str(8 << 30))),
    )
