"""How the GPUs of a group come together: each rank's region of memory is shared, tried out, and used by all or by none.

What keeps one rank from it is told to all, and logged: CUDA tensors then go through the host's memory.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import AllgatherOptions

from ringreduce import _C, plan
from ringreduce.config import Options
from ringreduce.errors import InvalidArgument, RingReduceError, SystemFailure
from ringreduce.gpu import kernels

ROW_BYTES = 4096
"""What a rank tells the others at once, at most."""

TRIAL_SECONDS = 60.0
"""For a sum over all GPUs, in which a rank may have to compile its kernels."""

LEAST_SLICE = 64 * 1024
"""Bytes. Not swept yet."""

LEAST_SLOT = 1024
"""Bytes."""

log = logging.getLogger(__name__)


def join(
    options: Options,
    timeout: float,
    channels: int,
    add_plans: Callable[[_C.GpuEngine], None],
    group: _C.ProcessGroupRing,
    ordinal: int,
) -> None:
    """Gives `group` an engine for tensors of CUDA device `ordinal`, unless some rank cannot have one.

    Plans have at most `channels` channels; `add_plans` gives an engine its plans. Collective. Raises `SystemFailure` if
    there is no engine although the options insist.
    """
    if options.gpu_transport == "host":
        return
    try:
        group.use(_engine(options, min(timeout, TRIAL_SECONDS), channels, add_plans, group, ordinal))
    except _NotForAll as reason:
        if options.gpu_transport == "peer":
            raise SystemFailure(
                f"gpu_transport is 'peer', but the group's GPUs cannot share memory: {reason}"
            ) from None
        log.warning("CUDA tensors of this group go through the host's memory, which is slow: %s", reason)


class _NotForAll(Exception):
    """What keeps some rank's GPU from the others; the same on all ranks."""


def _engine(
    options: Options,
    seconds: float,
    channels: int,
    add_plans: Callable[[_C.GpuEngine], None],
    group: _C.ProcessGroupRing,
    ordinal: int,
) -> _C.GpuEngine:
    """An engine over the memory of all ranks' GPUs, which works. Raises `_NotForAll`."""
    assert options.gpu_bytes is not None  # resolved
    error = ""
    handle = b""
    try:
        device = _C.CudaDevice(ordinal)
        region = _C.GpuRegion(device, options.gpu_bytes)
        handle = region.handle
    except RingReduceError as refusal:
        error = str(refusal)
    handles = [bytes.fromhex(each) for each in _tell_all(group, handle.hex(), error)]
    try:
        engine = _over_peer_memory(options, channels, group, device, region, handles)
        add_plans(engine)
    except RingReduceError as refusal:
        error = str(refusal)
    _tell_all(group, "", error)
    try:
        engine.try_out(seconds)
    except RingReduceError as refusal:
        error = str(refusal)
    _tell_all(group, "", error)
    return engine


def _tell_all(group: _C.ProcessGroupRing, said: str, error: str) -> list[str]:
    """What all ranks said. Raises `_NotForAll` if any has an error to tell instead."""
    row = json.dumps([said, error[: ROW_BYTES // 8]]).encode()  # a character takes 6 bytes at most
    own = torch.zeros(ROW_BYTES, dtype=torch.uint8)
    own[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([rows], [own], AllgatherOptions()).wait()
    answers: list[list[str]] = [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in rows]
    if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]:
        raise _NotForAll("; ".join(errors))
    return [said for said, _ in answers]


def _over_peer_memory(
    options: Options,
    channels: int,
    group: _C.ProcessGroupRing,
    device: _C.CudaDevice,
    region: _C.GpuRegion,
    handles: list[bytes],
) -> _C.GpuEngine:
    steps = [_C.takes_steps(handles, rank) for rank in range(group.size())]
    if options.gpu_mode != "auto":
        steps = [options.gpu_mode == "steps"] * group.size()
    log.info("CUDA tensors of this group: %s, %s", device, "step by step" if any(steps) else "one kernel a call")
    return _C.peer_engine(
        host=group.engine,
        device=device,
        region=region,
        handles=handles,
        shape=shape_for(group.size(), options, channels, any(steps)),
        steps=steps[group.rank()],
        images=functools.partial(_image, device.capability),
        slices=options.slices,
        least_slice_bytes=LEAST_SLICE,
    )


def shape_for(size: int, options: Options, channels: int, steps: bool) -> _C.RegionShape:
    """The slots that fit the memory the options allow. Where ranks take steps a channel has one lane."""
    assert options.gpu_bytes is not None and options.gpu_blocks is not None  # resolved
    lanes = channels if steps else max(options.gpu_blocks, channels)
    depth = plan.slot_depth(size)
    words = _C.RegionShape(lanes=lanes, one_lane=steps, depth=depth, slot_bytes=0).bytes(size)
    slot_bytes = (options.gpu_bytes - words) // (lanes * depth) // 128 * 128
    if slot_bytes < LEAST_SLOT:
        need = words + LEAST_SLOT * lanes * depth
        raise InvalidArgument(f"gpu_bytes is {options.gpu_bytes}; {size} ranks with {lanes} lanes need {need} or more")
    return _C.RegionShape(lanes=lanes, one_lane=steps, depth=depth, slot_bytes=slot_bytes)


def _image(capability: tuple[int, int], stem: str, row: str, prebuilt: bool) -> bytes:
    return kernels.image(stem, row, capability, prebuilt=prebuilt)
