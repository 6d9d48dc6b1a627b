"""Arrays of other libraries (CuPy, Numba) that lie on a GPU, in direct calls: used in place, in order with the stream
that their library has current.

A library tells its stream by `__cuda_array_interface__`, version 3. What it does with the array after a call waits for
the call, as if the call had been made on that stream.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from ringreduce import _C
from ringreduce.common.failures import InvalidArgument


class Guests:
    """The arrays of other libraries in one call."""

    def __init__(self) -> None:
        self.streams: set[tuple[int, int]] = set()
        """The libraries' streams, by (device, handle)."""

    def borrow(self, array: Any) -> torch.Tensor:
        """A tensor over the array's memory, which torch's current stream may use once this has returned.

        Raises InvalidArgument if the array may not be written.
        """
        interface = array.__cuda_array_interface__
        if interface["data"][1]:
            raise InvalidArgument(f"the {type(array).__name__} is read-only; pass a writable copy")
        tensor = from_dlpack(array) if hasattr(array, "__dlpack__") else torch.as_tensor(array, device="cuda")
        stream = interface.get("stream")
        if stream is not None:
            stream = 0 if stream == 1 else stream  # the default stream, which has both names
            device = tensor.device.index
            _C.make_stream_wait(device, _current(device), stream)
            self.streams.add((device, stream))
        return tensor

    def work(self, work: dist.Work) -> dist.Work:
        """What an asynchronous call returns for `work`."""
        return GuestWork(work, self) if self.streams else work  # type: ignore[return-value]

    def order(self) -> None:
        """What follows in the libraries' streams follows what torch's current streams have by now."""
        for device, stream in self.streams:
            _C.make_stream_wait(device, stream, _current(device))


class GuestWork:
    """A `Work` whose `wait` holds up the streams of other libraries, too."""

    def __init__(self, work: dist.Work, guests: Guests) -> None:
        self._work, self._guests = work, guests

    def wait(self, timeout: timedelta | None = None) -> bool:
        done: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._guests.order()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _current(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle
