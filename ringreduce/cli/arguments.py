"""Arguments that several commands share: how they are read, and what is wrong with those that cannot be."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.common.units import SIZE_HELP, parse_bytes
from ringreduce.config import PREFIX, resolve
from ringreduce.plan import COLLECTIVES
from ringreduce.topology.graph import LinkGraph
from ringreduce.topology.rates import Assumed

DEFAULT_SIZE = 160_000_000
MOST_BYTES = 2**63 - 1

SPELLINGS = {name.replace("_", ""): name for name in COLLECTIVES} | {
    "allreducecoalesced": "all_reduce",
    "allgatherintotensor": "all_gather",
    "allgatherbase": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "bcast": "broadcast",
    "alltoallsingle": "all_to_all",
    "alltoallbase": "all_to_all",
}
"""Collectives as torch, NCCL and MPI spell them, without case, hyphens, underscores and the prefix `nccl`."""

PICTURES = (".png", ".pdf", ".svg")


def size_bytes(text: str) -> int:
    """A number of bytes from 1, as `parse_bytes` reads it."""
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 1 <= count <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is {count} bytes; give from 1 to 2^63 - 1, such as 160MB")
    return count


def gpu_list(text: str) -> tuple[int, ...]:
    """ "0,1,3" or "0-3,6": positions of GPUs, each once."""
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r}: {part!r} is no GPU; give numbers as in 0,1,3 or 0-3")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise argparse.ArgumentTypeError(f"{text!r}: {part!r} ends before it begins; write {last}-{first}")
        if last - first >= 100_000:
            raise argparse.ArgumentTypeError(f"{text!r}: {part!r} is more GPUs than any machine has")
        chosen += range(first, last + 1)
    gpu, times = Counter(chosen).most_common(1)[0]
    if times > 1:
        raise argparse.ArgumentTypeError(f"{text!r} names GPU {gpu} twice; name each once")
    return tuple(chosen)


def collective(text: str) -> str:
    """The name that plans have for a collective, from any spelling of it."""
    squeezed = re.sub(r"[-_ ]", "", text.lower()).removeprefix("nccl")
    if squeezed not in SPELLINGS:
        raise argparse.ArgumentTypeError(f"{text!r} is no collective; known are {', '.join(COLLECTIVES)}")
    return SPELLINGS[squeezed]


def _number(text: str, unit: str, zero: bool = False, most: float = sys.float_info.max) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most or (zero and value == 0)):
        bounds = f"{'of at least' if zero else 'above'} 0" + f" and at most {most:g}" * (value > most)
        raise argparse.ArgumentTypeError(f"{text!r} {unit}; it must be a number {bounds}")
    return value


rate = partial(_number, unit="GB/s")
seconds = partial(_number, unit="seconds", most=1e9)  # longer ones the operating system cannot wait
microseconds = partial(_number, unit="microseconds", zero=True)


def count(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number from 1")
    return int(text)


def servers(text: str) -> tuple[int, int]:
    """ "16,4": 16 workers and 4 shards."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: give workers and shards, as in 16,4")
    return count(parts[0].strip()), count(parts[1].strip())


def picture(text: str) -> Path:
    """A file that a picture can be written to."""
    path = _output(text, "picture", PICTURES)
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text!r}: pictures need matplotlib; pip install matplotlib")
    return path


def page(text: str) -> Path:
    """A file that a page can be written to."""
    return _output(text, "page", (".html", ".htm"))


def _output(text: str, kind: str, endings: tuple[str, ...]) -> Path:
    path = Path(text)
    if path.suffix.lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind}; end its name in {', '.join(endings)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}; make it first")
    return path


def add_machine(parser: argparse.ArgumentParser, **file: Any) -> None:
    """The arguments that say which machine is meant; `file` is passed on to the positional one."""
    kinds = "text of `nvidia-smi topo -m` or of AMD's tools, NCCL XML, our JSON, -, or a preset's name"
    parser.add_argument("file", metavar="FILE", help=kinds, **file)
    parser.add_argument("--gpus", type=gpu_list, metavar="0,1,3", help="only these, by index, as ranks 0, 1, 2; or 0-3")
    rates = parser.add_argument_group("what a listing does not say (in GB/s: 1e9 bytes a second, in one direction)")
    rates.add_argument("--gpu", metavar="MODEL", help="the GPUs' model, such as v100: the speed of their links")
    rates.add_argument("--nvlink-gbps", type=rate, metavar="X", help="of one NVLink, such as 18 or 25")
    rates.add_argument("--pcie-gbps", type=rate, metavar="X", help="of a GPU's PCIe slot")
    rates.add_argument("--smp-gbps", type=rate, metavar="X", help="between two CPUs")
    peers = "of GPUs over PCIe (default: all but GeForce)"
    rates.add_argument("--peer-access", choices=("yes", "no"), help=peers)


def add_call(parser: argparse.ArgumentParser, algorithm: str) -> None:
    """The arguments that say which collective runs, on how much, and how."""
    known = "all_reduce (default), allgather, ... in torch's or NCCL's spelling"
    parser.add_argument("--collective", type=collective, default="all_reduce", metavar="NAME", help=known)
    sizes = f"{SIZE_HELP} (default: 160MB)"
    parser.add_argument("--size", type=size_bytes, default=DEFAULT_SIZE, metavar="SIZE", help=sizes)
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help=algorithm)
    made = "what to expect, from `ringreduce calibrate`"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=made)


def machine(arguments: argparse.Namespace) -> LinkGraph:
    """The machine that the arguments of `add_machine` mean, with the GPUs of `--gpus` alone.

    Raises TopologyError or OSError where there is none.
    """
    graph = _whole_machine(arguments)
    if arguments.gpus is None:
        return graph
    try:
        return graph.select(graph.places(arguments.gpus))
    except TopologyError as error:
        raise TopologyError(f"argument --gpus: {error}") from None


def _whole_machine(arguments: argparse.Namespace) -> LinkGraph:
    from ringreduce.topology import live, read
    from ringreduce.tuning import measured_memory

    peers = None if arguments.peer_access is None else arguments.peer_access == "yes"
    assume = Assumed(arguments.gpu, arguments.nvlink_gbps, arguments.pcie_gbps, arguments.smp_gbps, peers)
    where: str | None = arguments.file
    if where is not None:
        return read.load("/dev/stdin", assume) if where == "-" else read.described(where, assume)
    described = resolve(None)[0].topo_file
    if not described:
        return live.probe(assume, measured_memory())
    try:
        return read.described(described, assume)
    except TopologyError as error:
        raise TopologyError(f"{PREFIX}TOPO_FILE: {error}") from None
