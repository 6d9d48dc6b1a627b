"""That device "cuda" behaves as a GPU does, where it is stood in for: all of this is true on a GPU too.

Above all that nothing waits by itself, since what forgets to wait would else be seen by no test.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from stand_in.torch_cuda import activated, delay

# streams


def while_late(late: torch.cuda.Stream, begin: Callable[[], None], observe: Callable[[], Any]) -> Any:
    """What `observe` returns while `late` has not done what `begin` queued in it behind a delay."""
    for milliseconds in (100, 1000, 10000):
        torch.cuda.synchronize()
        with torch.cuda.stream(late):
            delay(milliseconds)
            delayed = late.record_event()
            begin()
        seen = observe()
        if not delayed.query():  # the stream itself may be a moment from the end of what `begin` queued
            late.synchronize()
            return seen
    pytest.fail("the late stream was never late: what should not wait for it does")


def test_what_does_not_wait_does_not_see() -> None:
    late, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    assert while_late(late, lambda: x.fill_(1), lambda: x.sum().item()) == 0
    assert x.sum().item() == 1000


@pytest.mark.parametrize("wait", ["event", "stream"])
def test_what_waits_sees(wait: str) -> None:
    late, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late):
        delay(50)
        x.add_(1)
        done = late.record_event()
    if wait == "event":
        torch.cuda.current_stream().wait_event(done)
    else:
        torch.cuda.current_stream().wait_stream(late)
    assert (x + 1).tolist() == [2] * 1000


def test_an_event_is_what_was_queued_when_it_was_recorded() -> None:
    late, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        x.fill_(1)
        first = late.record_event()

    def observe() -> list[float]:
        first.synchronize()
        return x.tolist()

    assert while_late(late, lambda: x.fill_(2), observe) == [1] * 4


OPERATORS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda x: x + 1,
    "copy": lambda x: x.clone(),
    "convert": lambda x: x.double(),
    "fill": lambda x: x[::2].zero_(),
    "matmul": lambda x: x.view(25, 40) @ x.view(40, 25),
    "sum": lambda x: x.sum(),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_do_not_wait(name: str) -> None:
    late, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    while_late(late, lambda: None, lambda: OPERATORS[name](x))
    with torch.cuda.stream(late):
        # In the late stream itself, without the host waiting for it.
        while_late(late, lambda: OPERATORS[name](x), lambda: None)


def test_threads_have_their_own_streams_and_device(devices: int) -> None:
    seen = []

    def other() -> None:
        seen.append((torch.cuda.current_stream() == torch.cuda.default_stream(), torch.cuda.current_device()))

    with torch.cuda.device(devices - 1), torch.cuda.stream(torch.cuda.Stream()) as _:
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        assert torch.cuda.current_device() == devices - 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [(True, 0)]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_streams_are_apart() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    assert len({stream.cuda_stream for stream in streams} | {0}) == 5
    assert torch.cuda.default_stream().cuda_stream == 0


def test_time_between_events() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    delay(20)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_copy_between_devices_waits_for_both(devices: int) -> None:
    if devices < 2:
        pytest.skip("one device")
    x, y = torch.zeros(1000, device="cuda:0"), torch.zeros(1000, device="cuda:1")
    delay(50)
    x.fill_(3)
    y.copy_(x)
    x.fill_(4)
    with torch.cuda.device(1):
        assert y.sum().item() == 3000
    assert x.to("cuda:1").device == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="xpected all tensors to be on"):
        x + y


@on_ranks(1, returns=["failed"], through=(activated,))
def test_an_operator_that_fails_makes_the_wait_fail(me: Rank) -> str:
    x = torch.zeros(4, device="cuda")
    try:
        x.index_fill_(0, torch.tensor([9], device="cuda"), 1)
        torch.cuda.synchronize()
    except RuntimeError:
        return "failed"
    return "went through"


# memory


def test_memory_is_reused_by_its_stream_at_once() -> None:
    x = torch.empty(12345, device="cuda")
    at = x.data_ptr()
    del x
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = torch.empty(12345, device="cuda")
    again = torch.empty(12345, device="cuda")
    assert again.data_ptr() == at != elsewhere.data_ptr()


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_while_another_stream_uses_it(recorded: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    y = torch.zeros(54321, device="cuda")

    def use() -> None:
        with torch.cuda.stream(main):
            x = torch.ones(54321, device="cuda")
        side.wait_stream(main)
        y.copy_(x)
        if recorded:
            x.record_stream(side)

    def reuse() -> None:
        x = torch.full((54321,), 2.0, device="cuda")
        main.synchronize()
        del x

    while_late(side, use, reuse)
    assert (y.unique().tolist() == [1]) == recorded


def test_out_is_resized() -> None:
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    out.resize_(5)[3:] = 7
    assert out.tolist() == [2, 2, 2, 7, 7]


def test_storages_are_saved_loaded_and_resized() -> None:
    x = torch.arange(6.0, device="cuda")
    file = io.BytesIO()
    torch.save(x[2:], file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.is_cuda
    assert loaded.tolist() == [2, 3, 4, 5]
    storage = x.untyped_storage()
    storage.resize_(8)
    storage.resize_(24)
    assert x[:2].tolist() == [0, 1]
    storage.resize_(0)
    assert (storage.nbytes(), x.data_ptr()) == (0, 0)


# copies


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32]
DTYPES += [torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 1:],
    "steps": lambda x: x.flatten()[1::2],
    "expanded": lambda x: x[1].expand(4, 3),
    "strided": lambda x: x.as_strided((2, 2), (1, 2), 1),
    "empty": lambda x: x[:0],
}


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit."""
    return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, view: str) -> None:
    host = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    expected, there = VIEWS[view](host), VIEWS[view](host.cuda())
    assert there.is_cuda
    assert (there.dtype, there.stride()) == (dtype, expected.stride())
    assert same(there.cpu(), expected)
    assert same(expected.cuda().cpu(), expected)
    assert same(there.clone().cpu(), expected)
    onto = torch.zeros(2, *there.shape, dtype=dtype, device="cuda")
    onto[1].copy_(there)
    assert same(onto.cpu(), torch.stack([torch.zeros_like(expected), expected]))


def test_copies_convert() -> None:
    host = torch.tensor([0.0, 1.5, -2.0])
    for dtype in (torch.bfloat16, torch.int32, torch.bool, torch.complex64):
        assert same(host.cuda().to(dtype).cpu(), host.to(dtype))
        assert same(torch.zeros(3, dtype=dtype, device="cuda").copy_(host).cpu(), host.to(dtype))
    conjugate = torch.tensor([1 + 2j]).cuda().conj()
    assert conjugate.tolist() == [1 - 2j]
    assert (conjugate * 2).resolve_conj().cpu().tolist() == [2 - 4j]


def test_pageable_memory_is_read_at_once() -> None:
    late, host, x = torch.cuda.Stream(), torch.ones(1000), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        delay(50)
        x.copy_(host, non_blocking=True)
    host.fill_(2)
    late.synchronize()
    assert x.sum().item() == 1000


def test_pinned_memory_is_read_and_written_in_the_stream() -> None:
    late, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    host, back = torch.ones(1000).pin_memory(), torch.zeros(1000, pin_memory=True)
    assert host.is_pinned()
    assert not torch.ones(1).is_pinned()

    def queue() -> None:
        host.fill_(1)
        x.copy_(host, non_blocking=True)
        back.copy_(x, non_blocking=True)

    def observe() -> float:
        host.fill_(2)
        return back.sum().item()

    assert while_late(late, queue, observe) == 0
    assert back.sum().item() == 2000


# autograd


def test_gradients() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.randn(3, 4)
    gradients = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(x.to(device)).square().sum().backward()
        optimizer.step()
        gradients.append([parameter.grad.cpu().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


# graphs


def test_graph() -> None:
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            delay(20)
            x.add_(1)
        main.wait_stream(side)
        y.copy_(x)
        double = x + x
    assert not torch.cuda.is_current_stream_capturing()
    assert x.sum().item() == 0
    for i in range(1, 4):
        x.add_(10)
        graph.replay()
        assert (x[0].item(), y[0].item(), double[-1].item()) == (11 * i, 11 * i, 22 * i)
    graph.reset()


def test_graphs_keep_their_memory() -> None:
    x = torch.ones(1000, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        y = (x + 1) * 2
    with torch.cuda.graph(second, pool=first.pool()):
        z = y + 1
    others = [torch.full((1000,), 9.0, device="cuda") for _ in range(20)]
    first.replay()
    second.replay()
    assert y.sum().item() == 4000
    assert z.sum().item() == 5000
    assert all(other.sum().item() == 9000 for other in others)


@on_ranks(1, returns=["refused"], through=(activated,))
def test_waiting_ends_a_capture(me: Rank) -> str:
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            x.sum().item()
    except RuntimeError:
        return "refused"
    return "captured"


# torch.distributed


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.mark.parametrize(("backend", "reached"), [("cpu:gloo,cuda:fake", True), ("cpu:gloo", False)])
def test_collectives_go_to_the_backend_of_the_device(store: dist.Store, backend: str, reached: bool) -> None:
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=10))
    try:
        dist.all_reduce(torch.ones(3))
        x = torch.ones(3, device="cuda")
        if reached:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
        else:
            with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
                dist.all_reduce(x)
    finally:
        dist.destroy_process_group()
