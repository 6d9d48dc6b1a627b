"""The files of a snapshot: their names, the names of the tensors in them, and reading and checking all of them.

checkpoint/                          renamed from checkpoint.partial-<token> when it is complete
    index.json                       says which file has which tensor
    server-0-of-2.safetensors        blocks and rows of server 0, with their states
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.safetensors import NAMES, Reader

FORMAT = "1"
INDEX = "index.json"
STEPS = struct.Struct("=Q")
"""The number of updates of a block, in the payload of a restore request."""


def files_of(servers: int) -> list[str]:
    return [file_of(f"{i}-of-{servers}") for i in range(servers)]


def file_of(part: str) -> str:
    return f"server-{part}.safetensors"


def names_of(key: str, states: int) -> list[str]:
    """Returns the names of the tensors of a key: its value, then its states."""
    return [key, *(f"{key}#state{i}" for i in range(states))]


def names_of_block(about: dict[str, Any], states: int) -> list[str]:
    """Returns the names of the tensors of a block. They have its range of elements, unless it is all of the key."""
    begin, count = about["begin"], about["count"]
    part = "" if count == math.prod(about["spec"]["shape"]) else f"[{begin}:{begin + count}]"
    return [name + part for name in names_of(about["key"], states)]


def read(path: Path) -> list[tuple[Reader, list[dict[str, Any]]]]:
    """Reads and checks a snapshot. Returns its files, and for each the descriptions of its blocks. Leaves out keys of
    which blocks are missing, because a worker was just making them. Raises `InvalidArgument`."""
    try:
        index = json.loads((path / INDEX).read_text())
        files = {str(file): str(digest) for file, digest in index["metadata"]["files"].items()}
        if index["metadata"]["format"] != FORMAT:
            raise InvalidArgument(f"{path} has format {index['metadata']['format']!r}; this version reads {FORMAT!r}")
        if set(files) != set(files_of(len(files))) or not files:
            raise InvalidArgument(f"{path / INDEX} does not have the files of all servers: {', '.join(files)!r:.200}")
    except InvalidArgument:
        raise
    except OSError as error:
        raise InvalidArgument(f"{path} is no whole snapshot: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{path / INDEX} is no index of a snapshot: {error!r}") from None
    readers = [Reader(path / file) for file in files]
    for reader, digest in zip(readers, files.values(), strict=True):
        if reader.digest != digest:
            raise InvalidArgument(f"{reader.path} is damaged: its header is not the one that {path / INDEX} knows")
        reader.check()
    found = [(reader, list(_blocks_of(reader))) for reader in readers]
    whole = _whole_keys(path, [block for _, blocks in found for block in blocks])
    return [(reader, [block for block in blocks if block["key"] in whole]) for reader, blocks in found]


def _blocks_of(reader: Reader) -> Iterator[dict[str, Any]]:
    """Yields the description of each block in the metadata, with its key's spec."""
    try:
        specs = json.loads(reader.metadata["keys"])
        for block in json.loads(reader.metadata["blocks"]):
            key, spec = str(block["key"]), specs[block["key"]]
            numbers = {name: int(block[name]) for name in ("begin", "count", "steps", "rows", "states")}
            known: dict[str, Any] = {name: dict(spec[name]) for name in ("mode", "update")}
            known["dtype"] = str(spec["dtype"])
            if known["dtype"] not in NAMES or min(numbers.values()) < 0:
                raise ValueError(f"block {block} of {known['dtype']}")
            if "table" in spec:
                known |= {"table": dict(spec["table"]), "shape": list(spec["shape"])}
            else:
                push_wire, pull_wire = spec.get("wire", ("float32", "float32"))
                known |= {
                    "per_block": max(1, int(spec["per_block"])),
                    "shape": [int(n) for n in spec["shape"]],
                    "wire": [str(push_wire), str(pull_wire)],
                }
            yield {"key": key, "spec": known, "update": dict(block.get("update", spec["update"])), **numbers}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{reader.path} does not say which blocks it has: {error!r:.200}") from None


def _whole_keys(path: Path, blocks: list[dict[str, Any]]) -> set[str]:
    """Returns the names of the tables, and of the tensors that have all their blocks."""
    places: dict[str, list[tuple[int, int]]] = {}
    specs: dict[str, dict[str, Any]] = {}
    for block in blocks:
        if specs.setdefault(block["key"], block["spec"]) != block["spec"]:
            raise InvalidArgument(f"{path}: files differ in what {block['key']!r} is")
        places.setdefault(block["key"], []).append((block["begin"], block["count"]))
    whole = {key for key, spec in specs.items() if "table" in spec}
    for key in specs.keys() - whole:
        there, elements, per_block = places[key], math.prod(specs[key]["shape"]), specs[key]["per_block"]
        if len(set(there)) < len(there) or any(
            begin % per_block or count != min(per_block, elements - begin) for begin, count in there
        ):
            raise InvalidArgument(f"{path}: blocks of {key!r} overlap, or are not those of its shape")
        if sum(n for _, n in there) == elements:
            whole.add(key)
    return whole
