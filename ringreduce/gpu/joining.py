"""How the GPUs of a group come together: each rank's region of memory is shared, tried out, and used by all or by none.

What keeps one rank from it is told to all, and logged: CUDA tensors then go through the host's memory. Where the
options, or `use_nccl`, ask for NCCL, it makes communicators for all ranks, or all raise.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions

from ringreduce import _C, plan
from ringreduce.common.failures import InvalidArgument, RingReduceError, SystemFailure
from ringreduce.common.ranks import call_ranks
from ringreduce.config import Options
from ringreduce.gpu import kernels, nccl
from ringreduce.gpu.rules import rules
from ringreduce.topology.group_plans import GroupTopology

ROW_BYTES = 4096
"""What a rank tells the others at once, at most."""

TRIAL_SECONDS = 60.0
"""For a sum over all GPUs, in which a rank may have to compile its kernels."""

LEAST_SLICE = 64 * 1024
"""Bytes. Not swept yet."""

LEAST_SLOT = 1024
"""Bytes."""

NCCL_COMMUNICATORS = 4
"""At most. Each has its own buffers, threads and connections, and all of their kernels must fit on the GPU together."""

ID_DIGITS = 2 * 128
"""Of NCCL's unique id, in hexadecimal."""

NCCL_LEAST_SLICE = 1024 * 1024
"""Bytes. Every slice of a step is an exchange more, which is a launch of a kernel at least. Not swept yet."""

NCCL_RULES = "broadcast:ring:1M-;reduce:ring:1M-"
"""The built-in algorithms but for these: directly, a root's links would carry the tensor once for each peer. Those take
the fewest exchanges: one or two, while a ring takes one a hop. Not measured."""

NCCL_RULES_OF_HOSTS = ";all_reduce:ring:1M-;reduce_scatter:ring:1M-;all_gather:ring:1M-"
"""Besides, where ranks are on several hosts: directly, a host would send to each rank of the others what a ring sends
once. Not measured."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What a group asks of an engine on its GPUs; the same on all ranks."""

    options: Options
    timeout: float
    """Seconds."""
    links: GroupTopology | None
    """What a file says of the links between the ranks' GPUs; None: look."""
    add_plans: Callable[[GroupTopology | None, Sequence[plan.Rule], _C.GpuEngine], object]
    """Gives an engine its plans: as the user says, else the topology, else the rules."""

    def channels(self, links: GroupTopology | None) -> int:
        """The most that a plan may have."""
        return max(self.options.parts.channels, links.channels if links else 1)


def join(wanted: Wanted, group: _C.ProcessGroupRing, ordinal: int, communicator: int) -> None:
    """Gives `group` an engine for tensors of CUDA device `ordinal`, unless some rank cannot have one.

    `communicator` is NCCL's (an address), or 0. Collective. Raises `SystemFailure` if there is no engine although the
    options, or a communicator, insist; `InvalidArgument` if some rank's communicator does not fit the group.
    """
    transport = wanted.options.gpu_transport
    if communicator or transport == "nccl":
        group.use(_over_nccl(wanted, group, ordinal, communicator))
        return
    if transport == "host":
        return
    try:
        group.use(_over_peer_memory(wanted, group, ordinal))
    except _NotForAll as reason:
        if transport == "peer":
            raise SystemFailure(
                f"gpu_transport is 'peer', but the group's GPUs cannot share memory: {reason}"
            ) from None
        log.warning(
            "CUDA tensors of this group go through the host's memory, which is slow: %s. If NCCL is installed, "
            "gpu_transport='nccl' may be faster",
            reason,
        )


class _NotForAll(Exception):
    """What keeps some rank's GPU from the others; the same on all ranks."""


def _over_peer_memory(wanted: Wanted, group: _C.ProcessGroupRing, ordinal: int) -> _C.GpuEngine:
    """An engine over the memory of all ranks' GPUs, which works. Raises `_NotForAll`."""
    options = wanted.options
    said, error = "", ""
    # Memory is allocated now, which may wait for what runs on the GPUs. If that waits for a rank of this process, the
    # rank has launched it once all are here.
    _tell_all(group, "", "")
    try:
        device = _C.CudaDevice(ordinal)
        region = _C.GpuRegion(device, options.parts.gpu_bytes)
        said = json.dumps([region.handle.hex(), device.pci_bus_id, device.multiprocessors])
    except RingReduceError as refusal:
        error = str(refusal)
    shown, buses, multiprocessors = zip(*map(json.loads, _tell_all(group, said, error)), strict=True)
    handles = [bytes.fromhex(each) for each in shown]
    links = wanted.links or _look_at_links(options, group, buses)
    sharing = [_C.ranks_on_gpu(handles, rank) for rank in range(group.size())]
    steps = [ranks > 1 if options.parts.gpu_mode == "auto" else options.parts.gpu_mode == "steps" for ranks in sharing]
    blocks = min(count // ranks for count, ranks in zip(multiprocessors, sharing, strict=True))
    try:
        engine = _C.peer_engine(
            host=group.engine,
            device=device,
            region=region,
            handles=handles,
            shape=shape_for(group.size(), options, wanted.channels(links), any(steps), blocks),
            steps=steps,
            images=functools.partial(_image, device.capability),
            slices=options.parts.slices,
            least_slice_bytes=LEAST_SLICE,
        )
        built_in = rules(group.size(), steps=any(steps))
        wanted.add_plans(links, built_in, engine)
    except RingReduceError as refusal:
        error = str(refusal)
    _tell_all(group, "", error)
    _try_out(group, engine, min(wanted.timeout / 2, TRIAL_SECONDS))  # less than others wait for what came of it
    log.info(
        "CUDA tensors of this group: %s, %s; algorithms: %s%sbuilt in: %s",
        device,
        "step by step" if any(steps) else "one kernel a call",
        f"by the user: {options.algorithms}, else " if options.algorithms else "",
        f"by {links.source}: {';'.join(map(str, links.rules()))}, else " if links else "",
        ";".join(map(str, built_in)),
    )
    return engine


def _look_at_links(options: Options, group: _C.ProcessGroupRing, buses: Sequence[str]) -> GroupTopology | None:
    """What rank 0 plans over the links between GPUs with these bus ids; None where nothing is planned."""
    if options.tuning == "off" or len(set(buses)) < max(2, len(buses)):
        return None
    text = ""
    if group.rank() == 0:
        from ringreduce.gpu.nvlink import plans_for  # which needs SciPy

        try:
            links = plans_for(buses)
            text = links.to_json() if links else ""
        except Exception as error:  # the others wait for the answer
            log.warning("cannot plan over the links between GPUs: %s; the built-in rules decide", error)
    text = _from_first(group, text)
    return GroupTopology.from_json(text) if text else None


def _try_out(group: _C.ProcessGroupRing, engine: _C.GpuEngine, seconds: float) -> None:
    error = ""
    try:
        engine.try_out(seconds)
    except RingReduceError as refusal:
        error = str(refusal)
    _tell_all(group, "", error)


def _over_nccl(wanted: Wanted, group: _C.ProcessGroupRing, ordinal: int, communicator: int) -> _C.GpuEngine:
    """An engine over NCCL, which works; for a `communicator`, over such as are split off it."""
    options, links = wanted.options, wanted.links
    error, wrong, said = "", "", ""
    channels = wanted.channels(links)
    communicators = min(channels, NCCL_COMMUNICATORS)
    try:
        version = _C.nccl_version(nccl.places())
        device = _C.CudaDevice(ordinal)
        if communicator:
            _C.check_nccl(communicator, device, group.rank(), group.size())
        ids = _C.nccl_ids(communicators) if group.rank() == 0 and not communicator else []
        said = json.dumps([version, socket.gethostname(), "".join(each.hex() for each in ids)])
    except InvalidArgument as refusal:
        wrong = str(refusal)
    except RingReduceError as refusal:
        error = str(refusal)
    try:
        _tell_all(group, "", wrong)
    except _NotForAll as reason:
        raise InvalidArgument(f"use_nccl: {reason}") from None
    try:
        versions, hosts, (ids_of_first, *_) = zip(*map(json.loads, _tell_all(group, said, error)), strict=True)
        if len(set(versions)) > 1:
            raise _NotForAll(f"ranks have different versions of NCCL: {', '.join(versions)}; install the same for all")
        seconds = wanted.timeout / 2  # less than what others, who have failed already, wait to tell it
        try:
            engine = _C.nccl_engine(
                host=group.engine,
                device=device,
                ids=[bytes.fromhex(ids_of_first[i : i + ID_DIGITS]) for i in range(0, len(ids_of_first), ID_DIGITS)],
                communicator=communicator,
                communicators=communicators,
                timeout=seconds,
                channels=channels,
                images=functools.partial(_image, device.capability),
                slices=options.parts.slices,
                least_slice_bytes=options.parts.least_slice_bytes or NCCL_LEAST_SLICE,
            )
            built_in = NCCL_RULES + (NCCL_RULES_OF_HOSTS if len(set(hosts)) > 1 else "")
            wanted.add_plans(links, plan.parse_algorithms(built_in), engine)
        except RingReduceError as refusal:
            error = str(refusal)
        _tell_all(group, "", error)
        _try_out(group, engine, seconds)
    except _NotForAll as reason:
        asked = "use_nccl was called" if communicator else "gpu_transport is 'nccl'"
        raise SystemFailure(f"{asked}, but NCCL does not join the group's GPUs: {reason}") from None
    log.info("CUDA tensors of this group: %s, NCCL %s, %d communicators", device, version, communicators)
    return engine


def _tell_all(group: _C.ProcessGroupRing, said: str, error: str) -> list[str]:
    """What all ranks said. Raises `_NotForAll` if any has an error to tell instead."""
    row = json.dumps([said, error[: ROW_BYTES // 8]]).encode()  # a character takes 6 bytes at most
    own = torch.zeros(ROW_BYTES, dtype=torch.uint8, device="cpu")  # whatever the default device
    own[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([rows], [own], AllgatherOptions()).wait()
    answers: list[list[str]] = [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in rows]
    ranks = group.options.global_ranks_in_group
    if errors := [f"{call_ranks([rank], ranks)}: {error}" for rank, (_, error) in enumerate(answers) if error]:
        raise _NotForAll("; ".join(errors))
    return [said for said, _ in answers]


def _from_first(group: _C.ProcessGroupRing, text: str) -> str:
    """What rank 0 says, of any length, on all ranks."""
    own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    count = torch.tensor([len(text.encode())], device="cpu")
    group.broadcast([count], BroadcastOptions()).wait()
    said = own if group.rank() == 0 else torch.zeros(max(1, int(count)), dtype=torch.uint8, device="cpu")
    group.broadcast([said], BroadcastOptions()).wait()
    return said.numpy().tobytes()[: int(count)].decode()


def shape_for(size: int, options: Options, channels: int, steps: bool, blocks: int) -> _C.RegionShape:
    """The slots that fit the memory the options allow, for at most so many `blocks` of a rank at once, which a GPU has
    room for with those of all ranks on it. Where ranks take steps there is one lane, which has all of the memory."""
    lanes = 1 if steps else max(min(options.parts.gpu_blocks, blocks), channels)
    depth = plan.slot_depth(size)
    words = _C.RegionShape(lanes=lanes, depth=depth, slot_bytes=0).bytes(size)
    slot_bytes = (options.parts.gpu_bytes - words) // (lanes * depth) // 128 * 128
    if slot_bytes < LEAST_SLOT:
        need = words + LEAST_SLOT * lanes * depth
        raise InvalidArgument(
            f"gpu_bytes is {options.parts.gpu_bytes}; {size} ranks with {lanes} lanes need {need} or more"
        )
    return _C.RegionShape(lanes=lanes, depth=depth, slot_bytes=slot_bytes)


def _image(capability: tuple[int, int], stem: str, row: str, prebuilt: bool) -> bytes:
    return kernels.image(stem, row, capability, prebuilt=prebuilt)
