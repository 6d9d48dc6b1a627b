"""What the driver and the GPU do that ringreduce counts on and no stand-in can show; and what a call costs the host.

    python -m bench.gpu.probe --json probe.json

A row for each question, whatever came of the others; "wrong" is 1 if the answer breaks what ringreduce assumes. Where
another process is killed, or an error could spoil a process for good, the asking is done by processes of their own.
`handover_us` is what later parts and the tests read: the time for which one process on the GPU waits for another.
"""

import ctypes
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu import device, driver, reports
from bench.gpu.driver import Gpu, Probe
from bench.gpu.processes import Processes

HOST_US = 15.0  # at most, of the host for an eager call
SECONDS = 2.0  # after which a call of the driver counts as blocked
QUEUED = 2500  # launches: more than a stream's queue takes
BYTES = 2 << 20  # of what is shared, which the driver then gives a place of its own
STAGES = ("relaxed words", "release and acquire", "and the block meets twice", "and as often as in a step")

Answer = dict[str, Any]


class Call(threading.Thread):
    """A call of the driver in a thread of its own. `failed` says what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)  # a call that never returns must not keep this program from its end
        self._call, self.failed = call, ""

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"


class Asker:
    """What the questions share."""

    def __init__(self, report: reports.Report, stand_in: bool) -> None:
        self.report, self.stand_in = report, stand_in
        torch.zeros(1, device="cuda")  # the context is torch's too
        self.gpu = Gpu(0)
        with tempfile.TemporaryDirectory() as folder:
            properties = torch.cuda.get_device_properties(0)
            self.image = driver.image(stand_in, (properties.major, properties.minor), Path(folder))

    def ask(self, question: str, answer: Callable[["Asker"], Answer]) -> None:
        began = time.monotonic()
        try:
            found = answer(self)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:500], "wrong": 1}
        self.report.row(question=question, **found, seconds=round(time.monotonic() - began, 1))

    def processes(self, *mains: Callable[..., None]) -> Processes:
        """Which run main(pipe, image)."""
        return Processes(self.stand_in, [(main, self.image) for main in mains])


def compilers(_: Asker) -> Answer:
    return {
        "compiler": device.first_line(os.environ.get("CXX", "c++").split()[-1], "--version") or "none",
        "nvcc": device.nvcc_version() or "none",
        "python": sys.version.split()[0],
    }


def stream_wait(asker: Asker, where: str, stream: int | None = None, graph: bool = False) -> Answer:
    """A stream waits for a word, of the GPU's memory or of the host's; then it is let go from outside."""
    gpu = asker.gpu
    words, address = gpu.host_words(1)
    if where == "gpu":
        address = gpu.memory(8)
    stream = gpu.stream() if stream is None else stream
    other = gpu.stream()
    if graph:
        captured, mode = torch.cuda.CUDAGraph(), "thread_local"
        with torch.cuda.graph(captured, stream=torch.cuda.Stream(), capture_error_mode=mode):
            gpu.wait(torch.cuda.current_stream().cuda_stream, address, 1)
        captured.replay()
        stream = torch.cuda.current_stream().cuda_stream
    else:
        gpu.wait(stream, address, 1)
    time.sleep(0.05)
    waited = not gpu.done(stream)
    began = time.perf_counter()
    if where == "host":
        words[0] = 1
    else:
        gpu.write(other, address, 1)
    while not gpu.done(stream) and time.perf_counter() - began < SECONDS:
        pass
    seen = gpu.done(stream)
    words[0] = 1
    gpu.write(other, address, 1)
    us = (time.perf_counter() - began) * 1e6
    return {"waited": waited, "let_go": seen, "us": us, "wrong": int(not waited or not seen)}


def blocked_calls(asker: Asker, busy: str) -> Answer:
    """Which calls of the driver do not return while a stream of the same context waits, a kernel spins, or a thread
    stands before the full queue of a stream that waits; until the host lets go. Nothing that lets others go may make
    one of them."""
    gpu, image = asker.gpu, asker.image
    words, address = gpu.host_words(2)
    stream, other = gpu.stream(), gpu.stream()
    spare, pinned, event = gpu.memory(BYTES), gpu.made("cuMemHostAlloc", 4096, 3), gpu.made("cuEventCreate", 2)
    rubbish = (ctypes.c_ubyte * 4096)()
    calls: dict[str, Callable[[], object]] = {
        "cuStreamQuery": lambda: gpu.done(other),
        "cuEventRecord": lambda: gpu.call("cuEventRecord", event, other),
        "cuEventQuery": lambda: gpu.call("cuEventQuery", event, allowed=driver.NOT_READY),
        "cuEventCreate": lambda: gpu.made("cuEventCreate", 2),
        "cuMemsetD8Async": lambda: gpu.call("cuMemsetD8Async", spare, 1, 8, other),
        "cuMemcpyAsync, pageable": lambda: gpu.call("cuMemcpyAsync", spare, ctypes.addressof(rubbish), 4096, other),
        "cuStreamWriteValue64": lambda: gpu.write(other, spare, 1),
        "cuStreamCreate": gpu.stream,
        "cuMemAlloc": lambda: gpu.made("cuMemAlloc_v2", BYTES),
        "cuMemHostAlloc": lambda: gpu.made("cuMemHostAlloc", 4096, 3),
        "cuMemFreeHost": lambda: gpu.call("cuMemFreeHost", pinned),
        "cuMemFree": lambda: gpu.call("cuMemFree_v2", spare),
    }
    launch = gpu.kernels(image) if image else None
    if launch:
        module = gpu.made("cuModuleLoadData", ctypes.c_char_p(image))
        fresh = gpu.kernels(image)
        calls["a kernel's first launch"] = lambda: fresh(other, "probe_nothing", Probe())
        calls["a kernel's launch"] = lambda: launch(other, "probe_nothing", Probe())
        calls["cuModuleLoadData"] = lambda: gpu.kernels(image)
        calls["cuModuleUnload"] = lambda: gpu.call("cuModuleUnload", module)
    if launch is None and busy != "a stream waits":
        return {"left_out": "no nvcc"}

    def fill() -> None:
        for _ in range(50 if asker.stand_in else QUEUED):
            launch(stream, "probe_nothing", Probe())

    blocked, failed = [], []
    for number, (name, call) in enumerate(calls.items(), 1):
        threads = [Call(call)]
        if busy == "a kernel spins":
            words[0] = 0
            launch(stream, "probe_hand_over", Probe(address, address + 8, 1, gpu.memory(16), 1, 1), 1, 32)
        else:
            gpu.wait(stream, address, number)
        if busy == "a queue is full":
            threads.append(Call(fill))
            threads[1].start()
            threads[1].join(0.3)
        threads[0].start()
        threads[0].join(SECONDS)
        if threads[0].is_alive():
            blocked.append(name)
        words[0] = number
        for thread in threads:
            thread.join(15)
            if thread.is_alive():
                raise TimeoutError(f"{name} did not return even after the wait was over")
        failed += [f"{name}: {thread.failed}" for thread in threads if thread.failed]
        gpu.call("cuStreamSynchronize", stream)
    found = {"blocked": "; ".join(blocked) or "none", "tried": len(calls), "wrong": len(failed)}
    return {**found, "failed": "; ".join(failed)} if failed else found


def shares(pipe: Any, _: bytes) -> None:
    """Shows some memory, and what is then found in it."""
    gpu = Gpu(0)
    address, stream = gpu.memory(BYTES), gpu.stream()
    gpu.write(stream, address, 41)
    gpu.call("cuStreamSynchronize", stream)
    pipe.send(gpu.handle(address))
    pipe.recv()
    pipe.send(gpu.read(address, stream))
    pipe.recv()


def ipc(asker: Asker) -> Answer:
    """The memory of another process: read, then written, by this one."""
    with asker.processes(shares) as others:
        address, stream = asker.gpu.open(others.hear(0)), asker.gpu.stream()
        read = asker.gpu.read(address, stream)
        asker.gpu.write(stream, address, 42)
        asker.gpu.call("cuStreamSynchronize", stream)
        others.tell(0, "written")
        written = others.hear(0)
        asker.gpu.call("cuIpcCloseMemHandle", address)
    return {"read": read, "written": written, "wrong": int((read, written) != (41, 42))}


def hands_over(pipe: Any, image: bytes) -> None:
    """One of two processes: a word goes to and fro `rounds` times, by its streams or in a kernel."""
    gpu = Gpu(0)
    own, stream = gpu.memory(BYTES), gpu.stream()
    pipe.send(gpu.handle(own))
    others = gpu.open(pipe.recv())
    second, rounds, way = pipe.recv()
    launch = gpu.kernels(image) if image else None
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    if way == "kernel" and launch:
        probe = Probe(own, others, rounds, own + 64, 1, second)
        launch(stream, "probe_hand_over", probe)
    else:
        for number in range(1, rounds + 1):
            for sends in (False, True) if second else (True, False):
                if not sends:
                    gpu.wait(stream, own, number)
                    continue
                if way == "step" and launch:
                    launch(stream, "probe_nothing", Probe())
                gpu.write(stream, others, number)
    gpu.call("cuStreamSynchronize", stream)
    gave_up = way == "kernel" and gpu.read(own + 64, stream) == 2**64 - 1
    pipe.send((time.perf_counter() - began, gave_up))
    pipe.recv()  # the other may still use the memory


def hand_over(asker: Asker, way: str, rounds: int) -> Answer:
    """Microseconds for which a process waits when it hands a word to another on the same GPU and that one answers:
    half of what a round trip takes. By words of streams alone; with a kernel before each, as in a step; or between two
    kernels that spin, which a GPU runs in turns."""
    if way != "words" and not asker.image:
        return {"left_out": "no nvcc"}
    with asker.processes(hands_over, hands_over) as others:
        handles = [others.hear(index) for index in (0, 1)]
        for index in (0, 1):
            others.tell(index, handles[1 - index])
            others.tell(index, (index, rounds, way))
        for index in (0, 1):
            others.hear(index)
        for index in (0, 1):
            others.tell(index, "go")
        seconds, gave_up = zip(*(others.hear(index) for index in (0, 1)), strict=True)
        for index in (0, 1):
            others.tell(index, "end")
    return {"handover_us": max(seconds) / rounds / 2 * 1e6, "wrong": int(any(gave_up))}


def reads_on(pipe: Any, image: bytes) -> None:
    """Reads memory of a process that is killed meanwhile, by copies and in kernels."""
    gpu = Gpu(0)
    address, stream = gpu.open(pipe.recv()), gpu.stream()
    pipe.send(gpu.read(address, stream))
    launch, own = gpu.kernels(image) if image else None, gpu.memory(BYTES)
    end, reads, values = time.monotonic() + 3, 0, set()
    while time.monotonic() < end:
        try:
            values.add(gpu.read(address, stream))
            if launch:  # which finds a word that is large enough
                launch(stream, "probe_hand_over", Probe(address, own, 1, own + 64, 1, 1))
                gpu.call("cuStreamSynchronize", stream)
        except driver.DriverError as error:
            pipe.send({"after_it": str(error), "reads": reads, "values": str(sorted(values))})
            return
        reads += 1
    pipe.send({"after_it": "reads go on", "reads": reads, "values": str(sorted(values))})


def exporter_killed(asker: Asker) -> Answer:
    """Does a read of a dead process's memory fail, or give data?"""
    with asker.processes(shares, reads_on) as others:
        others.tell(1, others.hear(0))
        others.hear(1)
        time.sleep(0.5)
        others.kill(0)
        found: Answer = others.hear(1)
    return found


def barrier(asker: Asker) -> Answer:
    """Nanoseconds of a hand-over between two blocks of one kernel, by stage: what one peer adds to a step."""
    if not asker.image:
        return {"left_out": "no nvcc"}
    gpu, rounds, found = asker.gpu, 100 if asker.stand_in else 10_000, {}
    launch, stream = gpu.kernels(asker.image), gpu.stream()
    for stage, name in enumerate(STAGES):
        for threads in (32, 512):
            times = []
            for _ in range(3):
                words = gpu.memory(4096)
                probe = Probe(words, words + 1024, rounds, words + 2048, stage, 0)
                launch(stream, "probe_hand_over", probe, 2, threads)
                gpu.call("cuStreamSynchronize", stream)
                times.append(gpu.read(words + 2048, stream))
            found[f"{name}, {threads} threads, ns"] = statistics.median(times) / rounds / 2
    return {**found, "wrong": int(max(found.values()) > 1e9)}


def host_parts(asker: Asker) -> Answer:
    """Microseconds of the host for calls that an engine's call is made of."""
    gpu, stream = asker.gpu, asker.gpu.stream()
    address, event = gpu.memory(8), gpu.made("cuEventCreate", 2)
    calls: dict[str, Callable[[], object]] = {
        "cuEventRecord": lambda: gpu.call("cuEventRecord", event, stream),
        "cuStreamWaitEvent": lambda: gpu.call("cuStreamWaitEvent", stream, event, 0),
        "cuStreamWriteValue64": lambda: gpu.write(stream, address, 1),
        "cuStreamWaitValue64": lambda: gpu.wait(stream, address, 1),
        "cuEventCreate": lambda: gpu.call("cuEventDestroy_v2", gpu.made("cuEventCreate", 2)),
        "cuStreamQuery": lambda: gpu.done(stream),
    }
    if asker.image:
        launch = gpu.kernels(asker.image)
        calls["cuLaunchKernel"] = lambda: launch(stream, "probe_nothing", Probe())
    return {name: _host_us(call, lambda: gpu.call("cuStreamSynchronize", stream)) for name, call in calls.items()}


def _host_us(call: Callable[[], object], settle: Callable[[], object], batch: int = 200) -> float:
    """Of one call, median of batches that are short enough for the stream's queue."""
    times = []
    for _ in range(8):
        settle()
        began = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - began) / batch * 1e6)
    settle()
    return statistics.median(times[1:])


def host_call(asker: Asker, mode: str) -> Answer:
    """Microseconds of the host for an all_reduce of 8 B, of a group with one rank, whose kernels wait for nobody."""
    import ringreduce

    store = dist.PrefixStore(f"host {mode}", dist.HashStore())
    options: Any = ringreduce.Options(gpu_transport="peer", engine=f"gpu_mode={mode}")
    waits = timedelta(seconds=30)
    dist.init_process_group("ringreduce", store=store, rank=0, world_size=1, timeout=waits, pg_options=options)
    try:
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x)
        settle = torch.cuda.synchronize
        found: Answer = {
            "torch.distributed": _host_us(lambda: dist.all_reduce(x), settle),
            "direct": _host_us(lambda: ringreduce.all_reduce(x), settle),
            "async": _host_us(lambda: dist.all_reduce(x, async_op=True), settle),
        }
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                dist.all_reduce(x)
        found["in a graph"] = _host_us(graph.replay, settle, 20) / 20
    finally:
        dist.destroy_process_group()
    asker.report.bar(f"us of the host for an all_reduce of 8 B, {mode}", found["torch.distributed"], at_most=HOST_US)
    return found


def main() -> int:
    parser = reports.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="questions with one of these words")
    args = parser.parse_args()
    report = reports.begin(args, "what the driver and the GPU do")
    asker, rounds = Asker(report, args.stand_in), 20 if args.stand_in else 200
    questions: dict[str, Callable[[Asker], Answer]] = {
        "compilers": compilers,
        "a stream waits for a word of the GPU": lambda a: stream_wait(a, "gpu"),
        "a stream waits for a word of the host": lambda a: stream_wait(a, "host"),
        "the NULL stream waits for a word of the host": lambda a: stream_wait(a, "host", 0),
        "a graph waits for a word of the GPU": lambda a: stream_wait(a, "gpu", graph=True),
        "a graph waits for a word of the host": lambda a: stream_wait(a, "host", graph=True),
        "memory of another process": ipc,
        "hand-over between processes, by streams": lambda a: hand_over(a, "words", rounds),
        "hand-over between processes, by streams with kernels": lambda a: hand_over(a, "step", rounds),
        "hand-over between processes, by kernels that spin": lambda a: hand_over(a, "kernel", rounds),
        "a process is killed while its memory is read": exporter_killed,
        "hand-over between blocks": barrier,
        "calls that block while a stream waits": lambda a: blocked_calls(a, "a stream waits"),
        "calls that block while a kernel spins": lambda a: blocked_calls(a, "a kernel spins"),
        "calls that block while a queue is full": lambda a: blocked_calls(a, "a queue is full"),
        "host us of driver calls": host_parts,
        "host us of a call, run": lambda a: host_call(a, "run"),
        "host us of a call, steps": lambda a: host_call(a, "steps"),
    }
    for question, answer in questions.items():
        if not args.only or any(word in question for word in args.only):
            asker.ask(question, answer)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
