"""What this machine has of what ringreduce can use: `look` reads it and never raises."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce import tuning
from ringreduce.common import compiled
from ringreduce.common.cores import own_cores
from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import RingReduceError, SystemFailure, TopologyError
from ringreduce.common.files import text_of
from ringreduce.common.system import refused_calls
from ringreduce.config import resolve
from ringreduce.coordination.process import boot_id, own_pidfd
from ringreduce.gpu import kernels, nccl
from ringreduce.gpu.nvcc import find_nvcc
from ringreduce.network.interfaces import local_interfaces, speed_of
from ringreduce.topology.graph import LinkGraph
from ringreduce.topology.live import probe
from ringreduce.topology.read import described


@dataclass(frozen=True)
class NetworkDevice:
    """A network interface; `gbit` is 0 where it does not tell."""

    name: str
    up: bool
    gbit: float
    loopback: bool = False


@dataclass(frozen=True)
class Gpu:
    """One that the CUDA driver shows."""

    name: str
    """With its number and place: "device 0 (NVIDIA H200, 0000:01:00.0)"."""
    capability: tuple[int, int]
    stream_values: bool
    """Whether streams can wait for 64-bit values."""
    shared_by: str
    """How other processes come to its memory; "" if they cannot."""
    accesses: tuple[bool, ...]
    """Of every GPU, whether kernels of this one can access its memory."""


@dataclass(frozen=True)
class Facts:
    """What `look` has read.  None: there is none, or no limit."""

    graph: LinkGraph
    torch: str
    """Its version; "" if there is none."""
    compiled: str
    """Why the compiled module cannot be used; "" if it can."""
    distributed: bool
    cuda: str | None
    """The CUDA that torch is built for."""
    cuda_devices: int
    compiler: str | None
    memory: str
    """Why ranks cannot share memory; "" if they can."""
    memory_left: int | None
    """Bytes that may still be taken."""
    bytes_per_rank: int
    fetch: bool
    """Whether ranks can read one another's memory."""
    fetch_wanted: bool
    yama: str
    cores: int
    """Those that this process may use."""
    cores_online: int
    quota: float | None
    """Cores' worth of time that the process's cgroup gets."""
    cuda_driver: str | None
    """The newest CUDA that the driver can do."""
    cuda_problem: str
    """Why there is no driver, or what failed on a GPU; "" if all is well."""
    gpus: tuple[Gpu, ...]
    gpu_kernels: tuple[str, str]
    """How kernels come to be here ("": they do not), and what to do then."""
    nccl: str | None
    nvcc: str | None
    interfaces: tuple[NetworkDevice, ...]
    memlock: int | None
    """Bytes."""
    open_files: int | None
    huge_pages: str
    """The kernel's choice for shared memory: always, within_size, advise, never, ...; "" if it does not say."""
    threads: int = 1
    """With which torch computes in a process."""
    refused: tuple[str, ...] = ()
    """The system calls that groups need and this process may not make."""
    boot_id: bool = True
    """Whether the kernel has an identity."""
    topo_file: str = ""
    """What RINGREDUCE_TOPO_FILE is."""
    topo_error: str = ""
    """Why no group could be made with it."""


def look(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Facts:
    """This machine, as far as it can be read."""
    try:
        options = resolve(None)[0]
    except ValueError:  # `ringreduce info` says which variable is wrong
        options = resolve(None, {})[0]
    topo_file, topo_error = options.topo_file, ""
    try:
        if topo_file:
            described(topo_file)
    except TopologyError as error:
        topo_error = str(error)
    missing = compiled.why_not()
    driver, cuda_problem, gpus = (None, missing, ()) if missing else _look_at_gpus()
    cores = len(own_cores())
    return Facts(
        graph=probe(memory=tuning.measured_memory()),
        **_look_at_torch(missing),
        compiled=missing,
        compiler=_find_compiler(),
        memory=_why_no_memory(),
        memory_left=memory_left(sysfs, proc),
        bytes_per_rank=options.parts.channels * options.parts.channel_bytes + options.parts.mailbox_bytes,
        fetch=not missing and tuning.fetches(options),
        fetch_wanted=bool(options.fetch),
        yama=text_of(proc / "sys/kernel/yama/ptrace_scope"),
        cores=cores,
        cores_online=os.cpu_count() or cores,
        quota=_quota(sysfs, proc),
        cuda_driver=driver,
        cuda_problem=cuda_problem,
        gpus=gpus,
        gpu_kernels=kernels.origin(),
        nvcc=find_nvcc(),
        interfaces=_interfaces(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        huge_pages=_chosen(text_of(sysfs / "kernel/mm/transparent_hugepage/shmem_enabled")),
        refused=tuple(refused_calls()),
        boot_id=bool(boot_id()),
        topo_file=topo_file,
        topo_error=topo_error,
    )


def _look_at_torch(missing: str) -> dict[str, Any]:
    """What `Facts` has of torch, and of the NCCL that it may bring."""
    facts = {"torch": "", "distributed": False, "cuda": None, "cuda_devices": 0, "nccl": _find_nccl(missing)}
    with contextlib.suppress(ImportError):
        import torch

        facts |= {"torch": torch.__version__, "distributed": torch.distributed.is_available()}
        facts |= {"cuda": torch.version.cuda, "cuda_devices": torch.cuda.device_count()}
        facts |= {"threads": torch.get_num_threads()}
        with contextlib.suppress(Exception):  # builds without CUDA have no such functions
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            facts["nccl"] = f"{'.'.join(map(str, version))}, in torch"
    return facts


def _find_compiler() -> str | None:
    try:
        words = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quote is not closed
        return None
    return shutil.which(words[0] if words else "c++")


def _find_nccl(missing: str) -> str | None:
    """The NCCL that the engine opens, or where it cannot be asked, the first one that can be opened; else AMD's."""
    if not missing:
        from ringreduce import _C

        with contextlib.suppress(RingReduceError):
            return _C.nccl_version(nccl.places())
    for name in (*nccl.places(), "libnccl.so.2", "librccl.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None


def _why_no_memory() -> str:
    try:
        os.close(own_pidfd())
        file = above_streams(os.memfd_create("ringreduce doctor", os.MFD_CLOEXEC))
    except SystemFailure as error:
        return str(error)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(file, 4096)
        os.pwrite(file, b"1", 0)
    except OSError as error:
        return f"a memfd of 4096 bytes: {error.strerror}"
    finally:
        os.close(file)
    return ""


def memory_left(sysfs: Path, proc: Path) -> int | None:
    """The least of what the machine has available and of what is left in each cgroup above this process."""
    left = []
    if available := re.search(r"MemAvailable:\s+(\d+) kB", text_of(proc / "meminfo")):
        left.append(int(available[1]) * 1024)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _cgroups(sysfs, proc, "memory"):
            most, taken = text_of(folder / limit), text_of(folder / used)
            if most.isdecimal() and taken.isdecimal():
                left.append(int(most) - int(taken))
    return max(0, min(left)) if left else None


def _quota(sysfs: Path, proc: Path) -> float | None:
    """The least number of cores' worth of time that a cgroup above this process gets."""
    quotas = []
    for folder in _cgroups(sysfs, proc, "cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroups(sysfs: Path, proc: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroups that this process is in, of version 1 or 2, up to the root."""
    for line in text_of(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = sysfs / "fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _look_at_gpus() -> tuple[str | None, str, tuple[Gpu, ...]]:
    """The driver's CUDA, what is wrong, and the GPUs. Takes 2 MB of each, to see if other processes could have them."""
    from ringreduce import _C

    if problem := _C.cuda_unavailable():
        return None, problem, ()
    driver = None
    gpus = []
    try:
        driver = kernels.dotted(_C.cuda_version())
        infos = [_C.CudaDeviceInfo(ordinal) for ordinal in range(_C.CudaDeviceInfo.count())]
        for ordinal, info in enumerate(infos):
            shared_by = _C.GpuRegion(_C.CudaDevice(ordinal), 2 * 1024**2).shared_by
            accesses = tuple(info.can_access(other) for other in infos)
            gpus.append(Gpu(str(info), info.capability, info.has_stream_values, shared_by, accesses))
    except RingReduceError as error:
        problem = str(error)
    return driver, problem, tuple(gpus)


def _interfaces() -> tuple[NetworkDevice, ...]:
    """As groups see them: those of this process's network namespace."""
    try:
        found = sorted(local_interfaces(), key=lambda each: each.name)
    except OSError:
        return ()
    return tuple(NetworkDevice(each.name, each.up, (speed_of(each.name) or 0) * 8e-9, each.loopback) for each in found)


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _chosen(text: str) -> str:
    """ "always [madvise] never" -> "madvise"."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""
