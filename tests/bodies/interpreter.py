"""The GPU's interpreter of plans, compiled for a CPU, whose threads are threads of this process."""

import ctypes
from typing import Any

import numpy as np
import pytest
from stand_in import build

from ringreduce.plan import Plan, lower, slot_depth

OPERATIONS = [
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
]
MOST_RANKS = 64
SECOND = 10**9
FINGERPRINT = 7
GAVE_UP = ["no", "timeout", "mismatch", "wrong_size", "aborted"]


class Tensors(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p * MOST_RANKS), ("count", ctypes.c_uint64 * MOST_RANKS))


class Report(ctypes.Structure):
    _fields_ = (
        ("abort", ctypes.c_uint32),
        ("waiting_for", ctypes.c_uint32),
        ("waited", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("gave_up", "peer", "channel", "round", "step")),
    )


class Notice(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("full", "fingerprint", "bytes", "offset"))


class GroupCall(ctypes.Structure):
    _fields_ = (
        ("lowered", ctypes.POINTER(ctypes.c_int32)),
        ("words", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("operation", "root", "channels")),
        *((name, ctypes.c_uint32) for name in ("element", "parts", "lanes", "launches")),
        *((name, ctypes.c_uint64) for name in ("slice", "largest", "timeout")),
        ("divisor", ctypes.c_double),
        ("factors", ctypes.POINTER(ctypes.c_double)),
        ("fingerprints", ctypes.POINTER(ctypes.c_uint64)),
        ("absent", ctypes.POINTER(ctypes.c_bool)),
        ("batches", ctypes.POINTER(ctypes.c_uint32)),
        ("inputs", ctypes.POINTER(Tensors)),
        ("outputs", ctypes.POINTER(Tensors)),
        ("reports", ctypes.POINTER(Report)),
        ("unlike", ctypes.POINTER(ctypes.c_uint64)),
        *((name, ctypes.c_bool) for name in ("weighs", "scaled", "stepwise", "threaded")),
    )


@pytest.fixture(scope="module")
def interpreter() -> Any:
    folder = build.build(build.ROOT / "build/stand_in", build.INTERPRETER)
    loaded = ctypes.CDLL(str(folder / "interpreter.so"))
    loaded.make_group.argtypes = [ctypes.c_uint32] * 4
    loaded.make_group.restype = ctypes.c_void_p
    loaded.drop_group.argtypes = [ctypes.c_void_p]
    loaded.words_in_use.argtypes = [ctypes.c_void_p]
    loaded.words_in_use.restype = ctypes.c_uint64
    loaded.notice.argtypes = [ctypes.c_void_p] + [ctypes.c_uint32] * 4
    loaded.notice.restype = ctypes.POINTER(Notice)
    loaded.broken_word.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    loaded.broken_word.restype = ctypes.POINTER(ctypes.c_uint64)
    loaded.make_call.argtypes = [ctypes.c_void_p, ctypes.POINTER(GroupCall)]
    loaded.make_call.restype = ctypes.c_bool
    loaded.launch_batch.argtypes = [ctypes.c_void_p, ctypes.POINTER(GroupCall)] + [ctypes.c_uint32] * 3
    loaded.launch_batch.restype = ctypes.c_bool
    loaded.waits_of_batch.argtypes = loaded.launch_batch.argtypes
    loaded.waits_of_batch.restype = ctypes.c_uint32
    return loaded


class Group:
    """The regions of `size` ranks on the CPU, and the calls that the ranks make over them."""

    def __init__(self, library: Any, size: int, *, lanes: int = 8, slot_bytes: int = 512) -> None:
        self.library = library
        self.size = size
        self.slot_bytes = slot_bytes
        self.regions = library.make_group(size, lanes, slot_depth(size), slot_bytes)

    def __del__(self) -> None:
        self.library.drop_group(self.regions)

    def words_in_use(self) -> int:
        return self.library.words_in_use(self.regions)

    def notice(self, owner: int, writer: int, *, lane: int = 0, slot: int = 0) -> Notice:
        return self.library.notice(self.regions, owner, lane, writer, slot).contents

    def forge(self, owner: int, writer: int, size: int, fingerprint: int = FINGERPRINT) -> None:
        """Makes `owner` believe that slot 0 of `writer` has `size` bytes."""
        notice = self.notice(owner, writer)
        notice.fingerprint, notice.bytes, notice.full = fingerprint, size, 1

    def break_rank(self, rank: int) -> None:
        self.library.broken_word(self.regions, rank).contents.value = 1

    def call(
        self,
        plan: Plan,
        inputs: list[list[np.ndarray]],
        outputs: list[list[np.ndarray]],
        kernel: str = "uint64_sum",
        **options: Any,
    ) -> "Call":
        return Call(self, plan, inputs, outputs, kernel, **options)


class Call:
    """A call of `plan` by all ranks: inputs[rank] and outputs[rank] are that rank's tensors, by position."""

    def __init__(
        self,
        group: Group,
        plan: Plan,
        inputs: list[list[np.ndarray]],
        outputs: list[list[np.ndarray]],
        kernel: str,
        *,
        lanes: int = 1,
        slice_elements: int = 64,
        stepwise: bool = False,
        threaded: bool = False,
        launches: int = 1,
        root: int = 0,
        parts: int = 1,
        divisor: float = 1.0,
        weighs: bool = False,
        factors: list[float] | None = None,
        fingerprints: list[int] | None = None,
        absent: tuple[int, ...] = (),
        batches: list[int] | None = None,
        aborted: bool = False,
        timeout: int = 60 * SECOND,
    ) -> None:
        size, lowered = plan.size, lower(plan)
        element = inputs[0][0].itemsize if inputs[0] else outputs[0][0].itemsize
        assert slice_elements * element <= group.slot_bytes

        def tensors(of_ranks: list[list[np.ndarray]]) -> Any:
            made = (Tensors * size)()
            for rank, arrays in enumerate(of_ranks):
                for position, array in enumerate(arrays):
                    made[rank].data[position] = array.ctypes.data
                    made[rank].count[position] = array.size
            return made

        self.group = group
        self.unlike = ctypes.c_uint64()
        self.reports = (Report * size)()
        for report in self.reports:
            report.abort = aborted
        self.described = GroupCall(
            lowered=(ctypes.c_int32 * len(lowered))(*lowered),
            words=len(lowered),
            kernel=kernel.encode(),
            operation=OPERATIONS.index(plan.collective),
            root=root,
            channels=len(plan.channels),
            element=element,
            parts=parts,
            lanes=lanes,
            launches=launches,
            slice=slice_elements,
            largest=max(array.size for arrays in inputs + outputs for array in arrays),
            timeout=timeout,
            divisor=divisor,
            weighs=weighs,
            factors=(ctypes.c_double * size)(*(factors or [1.0] * size)),
            fingerprints=(ctypes.c_uint64 * size)(*(fingerprints or [FINGERPRINT] * size)),
            absent=(ctypes.c_bool * size)(*(rank in absent for rank in range(size))),
            batches=(ctypes.c_uint32 * len(batches))(*batches) if batches else None,
            inputs=tensors(inputs),
            outputs=tensors(outputs),
            reports=self.reports,
            unlike=ctypes.pointer(self.unlike),
            scaled=factors is not None,
            stepwise=stepwise,
            threaded=threaded,
        )

    def make(self) -> list[str]:
        """Of each rank, why it gave up, or "no"."""
        assert self.group.library.make_call(self.group.regions, ctypes.byref(self.described))
        return self.gave_up()

    def launch_batch(self, rank: int, batch: int) -> str:
        """Launches a batch in round 0."""
        assert self.group.library.launch_batch(self.group.regions, ctypes.byref(self.described), rank, 0, batch)
        return self.gave_up()[rank]

    def waits(self, rank: int, round_: int, batch: int) -> int:
        """How many words a rank that takes steps waits for."""
        return self.group.library.waits_of_batch(self.group.regions, ctypes.byref(self.described), rank, round_, batch)

    def gave_up(self) -> list[str]:
        return [GAVE_UP[report.gave_up] for report in self.reports]


def run(
    interpreter: Any,
    plan: Plan,
    inputs: list[list[np.ndarray]],
    outputs: list[list[np.ndarray]],
    kernel: str = "uint64_sum",
    **options: Any,
) -> list[Report]:
    """Makes the call in a group of its own."""
    slot_bytes = -(-options.get("slice_elements", 64) * 8 // 128) * 128
    group = Group(interpreter, plan.size, lanes=len(plan.channels) * options.get("lanes", 1), slot_bytes=slot_bytes)
    call = group.call(plan, inputs, outputs, kernel, **options)
    if call.make() == ["no"] * plan.size and not options.get("absent"):
        assert group.words_in_use() == 0
    return list(call.reports)
