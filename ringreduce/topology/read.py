"""Reads the description of a machine, of whichever kind it is, into a link graph."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.common.files import content_of, encoding_of
from ringreduce.topology.clusters import cluster
from ringreduce.topology.graph import LinkGraph, off_the_fabric
from ringreduce.topology.matrix import read_matrix
from ringreduce.topology.nccl_xml import read_nccl_xml
from ringreduce.topology.rates import NOTHING, Assumed
from ringreduce.topology.rocm import is_rocm, read_rocm, tables_of_amd_smi

KINDS = (
    "what `nvidia-smi topo -m`, `rocm-smi --showtopo` or `amd-smi topology` prints, the XML of NCCL or RCCL "
    "(NCCL_TOPO_DUMP_FILE), or the JSON of a link graph"
)

LONGEST_NAME = 4096

_XML = re.compile(r"\s*(?:<\?xml|<!--|<!DOCTYPE|<(?:system|graphs|topology|nvidia_smi_log)\b)")
_EMBEDDED = re.compile(r"<system\b[^>]{0,200}>\s*<cpu\b")
_UNKNOWN_LINKS = "of whose links nothing is known here; describe the machine as the JSON of a link graph"
_ROW_WITH = r"^[^\w\n]*GPU\d{{1,4}}[ \t|]+(?:[A-Z]+\d*[ \t|]+)*(?:{})(?![\w-])"
_NOT_A_TOPOLOGY = (
    (
        re.compile(r"^\s*Link \d+: (?:[\d.]+ GB/s|<inactive>)", re.MULTILINE),
        "this is `nvidia-smi nvlink --status`, which does not say what the links lead to; run `nvidia-smi topo -m` and "
        "save what both print in one file",
    ),
    (
        re.compile(r"^\W*(?:NPU|Phy-ID)\d+\b", re.MULTILINE),
        f"it is of Ascend NPUs, {_UNKNOWN_LINKS}",
    ),
    (
        re.compile(r"^[^\w\n]*GPU \d+/\d+\b", re.MULTILINE),
        f"it is of Intel's GPUs, {_UNKNOWN_LINKS}",
    ),
    (
        re.compile(r'"link_type"\s*:'),
        "it is a part of what `amd-smi topology --json` prints; save all of it, or leave out --json",
    ),
)
_OTHER_VENDORS = (
    (re.compile(_ROW_WITH.format("MX|ETH"), re.MULTILINE), f"it is of MetaX GPUs (mx-smi), {_UNKNOWN_LINKS}"),
    (
        re.compile(_ROW_WITH.format(r"MT\d+|[SMH]PB|INT"), re.MULTILINE),
        f"it is of Moore Threads GPUs (mthreads-gmi), {_UNKNOWN_LINKS}",
    ),
)
"""Matrices that look like those of nvidia-smi, but have classes of their own."""
_ESCAPED = re.compile(r"\\[nt][ \t]*GPU\d|Affinity\\n[\"']")


def read(text: str, where: str, assume: Assumed = NOTHING, folder: Path | None = None) -> LinkGraph:
    """The graph that a text describes; `where` names the text in errors and is the graph's name.  Files that it names
    are looked for in `folder`, by default the current one.

    A text within a string, of a program or of JSON, is read with its \\n and \\t written out, and errors say so.
    Raises TopologyError, with line and column, if it describes none.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise TopologyError(f"{where}: line 1, column 1: it is empty; expected {KINDS}")
    if (at := text.find("\0")) >= 0:
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise TopologyError(f"{where}: line {line}, column {column}: it is binary; expected {KINDS}")
    if _XML.match(text):
        graph = read_nccl_xml(text, where, assume)
    elif _ESCAPED.search(text):
        written_out = re.sub(r"\\{1,8}([rnt])", lambda found: {"r": "", "n": "\n", "t": "\t"}[found[1]], text)
        graph = replace(_read_report(written_out, rf"{where}, with \n and \t written out", assume), name=where)
    elif tables := tables_of_amd_smi(text):
        graph = replace(read_rocm(tables, f"{where}, as tables", assume), name=where)
    elif text.lstrip().startswith("{"):
        if assume != NOTHING:
            raise TopologyError(
                f"{where}: a JSON graph states its own rates; edit its capacities, and leave --gpu, --nvlink-gbps, "
                "--pcie-gbps, --smp-gbps and --peer-access out"
            )
        return _read_json(text, where, folder or Path())
    else:
        graph = _read_report(text, where, assume)
    return replace(graph, assumed=(*graph.assumed, *off_the_fabric(graph)))


def _read_json(text: str, where: str, folder: Path) -> LinkGraph:
    """A link graph, or a cluster of machines."""
    document: Any = None
    with suppress(ValueError, RecursionError):  # which LinkGraph.from_json explains
        document = json.loads(text)
    if not (isinstance(document, dict) and isinstance(document.get("machine"), str) and "nodes" not in document):
        return LinkGraph.from_json(text, where)
    if len(document["machine"]) > LONGEST_NAME:
        raise TopologyError(f"{where}: machine has {len(document['machine'])} characters; give a preset or a file")
    file = folder / document["machine"]
    if not file.is_file():
        try:
            machine = described(document["machine"])
        except TopologyError as error:
            raise TopologyError(f"{where}: machine: {error}") from None
        return cluster(document, machine, where)
    if re.match(r"\s*\{", start := content_of(file).decode(errors="replace")) and re.search(r'"machine"\s*:', start):
        raise TopologyError(f"{where}: machine is {document['machine']!r}, a cluster itself; name one host's file")
    return cluster(document, load(file), where)


def _read_report(text: str, where: str, assume: Assumed) -> LinkGraph:
    """The graph of what a tool printed, somewhere in a text."""
    if (found := _EMBEDDED.search(text)) and (end := text.find("</system>", found.start())) >= 0:
        before = re.sub(r"[^\r\n]", " ", text[: found.start()])  # so that lines and columns stay
        return read_nccl_xml(before + text[found.start() : end + 9], where, assume)
    if is_rocm(text):
        return read_rocm(text, where, assume)
    names_gpus = re.search(r"GPU\d", text)
    for shown, what in _OTHER_VENDORS if names_gpus else _NOT_A_TOPOLOGY:
        if at := shown.search(text):
            line = text.count("\n", 0, at.start()) + 1
            raise TopologyError(f"{where}: line {line}, column 1: {what}")
    if not names_gpus:
        start = text.strip()[:40]
        raise TopologyError(f"{where}: line 1, column 1: it begins {start!r}, which is no topology; expected {KINDS}")
    return read_matrix(text, where, assume)


def load(path: str | Path, assume: Assumed = NOTHING) -> LinkGraph:
    """The graph that a file describes.  Raises TopologyError that names the path, for its text as `read` does, or for
    a file that cannot be read."""
    try:
        content = content_of(path)
    except FileNotFoundError:
        raise TopologyError(f"{path} does not exist; give a file with {KINDS}") from None
    except IsADirectoryError:
        raise TopologyError(f"{path} is a directory; give a file in it, with {KINDS}") from None
    except OSError as error:
        raise TopologyError(f"{path} cannot be read: {error.strerror}; expected {KINDS}") from None
    piped = str(path) == "/dev/stdin"
    return read(_decoded(content, path), str(path), assume, Path() if piped else Path(path).parent)


def _decoded(content: bytes, path: str | Path) -> str:
    encoding = encoding_of(content)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        what = f"it is not {encoding.removesuffix('-sig').upper()} text; save it as UTF-8, with {KINDS}"
        raise TopologyError(f"{path}: line {line}, column {column}: {what}") from None


def described(where: str, assume: Assumed = NOTHING) -> LinkGraph:
    """The machine that a file describes, or if there is no such file, the preset of that name.

    Raises TopologyError if it is neither, OSError if the file cannot be read.
    """
    from ringreduce.topology.presets import PRESETS, preset

    if Path(where).exists():
        return load(where, assume)
    if where in PRESETS:
        return preset(where, assume)
    near = sorted(name for name in PRESETS if name.startswith(where)) or get_close_matches(where, PRESETS)
    if near:
        raise TopologyError(f"{where!r} is neither a file nor a preset; did you mean {' or '.join(near)}?")
    known = ", ".join(PRESETS)
    raise TopologyError(f"{where!r} is neither a file nor a preset; give a file with {KINDS}, or one of {known}")
