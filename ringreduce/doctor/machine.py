"""What this machine lets ringreduce do, and why: `ringreduce doctor`. `examine` judges, `render` draws the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ringreduce.common.cores import crowded
from ringreduce.common.units import bytes_text
from ringreduce.doctor.facts import Facts, look
from ringreduce.gpu import kernels
from ringreduce.topology.graph import FABRIC, NodeKind

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "limited", "missing", "not used"]

OLDEST_TORCH = (2, 11)

LEAST_FILES = 1024
"""Open files below which groups may run out of them: each group of a rank holds one for every other rank."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what there is, why it matters here, and what would better it ("" if nothing)."""

    subject: str
    state: State
    what: str
    why: str
    fix: str = ""


def examine(facts: Facts | None = None) -> list[Finding]:
    """Everything that matters, about this machine if no facts are given."""
    facts = facts or look()
    return [
        Finding(subject, state, what, why, fix)
        for subject, why, judge in JUDGES
        for state, what, fix in filter(None, [judge(facts)])
    ]


def render(findings: list[Finding]) -> Table:
    """The findings as a table for a rich console."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "limited": "yellow", "missing": "red", "not used": "dim"}
    table = Table("", "state", "what there is", "why it matters", "what to do")
    for finding in findings:
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(finding.subject, state, *map(Text, (finding.what, finding.why, finding.fix)))
    return table


Judged = tuple[State, str, str]
"""What a judge says of its subject: the state, what there is, and what would better it ("" if nothing)."""
JUDGES: list[tuple[str, str, Callable[[Facts], Judged | None]]] = []
"""What each judges, why it matters here, and the judge."""


def _about(subject: str, why: str) -> Callable[[Callable[[Facts], Judged | None]], None]:
    return lambda judge: JUDGES.append((subject, why, judge))


@_about("torch", "ringreduce is a backend of torch.distributed")
def _torch(facts: Facts) -> Judged:
    if not facts.torch:
        return "missing", "none", "pip install torch; topo, plan and simulate need none"
    cuda = f"CUDA {facts.cuda}" if facts.cuda else "no CUDA"
    what = f"torch {facts.torch}, {cuda}"
    version = re.match(r"(\d+)\.(\d+)", facts.torch)
    if not facts.distributed:
        return "missing", f"{what}, without torch.distributed", "install torch from PyPI for Linux"
    if version is None or (int(version[1]), int(version[2])) < OLDEST_TORCH:
        return "limited", what, f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    if len(facts.graph.gpus) > facts.cuda_devices:
        seen = f"{what}; it sees {facts.cuda_devices} of {len(facts.graph.gpus)} GPUs"
        fix = "see torch.cuda.is_available()" if facts.cuda else "install a torch that is built for CUDA"
        return "limited", seen, fix
    return "ok", what, ""


@_about("compiled module", "makes groups and runs their calls; topo, plan and simulate do without")
def _compiled(facts: Facts) -> Judged:
    if not facts.compiled:
        return "ok", "loads", ""
    what, _, fix = facts.compiled.rpartition("; ")
    return "missing", what, fix


@_about("C++ compiler", "builds ringreduce from its source, and anew for another torch")
def _compiler(facts: Facts) -> Judged:
    if facts.compiler:
        return "ok", facts.compiler, ""
    return "limited", "none on PATH", "install g++ or clang++, or set CXX"


@_about("shared memory", "the ranks of a host move data through memory that they share (a memfd, not /dev/shm)")
def _shared_memory(facts: Facts) -> Judged:
    if facts.memory:
        what, _, fix = facts.memory.partition("; ")
        return "missing", what, fix or "allow memfd_create, and files of some MB: see seccomp, `ulimit -n`, `ulimit -f`"
    need = facts.bytes_per_rank * facts.cores
    each = f"{bytes_text(facts.bytes_per_rank, 1024)} for a rank and group"
    if facts.memory_left is None:
        return "ok", f"memfd works; {each}", ""
    what = f"memfd works; {bytes_text(facts.memory_left, 1024)} left, {each}"
    if facts.memory_left < need:
        fix = "raise the memory limit of the cgroup (Docker: --memory), or set RINGREDUCE_ENGINE=channel_bytes=1M"
        return "limited", what, fix
    return "ok", what, ""


@_about(
    "peers' memory",
    "ranks read one another's tensors where they lie; without, everything is copied through shared memory",
)
def _peer_memory(facts: Facts) -> Judged:
    if facts.fetch:
        return "ok", "can be read", ""
    if facts.compiled:
        return "limited", "not tried: the compiled module does not load", "see there"
    if not facts.fetch_wanted:
        return "limited", "not read, by RINGREDUCE_FETCH", "unset RINGREDUCE_FETCH"
    if facts.yama not in ("", "0"):
        fix = "sysctl kernel.yama.ptrace_scope=0, or run as root (Docker: --cap-add=SYS_PTRACE)"
        return "limited", f"kernel.yama.ptrace_scope is {facts.yama}", fix
    fix = "allow process_vm_readv (Docker: --cap-add=SYS_PTRACE, or another seccomp profile)"
    return "limited", "the kernel refuses it", fix


@_about("cores", "a rank that waits for a core delays all others; ranks on one NUMA node share its memory")
def _cores(facts: Facts) -> Judged:
    nodes = len(facts.graph.of_kind(NodeKind.CPU))
    what = f"{facts.cores} of {facts.cores_online} cores, {_count(nodes, 'NUMA node')}"
    if facts.quota is not None and facts.quota < facts.cores:
        fix = f"start at most {max(1, int(facts.quota))} ranks, or raise the limit (Docker: --cpus)"
        return "limited", f"{what}, time of {facts.quota:g} cores", fix
    if facts.cores < 2:
        return "limited", what, "allow more (taskset, or Docker: --cpuset-cpus)"
    return "ok", what, ""


@_about("threads", "where the ranks of a host compute with more threads than there are cores, all are slow")
def _threads(facts: Facts) -> Judged:
    wrong = crowded(2, facts.threads, facts.cores)
    return ("limited", *wrong) if wrong else ("ok", f"torch has {facts.threads} in a process", "")


def _notes_on_gpus(facts: Facts) -> list[str]:
    """Notes of the probe that are about GPUs; the rest is shown with the topology."""
    return [text for text in facts.graph.assumed if "GPU" in text or "NVLinks" in text or "XGMI" in text]


def _without(facts: Facts, state: State) -> State:
    """The state of what only GPUs need, and which is not there: a machine of CPUs does not use it."""
    return state if facts.graph.gpus or facts.gpus or _notes_on_gpus(facts) else "not used"


@_about("GPUs", "GPUs reduce in their own memory; ranks on CPUs need none")
def _gpus(facts: Facts) -> Judged:
    gpus, notes = facts.graph.gpus, _notes_on_gpus(facts)
    if not gpus:
        fix = "if there are any: "
        fix += "install the driver, show the GPUs to the container (Docker: --gpus all), `pip install nvidia-ml-py`"
        return _without(facts, "missing"), " ".join(["none", *notes]), fix
    models = Counter(gpu.detail.split(" at ")[0] or "GPU" for gpu in gpus)
    what = ", ".join(f"{count} x {model}" for model, count in models.items())
    if notes:
        return "limited", what, " ".join(notes)
    return "ok", what, ""


@_about("CUDA driver", "gives CUDA tensors to ringreduce; ranks on CPUs need none")
def _cuda_driver(facts: Facts) -> Judged:
    if facts.cuda_driver is None:
        what, _, fix = facts.cuda_problem.partition("; ")
        return _without(facts, "missing"), what, fix
    what = f"CUDA {facts.cuda_driver}, {_count(len(facts.gpus), 'GPU')}"
    if facts.cuda_problem:
        return "limited", f"{what}; {facts.cuda_problem}", "see `nvidia-smi`"
    if not facts.gpus:
        return "limited", what, "show the GPUs to the process (CUDA_VISIBLE_DEVICES)"
    return "ok", what, ""


@_about("GPU kernels", "reduce on GPUs; one that can load none of them keeps its whole group from it")
def _gpu_kernels(facts: Facts) -> Judged:
    what, fix = facts.gpu_kernels
    if not what:
        return _without(facts, "missing"), "neither built with the package nor an NVRTC", fix
    old = [f"{gpu.name} has {kernels.dotted(gpu.capability)}" for gpu in facts.gpus if gpu.capability < kernels.OLDEST]
    if old:
        fix = f"use GPUs of compute capability {kernels.dotted(kernels.OLDEST)} or more"
        return "limited", f"{what}; {', '.join(old)}", fix
    middle = [gpu.name for gpu in facts.gpus if gpu.capability < kernels.OLDEST_PREBUILT]
    if middle and "NVRTC" not in what:
        return "limited", f"{what}; too new for {', '.join(middle)}", kernels.FIX
    return "ok", what, ""


@_about(
    "GPUs' memory",
    "ranks read and write one another's GPUs; where any cannot, their CUDA tensors go through the host's memory",
)
def _gpu_memory(facts: Facts) -> Judged | None:
    """How ranks on GPUs come together; nothing without GPUs."""
    if not facts.gpus:
        return None
    closed = [gpu.name for gpu in facts.gpus if not gpu.shared_by]
    if closed:
        fix = (
            "see `ulimit -l`, and start the container with --ipc=host; ranks that are threads of one process need none"
        )
        return "limited", f"other processes cannot have that of {', '.join(closed)}", fix
    apart = [
        f"{number} of {other}"
        for number, gpu in enumerate(facts.gpus)
        for other, can in enumerate(gpu.accesses)
        if not can
    ]
    ways = ", ".join(sorted({gpu.shared_by for gpu in facts.gpus}))
    if apart:
        fix = "see `nvidia-smi topo -p2p r`; over PCIe, switch off ACS and the IOMMU"
        return "limited", f"no access from device {', '.join(apart)}", fix
    if without := [gpu.name for gpu in facts.gpus if not gpu.stream_values]:
        what = f"by {ways}; streams of {', '.join(without)} cannot wait for 64-bit values"
        return "limited", what, "a GPU for every rank: only ranks that share one need them"
    each = ", from each GPU to all" if len(facts.gpus) > 1 else ""
    return "ok", f"shared by {ways}{each}; streams wait for 64-bit values", ""


@_about("NVLink or XGMI", "rings and trees over these links are several times faster than over PCIe")
def _fabric(facts: Facts) -> Judged | None:
    """The GPUs' own links; nothing about fewer than two GPUs."""
    graph = facts.graph
    if len(graph.gpus) < 2:
        return None
    out = {
        gpu.name: sum(link.capacity for link in graph.following[gpu.name] if link.kind in FABRIC) for gpu in graph.gpus
    }
    without = [name for name, capacity in out.items() if not capacity]
    if len(without) == len(out):
        return "limited", "none: PCIe only", "nothing, if the GPUs have no such links"
    low, high = min(filter(None, out.values())), max(out.values())
    what = f"{low:g} GB/s" if low == high else f"{low:g} to {high:g} GB/s"
    if without:
        look = "see `nvidia-smi nvlink -s`, or `rocm-smi --showtopo` for AMD GPUs"
        return "limited", f"{what} a GPU, none for {', '.join(without)}", look
    return "ok", f"{what} from each GPU, each way", ""


@_about("topology file", "groups plan over the links that this file describes")
def _topo_file(facts: Facts) -> Judged | None:
    if facts.topo_error:
        return "missing", facts.topo_error, "correct RINGREDUCE_TOPO_FILE, or unset it"
    return ("ok", facts.topo_file, "") if facts.topo_file else None


@_about("NCCL", "carries collectives of CUDA tensors in torch, also between hosts (`cpu:ringreduce,cuda:nccl`)")
def _nccl(facts: Facts) -> Judged:
    if facts.nccl:
        return "ok", facts.nccl, ""
    fix = "install a torch that is built for CUDA, or libnccl2"
    return _without(facts, "limited"), "none", fix if facts.graph.gpus else ""


@_about("CUDA toolkit", "compiles kernels for GPUs; ranks on CPUs need none")
def _toolkit(facts: Facts) -> Judged:
    if facts.nvcc:
        return "ok", facts.nvcc, ""
    fix = "install the CUDA toolkit, or set CUDA_HOME"
    return _without(facts, "limited"), "no nvcc", fix if facts.graph.gpus else ""


@_about("network", "ranks meet at a store over TCP, and hosts are no faster than the network between them")
def _network(facts: Facts) -> Judged:
    up = [interface for interface in facts.interfaces if interface.up]
    speeds = [f"{one.name} ({one.gbit:g} Gbit/s)" if one.gbit else one.name for one in up]
    what = ", ".join(speeds) or "none is up"
    if not any(interface.loopback for interface in up):
        return "missing", f"{what}; no loopback", "ip link set lo up"
    if len(up) == 1:
        return "limited", f"{what}: this host alone", "set up an interface to reach other hosts"
    return "ok", what, ""


@_about("system calls", "groups need some that containers' and services' seccomp filters may refuse")
def _system_calls(facts: Facts) -> Judged | None:
    refused = ", ".join(facts.refused)
    return ("missing", f"refused: {refused}", f"let the seccomp filter allow {refused}") if refused else None


@_about(
    "host's identity", "ranks with one are on one host; if a process has ended, the others see it by its number there"
)
def _identity(facts: Facts) -> Judged | None:
    if facts.boot_id:
        return None
    fix = "if other hosts have its name, set RINGREDUCE_HOST_ID to a text of its own on each"
    return "limited", "no boot id in /proc/sys/kernel/random: the host's name stands for it", fix


@_about("locked memory", "RDMA and GPUs reach only memory that is locked; ranks on CPUs lock none")
def _memlock(facts: Facts) -> Judged:
    needed = bool(facts.graph.gpus) or any(nic.name.startswith("mlx") for nic in facts.graph.of_kind(NodeKind.NIC))
    what = "no limit" if facts.memlock is None else f"at most {bytes_text(facts.memlock, 1024)}"
    if facts.memlock is not None and needed:
        return "limited", what, "ulimit -l unlimited (Docker: --ulimit memlock=-1)"
    return "ok", what, ""


@_about("open files", "every group of a rank holds one for each other rank, to see it die")
def _open_files(facts: Facts) -> Judged:
    what = "no limit" if facts.open_files is None else f"at most {facts.open_files}"
    if facts.open_files is not None and facts.open_files < LEAST_FILES:
        return "limited", what, f"ulimit -n {LEAST_FILES} or more (Docker: --ulimit nofile)"
    return "ok", what, ""


@_about("huge pages", "large tensors in shared memory may miss the TLB less")
def _huge_pages(facts: Facts) -> Judged | None:
    if not facts.huge_pages:
        return None
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if facts.huge_pages in ("always", "within_size", "force"):
        return "ok", f"{facts.huge_pages}, for shared memory", ""
    return "limited", f"{facts.huge_pages}, for shared memory", f"echo within_size > {path}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
