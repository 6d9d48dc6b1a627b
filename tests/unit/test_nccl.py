"""Plans over NCCL without a GPU: csrc/nccl and its engine, on stand-ins for CUDA and NCCL, with ranks as threads.

tests/stand_in/nccl_test.cpp has what runs; here it is built, told which calls to make, and given the machine that the
stand-ins play. What comes of a call must have the bits that the CPU's engine gives.
"""

import ctypes
import importlib.util
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in import build as stand_in

import ringreduce.plan.ring as ring
from ringreduce.errors import InvalidArgument
from ringreduce.gpu import nccl
from ringreduce.plan import BUILDERS, Plan, build, layout, lower

pytestmark = pytest.mark.slow  # compiles a stand-in for NCCL

ROOT = stand_in.ROOT
STAND_IN = stand_in.STAND_IN
OPERATIONS = [
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*FLOATS, *INTEGERS, "bool", *COMPLEX]
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"]
ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with the stand-ins, kernels for them, and the test program."""
    return stand_in.build(ROOT / "build/stand_in", stand_in.LIBRARIES | stand_in.NCCL | stand_in.NCCL_TEST)


def run(built: Path, *arguments: Any, library: str | Path = "libnccl.so.2", **settings: Any) -> str:
    """What the program prints; `settings` are those of the stand-ins, in capitals."""
    env = {
        **os.environ,
        "RINGREDUCE_LIBCUDA": str(built / "libcuda.so.1"),
        "RINGREDUCE_LIBNCCL": str(built / library),
        "STAND_IN_KERNELS": str(built / "kernels.so"),
        "RINGREDUCE_STAND_IN_DEVICES": "8",
        **{f"RINGREDUCE_STAND_IN_{name}": str(value) for name, value in settings.items()},
    }
    done = subprocess.run(
        [built / "nccl_test", *map(str, arguments)], env=env, check=False, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def case(
    plan: Plan,
    counts: list[int],
    dtype: str = "float32",
    op: str = "sum",
    *,
    communicators: int = 1,
    adopts: bool = False,
    in_place: bool = False,
    replays: int = 0,
    slice_bytes: int = 0,
    root: int = 0,
) -> list[int]:
    """A call of `plan` as read_case() reads it; block b has counts[b % len(counts)] elements."""
    shape = layout(plan.collective, plan.size)
    count = [counts[block % len(counts)] for block in range(shape.blocks)]
    flags = [communicators, adopts, in_place, replays, slice_bytes]
    total = count[0] if len(counts) == 1 else sum(count)
    words = [OPERATIONS.index(plan.collective), plan.size, root, DTYPES.index(dtype), OPS.index(op), *flags]
    words += [total, max(count)]
    lowered = lower(plan)
    words += [len(lowered), *lowered, *(40 + 9 * rank for rank in range(plan.size))]
    for rank in range(plan.size):
        turned = (rank - root) % plan.size if plan.collective in ROOTED else rank
        for has in (shape.has_input, shape.needs_output):
            sizes = [count[block] for block in range(shape.blocks) if has(turned, block)]
            words += [len(sizes), *sizes]
    return words


def check(built: Path, tmp_path: Path, cases: list[list[int]], **options: Any) -> None:
    np.array([word for words in cases for word in words], np.int64).tofile(tmp_path / "cases")
    assert run(built, "collectives", tmp_path / "cases", **options) == f"{len(cases)} calls\n"


def two_rings(size: int) -> Plan:
    order = tuple(range(size))
    return ring.all_reduce([(order, 2), (order[::-1], 1)])


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_plan(built: Path, tmp_path: Path, collective: str, algorithm: str) -> None:
    check(
        built,
        tmp_path,
        [case(build(collective, algorithm, size), [n]) for size in (2, 3, 5) for n in (0, 1, 997, 5000)],
    )


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_uneven_blocks(built: Path, tmp_path: Path, collective: str) -> None:
    plans = [build(collective, algorithm, 4) for algorithm in BUILDERS[collective]]
    check(built, tmp_path, [case(plan, counts) for plan in plans for counts in ([997, 3, 64, 0], [1, 2000])])


def reductions() -> Iterator[tuple[str, str]]:
    for dtype, op in itertools.product(DTYPES, OPS):
        averages, orders, bits = op in ("avg", "premul_sum"), op in ("min", "max"), op in ("band", "bor", "bxor")
        if averages and dtype not in FLOATS + COMPLEX:
            continue
        if (orders and dtype in COMPLEX) or (bits and dtype in FLOATS + COMPLEX):
            continue
        yield dtype, op


@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
def test_every_dtype_and_op(built: Path, tmp_path: Path, algorithm: str) -> None:
    plan = build("all_reduce", algorithm, 3)
    check(built, tmp_path, [case(plan, [1003], dtype, op) for dtype, op in reductions()])


@pytest.mark.parametrize("communicators", [1, 2, 3])
def test_channels_and_slices(built: Path, tmp_path: Path, communicators: int) -> None:
    cases = [
        case(two_rings(size), [n], communicators=communicators, slice_bytes=slice_bytes)
        for size in (2, 4)
        for n in (5, 1000, 30_000)
        for slice_bytes in (64, 4096, 1 << 20)
        if n < 30_000 or slice_bytes > 64
    ]
    check(built, tmp_path, cases)
    check(built, tmp_path, cases[:6], library="libnccl_2_12.so")


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "tree", "halving_doubling"])
def test_in_place_average_and_factors(built: Path, tmp_path: Path, algorithm: str) -> None:
    plan = build("all_reduce", algorithm, 4)
    check(built, tmp_path, [case(plan, [3001], "bfloat16", op, in_place=True) for op in ("sum", "avg", "premul_sum")])


def test_roots(built: Path, tmp_path: Path) -> None:
    plans = [build(c, a, 3) for c, a in ALGORITHMS if c in ROOTED]
    check(built, tmp_path, [case(plan, [700], root=root) for plan in plans for root in (1, 2)])


@pytest.mark.parametrize("communicators", [1, 2])
@pytest.mark.parametrize("library", ["libnccl.so.2", "libnccl_2_12.so"])
def test_adopted_communicator_is_left_as_it_was(built: Path, tmp_path: Path, library: str, communicators: int) -> None:
    cases = [case(two_rings(3), [n], communicators=communicators, adopts=True) for n in (10, 2000)]
    check(built, tmp_path, cases, library=library)


@pytest.mark.parametrize("communicators", [1, 2])
def test_graphs(built: Path, tmp_path: Path, communicators: int) -> None:
    plans = [two_rings(3), *(build("all_reduce", name, 3) for name in ("two_shot", "tree"))]
    plans += [build("all_to_all", "direct", 3), build("broadcast", "ring", 3)]
    cases = [case(plan, [2000], "float16", replays=3, communicators=communicators) for plan in plans]
    check(built, tmp_path, cases)


FAULTS = [
    *("timeout", "abort_by_a_rank", "abort_of_the_host", "network_error", "other_size"),
    *("bad_call_leaves_the_group", "wrong_communicators"),
]


@pytest.mark.parametrize("test", ["barrier", "several_streams", "first_call_in_a_capture", *FAULTS])
def test_engine(built: Path, test: str) -> None:
    run(built, test)


def test_abort_of_a_call_that_is_stuck_in_nccl(built: Path) -> None:
    run(built, "abort_of_a_stuck_call", NCCL_HANGS=1)


# ---- the library ----------------------------------------------------------------------------------------------------


def test_version(built: Path) -> None:
    assert run(built, "print_unavailable") == f"2.27.5 ({built / 'libnccl.so.2'})\n"


def test_no_library(built: Path) -> None:
    text = run(built, "print_unavailable", library="nowhere.so")
    assert text.startswith("no NCCL: ")
    assert "nowhere.so" in text
    assert "; install it: `pip install nvidia-nccl-cu13`" in text


def test_old_library(built: Path, tmp_path: Path) -> None:
    source = tmp_path / "nccl.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* v) { return *v = 2604, 0; }'
    )
    subprocess.run([*stand_in.compiler(), "-shared", source, "-o", tmp_path / "ancient.so"], check=True)
    text = run(built, "print_unavailable", library=tmp_path / "ancient.so")
    assert "ancient.so) is too old: it has no ncclGetUniqueId, " in text
    assert "ncclSend" in text
    assert "ncclGetVersion" not in text
    assert "ncclCommSplit" not in text


def include_folders() -> list[Path] | None:
    """Those of nccl.h and of what it includes: NVIDIA's wheel or the system's, and the CUDA toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(home) / "nccl" for home in (spec.submodule_search_locations if spec else None) or ()]
    homes += [Path(home) for home in (os.environ.get("NCCL_HOME"), "/usr/local/cuda", "/usr") if home]
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        roots.append(str(Path(nvcc).resolve().parents[1]))
    header = next((home / "include" for home in homes if (home / "include/nccl.h").exists()), None)
    runtime = next((Path(root, "include") for root in roots if root and Path(root, "include/cuda.h").exists()), None)
    return [header, runtime] if header and runtime else None


@pytest.mark.skipif(include_folders() is None, reason="no nccl.h, or no CUDA toolkit, is here")
def test_api_is_that_of_nccl_h(tmp_path: Path) -> None:
    def errors(csrc: Path) -> str:
        folders = [flag for folder in include_folders() or () for flag in ("-isystem", folder)]
        check = [*stand_in.compiler(), "-fsyntax-only", f"-I{csrc}", *folders, STAND_IN / "nccl_signatures.cpp"]
        return subprocess.run(check, check=False, capture_output=True, text=True).stderr

    assert errors(ROOT / "csrc") == ""
    (tmp_path / "nccl").mkdir()
    api = (ROOT / "csrc/nccl/api.h").read_text()
    for name, right, wrong in [
        ("ncclCommInitRank", "ncclUniqueId id, int rank", "int rank, ncclUniqueId id"),
        ("ncclRecv", "(void* data", "(const void* data"),
        ("ncclCommSplit", "int key, ", ""),
    ]:
        at = api.index(f"{name}, ncclResult_t")
        changed = api[:at] + api[at:].replace(right, wrong, 1)
        assert changed != api
        (tmp_path / "nccl/api.h").write_text(changed)
        assert f"static assertion failed: {name}\n" in errors(tmp_path)


# ---- ringreduce.gpu.nccl --------------------------------------------------------------------------------------------


def test_places_are_files_of_wheels() -> None:
    assert all(Path(place).is_file() for place in nccl.places())


def test_places_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path / name)]) if name == "nvidia" else None,
    )
    assert nccl.places() == [str(library)]


class Indexed:
    def __index__(self) -> int:
        return 81


@pytest.mark.parametrize(
    "communicator",
    [
        81,
        ctypes.c_void_p(81),
        SimpleNamespace(comm=81),
        SimpleNamespace(comm=ctypes.c_void_p(81)),
        SimpleNamespace(ptr=81),
        SimpleNamespace(_comm_ptr=lambda: 81),
        Indexed(),
    ],
)
def test_handle_of(communicator: object) -> None:
    assert nccl.handle_of(communicator) == 81


@pytest.mark.parametrize(
    ("communicator", "text"),
    [
        ("81", "a str is no NCCL communicator"),
        (SimpleNamespace(comm="81"), "a SimpleNamespace is no NCCL communicator"),
        (True, "a bool is no NCCL communicator"),
        (0, "the NCCL communicator is null"),
        (ctypes.c_void_p(), "the NCCL communicator is null"),
        (SimpleNamespace(ptr=0), "the NCCL communicator is null"),
        (-1, "is -1, which is no address"),
    ],
)
def test_what_is_no_handle(communicator: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        nccl.handle_of(communicator)
