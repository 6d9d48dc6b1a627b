"""The knobs. An option wins over its RINGREDUCE_* environment variable, and the variable over the default.

Only this module reads the variables of knobs. OTHER_VARIABLES lists what other code reads. `ringreduce info`
prints every knob with its value and its origin, and the other variables.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from ringreduce.common.failures import InvalidArgument, PlanError
from ringreduce.common.units import parse_bytes
from ringreduce.plan import Slicing, parse_algorithms, slot_depth

PREFIX = "RINGREDUCE_"

OTHER_VARIABLES: Mapping[str, str] = {
    "RINGREDUCE_LIBCUDA": "the file of the CUDA driver's library (default: libcuda.so.1)",
    "RINGREDUCE_LIBNCCL": "the file of NCCL's library (default: the one that torch uses, or a wheel's)",
    "RINGREDUCE_NVCC": "the nvcc that compiles GPU kernels at first use, and in a build; 0: none",
    "RINGREDUCE_TORCHS": "the torches that a build compiles for: folders, with : between (default: this Python's)",
    "RINGREDUCE_WERROR": "1: warnings end a build",
    "RINGREDUCE_AS_GLOO": "1: groups of backend 'gloo' run on ringreduce (ringreduce.as_gloo)",
    "RINGREDUCE_LIFE": "set by `ringreduce keep` for the program that it starts",
}
"""Variables of no knob. Those that begin with one of OF_TESTS belong to tests."""
OF_TESTS = ("RINGREDUCE_STAND_IN_", "RINGREDUCE_TEST_")

log = logging.getLogger(__name__)


def _knob(default: Any, allowed: tuple[str, ...] | tuple[int, int] | None, help: str) -> Any:
    """`allowed`: the words, or the least and the largest number; None for any text."""
    return field(default=None, metadata={"default": default, "allowed": allowed, "help": help})


def _part(default: Any, allowed: tuple[str, ...] | tuple[int, int], help: str) -> Any:
    return field(default=default, metadata={"default": default, "allowed": allowed, "help": help})


@dataclass(frozen=True)
class EngineParts:
    """The parts of `Options.engine`, which only those who work on the engine set."""

    channels: int = _part(3, (1, 64), "channels, the rings or trees that one plan may have")
    channel_bytes: int = _part(
        4 * 1024**2,
        (64 * 1024, 1024**3),
        "shared memory for one channel's slots, per rank; above 8 ranks each takes less",
    )
    mailbox_bytes: int = _part(2 * 1024**2, (64 * 1024, 1024**3), "shared memory for point-to-point messages, per rank")
    arena_keep_bytes: int = _part(
        256 * 1024**2, (0, 1024**4), "memory of freed shared tensors that a process keeps for new ones"
    )
    spins: int = _part(0, (0, 1_000_000), "looks before a waiting rank yields its core (default: by ranks per core)")
    yields: int = _part(
        0, (0, 1_000_000_000), "yields before a waiting rank sleeps (default: by the probe where ranks share cores)"
    )
    slices: int = _part(4, (1, 1024), "slices that a chunk is cut in, if they are not too small or too large")
    least_slice_bytes: int = _part(0, (0, 1024**3), "the smallest size of a slice (default: by `fetch` and network)")
    least_fetch_bytes: int = _part(0, (0, 1024**3), "smaller slices are copied (default: by ranks per core)")
    most_fetch_bytes: int = _part(
        0,
        (0, 1024**5),
        "above two ranks, calls in place that reduce more bytes than this in all make copies (default: probed)",
    )
    stream_bytes: int = _part(
        48 * 1024**2, (0, 1024**5), "outputs that have so many bytes in all are stored past the caches"
    )
    spread_bytes: int = _part(
        0, (0, 1024**3), "over so much of a channel's slots a rank's values go in turn; 1: over none (default: probed)"
    )
    gpu_bytes: int = _part(64 * 1024**2, (1024**2, 16 * 1024**3), "memory of each GPU for a group's slots")
    gpu_blocks: int = _part(32, (1, 1024), "thread blocks of a call, each of which takes a multiprocessor")
    gpu_mode: str = _part(
        "auto",
        ("auto", "run", "steps"),
        "'run': a kernel takes a whole call; 'steps': a batch of its steps; 'auto': 'steps' where ranks share a GPU",
    )

    def __str__(self) -> str:
        """The shortest text that has these parts."""
        set_here = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in set_here if value != default)


PARTS = {each.name: each for each in fields(EngineParts)}


@functools.cache
def _engine_parts(text: str, where: str) -> EngineParts:
    """`where`: what errors call the text."""
    values = {}
    for each in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, each.partition("="))
        if name not in PARTS:
            raise InvalidArgument(f"{where} has {each!r}; it must be NAME=VALUE, NAME one of {', '.join(PARTS)}")
        values[name] = _parsed(PARTS[name], value)
        _check(PARTS[name], values[name], f"{name} in {where}")
    return EngineParts(**values)


def _refuse_old(knobs: Mapping[str, str]) -> None:
    """Raises `InvalidArgument` if one of these is a knob that has become a part. `knobs`: what users call them."""
    if part := next((each for each in PARTS if each in knobs), ""):
        raise InvalidArgument(f"{knobs[part]} is a part of engine; set RINGREDUCE_ENGINE, or engine=, to '{part}=...'")


@dataclass(frozen=True)
class Options:
    """Options of a group, for `pg_options` of `init_process_group` and `new_group`.

    Most must be the same on all ranks. Of `tuning`, `topo_file` and `hosts_file` only rank 0's count. `socket_ifname`,
    `ports`, `host_id`, `secret_file`, `recorded_calls`, `dump_when_broken`, `debug`, `share_allocations` and
    `arena_keep_bytes`, a part of `engine`, may differ between ranks. `arena_bytes`, `arena_keep_bytes` and
    `share_allocations` concern the process, which has one arena for all groups.

    A field left at None takes its RINGREDUCE_* variable, or else its default. Raises `InvalidArgument` for bad values.
    Where torch is loaded, the object is one of torch's `Backend.Options` too, as DeviceMesh's `backend_override` needs.
    """

    algorithms: str = _knob(
        "", None, "which algorithm for which size, as 'all_reduce:ring;broadcast:tree:32K-' (default: as tuned)"
    )
    transport: str = _knob(
        "auto",
        ("auto", "shared_memory", "tcp", "gloo"),
        "'auto': memory inside a host, TCP between hosts; 'shared_memory': one host; 'tcp': as if each rank had a "
        "host of its own; 'gloo': plans over Gloo's messages",
    )
    socket_ifname: str = _knob(
        "", None, "interfaces for other hosts: prefixes ('eth,ib'), '=eth0', '^docker,lo' or '10.1.0.0/16'"
    )
    ports: str = _knob("", None, "TCP ports to listen at for other hosts: '20000-20100' (default: any)")
    host_id: str = _knob("", None, "ranks with the same text are on one host (default: as the kernel says)")
    secret_file: str = _knob(
        "", None, "a file that only ranks of the job can read; who does not know its content cannot connect"
    )
    hosts_file: str = _knob(
        "",
        None,
        "what `ringreduce doctor --peers --write` measured between hosts (default: see docs/hosts.md). Only "
        "rank 0's is read",
    )
    connections: int = _knob(1, (1, 64), "TCP connections of a link, for each pair of interfaces")
    dead_after: int = _knob(10, (1, 24 * 3600), "seconds without a sign of life after which a link breaks")
    wire_dtype: str = _knob(
        "float32",
        ("float32", "bfloat16", "int8", "int4"),
        "how all_reduce sends float32 to other hosts: 'float32', 'bfloat16', 'int8' or 'int4' (half, a quarter, an "
        "eighth of the bytes; rounds, see docs/compression.md)",
    )
    tuning: str = _knob(
        "auto",
        None,
        "'auto': this machine's own file; 'off': built-in rules; else the path of a file that `ringreduce tune` has "
        "written. Only rank 0's is read",
    )
    topo_file: str = _knob(
        "",
        None,
        "a file with the machine's links, see `ringreduce topo --json`: rank r is on its r-th GPU. Rank 0's counts",
    )
    arena_bytes: int = _knob(
        16 * 1024**3,
        (0, 1024**4),
        "address space per process for shared tensors; the process's first group decides; 0: the group shares none",
    )
    share_allocations: int = _knob(
        0, (0, 1), "1: torch's CPU tensors of 1 MB and more are shared tensors (ringreduce.share_allocations); 0: not"
    )
    fetch: int = _knob(
        1, (0, 1), "1: ranks read one another's tensors where they are, if that is faster; 0: through copies"
    )
    gpu_transport: str = _knob(
        "auto",
        ("auto", "peer", "nccl", "host"),
        "for CUDA tensors: 'peer': GPUs' shared memory; 'nccl': NCCL's messages; 'host': the host's memory; 'auto': "
        "'peer' where it works, else 'host'",
    )
    recorded_calls: int = _knob(
        2000, (0, 10_000_000), "latest calls that the flight recorder keeps, per group; 0: none"
    )
    dump_when_broken: int = _knob(1, (0, 1), "1: write the flight record when the group breaks; 0: do not")
    debug: int = _knob(0, (0, 2), "1: log the life of groups; 2: also print a line for every call")
    engine: str = _knob(
        "", None, "for work on the engine: parts of it, as 'slices=2,channel_bytes=64K'; `ringreduce info` lists them"
    )

    def __new__(cls, *given: Any, **named: Any) -> Options:
        _refuse_old({name: name for name in named})
        if cls is Options and hasattr(sys.modules.get("torch"), "distributed") and (kind := _with_torch()) is not cls:
            return kind.__new__(kind)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value is not None:
                _check(knob, value, knob.name)

    @property
    def parts(self) -> EngineParts:
        """The parts of `engine`."""
        return _engine_parts(self.engine or "", "engine")

    def __reduce__(self) -> tuple[Any, ...]:
        return Options, tuple(getattr(self, knob.name) for knob in fields(self))


@functools.cache
def _with_torch() -> type[Options]:
    """The class of options that are made where torch is loaded."""
    try:
        from torch._C._distributed_c10d import Backend
    except ImportError:  # torch without torch.distributed
        return Options

    class WithTorch(Options, Backend.Options):
        def __init__(self, *given: Any, **named: Any) -> None:
            Backend.Options.__init__(self, "ringreduce")
            Options.__init__(self, *given, **named)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(WithTorch, name, getattr(Options, name))
    return WithTorch


DEFAULTS: Mapping[str, Any] = {knob.name: knob.metadata["default"] for knob in fields(Options)}

# 3 channels of 4 MB and 2 MB of mailboxes are 14 MB per rank, of which a channel that is not used takes none. Swept for
# all_reduce of 64 MB with 4 ranks on 2 cores (Xeon with 2 MB of L2 a core, November 2026): 4 MB a channel took 26.0 ms,
# 2 MB 27.8, 1 MB 28.0 (medians of two runs); for 2 ranks they were alike. More and smaller slots gained nothing.

# Above so many ranks all slots of a channel together stay as large as theirs, so that they still fit the caches. Swept
# for all_reduce with 16, 24 and 32 ranks on the same 2 cores, three rounds: with 1 or 2 MB a channel 1 MB took 0.7 to
# 0.95 of its time with 4 MB, and 16 MB 0.9 to 1.05. With 8 ranks 4 MB was the fastest for 16 MB.
RANKS_WITH_WHOLE_SLOTS = 8
LEAST_SHARED_SLOT = 16 * 1024

# Looks before a yield: with a core for every rank a peer answers sooner than the kernel could switch; with fewer, the
# peer may need our core to answer at all. Small calls without a root no longer use this (csrc/engine/placement.h). When
# they did, it was swept with one_shot of 64 bytes on a 2-core Xeon, November 2026: with 4 ranks 5, 6 and 50 looks took
# 4.1, 4.1 and 6.9 us, with 8 ranks 3, 6 and 50 took 13.3, 14.1 and 26.9 us. On a 2-core EPYC, whose looks are shorter,
# 0, 1, 2, 3 and 5 took 7.8, 7.5, 7.6, 7.7 and 7.9 us with 4 ranks, and 1, 2 and 5 the same with 8.
SPINS_WITH_OWN_CORE = 2000
SPINS_SHARING_CORES = 2
# With links each look is a system call: a few hundred would be a time in which the kernel can switch.
SPINS_WITH_LINKS = 5

# Yields before a rank sleeps: by the probe where ranks share cores (tuning.yields). A rank with a core of its own
# yields for the millisecond that csrc/core/waiting.h allows. Where all threads of all ranks have a core, a thread that
# waits for its own call keeps its core for that millisecond instead: other work that it yields to may keep the core for
# longer than the peer takes. Beside two processes of nice 10, vLLM with 2 ranks generated 1.00 and 1.05 times as many
# tokens a second (1 and 8 sequences) as over its own shared memory, and with yields 0.81 and 0.80 (2-core EPYC, medians
# of 4 and of 3 rounds, 2026-11-30).
YIELDS_WITH_OWN_CORE = 1_000_000_000
YIELDS_SHARING_CORES = 40

# From which slice on ranks read one another's tensors where they are. Swept on the same Xeon for all_reduce,
# reduce_scatter, all_gather and all_to_all: with 2 ranks reading was faster from 8 KB on, by up to 1.5x at 128 KB; with
# 4 and 8 ranks on the 2 cores slices of 32 KB took up to 2x longer, those of 64 KB and more up to 0.7x.
LEAST_FETCH_WITH_OWN_CORE = 8 * 1024
LEAST_FETCH_SHARING_CORES = 64 * 1024

# Up to how many bytes of all ranks' tensors more than two ranks read them in place, combine, and write back. The kernel
# copies from memory more slowly than a program does, so it depends on by how much (tuning.most_fetch). Measured for
# all_reduce with 4 and 8 ranks on 2-core Xeons (2 MB of L2 a core), November 2026, times over those of copies: where
# the kernel took some 1.8 times as long, 64 and 128 MB in all took 0.7 and 0.9, 256 and 512 MB 1.0 to 1.5. Where it
# took 2.2 times as long, up to 32 MB in all took 0.95 to 1.0, 64 and 128 MB 1.25 to 1.55.
MOST_FETCH = 192 * 1024**2
MOST_FETCH_SLOW_KERNEL = 48 * 1024**2

# `stream_bytes`. An output that belongs to so many bytes has left the caches before anybody can read it again, and a
# store through the caches would first fetch what it overwrites. Swept for reduce_scatter, all_gather, all_to_all and
# broadcast with 2 and 4 ranks: with 64 MB and more, stores past the caches took 0.80 to 0.99 of the time; with 32 MB up
# to 1.5 times as long.

# What is read in place needs no slices but to stay in the cache between being read and being written: of 16 KB to 1 MB,
# 128 KB and 256 KB were fastest for 1 MB to 160 MB. What is copied twice wants them small enough to overlap the copies.
SLICE_FETCHED = 256 * 1024
LEAST_SLICE_COPIED = 16 * 1024
# Each slice that goes to another host costs both ends a system call or two. So one is at least what the wire carries in
# about so many seconds, up to the second figure. Over an unshaped veth of 2 hosts all_reduce of 64 KB took 34 us in one
# slice and 63 us in four (2-core EPYC, each rank on a core, medians, 2026-11-29).
SLICE_ON_WIRE = 50e-6
LEAST_SLICE_SENT = 128 * 1024

# Over Gloo every slice that a step sends is a message, for which several threads of both ranks have to get their turn:
# so few of them, but none larger than what a group may keep of each that is under way. Not swept yet.
LEAST_SLICE_GLOO = 256 * 1024
MOST_SLICE_GLOO = 4 * 1024**2


def resolve(options: Any, environ: Mapping[str, str] = os.environ) -> tuple[Options, dict[str, str]]:
    """All fields filled in, and where each came from: "option", "RINGREDUCE_X" or "default".

    `options`: `Options`, None, or the options of another backend, which do not concern this one: torch hands one object
    to all backends of a group.
    """
    if options is not None and not isinstance(options, Options):
        if not _is_of_torch(options):
            raise InvalidArgument(f"pg_options is a {type(options).__name__}; it must be ringreduce.Options or None")
        log.info(
            "pg_options is a %s, which is for another backend; ringreduce takes its own from the environment and the "
            "defaults",
            type(options).__name__,
        )
        options = None
    given = options or Options()
    said = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text.strip()}
    _refuse_old({name.removeprefix(PREFIX).lower(): name for name in said})
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for knob in fields(Options):
        variable = PREFIX + knob.name.upper()
        value = getattr(given, knob.name)
        origin = "option"
        if value is None and variable in said:
            origin, value = variable, _parsed(knob, said[variable])
            _check(knob, value, variable)
        if value is None:
            origin, value = "default", DEFAULTS[knob.name]
        values[knob.name] = int(value) if isinstance(value, bool) else value
        origins[knob.name] = origin
    for name in said:
        of_knob = name.removeprefix(PREFIX).lower() in values
        if not of_knob and name not in OTHER_VARIABLES and not name.startswith(OF_TESTS):
            _warn_of_unknown(name)
    return replace(given, **values), origins


def _is_of_torch(options: Any) -> bool:
    """Whether these are options of some backend of torch."""
    try:
        from torch._C._distributed_c10d import Backend
    except ImportError:
        return False
    return isinstance(options, Backend.Options)


@functools.cache  # once for each
def _warn_of_unknown(name: str) -> None:
    from difflib import get_close_matches

    known = [*(PREFIX + each.upper() for each in DEFAULTS), *OTHER_VARIABLES]
    like = [each for each in known if each.startswith(name)] or get_close_matches(name, known, 1, 0.0)
    log.warning("%s is set, but no setting has that name; the nearest is %s; see `ringreduce info`", name, like[0])


def _parsed(knob: Field[Any], text: str) -> Any:
    """The value that `text` says; the text itself where it says none, which `_check` refuses."""
    if isinstance(knob.metadata["default"], str):
        return text
    try:
        return parse_bytes(text) if knob.name.endswith("_bytes") else int(text)
    except ValueError:
        return text


def _check(knob: Field[Any], value: Any, where: str) -> None:
    """Raises `InvalidArgument` for a value that is not allowed. `where`: what errors call it."""
    name, allowed = knob.name, knob.metadata["allowed"]
    if name == "algorithms":
        if not isinstance(value, str):
            raise InvalidArgument(f"{where} is {value!r}; it must be text such as 'all_reduce:ring:32K-'")
        try:
            parse_algorithms(value)
        except PlanError as error:
            raise InvalidArgument(f"{where}={value!r}: {error}") from None
        return
    if allowed is not None and isinstance(allowed[0], str):
        if value not in allowed:
            raise InvalidArgument(f"{where} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
    elif allowed is not None:
        low, high = allowed
        if not isinstance(value, int) or (isinstance(value, bool) and high > 1) or not low <= value <= high:
            raise InvalidArgument(f"{where} is {value!r}; it must be a whole number from {low} to {high}")
    elif name == "tuning":
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"{where} is {value!r}; it must be 'auto', 'off' or the path of a file")
    elif not isinstance(value, str):
        what = "the path of a file, or '' for none" if name in ("topo_file", "hosts_file") else "text, '' for none"
        raise InvalidArgument(f"{where} is {value!r}; it must be {what}")
    elif name == "engine":
        _engine_parts(value, where)


def slot_bytes_for(size: int, options: Options) -> int:
    """Of one slot in a group of `size` ranks."""
    whole = options.parts.channel_bytes // slot_depth(size)
    shared = max(whole * RANKS_WITH_WHOLE_SLOTS // max(size, RANKS_WITH_WHOLE_SLOTS), LEAST_SHARED_SLOT)
    return max(min(whole, shared) // 4096 * 4096, 4096)


def slicing_for(options: Options, slot_bytes: int, fetch: bool, wire: float = 0.0) -> Slicing:
    """How a group with these options cuts a chunk. `wire`: bytes per second between its hosts, if there are several."""
    parts = options.parts
    if fetch and not parts.least_slice_bytes:
        return Slicing(parts.slices, SLICE_FETCHED, min(SLICE_FETCHED, slot_bytes))
    sent = min(int(wire * SLICE_ON_WIRE / LEAST_SLICE_COPIED + 0.5) * LEAST_SLICE_COPIED, LEAST_SLICE_SENT)
    return Slicing(parts.slices, parts.least_slice_bytes or max(LEAST_SLICE_COPIED, sent), slot_bytes)


def fetch_from(options: Options, size: int, cores: Collection[int], fetch: bool) -> int | None:
    """From which slice on `size` ranks on these cores read one another's memory; None if they cannot."""
    if not fetch:
        return None
    usual = LEAST_FETCH_WITH_OWN_CORE if size <= len(cores) else LEAST_FETCH_SHARING_CORES
    return options.parts.least_fetch_bytes or usual
