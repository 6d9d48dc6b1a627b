"""What `steps` measures beside ours: a synchronous step by libraries that one would build a store with.

Each peer is a context manager of all ranks that gives `step(gradient, w)`: every rank's gradients are added in the
order of ranks, an optimizer makes a step where the parameters live, and every rank gets the result in `w`. Where a
library leaves it open, every rank has a server beside it with an equal part of the parameters, as in our store.

    zmq       ZeroMQ: a process for each server, Unix sockets, neither pushes nor values copied by us but once
    rpc       torch.distributed.rpc over TensorPipe: servers are threads of the ranks
    redis     Redis by a Unix socket: gradients and values are keys, rank 0 adds and steps
    ray       Ray: an actor for each server, tensors go through its object store
    mxnet     MXNet 1.9.1's dist_sync (ps-lite): a process for each server, optimizer on the servers
    torchft   the prototype of torchft.parameter_server: one server, a session with a Gloo group for each rank

`install` puts each library into a folder of its own in bench/.peers; redis needs redis-server on PATH as well.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
PACKAGES = {
    "zmq": ["pyzmq"],
    "redis": ["redis"],
    "ray": ["ray"],
    "mxnet": ["mxnet==1.9.1", "numpy<1.24"],  # its last release, which names what later NumPys do not have
    "torchft": ["opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"],
}
"""Of PyPI, by peer; torchft itself is installed without the torch that it would bring."""
ARGUMENTS: dict[str, dict[str, float]] = {"SGD": {"lr": 0.01, "momentum": 0.9}, "AdamW": {"lr": 0.001}}
Step = Callable[[Tensor, Tensor], object]


def install(name: str) -> None:
    """Makes a venv with the peer's packages, unless it is there."""
    venv = FOLDER / name
    if name not in PACKAGES or (venv / "whole").exists():
        return
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *PACKAGES[name]], check=True)
    if name == "torchft":
        subprocess.run([*pip, "--no-deps", "torchft==0.2.0"], check=True)
    (venv / "whole").touch()


def _packages(name: str) -> str:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(FOLDER / name / "lib" / version / "site-packages")


def _import(peer: str, module: str) -> Any:
    """A module of a peer, beside those of this process."""
    if _packages(peer) not in sys.path:
        sys.path.append(_packages(peer))
    return importlib.import_module(module)


class Part:
    """What a server has: values, and what updates them."""

    def __init__(self, count: int, optimizer: str) -> None:
        self.w = torch.zeros(count)
        parameter = torch.nn.Parameter(self.w)
        kind = getattr(torch.optim, optimizer)
        self.optimizer = kind([parameter], **ARGUMENTS[optimizer], foreach=False)
        self.parameter, self.sum = parameter, torch.empty(count)

    def step(self, gradients: list[Tensor]) -> Tensor:
        if len(gradients) == 1:
            self.sum.copy_(gradients[0])
        else:
            torch.add(gradients[0], gradients[1], out=self.sum)
        for other in gradients[2:]:
            self.sum += other
        self.update()
        return self.w

    def update(self) -> None:
        """By the gradients' sum."""
        self.parameter.grad = self.sum
        self.optimizer.step()


class Round:
    """A part whose workers are threads here: all that push get the values after the step that the last one makes."""

    def __init__(self, count: int, workers: int, optimizer: str) -> None:
        torch.set_num_threads(1)
        self.part, self.pushed = Part(count, optimizer), [torch.empty(0)] * workers
        self.barrier = threading.Barrier(workers, lambda: self.part.step(self.pushed))

    def push(self, rank: int, gradient: Tensor) -> Tensor:
        self.pushed[rank] = gradient
        self.barrier.wait()
        return self.part.w

    def push_array(self, rank: int, gradient: Any) -> Any:
        return self.push(rank, torch.from_numpy(gradient)).numpy()


def _parts(count: int) -> list[slice]:
    """Of each server."""
    ends = [count * i // dist.get_world_size() for i in range(dist.get_world_size() + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _from_rank_0(what: Any) -> Any:
    box = [what]
    dist.broadcast_object_list(box)
    return box[0]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Of rank 0, for all."""
    with tempfile.TemporaryDirectory() as folder:
        yield _from_rank_0(folder)
        dist.barrier()


# ---- ZeroMQ ----------------------------------------------------------------------------------------------------------


def _serve_zmq(address: str, count: int, workers: int, optimizer: str) -> None:
    zmq = _import("zmq", "zmq")
    torch.set_num_threads(1)
    part, router = Part(count, optimizer), zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    while True:
        came = sorted((router.recv_multipart(copy=False) for _ in range(workers)), key=lambda frames: frames[0].bytes)
        if any(len(frames[1].buffer) == 0 for frames in came):
            return
        value = part.step([torch.frombuffer(frames[1].buffer, dtype=torch.float32) for frames in came])
        for frames in came:
            router.send(frames[0].bytes, zmq.SNDMORE)
            router.send(value.numpy(), copy=False)  # nothing changes it before all have it and have pushed again


@contextlib.contextmanager
def zmq(count: int, optimizer: str) -> Iterator[Step]:
    library, rank, workers = _import("zmq", "zmq"), dist.get_rank(), dist.get_world_size()
    parts, context = _parts(count), library.Context()
    with _folder() as folder:
        addresses = [f"ipc://{folder}/{server}" for server in range(workers)]
        arguments = (addresses[rank], parts[rank].stop - parts[rank].start, workers, optimizer)
        server = multiprocessing.get_context("spawn").Process(target=_serve_zmq, args=arguments, daemon=True)
        server.start()
        sockets = []
        for address in addresses:
            sockets.append(context.socket(library.DEALER))
            sockets[-1].setsockopt(library.IDENTITY, rank.to_bytes(4, "big"))
            sockets[-1].connect(address)

        def step(gradient: Tensor, w: Tensor) -> None:
            for each, part in zip(sockets, parts, strict=True):
                each.send(gradient[part].numpy(), copy=False)
            for each, part in zip(sockets, parts, strict=True):
                w[part] = torch.frombuffer(each.recv(copy=False).buffer, dtype=torch.float32)

        yield step
        for each in sockets:
            each.send(b"")
        server.join(30)
        context.destroy()


# ---- torch's RPC -----------------------------------------------------------------------------------------------------

_served: dict[str, Round] = {}


def _push_by_rpc(rank: int, gradient: Tensor) -> Tensor:
    return _served["round"].push(rank, gradient)


@contextlib.contextmanager
def rpc(count: int, optimizer: str) -> Iterator[Step]:
    rank, workers = dist.get_rank(), dist.get_world_size()
    parts = _parts(count)
    _served["round"] = Round(parts[rank].stop - parts[rank].start, workers, optimizer)
    place, threads = f"tcp://127.0.0.1:{_from_rank_0(_free_port())}", max(16, workers)
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=place, num_worker_threads=threads)
    torch_rpc.init_rpc(f"rank{rank}", rank=rank, world_size=workers, rpc_backend_options=options)

    def step(gradient: Tensor, w: Tensor) -> None:
        calls = [
            torch_rpc.rpc_async(f"rank{i}", _push_by_rpc, args=(rank, gradient[part])) for i, part in enumerate(parts)
        ]
        for call, part in zip(calls, parts, strict=True):
            w[part] = call.wait()

    yield step
    torch_rpc.shutdown()


# ---- Redis -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(folder: str) -> Iterator[str]:
    """Started; the path of its socket."""
    path = f"{folder}/redis"
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not Path(path).exists():
                time.sleep(0.01)
            yield path
        finally:
            server.terminate()


@contextlib.contextmanager
def redis(count: int, optimizer: str) -> Iterator[Step]:
    library, rank, workers = _import("redis", "redis"), dist.get_rank(), dist.get_world_size()
    with _folder() as folder, contextlib.ExitStack() as undo:
        path = undo.enter_context(redis_server(folder)) if rank == 0 else f"{folder}/redis"
        dist.barrier()
        client, part = library.Redis(unix_socket_path=path), Part(count, optimizer)

        def step(gradient: Tensor, w: Tensor) -> None:
            if rank > 0:
                client.set(f"gradient{rank}", memoryview(gradient.numpy()).cast("B"))
                client.rpush("pushed", rank)
                client.blpop(f"stepped{rank}")
                w.copy_(torch.frombuffer(bytearray(client.get("w")), dtype=torch.float32))
                return
            for _ in range(1, workers):
                client.blpop("pushed")
            others = [np.frombuffer(client.get(f"gradient{i}"), np.float32).copy() for i in range(1, workers)]
            value = part.step([gradient, *map(torch.from_numpy, others)])
            client.set("w", memoryview(value.numpy()).cast("B"))
            for i in range(1, workers):
                client.rpush(f"stepped{i}", 1)
            w.copy_(value)

        yield step
        client.close()
        dist.barrier()


# ---- Ray -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ray(count: int, optimizer: str) -> Iterator[Step]:
    rank, workers, parts = dist.get_rank(), dist.get_world_size(), _parts(count)
    # Of the processes that Ray starts, which are to know it and each other.
    os.environ |= {"PYTHONPATH": f"{_packages('ray')}:{FOLDER.parents[1]}", "RAY_AUTH_MODE": "token"}
    os.environ["RAY_AUTH_TOKEN"] = _from_rank_0(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    library = _import("ray", "ray")
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "peers"}
    if rank == 0:
        context = library.init(num_cpus=1, object_store_memory=1 << 30, include_dashboard=False, **quiet)
        kind = library.remote(num_cpus=0, max_concurrency=workers)(Round)
        kept = [
            kind.options(name=f"server{i}").remote(part.stop - part.start, workers, optimizer)
            for i, part in enumerate(parts)
        ]
        address = context.address_info["gcs_address"]
    address = _from_rank_0(address if rank == 0 else "")
    if rank > 0:
        library.init(address=address, **quiet)
    servers = [library.get_actor(f"server{i}") for i in range(workers)]

    def step(gradient: Tensor, w: Tensor) -> None:
        calls = [
            each.push_array.remote(rank, gradient[part].numpy()) for each, part in zip(servers, parts, strict=True)
        ]
        for part, value in zip(parts, library.get(calls), strict=True):
            np.copyto(w[part].numpy(), value)

    yield step
    dist.barrier()
    if rank > 0:
        library.shutdown()
    dist.barrier()
    if rank == 0:
        kept.clear()
        library.shutdown()


# ---- MXNet -----------------------------------------------------------------------------------------------------------

_MXNET = """
import sys, mxnet, numpy
_, count, kind, *arguments = sys.argv
store = mxnet.kv.create("dist_sync")
options = {name: float(value) for name, value in (each.split("=") for each in arguments)}
options["learning_rate"] = options.pop("lr")
store.set_optimizer(getattr(mxnet.optimizer, kind)(wd=0.0, **options))
w, given = mxnet.nd.zeros(int(count)), mxnet.nd.ones(int(count)) * (store.rank + 1)
gradient = mxnet.nd.empty(int(count))
store.init("w", w)
print("ready", flush=True)
for _ in sys.stdin:
    given.copyto(gradient)  # pull writes to what was pushed
    store.push("w", gradient)
    store.pull("w", out=w)
    w.wait_to_read()
    print(w[0].asscalar(), flush=True)
"""
"""Steps of tensors of its own: rank r's gradient is r + 1 everywhere. It prints the first element."""


@contextlib.contextmanager
def mxnet(count: int, optimizer: str) -> Iterator[Step]:
    rank, workers = dist.get_rank(), dist.get_world_size()
    port = _from_rank_0(_free_port())
    python = FOLDER / "mxnet" / "bin" / "python"
    arguments = [f"{name}={value}" for name, value in ARGUMENTS[optimizer].items()]
    environment = os.environ | {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    roles = ["scheduler", "server", "worker"] if rank == 0 else ["server", "worker"]
    processes = [
        subprocess.Popen(
            [python, "-c", _MXNET, str(count), optimizer, *arguments],
            env=environment | {"DMLC_ROLE": role},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    into, out = processes[-1].stdin, processes[-1].stdout
    assert into is not None and out is not None

    def step(gradient: Tensor, w: Tensor) -> None:
        into.write("\n")
        into.flush()
        w[0] = float(out.readline())

    try:
        out.readline()
        yield step
        dist.barrier()
        into.close()
        for process in reversed(processes):
            process.wait(20)
    finally:
        for process in processes:
            process.kill()


# ---- torchft ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torchft(count: int, optimizer: str) -> Iterator[Step]:
    base = _import("torchft", "torchft.parameter_server").ParameterServer
    group = _import("torchft", "torchft.process_group").ProcessGroupGloo
    rank, workers = dist.get_rank(), dist.get_world_size()

    class Server(base):  # type: ignore[misc, valid-type]
        round = Round(count, workers, optimizer)

        @classmethod
        def new_process_group(cls) -> Any:
            return group()

        def forward(self, session: str, group: Any) -> None:
            who, gradient = torch.empty(1), torch.empty(count)
            group.recv([who], 1, 0).wait()
            while True:
                group.recv([gradient], 1, 0).wait()
                if gradient[0].isnan():
                    return
                group.send([self.round.push(int(who), gradient)], 1, 0).wait()

    server = Server(port=0) if rank == 0 else None
    if server is not None:
        server._server.handle_error = lambda *_: None  # its connections always end by one, which is printed,
        server._server.RequestHandlerClass.log_message = lambda *_: None  # as is that they begin
    session = Server.new_session(_from_rank_0(server.address() if server is not None else ""))
    session.send([torch.tensor([float(rank)])], 0, 0).wait()

    def step(gradient: Tensor, w: Tensor) -> None:
        session.send([gradient], 0, 0).wait()
        session.recv([w], 0, 0).wait()

    yield step
    session.send([torch.full((count,), torch.nan)], 0, 0).wait()
    dist.barrier()


PEERS: dict[str, Callable[[int, str], contextlib.AbstractContextManager[Step]]] = {
    "zmq": zmq,
    "rpc": rpc,
    "redis": redis,
    "ray": ray,
    "mxnet": mxnet,
    "torchft": torchft,
}
