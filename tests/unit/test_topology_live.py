"""This machine, read from an NVML and a /sys that the tests make up, and once from the real ones."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringreduce.topology import live
from ringreduce.topology.graph import LinkKind, NodeKind
from ringreduce.topology.group_plans import graph_of_gpus, plan_group
from ringreduce.topology.hardware import System, look, this_system
from ringreduce.topology.live import decide, probe
from ringreduce.topology.presets import CUBE_MESH_V100, preset
from ringreduce.topology.rates import Assumed


class Sysfs:
    """A folder like /sys, with as much in it as a test puts there."""

    def __init__(self, root):
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def pci(self, path, speed=8.0, width=16, numa=0, **more):
        """A device at a path such as "0000:00:02.0/0000:04:00.0"; those above it must be there."""
        bus = path.split("/")[-1]
        folder = f"devices/pci0000:{path[5:7]}/{path}"
        values = {"max_link_speed": f"{speed} GT/s PCIe", "current_link_width": width, "numa_node": numa, **more}
        for name, value in values.items():
            self.write(f"{folder}/{name}", value)
        (self.root / "bus/pci/devices" / bus).symlink_to(self.root / folder)
        return folder

    def switch(self, root_port, number, below, **more):
        """A switch under a root port with so many downstream ports; their paths."""
        up = f"{root_port}/0000:{number:02x}:00.0"
        self.pci(root_port, **more)
        self.pci(up, **more)
        ports = [f"{up}/0000:{number + 1:02x}:{port:02x}.0" for port in range(below)]
        for port in ports:
            self.pci(port, **more)
        return ports

    def interface(self, kind, name, device, **files):
        for file, text in files.items():
            self.write(f"class/{kind}/{name}/{file.replace('__', '/')}", text)
        (self.root / f"class/{kind}/{name}").mkdir(parents=True, exist_ok=True)
        (self.root / f"class/{kind}/{name}/device").symlink_to(self.root / device)

    def numa(self, *nodes):
        for number, cores in enumerate(nodes):
            self.write(f"devices/system/node/node{number}/cpulist", cores)


class Nvml:
    """As much of pynvml as is asked; a GPU is its bus id, and by link number the type and bus id at the other end."""

    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, gpus, name="Tesla V100-SXM2-16GB", capability=(7, 0), broken=()):
        self.gpus = gpus
        self.name = name
        self.capability = capability
        self.broken = broken
        self.running = 0

    def __getattribute__(self, function):
        if function.startswith("nvml") and function in self.broken:
            raise AttributeError(function)
        return object.__getattribute__(self, function)

    def nvmlInit(self):
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=f"0000{gpu['bus'].upper()}".encode())

    def nvmlDeviceGetName(self, gpu):
        return self.name.encode()

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu['bus'][5:7]}cafe"

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return self.capability

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu):
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu):
        return 8

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= len(gpu["links"]):
            raise RuntimeError("Not Supported")
        return int(gpu["links"][link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return gpu["links"][link][0]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(busId=gpu["links"][link][1])


TO_GPU, TO_NPU, TO_SWITCH, TO_UNKNOWN = 0, 1, 2, 255


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def system(sysfs, **more):
    """A system with nothing but a folder like /sys."""
    nowhere = sysfs.root.parent
    return System(**{"sysfs": sysfs.root, "proc": nowhere / "proc", "dev": nowhere / "dev", **more})


def shape(graph):
    return {ends: (link.kind, link.lanes, round(link.capacity, 6)) for ends, link in graph.by_ends.items()}


def dgx1(sysfs):
    """A DGX-1 with V100s: its folder like /sys, and its NVML."""
    buses = []
    for number in range(4):
        numa = number // 2
        root_port = f"0000:{0x80 * numa:02x}:0{2 + number % 2}.0"
        ports = sysfs.switch(root_port, number * 0x10 + 4, 3, numa=numa)
        nic = sysfs.pci(f"{ports[0]}/0000:{number * 0x10 + 6:02x}:00.0", numa=numa)
        sysfs.interface("infiniband", f"mlx5_{number}", nic, ports__1__rate="100 Gb/sec (4X EDR)")
        sysfs.interface("net", f"ib{number}", nic, speed=56000)
        for at, port in enumerate(ports[1:]):
            bus = f"0000:{number * 0x10 + 7 + at:02x}:00.0"
            sysfs.pci(f"{port}/{bus}", numa=numa, current_link_speed="2.5 GT/s PCIe")
            buses.append(bus)
    sysfs.numa("0-19,40-59", "20-39,60-79")
    sysfs.interface("net", "lo", "devices/virtual/net/lo")
    gpus = [{"bus": bus, "links": []} for bus in buses]
    for lanes, pairs in CUBE_MESH_V100.items():
        for one, other in itertools.chain(pairs, ((b, a) for a, b in pairs)):
            gpus[one]["links"] += [(TO_GPU, f"0000{buses[other]}")] * lanes
    return Nvml(gpus)


def test_a_dgx1_looks_as_its_preset(sysfs):
    nvml = dgx1(sysfs)
    assume = Assumed(smp=20)
    graph = decide(look(system(sysfs, nvml=nvml)), assume)
    assert shape(graph) == shape(preset("dgx1-v100", assume))
    assert graph.name == "this machine: 8 x Tesla V100-SXM2-16GB"
    assert graph.assumed == ()
    assert nvml.running == 0
    expected = {node.name: (node.kind, node.index, node.numa) for node in preset("dgx1-v100").nodes}
    assert {node.name: (node.kind, node.index, node.numa) for node in graph.nodes} == expected
    assert graph.by_ends["mlx5_0", "PCIe0"].source == "port of 100 Gbit/s"


@pytest.mark.parametrize(
    "visible, order", [("0,3,5", [0, 3, 5]), ("5,0,3", [5, 0, 3]), (" 0, GPU-18cafe ,5", [0, 3, 5])]
)
def test_only_visible_gpus_are_there_in_that_order(sysfs, visible, order):
    nvml = dgx1(sysfs)
    graph = decide(look(system(sysfs, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": visible})))
    assert [gpu.name for gpu in graph.gpus] == [f"GPU{index}" for index in order]
    assert {ends for ends, link in graph.by_ends.items() if link.kind is LinkKind.NVLINK} == {
        ("GPU0", "GPU3"), ("GPU3", "GPU0")
    }  # fmt: skip
    assert shape(graph)["GPU0", "GPU3"] == (LinkKind.NVLINK, 2, 50)


@pytest.mark.parametrize(
    "visible, left, said",
    [
        ("1,9,2", ["GPU1"], "'9', which is no other GPU"),
        ("2,2", ["GPU2"], "'2', which is no other GPU"),
        ("GPU-", [], "'GPU-', which is no other GPU"),
        ("", [], "none of 8"),
        ("-1", [], "none of 8"),
    ],
)
def test_what_cuda_does_not_show_is_not_there(sysfs, visible, left, said):
    nvml = dgx1(sysfs)
    graph = decide(look(system(sysfs, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": visible})))
    assert [gpu.name for gpu in graph.gpus] == left
    assert any(said in text for text in graph.assumed)


def test_a_groups_gpus_are_found_by_their_bus_ids(sysfs, monkeypatch):
    nvml = dgx1(sysfs)
    shown = system(sysfs, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(live, "this_system", lambda: shown)
    machine = live.probe_all()
    buses = [gpu["bus"].upper() for gpu in nvml.gpus]  # as the driver writes them
    graph = graph_of_gpus(machine, [buses[3], buses[0]])
    assert [gpu.name for gpu in graph.gpus] == ["GPU3", "GPU0"]
    assert plan_group(graph, "a test").ranks == ("GPU3", "GPU0")
    assert graph_of_gpus(machine, [buses[3], "0000:FF:00.0"]) is None
    assert graph_of_gpus(machine, [buses[3], buses[3]]) is None


def test_nothing_tells_of_all_gpus_without_nvml(sysfs, monkeypatch):
    monkeypatch.setattr(live, "this_system", lambda: system(sysfs))
    assert live.probe_all() is None


def test_gpus_of_several_models_are_numbered_otherwise_by_cuda(sysfs, monkeypatch):
    nvml = dgx1(sysfs)
    monkeypatch.setattr(Nvml, "nvmlDeviceGetName", lambda self, gpu: "Tesla " + ("P100", "V100")[gpu is nvml.gpus[0]])
    for order, said in (({}, True), ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False)):
        graph = decide(look(system(sysfs, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "1,0", **order})))
        assert any("CUDA_DEVICE_ORDER" in text for text in graph.assumed) == said


def test_links_to_switches_are_one_switch(sysfs):
    buses = ["0000:0f:00.0", "0000:2d:00.0"]
    for bus in buses:
        sysfs.pci(bus, speed=32.0)
    links = [(TO_SWITCH, b"00000000:1c:00.0")] * 5 + [(TO_SWITCH, b"00000000:1b:00.0")] * 12 + [(TO_UNKNOWN, b"")]
    nvml = Nvml([{"bus": bus, "links": links} for bus in buses], "NVIDIA H100 80GB HBM3")
    graph = decide(look(system(sysfs, nvml=nvml)))
    assert shape(graph)["GPU1", "NVSwitch0"] == shape(graph)["NVSwitch0", "GPU0"] == (LinkKind.NVLINK, 18, 450)
    assert [text for text in graph.assumed if "NVLinks of GPU1" in text] != []
    assert shape(graph)["GPU0", "CPU0"][2] == pytest.approx(63.015, abs=1e-3)


def test_odd_ends_of_links_are_left_out(sysfs):
    bus = "0000:0f:00.0"
    sysfs.pci(bus)
    links = [(TO_GPU, bus), (TO_GPU, "0000:77:00.0"), (TO_NPU, "0004:05:00.0"), None]
    graph = decide(look(system(sysfs, nvml=Nvml([{"bus": bus, "links": links}]))))
    assert {link.kind for link in graph.links} == {LinkKind.PCIE}
    assert [text for text in graph.assumed if "lead to itself" in text] != []


@pytest.mark.parametrize(
    "name, capability, assume, rate, said",
    [
        ("NVIDIA RTX A6000", (8, 6), Assumed(), 14.0625, False),
        ("Graphics Device", (8, 0), Assumed(), 25, False),
        ("Graphics Device", (10, 0), Assumed(), 50, False),
        ("Graphics Device", (77, 7), Assumed(), 25, True),
        ("Graphics Device", (77, 7), Assumed(nvlink=31), 31, False),
        ("Graphics Device", (77, 7), Assumed(gpu="b200"), 50, False),
    ],
)
def test_the_rate_of_nvlinks_follows_from_the_model(sysfs, name, capability, assume, rate, said):
    buses = ["0000:0f:00.0", "0000:2d:00.0"]
    for bus in buses:
        sysfs.pci(bus)
    gpus = [{"bus": bus, "links": [(TO_GPU, other)]} for bus, other in (buses, reversed(buses))]
    graph = decide(look(system(sysfs, nvml=Nvml(gpus, name, capability))), assume)
    assert shape(graph)["GPU0", "GPU1"] == (LinkKind.NVLINK, 1, rate)
    assert any("--nvlink-gbps" in text for text in graph.assumed) == said


def test_the_speed_of_pcie_is_what_both_ends_can_do(sysfs):
    port = "0000:00:01.0"
    sysfs.pci(port, speed=8.0)
    sysfs.pci(f"{port}/0000:0f:00.0", speed=32.0, width=8)
    nvml = Nvml([{"bus": "0000:0f:00.0", "links": []}])
    link = decide(look(system(sysfs, nvml=nvml))).by_ends["GPU0", "CPU0"]
    assert link.capacity == pytest.approx(7.877, abs=1e-3)
    assert link.source == "PCIe, 8 GT/s x8"
    assert decide(look(system(sysfs, nvml=nvml)), Assumed(pcie=6)).by_ends["GPU0", "CPU0"].capacity == 6


@pytest.mark.parametrize("files", [{}, {"speed": "Unknown", "width": 0, "numa": -1}, {"width": 255, "numa": "x"}])
def test_what_sysfs_does_not_tell_is_asked_of_nvml(sysfs, files):
    if files:
        sysfs.pci("0000:0f:00.0", **files)
    sysfs.numa("0-3", "4-7")
    nvml = Nvml([{"bus": "0000:0f:00.0", "links": []}])
    graph = decide(look(system(sysfs, nvml=nvml)))
    assert graph.by_ends["GPU0", "CPU0"].source == "PCIe 4.0 x8, says NVML"
    assert any("GPU0" in text and "CPU0 is assumed" in text for text in graph.assumed)


FUNCTIONS = [name for name in vars(Nvml) if name.startswith("nvml")]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_nvml_lacks_end_nothing(sysfs, function):
    nvml = dgx1(sysfs)
    nvml.broken = (function,)
    graph = decide(look(system(sysfs, nvml=nvml)))
    assert graph.gpus or graph.of_kind(NodeKind.CORE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_nvml_that_fail_end_nothing(sysfs, monkeypatch, function):
    def fail(self, *arguments):
        raise RuntimeError("Unknown Error")

    nvml = dgx1(sysfs)
    monkeypatch.setattr(Nvml, function, fail)
    graph = decide(look(system(sysfs, nvml=nvml)))
    assert graph.gpus or graph.of_kind(NodeKind.CORE)


def test_gpus_that_do_not_answer_are_left_out_and_said(sysfs):
    nvml = dgx1(sysfs)
    nvml.gpus[2] = {"bus": "fallen off the bus", "links": []}
    graph = decide(look(system(sysfs, nvml=nvml)))
    assert [gpu.index for gpu in graph.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert "GPU 2 does not answer NVML; it is left out." in graph.assumed


@pytest.mark.parametrize("vendor, kind, device, said", [("0x10de", "0x030200", "nvidiactl", "nvidia-ml-py"),
                                                        ("0x1002", "0x038000", "kfd", "rocm-smi")])  # fmt: skip
def test_without_nvml_gpus_are_those_whose_driver_is_at_hand(sysfs, vendor, kind, device, said):
    for number, what in enumerate((kind, kind, "0x060400")):
        sysfs.pci(f"0000:00:0{number}.0", vendor=vendor, **{"class": what})
    here = system(sysfs)
    assert look(here).gpus == ()
    here.dev.mkdir()
    (here.dev / device).touch()
    graph = decide(look(here))
    assert [gpu.detail for gpu in graph.gpus] == ["at 0000:00:00.0", "at 0000:00:01.0"]
    assert any(said in text for text in graph.assumed)


def test_cores_are_at_the_memory_of_their_numa_node(sysfs):
    sysfs.numa("0-3", "4-7", "")
    graph = decide(look(system(sysfs, cores=frozenset({2, 3, 6}), memory=12.5)), Assumed(smp=30))
    assert shape(graph) == {
        (one, other): (kind, 1, rate)
        for ends, kind, rate in (
            (("CORE2", "CPU0"), LinkKind.MEMORY, 12.5),
            (("CORE3", "CPU0"), LinkKind.MEMORY, 12.5),
            (("CORE6", "CPU1"), LinkKind.MEMORY, 12.5),
            (("CPU0", "CPU1"), LinkKind.SMP, 30),
        )
        for one, other in (ends, reversed(ends))
    }
    assert graph.name == "this machine: 3 cores" and graph.assumed == ()


def test_numa_nodes_without_cores_of_ours_are_not_there(sysfs):
    sysfs.numa("0-3", "4-7")
    graph = decide(look(system(sysfs, cores=frozenset({5}), memory=12.5)))
    assert [node.name for node in graph.nodes] == ["CPU1", "CORE5"]


def test_memory_that_was_not_measured_is_assumed(sysfs):
    graph = decide(look(system(sysfs, cores=frozenset({0, 1}))))
    assert {link.capacity for link in graph.links} == {live.MEMORY}
    assert any("`ringreduce tune`" in text for text in graph.assumed)


def test_cpus_are_known_by_their_model(sysfs):
    sysfs.numa("0", "1")
    here = system(sysfs, cores=frozenset({0, 1}))
    here.proc.mkdir()
    (here.proc / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\n")
    graph = decide(look(here))
    assert "Zen 3" in graph.by_ends["CPU0", "CPU1"].source
    assert not any("--smp-gbps" in text for text in graph.assumed)


def test_nics_have_ports_and_slots(sysfs):
    sysfs.numa("0", "1")
    fast = sysfs.pci("0000:01:00.0", speed=16.0, numa=1)
    virtual = sysfs.pci("0000:02:00.0", max_link_speed="")
    silent = sysfs.pci("0000:03:00.0", max_link_speed="")
    sysfs.interface("net", "eth0", fast, speed=25000)
    sysfs.write(f"{virtual}/virtio1/status", "")
    sysfs.interface("net", "eth1", f"{virtual}/virtio1", speed=10000)
    sysfs.interface("net", "eth2", silent, speed=-1)
    sysfs.interface("net", "narrow", sysfs.pci("0000:04:00.0", speed=8.0, width=1), speed=25000)
    graph = decide(look(system(sysfs, cores=frozenset({0, 1}))))
    assert shape(graph)["eth0", "CPU1"] == shape(graph)["CPU1", "eth0"] == (LinkKind.PCIE, 1, 3.125)
    assert shape(graph)["eth1", "CPU0"] == (LinkKind.PCIE, 1, 1.25)
    assert shape(graph)["narrow", "CPU0"][2] == pytest.approx(0.985, abs=1e-3)
    assert "How fast eth2 is, the system does not tell: it is left out." in graph.assumed


def test_a_system_without_anything_has_a_core(tmp_path):
    nowhere = tmp_path / "nothing"
    graph = decide(look(System(sysfs=nowhere, proc=nowhere, dev=nowhere)))
    assert [node.name for node in graph.nodes] == ["CPU0", "CORE0"]


@pytest.mark.parametrize("text", ["\udcff\x00", "x-y,,3-,-4", "9" * 30, "16.0.0 GT"])
def test_nonsense_in_files_ends_nothing(sysfs, text):
    dgx1(sysfs)
    for file in [file for file in sysfs.root.rglob("*") if file.is_file()]:
        file.write_bytes(text.encode(errors="surrogateescape"))
    here = system(sysfs, cores=frozenset({0}))
    here.dev.mkdir()
    (here.dev / "nvidiactl").touch()
    assert decide(look(here)).nodes
    assert decide(look(system(sysfs, nvml=dgx1(Sysfs(sysfs.root / "other"))))).gpus


def test_this_machine():
    graph = decide(replace(look(this_system()), gpus=()))
    assert {node.index for node in graph.of_kind(NodeKind.CORE)} == os.sched_getaffinity(0)
    assert graph.gpus == ()
    known = {NodeKind.GPU, NodeKind.CORE}
    assert known & {node.kind for node in probe().nodes}
    assert all(Path("/sys/devices/system/cpu", f"cpu{node.index}").exists() for node in graph.of_kind(NodeKind.CORE))
