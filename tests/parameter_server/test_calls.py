"""What calls of one process do: order by priority, abort, waiting for a first value."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from distributed.harness import Rank, in_threads, run
from processes import limited
from torch._C._distributed_c10d import HashStore

import ringreduce.parameter_server as ps
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, SystemFailure
from ringreduce.parameter_server import control
from ringreduce.parameter_server.server.process import ServerProcess

SMALL: dict[str, Any] = {"window": 4 << 20, "memory": 16 << 20, "block_bytes": 4096}
ADAM, SUM = ps.optimizer(torch.optim.Adam), ps.sync(average=False)
MODEL = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
NESTED = torch.nested.nested_tensor([torch.ones(3)])


def test_of_updates_that_are_ready_at_once_the_most_urgent_goes_first() -> None:
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        order.append(info.key)
        if info.key == "first":
            begun.set()
            assert go_on.wait(30)

    with ps.join(functions={"slow": slow}, **SMALL) as kv:
        for key in ("first", "last", "middle", "urgent"):
            kv.init(key, torch.zeros(3), update=ps.function("slow"), mode=ps.asynchronous())
        pending = [kv.push("first", torch.zeros(3))]
        assert begun.wait(30)  # the server is busy, and the others become ready meanwhile
        pending += [kv.push("last", torch.zeros(3), priority=-1), kv.push("middle", torch.zeros(3))]
        pending += [kv.push("urgent", torch.zeros(3), priority=7)]
        go_on.set()
        kv.wait(*pending)
    assert order == ["first", "urgent", "middle", "last"]


def test_abort_ends_a_wait_of_another_thread() -> None:
    go_on = threading.Event()

    def stuck(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        assert go_on.wait(30)

    kv = ps.join(functions={"stuck": stuck}, **SMALL)
    kv.init("w", torch.zeros(3), update=ps.function("stuck"))
    pending = kv.push("w", torch.zeros(3))
    timer = threading.Timer(0.2, kv.abort)
    timer.start()
    with pytest.raises(Aborted, match=r"abort\(\) was called"):
        pending.wait()
    go_on.set()
    timer.join()
    with pytest.raises(Aborted):
        kv.barrier()
    kv.calls.close()


def test_a_reader_does_not_wait_for_an_update_that_stops() -> None:
    go_on = threading.Event()

    def stops(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        value += 1
        assert info.version == 1 or go_on.wait(30)

    store = HashStore()
    with ps.join(store, rank=0, size=1, functions={"stops": stops}, **SMALL) as kv:
        w = torch.zeros(3)
        kv.init("w", w, update=ps.function("stops"), mode=ps.asynchronous())
        kv.push("w", w).wait()
        with ps.join(store, role="worker", window=4 << 20) as reader:
            reader.pull("w", w)
            pending = kv.push("w", w)
            time.sleep(0.1)  # the update has begun
            assert reader.pull("w", w, timeout=5) == {"w": [1]}
            assert w.tolist() == [1, 1, 1]
            go_on.set()
        pending.wait()


def test_a_slow_update_is_no_fault_of_a_worker() -> None:
    go_on = threading.Event()

    def slow(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        value += 1
        assert go_on.wait(30)

    with ps.join(functions={"slow": slow}, **SMALL) as kv:
        w = torch.zeros(3)
        kv.init("w", w, update=ps.function("slow"))
        pending = kv.push("w", torch.zeros(3))
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"'w' on server 0 .* is not ready"):
            pending.wait(timeout=0.1)
        with pytest.raises(CollectiveTimeout):
            kv.pull("w", w, timeout=0.1)
        assert w.tolist() == [0, 0, 0]
        go_on.set()
        pending.wait()
        kv.pull("w", w)
        assert w.tolist() == [1, 1, 1]
        assert time.monotonic() > begin


def test_dictionaries_and_outputs_must_match() -> None:
    with ps.join(**SMALL) as kv:
        kv.init({"a": torch.zeros(2), "b": torch.zeros(3)})
        with pytest.raises(InvalidArgument, match="give a dictionary of outputs"):
            kv.push_pull({"a": torch.zeros(2)}, out=torch.zeros(2))
        with pytest.raises(InvalidArgument, match="a dictionary and a tensor were given"):
            kv.push({"a": torch.zeros(2)}, torch.zeros(2))
        with pytest.raises(InvalidArgument, match="no tensor was given for key 'a'"):
            kv.push("a")
        with pytest.raises(InvalidArgument, match=r"it must be a torch\.Tensor or a NumPy array"):
            kv.push("a", [1.0, 2.0])
        out = {"a": torch.empty(2), "b": torch.empty(3)}
        kv.push_pull({"a": torch.ones(2), "b": torch.ones(3)}, out=out).wait()
        assert out["a"].tolist() == [1, 1] and out["b"].tolist() == [1, 1, 1]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Of 6 float32 in shape (2, 3), none of them a plain tensor."""
    return {
        "transposed": torch.zeros(3, 2).t(),
        "every other element": torch.zeros(2, 6)[:, ::2],
        "leaf of a graph": torch.zeros(2, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
        "part of a storage": torch.zeros(100)[50:56].view(2, 3),
    }


@pytest.mark.parametrize("kind", odd_tensors())
def test_tensors_that_are_not_plain_are_pushed_and_pulled_as_plain_ones_are(kind: str) -> None:
    value, out = torch.arange(6.0).view(2, 3), odd_tensors()[kind]
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.zeros(2, 3), update=ps.assign(), mode=ps.asynchronous())
        source = odd_tensors()[kind]
        with torch.no_grad():
            source.copy_(value)
        kv.push("x", source).wait()
        assert kv.pull("x", out) == {"x": [1]}
        assert torch.equal(out, value)


@pytest.mark.parametrize("left", [0, 20])
def test_a_tensor_whose_memory_was_freed_is_refused(left: int) -> None:
    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(left)
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.ones(2, 3))
        for call in (kv.init, kv.push, kv.pull):
            message = "has 20 bytes of memory and needs 24" if left else ".*no memory: .* its storage was freed"
            with pytest.raises(InvalidArgument, match=f"'x'.*{message}"):
                call("x", freed)


class Stands(torch.Tensor):
    """Has no memory of its own, as a DTensor."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()


@pytest.mark.parametrize(
    "tensor", [Stands(), torch._to_functional_tensor(torch.zeros(2, 3))], ids=["wrapper", "functional"]
)
def test_a_tensor_that_stands_for_others_is_refused(tensor: torch.Tensor) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.ones(2, 3))
        for call in (kv.init, kv.push, kv.pull):
            with pytest.raises(InvalidArgument, match=r"'x': .*to_local"):
                call("x", tensor)


def test_nothing_has_moved_if_an_argument_is_wrong() -> None:
    with ps.join(**SMALL) as kv:
        kv.init({"a": torch.zeros(2), "b": torch.zeros(3)}, mode=ps.asynchronous())
        a, wrong = torch.ones(2), torch.ones(4)
        for call in (
            lambda: kv.push({"a": a, "b": wrong}),
            lambda: kv.push_pull("a", a, out=wrong),
            lambda: kv.push_pull({"a": a}, out={"none": a}),
            lambda: kv.push_pull("a", a, out=torch.zeros(1).expand(2)),
            lambda: kv.push("a", a, priority=1 << 31),
        ):
            with pytest.raises(InvalidArgument):
                call()
        with pytest.raises(InvalidArgument):
            kv.init({"c": torch.zeros(2), "d": torch.zeros(2, dtype=torch.int32)})
        with pytest.raises(InvalidArgument, match="there is no key 'c'"):
            kv.pull("c", a)
        kv.pull("a", a)
        assert a.tolist() == [0, 0]


@pytest.mark.parametrize("how", ["data", "set", "resize"])
def test_a_target_that_gets_other_memory_is_not_written_to(how: str) -> None:
    out, other = torch.zeros(1000), torch.zeros(1000)
    with ps.join(window=4 << 20, memory=16 << 20) as kv:
        kv.init("x", torch.ones(1000))
        pending = kv.push_pull("x", torch.ones(1000), out=out)
        pending.start()
        if how == "data":
            out.data = other
        elif how == "set":
            out.set_(other)
        else:
            out.untyped_storage().resize_(0)
        with pytest.raises(InvalidArgument, match="the tensor for 'x' got other memory while it was pulled"):
            pending.wait()
    assert other.tolist() == [0] * 1000


def test_autograd_hears_of_a_pull() -> None:
    w = torch.ones(3, requires_grad=True)
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(3))
        loss = (w * w).sum()
        kv.pull("w", w.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_ctrl_c_ends_a_push_that_waits_for_room() -> None:
    go_on = threading.Event()

    def stuck(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        assert go_on.wait(60)

    kv = ps.join(functions={"stuck": stuck}, window=1 << 20, memory=16 << 20)
    kv.init("w", torch.zeros(1 << 17), update=ps.function("stuck"), mode=ps.asynchronous())
    kv.push("w", torch.zeros(1 << 17))
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(9):
            kv.push("w", torch.zeros(1 << 17))
    signal.signal(signal.SIGINT, before)
    go_on.set()
    kv.calls.close()


def test_a_forked_child_is_told_that_the_worker_is_its_parent() -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(3), update=ps.reduce("sum"), mode=ps.asynchronous())
        pending = kv.push_pull("w", torch.zeros(3), out=torch.zeros(3), start=False)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            told = []
            for call in (
                lambda: kv.push("w", torch.ones(3)),
                lambda: kv.pull("w", torch.ones(3)),
                pending.start,
                pending.wait,
                kv.leave,
                kv.stats,
            ):
                try:
                    call()
                    told.append("nothing")
                except InvalidArgument as error:
                    told.append(str(error))
            os.write(writer, "\n".join(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(reader, 10000).decode().splitlines()
        assert len(told) == 6 and all("the process that this one was forked from" in each for each in told), told
        kv.push("w", torch.ones(3)).wait()
        kv.pull("w", out := torch.zeros(3))
        assert out.tolist() == [1, 1, 1]
        os.close(reader)
        os.close(writer)


def test_calls_after_leave_say_so() -> None:
    kv = ps.join(**SMALL)
    kv.init("w", torch.zeros(3))
    kv.leave()
    for call in (kv.clock, kv.barrier, lambda: kv.push("w", torch.zeros(3)), lambda: kv.pull("w", torch.zeros(3))):
        with pytest.raises(InvalidArgument, match="this worker has left"):
            call()


def fills_its_window(me: Rank) -> str:
    sizes = {"window": 1 << 20, "memory": 16 << 20, "block_bytes": 1 << 18}
    with ps.join(me.store, rank=me.rank, size=me.size, **sizes) as kv:
        kv.init("first", torch.zeros(3))
        kv.init("w", torch.zeros(1 << 17))
        kv.barrier()
        if me.rank == 1:  # pushes nothing, so no round ends
            me.store.wait(["full"])
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            for _ in range(9):
                kv.push("w", torch.zeros(1 << 17), timeout=0.2)
        me.store.set("full", "")
        return str(caught.value)


def test_a_push_that_found_no_room_says_who_is_late() -> None:
    text, _ = run(fills_its_window, 2)
    assert re.search(r"window of \d+ bytes has had no room .*'w' on .* waits for worker 1 .*larger window=", text), text


def test_times_may_be_timedeltas() -> None:
    minute = timedelta(minutes=1)
    assert ps.sync(quorum=1, grace=timedelta(milliseconds=20)) == ps.sync(quorum=1, grace=0.02)
    kv = ps.join(timeout=minute)
    assert kv.timeout == 60
    kv.init("w", torch.zeros(3), timeout=minute)
    kv.push("w", torch.ones(3), timeout=minute).wait(minute)
    kv.barrier(minute)
    kv.pull("w", out=torch.zeros(3), timeout=minute)
    with pytest.raises(InvalidArgument, match=r"timeout is datetime\.timedelta"):
        kv.clock(-minute)
    kv.leave(timedelta.max)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.push("w", torch.zeros(3), timeout="5"), "timeout is '5'; it must be seconds, 0 or more"),
        (lambda kv: kv.barrier(timeout=-1), "timeout is -1; it must be seconds"),
        (lambda kv: kv.init("v", torch.zeros(3), timeout=float("nan")), "timeout is nan; it must be seconds"),
        (lambda kv: kv.wait([kv.push("w", torch.zeros(3))]), r"wait\(\) was given a list; give what push\(\)"),
        (lambda kv: kv.empty(3, dtype="float32"), "dtype is 'float32'; it must be a torch.dtype"),
        (lambda kv: kv.empty(2.5), r"size is \(2.5,\), which torch.empty does not take"),
        (lambda kv: kv.empty(2**70), "which torch.empty does not take"),
        (lambda kv: kv.empty(3, 0), r"size is \(3, 0\); a tensor that can be pushed"),
        (lambda kv: kv.push_pull(3, torch.zeros(3), out=torch.zeros(3)), "key is 3; it must be a string"),
        (lambda kv: kv.push_pull({"w": torch.zeros(3)}, out=torch.zeros(3)), "give a dictionary of outputs"),
        (lambda kv: kv.push_pull("w", torch.zeros(3), out=torch.zeros(3), start="no"), "start is 'no'; it must be"),
        (lambda kv: kv.push("w", torch.zeros(3), weight=torch.ones(())), r"weight is tensor\(1.\); it must be"),
        (lambda kv: kv.push("w", torch.zeros(3), priority=0.5), "priority is 0.5; it must be a whole number"),
        (lambda kv: kv.push("w", torch.zeros(3), weight=10**400), "weight is 1000*; it must be a positive number"),
        (lambda kv: kv.push("w", torch.zeros(3), weight=10**5000), "weight is of type int; it must be a positive"),
        (lambda kv: kv.clock(-(10**400)), "timeout is -1000*; it must be seconds"),
        (lambda kv: kv.stats("1"), "timeout is '1'; it must be seconds"),
        (lambda kv: kv.push(["w"], torch.zeros(3)), r"key is \['w'\]; it must be a string"),
        (lambda kv: kv.pull({1: torch.zeros(3)}), "key is 1; it must be a string"),
        (lambda kv: kv.pull("\ud800", torch.zeros(3)), r"key is '\\ud800'; it must be a string"),
        (lambda kv: kv.push("w", NESTED), "'w': a tensor is nested"),
        (lambda kv: kv.pull("w", NESTED), "'w': a tensor is nested"),
        (lambda kv: kv.init("v", torch.zeros(3), push_wire=[]), r"push_wire of 'v' is \[\]; it must be one of"),
        (
            lambda kv: kv.init("v", torch.zeros(3).int(), update=ADAM, mode=SUM),
            r"'v' is torch.int32, which .*Adam cannot",
        ),
        (
            lambda kv: kv.init("v", torch.zeros(3), update=ps.function("short")),
            r"'short' of join\(\) does not take \(value, ",
        ),
        (
            lambda kv: kv.init("v", torch.zeros(3), update=ps.function("f", x=1)),
            r"'f' of join\(\) does not .*info, x=\)",
        ),
        (lambda kv: kv.follow(None), "model is None; it must be a torch.nn.Module"),
        (lambda kv: kv.follow(MODEL, prefix=1), "prefix is 1; it must be a string"),
        (lambda kv: kv.follow(MODEL, at_most_behind="1"), "at_most_behind is '1'; it must be a number of rounds"),
        (lambda kv: ps.attach(None, MODEL, SGD), "kv is None; it must be what ps.join"),
        (lambda kv: ps.attach(kv, "x", SGD), "model is 'x'; it must be a torch.nn.Module"),
        (lambda kv: ps.attach(kv, MODEL, SGD, prefix=None), "prefix is None; it must be"),
        (lambda kv: ps.Embedding(None, "e", 4, update=ps.assign()), "kv is None; it must"),
        (lambda kv: ps.Embedding(kv, "e", 10**400, update=ps.assign()), "dim is 1000*; it must be the elements"),
        (lambda kv: kv.snapshot(3), "path is 3; it must be a string or an os.PathLike"),
        (lambda kv: kv.snapshot("x" * 5000), "path is '.*, where nothing can be written: File name too long"),
        (lambda kv: kv.restore(None), "path is None; it must be a string or an os.PathLike"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[ps.KeyValue], Any], message: str) -> None:
    functions = {"short": lambda value, push: None, "f": lambda value, push, state, info: None}
    with ps.join(**SMALL, functions=functions) as kv:
        kv.init("w", torch.ones(3), mode=ps.asynchronous())
        with pytest.raises(InvalidArgument, match=message):
            call(kv)
        kv.init("v", torch.zeros(2))  # the name is free
        kv.push("w", torch.full((3,), 2.0), weight=np.float32(1), priority=np.int64(3)).wait()
        kv.pull("w", out := torch.zeros(3))
        assert out.tolist() == [2] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": "5"}, "timeout is '5'; it must be seconds"),
        ({"timeout": float("nan")}, "timeout is nan; it must be seconds"),
        ({"window": "64M"}, "window is '64M'; it must be bytes"),
        ({"block_bytes": 4096.5}, "block_bytes is 4096.5; it must be bytes"),
        ({"memory": 10**400}, "memory is 1000*; it must be bytes"),
        ({"role": ["worker"]}, r"role is \['worker'\]; it must be"),
        ({"name": 1}, "name is 1; it must be a string"),
        ({"group": None}, "group is None; it must be a string"),
        ({"role": "reader", "group": "left"}, "group is 'left' with role='reader'; readers .* leave it out"),
        ({"workers": "2"}, "workers is '2'; it must be a number of workers"),
        ({"backups": None}, "backups is None; it must be 0, or 1"),
        ({"listen": "no"}, "listen is 'no'; it must be True or False"),
        ({"functions": len}, "functions is <built-in function len>; it must be a dictionary"),
        ({"functions": {"f": 1}}, r"functions\['f'\] is 1; it must be a function"),
        ({"store": 1, "rank": 0, "size": 1}, "store is 1; it must be a torch.distributed.Store"),
        ({"store": HashStore(), "rank": "0", "size": 1}, "rank is '0' and size 1; a parameter server needs"),
    ],
)
def test_bad_arguments_of_join_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ps.join(**SMALL | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "sync"}, r"mode is 'sync'; it must be made by ps\.sync\(\)"),
        ({"update": "assign"}, r"update is 'assign'; it must be made by ps\.assign\(\)"),
    ],
)
def test_modes_and_updates_are_no_words(given: dict[str, Any], message: str) -> None:
    with ps.join(**SMALL) as kv, pytest.raises(InvalidArgument, match=message):
        kv.init("w", torch.zeros(3), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ps.sync(quorum=10**400), "quorum is 1000*; it must be a number of workers"),
        (lambda: ps.sync(quorum=1, grace="1"), "grace is '1'; it must be seconds"),
        (lambda: ps.sync(average=1), "average is 1; it must be True or False"),
        (lambda: ps.ssp(1, group=b"w"), "group is b'w'; it must be a string"),
        (lambda: ps.reduce(["sum"]), r"op is \['sum'\]; it must be one of"),
        (lambda: ps.rowwise_adagrad(lr=10**400), "lr is 1000*; it must be a number, 0 or more"),
        (lambda: ps.function(len), "name is <built-in function len>; it must be a string"),
        (lambda: ps.function("f", x=10**400), "x is 1000*; arguments of a function must be"),
        (
            lambda: ps.optimizer(torch.optim.SGD, lr=10**400),
            "lr is 1000*; an optimizer's arguments must be Python numbers",
        ),
        (lambda: ps.optimizer(torch.optim.Adam, betas=0.9), "torch.optim.Adam does not take these arguments"),
        (lambda: ps.optimizer(torch.optim.Adam, capturable=True), "torch.optim.Adam does not take these arguments"),
    ],
)
def test_bad_arguments_of_modes_and_updates_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_numpy_arrays_that_torch_cannot_take() -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(3))
        for array in (np.zeros(3, np.float32)[::-1], np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0])):
            with pytest.raises(InvalidArgument, match="'w'"):
                kv.push("w", array)
        fixed = np.ones(3, np.float32)
        fixed.flags.writeable = False
        kv.push("w", fixed).wait()


def test_a_name_is_free_again_when_a_server_has_refused_it() -> None:
    with ps.join(**SMALL) as kv:
        with pytest.raises(InvalidArgument, match="join with a larger memory="):
            kv.init("w", torch.zeros(1 << 24))
        with pytest.raises(InvalidArgument, match="no function 'f' is known"):
            kv.init("w", torch.zeros(5), update=ps.function("f"))
        with pytest.raises(InvalidArgument, match="there is no key 'w'"):
            kv.push("w", torch.zeros(5))
        kv.init("w", torch.full((5,), 7.0))
        kv.pull("w", out := torch.zeros(5))
        assert out.tolist() == [7] * 5


def test_a_function_may_keep_its_tensors() -> None:
    kept: list[torch.Tensor] = []

    def keeps(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        value += push
        push.fill_(9)
        kept.append(value)

    with ps.join(functions={"keeps": keeps}, **SMALL) as kv:
        kv.init("w", torch.zeros(3), update=ps.function("keeps"), mode=ps.asynchronous())
        (lent := kv.empty(3)).fill_(2)
        kv.push("w", lent).wait()
        kept[0].add_(100)
        kv.pull("w", out := torch.zeros(3))
        assert out.tolist() == [2] * 3 and lent.tolist() == [2] * 3
    assert kept[0].tolist() == [102] * 3


def test_a_function_that_uses_the_parameter_server_is_told_at_once() -> None:
    told: list[str] = []
    ones = torch.ones(3)

    def asks(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        for call in (
            kv.stats,
            kv.barrier,
            kv.leave,
            lambda: kv.init("x", ones),
            lambda: kv.push("w", ones),
            lambda: kv.pull("w", torch.zeros(3)),
            other.wait,
            local.statistics,
        ):
            with pytest.raises(InvalidArgument, match="an update function, may not use the parameter server") as raised:
                call()
            told.append(str(raised.value))
        value += push

    with ps.join(functions={"asks": asks}, **SMALL) as kv:
        local: Any = kv.calls.local
        kv.init("other", ones)
        other = kv.push("other", ones)
        kv.init("w", ones, update=ps.function("asks"), mode=ps.asynchronous())
        kv.push("w", ones).wait()
        assert len(told) == 8
        kv.pull("w", out := torch.zeros(3))
        assert out.tolist() == [2] * 3 and kv.stats()["servers"]


def test_a_signal_handler_cannot_ask_amid_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.join(**SMALL) as kv:
        answer = ServerProcess.answer

        def interrupts(self: ServerProcess, *arguments: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)
            return answer(self, *arguments)

        def handler(*_: object) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            with pytest.raises(InvalidArgument, match=r"a signal handler asked server 0 .* while its thread waited"):
                kv.stats()
            handled.append(True)

        handled: list[bool] = []
        before = signal.signal(signal.SIGALRM, handler)
        monkeypatch.setattr(ServerProcess, "answer", interrupts)
        assert None not in kv.stats()["servers"].values()
        signal.signal(signal.SIGALRM, before)
        assert handled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [512.0, 1e-7, 1e30])
def test_a_weighted_average_is_as_large_as_its_values(dtype: torch.dtype, weight: float) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(4, dtype=dtype))
        out = torch.zeros(4, dtype=dtype)
        kv.push_pull("w", torch.full((4,), 200.0, dtype=dtype), out=out, weight=weight).wait()
        assert out.tolist() == [200.0] * 4


def test_abort_ends_a_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, answer = threading.Event(), ServerProcess.answer

    def late(self: ServerProcess, *arguments: Any) -> Any:
        answers.wait(60)
        return answer(self, *arguments)

    kv = ps.join(**SMALL)
    monkeypatch.setattr(ServerProcess, "answer", late)
    try:
        threading.Timer(0.2, kv.abort).start()
        for _ in range(2):
            with pytest.raises(Aborted, match=r"abort\(\) was called"):
                kv.init("w", torch.zeros(4))
    finally:
        answers.set()
        kv.calls.close()


def test_an_answer_that_is_too_long_is_an_error_and_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(4))
        monkeypatch.setattr(control, "MOST", 150)
        with pytest.raises(SystemFailure, match=r"a control message has \d+ bytes; the most is 150"):
            kv.stats()
        monkeypatch.undo()
        kv.push_pull("w", torch.ones(4), out=(out := torch.empty(4))).wait()
        assert out.eq(1).all()
        assert kv.stats()["servers"]


def test_threads_get_their_own_answers() -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(3))
        wrong: list[Any] = []

        def asks() -> None:
            for _ in range(100):
                if kv.stats(timeout=10)["worker"] != 0 or None in kv.stats(timeout=10)["servers"].values():
                    wrong.append("no answer")

        in_threads([asks] * 4)
        assert not wrong


def test_the_door_outlives_a_lack_of_descriptors() -> None:
    with ps.join(**SMALL) as kv:
        kv.init("w", torch.zeros(3))
        address = kv.calls.local.listener.address  # type: ignore[union-attr]
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
        with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd"))):
            for client in clients:
                client.connect(address)
            time.sleep(0.3)
        for client in clients:
            client.close()
        kv.init("v", torch.ones(3))
        assert None not in kv.stats()["servers"].values()
