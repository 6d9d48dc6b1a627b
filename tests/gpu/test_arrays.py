"""Direct calls on arrays of other libraries: in place, and in order with the stream that their library has current."""

from typing import Any

import pytest
import torch
from distributed import harness
from frameworks.launch import torchrun
from stand_in import torch_cuda
from torch.utils.dlpack import to_dlpack

import ringreduce
from ringreduce import _C
from ringreduce.errors import InvalidArgument


class Guest:
    """What CuPy shows of an array: memory, and the stream that is current there."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream, read_only: bool = False) -> None:
        self.tensor, self.stream, self.read_only = tensor, stream, read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, data = tuple(self.tensor.shape), (self.tensor.data_ptr(), self.read_only)
        return {"shape": shape, "typestr": "<f4", "data": data, "version": 3, "stream": self.stream.cuda_stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.tensor.device.index

    def __dlpack__(self, stream: int | None = None, **_: Any) -> Any:
        _C.make_stream_wait(self.tensor.device.index, 0 if stream == 1 else stream or 0, self.stream.cuda_stream)
        return to_dlpack(self.tensor)


def sum_guests(me: harness.Rank, async_op: bool) -> list[float]:
    stream = torch.cuda.Stream()
    with me.join(options=ringreduce.Options(engine="gpu_mode=steps")):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1000, device="cuda")
            guest = Guest(tensor, stream)
            torch_cuda.delay(100)
            tensor.fill_(me.rank + 1)  # late, in the guest's stream
        work = ringreduce.all_reduce(guest, async_op=async_op)
        if work is not None:
            work.wait()
        with torch.cuda.stream(stream):
            return torch.stack([tensor[0], tensor[-1]]).tolist()  # waits for this stream alone


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_the_stream_of_a_guest_is_respected(async_op: bool) -> None:
    assert harness.run(torch_cuda.activated, 2, sum_guests, async_op) == [[3.0, 3.0]] * 2


class Arrays:
    """CuPy's arrays where there is a GPU, else guests; on a stream that is not torch's."""

    def __init__(self) -> None:
        if torch.version.cuda is not None:
            import cupy

            self.cupy = cupy
            self.cupy.cuda.Device(torch.cuda.current_device()).use()
            self.cupy.cuda.Stream(non_blocking=True).use()
        self.stream = torch.cuda.Stream()

    def full(self, count: int, value: float) -> Any:
        if torch.version.cuda is not None:
            return self.cupy.full(count, value, dtype="float32")
        with torch.cuda.stream(self.stream):
            return Guest(torch.full((count,), value, device="cuda"), self.stream)

    def values(self, array: Any) -> list[float]:
        if torch.version.cuda is not None:
            return array.get().tolist()
        with torch.cuda.stream(self.stream):
            return array.tensor.tolist()


def exchange_arrays(me: harness.Rank) -> list[list[float]]:
    arrays = Arrays()
    with me.join(options=ringreduce.Options(gpu_transport="peer", engine="gpu_mode=steps")):
        summed = arrays.full(1000, me.rank + 1)
        ringreduce.all_reduce(summed)
        told = arrays.full(2, me.rank)
        ringreduce.broadcast(told, 1)
        gathered = arrays.full(2 * me.size, -1)
        ringreduce.all_gather_into_tensor(gathered, arrays.full(2, me.rank))
        scattered = arrays.full(1, -1)
        ringreduce.reduce_scatter_tensor(scattered, arrays.full(me.size, me.rank + 5))
        return [sorted(set(arrays.values(summed))), *map(arrays.values, (told, gathered, scattered))]


def test_arrays_in_and_out() -> None:
    if torch.version.cuda is not None:
        pytest.importorskip("cupy")
    found = harness.run(torch_cuda.activated, 2, exchange_arrays)
    assert found == [[[3.0], [1.0, 1.0], [0.0, 0.0, 1.0, 1.0], [11.0]]] * 2


@pytest.mark.skipif(torch.version.cuda is None, reason="CuPy needs a GPU, not a stand-in")
def test_the_example_with_cupy() -> None:
    pytest.importorskip("cupy")
    assert "2 ranks summed 1,000,000 elements of a cupy" in torchrun("examples/cupy_arrays.py")


def refuse_read_only(me: harness.Rank) -> str:
    with me.join():
        guest = Guest(torch.zeros(3, device="cuda"), torch.cuda.current_stream(), read_only=True)
        with pytest.raises(InvalidArgument) as raised:
            ringreduce.all_reduce(guest)
        return str(raised.value)


def test_read_only_arrays_are_refused() -> None:
    [message] = harness.run(torch_cuda.activated, 1, refuse_read_only)
    assert "read-only" in message and "copy" in message


def fail_then_call(me: harness.Rank) -> str:
    stream = torch.cuda.Stream()
    with me.join(options=ringreduce.Options(engine="gpu_mode=steps")):
        with pytest.raises(InvalidArgument):
            ringreduce.all_gather([Guest(torch.zeros(3, device="cuda"), stream)], "no array")  # type: ignore[arg-type]
        work = ringreduce.all_reduce(torch.zeros(3), async_op=True)
        assert work is not None
        work.wait()
        return type(work).__name__


def test_a_failed_call_leaves_nothing_to_the_next() -> None:
    assert harness.run(torch_cuda.activated, 1, fail_then_call) == ["Work"]
