"""The doctor: what it says of machines that the tests make up, what it reads of one, and once all of it for real."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from stand_in import build

from ringreduce.doctor import facts as facts_module
from ringreduce.doctor.facts import Facts, Gpu, NetworkDevice, look
from ringreduce.doctor.machine import examine, render
from ringreduce.gpu import kernels
from ringreduce.network.interfaces import Interface
from ringreduce.topology.graph import LinkGraph, Node, NodeKind
from ringreduce.topology.presets import preset

GB = 1024**3
LOOPBACK = NetworkDevice("lo", up=True, gbit=0, loopback=True)
ETHERNET = NetworkDevice("eth0", up=True, gbit=25)
CORES = LinkGraph("cores", (Node("CPU0", NodeKind.CPU), Node("CORE0", NodeKind.CORE)), ())

# In a machine of two.
GPU = Gpu("device 0 (H100)", (9, 0), stream_values=True, shared_by="IPC handles", accesses=(True, True))
GPUS = (GPU, replace(GPU, name="device 1 (H100)"))

# A machine for which there is nothing to do.
FACTS = Facts(
    graph=preset("dgx1-v100"),
    torch="2.13.0+cu128",
    compiled="",
    distributed=True,
    cuda="12.8",
    cuda_devices=8,
    compiler="/usr/bin/c++",
    memory="",
    memory_left=400 * GB,
    bytes_per_rank=14 * 1024**2,
    fetch=True,
    fetch_wanted=True,
    yama="0",
    cores=80,
    cores_online=80,
    quota=None,
    cuda_driver="13.0",
    cuda_problem="",
    gpus=GPUS,
    gpu_kernels=("built with the package", ""),
    nccl="2.27.3, in torch",
    nvcc="/usr/local/cuda/bin/nvcc",
    interfaces=(LOOPBACK, ETHERNET),
    memlock=None,
    open_files=1024,
    huge_pages="always",
)


def finding(subject, **changes):
    (found,) = [finding for finding in examine(replace(FACTS, **changes)) if finding.subject == subject]
    return found


def test_a_machine_without_fault():
    findings = examine(FACTS)
    assert {finding.state for finding in findings} == {"ok"}
    assert all(finding.what and finding.why and not finding.fix for finding in findings)
    assert finding("GPUs").what == "8 x V100"
    assert finding("NVLink or XGMI").what == "150 GB/s from each GPU, each way"
    assert finding("network").what == "lo, eth0 (25 Gbit/s)"
    assert finding("cores").what == "80 of 80 cores, 2 NUMA nodes"
    assert finding("locked memory").what == "no limit"
    assert finding("CUDA driver").what == "CUDA 13.0, 2 GPUs"
    assert finding("GPUs' memory").what.startswith("shared by IPC handles, from each GPU to all")


@pytest.mark.parametrize(
    "subject, state, says, fix, changes",
    [
        ("torch", "missing", "without torch.distributed", "from PyPI", {"distributed": False}),
        ("torch", "limited", "torch 2.9.1", "torch 2.11 or newer", {"torch": "2.9.1"}),
        ("torch", "limited", "no CUDA; it sees 0 of 8 GPUs", "built for CUDA", {"cuda": None, "cuda_devices": 0}),
        ("torch", "limited", "it sees 3 of 8 GPUs", "is_available", {"cuda_devices": 3}),
        ("C++ compiler", "limited", "none on PATH", "g++", {"compiler": None}),
        ("shared memory", "missing", "no pidfd", "use Linux 5.3", {"memory": "no pidfd; use Linux 5.3"}),
        ("shared memory", "missing", "memfd_create: no", "seccomp", {"memory": "memfd_create: no"}),
        ("shared memory", "limited", "1 GB left", "--memory", {"memory_left": GB}),
        ("peers' memory", "limited", "ptrace_scope is 1", "ptrace_scope=0", {"fetch": False, "yama": "1"}),
        ("peers' memory", "limited", "the kernel refuses", "process_vm_readv", {"fetch": False, "yama": ""}),
        ("peers' memory", "limited", "RINGREDUCE_FETCH", "unset", {"fetch": False, "fetch_wanted": False}),
        ("cores", "limited", "time of 2.5 cores", "at most 2 ranks", {"quota": 2.5}),
        ("cores", "limited", "1 of 80 cores", "taskset", {"cores": 1}),
        ("threads", "limited", "2 ranks x 80 threads on 80 cores", "OMP_NUM_THREADS=40", {"threads": 80}),
        ("system calls", "missing", "refused: ioctl", "allow ioctl", {"refused": ("ioctl",)}),
        ("host's identity", "limited", "no boot id", "RINGREDUCE_HOST_ID", {"boot_id": False}),
        ("GPUs", "missing", "none", "--gpus all", {"graph": CORES}),
        ("GPUs", "missing", "shows none", "driver", {"graph": replace(CORES, assumed=("It shows none of 4 GPUs.",))}),
        ("GPUs", "limited", "8 x V100", "NVLinks are", {"graph": replace(FACTS.graph, assumed=("NVLinks are ...",))}),
        ("CUDA driver", "missing", "no libcuda", "install it",
         {"cuda_driver": None, "gpus": (), "cuda_problem": "no libcuda; install it"}),
        ("CUDA driver", "limited", "CUDA 13.0, 0 GPUs", "CUDA_VISIBLE_DEVICES", {"gpus": ()}),
        ("CUDA driver", "limited", "2 GPUs; out of memory", "nvidia-smi", {"cuda_problem": "out of memory"}),
        ("GPU kernels", "missing", "nor an NVRTC", "pip install", {"gpu_kernels": ("", "pip install it")}),
        ("GPU kernels", "limited", "device 0 (H100) has 6.1", "7.0 or more",
         {"gpus": (replace(GPU, capability=(6, 1)),)}),
        ("GPU kernels", "limited", "too new for device 0", "nvidia-cuda-nvrtc",
         {"gpus": (replace(GPU, capability=(7, 5)),)}),
        ("GPUs' memory", "limited", "cannot have that of device 1", "--ipc=host",
         {"gpus": (GPU, replace(GPUS[1], shared_by=""))}),
        ("GPUs' memory", "limited", "no access from device 1 of 0", "ACS",
         {"gpus": (GPU, replace(GPUS[1], accesses=(False, True)))}),
        ("GPUs' memory", "limited", "streams of device 0 (H100) cannot", "a GPU for every rank",
         {"gpus": (replace(GPU, stream_values=False), GPUS[1])}),
        ("NVLink or XGMI", "limited", "none: PCIe only", "no such links",
         {"graph": preset("pcie-4"), "cuda_devices": 4}),
        ("NCCL", "limited", "none", "libnccl2", {"nccl": None}),
        ("CUDA toolkit", "limited", "no nvcc", "CUDA_HOME", {"nvcc": None}),
        ("network", "missing", "eth0 (25 Gbit/s); no loopback", "lo up", {"interfaces": (ETHERNET,)}),
        ("network", "missing", "none is up", "lo up", {"interfaces": (replace(LOOPBACK, up=False),)}),
        ("network", "limited", "lo: this host alone", "interface", {"interfaces": (LOOPBACK,)}),
        ("locked memory", "limited", "at most 8 MB", "ulimit -l", {"memlock": 8 * 1024**2}),
        ("open files", "limited", "at most 256", "ulimit -n", {"open_files": 256}),
        ("huge pages", "limited", "never", "shmem_enabled", {"huge_pages": "never"}),
    ],
)  # fmt: skip
def test_every_fault_has_a_finding_and_a_fix(subject, state, says, fix, changes):
    found = finding(subject, **changes)
    assert found.state == state
    assert says in found.what
    assert fix in found.fix


def test_one_fault_is_one_finding():
    faults = examine(replace(FACTS, memlock=0, nccl=None))
    assert {finding.subject for finding in faults if finding.state != "ok"} == {"locked memory", "NCCL"}


def test_gpus_that_are_off_the_fabric_are_named():
    graph = FACTS.graph
    left = tuple(link for link in graph.links if "GPU5" not in (link.src, link.dst) or "PCIe" in link.src + link.dst)
    found = finding("NVLink or XGMI", graph=replace(graph, links=left))
    assert found.state == "limited"
    assert found.what == "100 to 150 GB/s a GPU, none for GPU5"


def test_a_machine_of_cores_needs_nothing_of_gpus():
    findings = {one.subject: one for one in examine(replace(FACTS, graph=CORES, nccl=None, nvcc=None, memlock=65536))}
    assert "NVLink or XGMI" not in findings
    assert findings["locked memory"].state == "ok"
    assert findings["NCCL"].fix == findings["CUDA toolkit"].fix == ""


def test_what_the_kernel_does_not_say_is_not_judged():
    findings = {finding.subject: finding for finding in examine(replace(FACTS, huge_pages="", memory_left=None))}
    assert "huge pages" not in findings
    assert findings["shared memory"].state == "ok"


def test_nvrtc_serves_gpus_that_are_too_old_for_what_was_built():
    old = (replace(GPU, capability=(7, 5)),)
    assert finding("GPU kernels", gpus=old, gpu_kernels=("built, else compiled by NVRTC 13.0", "")).state == "ok"


def test_the_table_has_every_word():
    findings = examine(replace(FACTS, quota=1.0, fetch=False, yama="[red]2"))
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(findings))
    text = console.export_text()
    for finding in findings:
        assert all(word in text for word in (finding.subject, finding.state, finding.what, finding.why, finding.fix))


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")


@pytest.mark.parametrize(
    "cgroup, files, left, quota",
    [
        ("0::/", {}, 8 * GB, None),
        ("0::/a/b", {"a/memory.max": 3 * GB, "a/memory.current": GB, "a/b/memory.max": "max",
                     "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 2 * GB, 1.5),
        ("0::/../..", {"memory.max": GB, "memory.current": 2 * GB}, 0, None),
        ("5:cpu,cpuacct:/c\n4:memory:/m\n0::/", {
            "memory/m/memory.limit_in_bytes": 4 * GB, "memory/m/memory.usage_in_bytes": GB,
            "cpu/c/cpu.cfs_quota_us": 50000, "cpu/c/cpu.cfs_period_us": 100000, "cpu/cpu.cfs_quota_us": -1},
         3 * GB, 0.5),
        ("nonsense", {"memory.max": 1}, 8 * GB, None),
    ],
)  # fmt: skip
def test_limits_of_cgroups_are_found(tmp_path, cgroup, files, left, quota):
    write(tmp_path / "proc", {"self/cgroup": cgroup, "meminfo": f"MemAvailable:   {8 * GB // 1024} kB"})
    write(tmp_path / "sys/fs/cgroup", files)
    facts = look(tmp_path / "sys", tmp_path / "proc")
    assert (facts.memory_left, facts.quota) == (left, quota)


def test_kernel_settings_are_read(tmp_path):
    write(
        tmp_path,
        {
            "proc/sys/kernel/yama/ptrace_scope": 1,
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] never",
        },
    )
    facts = look(tmp_path / "sys", tmp_path / "proc")
    assert (facts.yama, facts.huge_pages) == ("1", "within_size")


def test_interfaces_are_those_that_groups_see(monkeypatch):
    """The kernel is asked by netlink: /sys may show another network namespace's."""
    there = [Interface("lo", 1, (), loopback=True), Interface("eth1", 3, (), up=False), Interface("eth0", 2, ())]
    monkeypatch.setattr(facts_module, "local_interfaces", lambda: there)
    monkeypatch.setattr(facts_module, "speed_of", {"eth0": 12.5e9}.get)
    assert look().interfaces == (NetworkDevice("eth0", True, 100), NetworkDevice("eth1", False, 0), LOOPBACK)


def test_a_machine_of_cores_does_not_use_what_gpus_need():
    changes = {"graph": CORES, "gpus": (), "nccl": None, "nvcc": None, "cuda_driver": None, "cuda_problem": "none; x"}
    found = examine(replace(FACTS, **changes, gpu_kernels=("", "pip install it")))
    unused = {one.subject for one in found if one.state == "not used"}
    assert unused == {"GPUs", "CUDA driver", "GPU kernels", "NCCL", "CUDA toolkit"}
    assert not [one for one in found if one.state == "missing"]


def test_nccl_is_the_one_that_the_engine_opens(monkeypatch, tmp_path):
    from ringreduce import _C

    library = tmp_path / "libnccl.so.2"
    subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(library)], check=True)
    monkeypatch.setattr(facts_module.nccl, "places", lambda: [str(library)])
    monkeypatch.setattr(_C, "nccl_version", lambda places: "2.27.3" if places == [str(library)] else "")
    assert facts_module._find_nccl("") == "2.27.3"
    assert facts_module._find_nccl("the compiled module does not load") == str(library)


@pytest.mark.parametrize("text", [" ", "'", "nosuch -x", ""])
def test_a_compiler_that_is_none(text, monkeypatch):
    monkeypatch.setenv("CXX", text)
    assert (look().compiler is None) == (text in ("'", "nosuch -x"))


def test_a_system_that_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ENGINE", "slices=many")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    facts = look(tmp_path, tmp_path)
    assert (facts.memory_left, facts.quota, facts.huge_pages, facts.compiler) == (None, None, "", None)
    assert examine(facts)


def test_this_machine():
    findings = examine()
    subjects = [finding.subject for finding in findings]
    assert len(subjects) == len(set(subjects)) >= 11
    assert all(finding.what and finding.why for finding in findings)
    (memory,) = [finding for finding in findings if finding.subject == "shared memory"]
    assert memory.state != "missing"


def test_the_topology_file(monkeypatch, tmp_path):
    assert not [found for found in examine(FACTS) if found.subject == "topology file"]
    assert finding("topology file", topo_file="dgx1-v100").state == "ok"
    monkeypatch.setenv("RINGREDUCE_TOPO_FILE", str(tmp_path / "missing"))
    (found,) = [found for found in examine(look()) if found.subject == "topology file"]
    assert found.state == "missing" and "neither a file nor a preset" in found.what


def test_kernels_come_from_the_build_or_from_nvrtc(monkeypatch, tmp_path):
    def origin(nvrtc, *files):
        for path in tmp_path.iterdir():
            path.unlink()
        for name in files:
            (tmp_path / name).write_bytes(b"1")
        kernels._fatbin.cache_clear()
        monkeypatch.setattr(kernels, "_nvrtc_or_reason", lambda: nvrtc)
        return kernels.origin()

    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    nvrtc = object.__new__(kernels.Nvrtc)
    nvrtc.version = "13.0"
    both = ("a.cu", "a.fatbin", "b.cu", "b.fatbin")
    try:
        assert origin("none", *both) == ("built with the package, for compute capability 8.0 and newer", "")
        assert origin("none", *both[:3]) == ("", kernels.FIX) == origin("none")
        assert origin(nvrtc, *both)[0].endswith("newer, else compiled by NVRTC 13.0 at first use")
        assert origin(nvrtc, "a.cu") == ("compiled by NVRTC 13.0 at first use", "")
    finally:
        kernels._fatbin.cache_clear()


def facts_of_gpus(**settings):
    """What the doctor sees where the stand-in for the driver plays a machine, in a process of its own."""
    code = "from ringreduce.doctor.facts import look; from dataclasses import asdict; import json; f = asdict(look());"
    code += "print(json.dumps([f['cuda_driver'], f['cuda_problem'], f['gpus']]))"
    environment = {**os.environ, **settings, "PYTHONPATH": str(build.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=100
    )
    driver, problem, gpus = json.loads(done.stdout)
    found = [Gpu(**{**gpu, "capability": tuple(gpu["capability"]), "accesses": tuple(gpu["accesses"])}) for gpu in gpus]
    return driver, problem, tuple(found)


@pytest.fixture(scope="module")
def libcuda():
    return str(build.build(build.ROOT / "build/stand_in") / "libcuda.so.1")


@pytest.mark.parametrize(
    "machine, shared_by, others",
    [
        ({}, "IPC handles", True),
        ({"RINGREDUCE_STAND_IN_NO_PEER": "1"}, "IPC handles", False),
        ({"RINGREDUCE_STAND_IN_NO_IPC": "1"}, "file descriptors", True),
        ({"RINGREDUCE_STAND_IN_NO_IPC": "1", "RINGREDUCE_STAND_IN_NO_VMM": "1"}, "", True),
    ],
)
def test_gpus_are_looked_at(libcuda, machine, shared_by, others):
    driver, problem, gpus = facts_of_gpus(RINGREDUCE_LIBCUDA=libcuda, **machine)
    assert driver and not problem
    assert [gpu.shared_by for gpu in gpus] == [shared_by] * 2
    assert [gpu.accesses for gpu in gpus] == [(True, others), (others, True)]
    assert all(gpu.stream_values and gpu.capability == (9, 0) for gpu in gpus)
    states = {found.subject: found.state for found in examine(replace(FACTS, gpus=gpus))}
    assert states["GPUs' memory"] == ("ok" if shared_by and others else "limited")


def test_a_driver_that_is_not_there(tmp_path):
    driver, problem, gpus = facts_of_gpus(RINGREDUCE_LIBCUDA=str(tmp_path / "libcuda.so.1"))
    assert (driver, gpus) == (None, ())
    assert "no CUDA driver" in problem and "; install the NVIDIA driver" in problem


def test_a_gpu_that_fails_is_told(libcuda):
    driver, problem, _ = facts_of_gpus(RINGREDUCE_LIBCUDA=libcuda, RINGREDUCE_STAND_IN_MEMORY="1")
    assert driver and "OUT_OF_MEMORY" in problem
