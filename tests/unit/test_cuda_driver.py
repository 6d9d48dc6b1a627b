"""csrc/cuda, the host's side of CUDA, without a GPU: on a stand-in for the driver, across real processes.

tests/stand_in/driver has the tests proper. Here they are built, run, each in a process of its own, and given
the machine that the stand-in plays.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from stand_in import build

pytestmark = pytest.mark.slow  # compiles the driver and what it is tried with

ROOT = build.ROOT
STAND_IN = build.STAND_IN


@pytest.fixture(scope="module")
def built():
    """A folder with the stand-in driver, kernels for it, and the test program."""
    return build.build(ROOT / "build/stand_in", build.LIBRARIES | build.DRIVER_TEST)


def run(built, test, libcuda=None, **machine):
    """What `test` prints; `machine` holds settings of the stand-in, in capitals."""
    settings = {f"RINGREDUCE_STAND_IN_{name}": str(value) for name, value in machine.items()}
    env = {
        **os.environ,
        "RINGREDUCE_LIBCUDA": str(libcuda or built / "libcuda.so.1"),
        "STAND_IN_FOLDER": str(built),
        **settings,
    }
    done = subprocess.run(
        [built / "driver_test", test], env=env, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def library(folder, source, *others):
    """A driver of a few lines, which has all other functions from `others`."""
    (folder / "driver.cpp").write_text(source)
    files = [folder / "driver.cpp", "-Wl,--no-as-needed", *others]
    subprocess.run([*build.compiler(), "-shared", *files, "-o", folder / "libcuda.so.1"], check=True)
    return folder / "libcuda.so.1"


@pytest.mark.parametrize(
    "test",
    [
        *("devices", "launches", "streams", "priorities", "capture", "relaxed_capture", "forked_by_others"),
        *("pooled_events", "shared_kernels"),
    ],
)
def test_device(built, test):
    run(built, test)


def test_calls_that_hold_their_context(built):
    run(built, "context_lock", CONTEXT_LOCK=1)


@pytest.mark.parametrize("test", ["all_kernels", "all_reduce_in_kernels", "all_reduce_in_steps"])
def test_kernels_of_csrc(built, test):
    run(built, test)


def test_out_of_memory_names_call_size_and_device(built):
    run(built, "out_of_memory", MEMORY=32 << 20)


SHARED = ["memory", "one_process", "freed", "damaged_handles", "damaged_words", "forked", "owner_killed", "forged_size"]


FIRST = ("ipc", "file_descriptor")  # the way that the code tries, where a driver has both


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("machine", [{}, {"NO_IPC": 1}, {"NO_VMM": 1}], ids=["both", "vmm", "ipc"])
@pytest.mark.parametrize("test", [*SHARED, "two_processes_one_gpu", "two_processes_two_gpus"])
def test_shared_memory(built, test, machine, first, monkeypatch):
    monkeypatch.setenv("DRIVER_TEST_FIRST", first)
    run(built, test, **machine)


def test_a_driver_that_does_not_tell_sizes_is_believed(built):
    run(built, "two_processes_one_gpu", NO_VMM=1, NO_RANGE_SIZE=1)


def test_descriptors_go_from_process_to_process(built):
    run(built, "lent_descriptors")
    run(built, "no_descriptors_left")
    run(built, "needs_no_ptrace", NO_IPC=1)


def test_words_that_the_driver_does_not_register(built):
    run(built, "words_not_registered", NO_HOST_REGISTER=1)


def test_without_any_sharing_ranks_of_one_process_still_share(built):
    run(built, "one_process", NO_IPC=1, NO_VMM=1)
    run(built, "nothing_shared", NO_IPC=1, NO_VMM=1)


@pytest.mark.parametrize("machine", [{}, {"NO_IPC": 1}], ids=["ipc", "vmm"])
def test_no_peer_access(built, machine):
    run(built, "no_peer_access", NO_PEER=1, **machine)
    run(built, "peer_stays_closed", NO_PEER=1, **machine)


def test_mapping_without_context_keeps_nothing(built):
    run(built, "context_gone", NO_IPC=1)


@pytest.mark.parametrize("first", FIRST)
def test_gpus_of_other_ranks_may_be_hidden(built, first, monkeypatch):
    monkeypatch.setenv("DRIVER_TEST_FIRST", first)
    run(built, "gpu_hidden", VISIBLE=0)


def test_of_hidden_gpus_the_driver_says_whether_there_is_access(built):
    run(built, "hidden_without_peer_access", VISIBLE=0, NO_PEER=1)


def unavailable(built, libcuda=None, **machine):
    first, again = run(built, "print_unavailable", libcuda, **machine).splitlines()
    assert first == again
    return first


def test_available(built):
    assert unavailable(built) == ""


def test_no_driver(built):
    text = unavailable(built, built / "nowhere.so.1")
    assert text.startswith("no CUDA driver: ")
    assert "nowhere.so.1" in text
    assert "; install the NVIDIA driver" in text


def test_no_gpu(built):
    text = unavailable(built, DEVICES=0)
    assert text.startswith(
        "the CUDA driver for CUDA 13.0 sees no GPU: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected); "
    )


def test_old_driver(built, tmp_path):
    source = """
    extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 0; }
    extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int* v) { return *v = 11060, 0; }
    """
    text = unavailable(built, library(tmp_path, source))
    assert "is too old: it is for CUDA 11.6 and has no " in text
    assert "cuStreamBatchMemOp_v2" in text
    assert "cuInit" not in text
    assert "install an NVIDIA driver for CUDA 11.7 or later" in text


def test_driver_that_does_not_start(built, tmp_path):
    source = """extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 803; }"""
    text = unavailable(built, library(tmp_path, source, built / "libcuda.so.1"))
    assert text == "the CUDA driver for CUDA 13.0 does not start: cuInit: CUDA error 803; see whether nvidia-smi works"


def cuda_include():
    """The folder of cuda.h: the toolkit's."""
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        roots.append(str(Path(nvcc).resolve().parents[1]))
    return next((Path(root, "include") for root in roots if root and Path(root, "include/cuda.h").exists()), None)


@pytest.mark.skipif(cuda_include() is None, reason="no cuda.h: there is no CUDA toolkit here")
def test_api_is_that_of_cuda_h(tmp_path):
    def errors(csrc):
        check = [
            *build.compiler(),
            "-fsyntax-only",
            f"-I{csrc}",
            "-isystem",
            cuda_include(),
            STAND_IN / "signatures.cpp",
        ]
        return subprocess.run(check, check=False, capture_output=True, text=True).stderr

    assert errors(ROOT / "csrc") == ""
    (tmp_path / "cuda").mkdir()
    api = (ROOT / "csrc/cuda/api.h").read_text()
    for name, right, wrong in [
        ("cuMemAlloc", "CUdeviceptr * pointer, std::size_t bytes", "CUdeviceptr * pointer, unsigned bytes"),
        ("cuStreamQuery", "(CUstream stream)", "(CUstream stream, int flags)"),
        ("cuMemSetAccess", "const CUmemAccessDesc* access", "CUmemAccessDesc* access"),
    ]:
        line = next(line for line in api.splitlines() if f"({name}, " in line)
        at = api.index(line)
        changed = api[:at] + api[at:].replace(right, wrong, 1)
        assert changed != api
        (tmp_path / "cuda/api.h").write_text(changed)
        assert f"static assertion failed: {name}\n" in errors(tmp_path)
