"""Which algorithm runs for which size: what the cost model or a measurement decided, overridden by rules of the user.

    rules = entry { ";" entry }             entry = [ collective ":" ] algorithm [ ":" range [ ":" slice ] ]
                                            range = begin "-" [ end ]

as in ``all_reduce:one_shot:0-32K;two_shot:32K-;broadcast:tree:1M-:64K``.  An entry without a collective is for that of
the entry before it.  A range counts the bytes of one block of the collective: the whole tensor for all_reduce,
broadcast and reduce, one rank's part of it for the others.  It includes its begin and not its end; without an end it
is open, and without a range an entry is for all sizes.  *slice* says how many bytes go through a slot at once; without
it, or as 0, the options `slices` and `least_slice_bytes` do.  K, M and G are powers of 1024.  No two entries may claim
the same size of the same collective; sizes that none claims keep what they had.  ``direct`` is known to every
collective; for all_reduce it is one_shot or two_shot, by size (`one_shot_end`).
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ringreduce.common.failures import PlanError
from ringreduce.common.units import UNITS
from ringreduce.plan.builders import BUILDERS

ONE_SHOT_BYTES = 64 * 1024
"""Below this size a group of two runs one_shot; larger groups get proportionally less, see `one_shot_end`.

Swept for 4 KB to 128 KB, float32 sum, on 2 cores (Xeon with 2 MB of L2 a core, November 2026): two_shot took less time
from 64 KB on with 2 ranks, from 16 KB with 4, 24 KB with 8 and 16 KB with 16.
"""

ROOTED = ("broadcast", "reduce", "gather", "scatter")

IN_RANK_ORDER = ("direct", "one_shot", "two_shot")
"""The algorithms of an all_reduce that combine in the order of ranks, however many there are."""

SPELLINGS = {spelling: name for name in BUILDERS for spelling in (name, name.replace("_", ""))}  # c10d: allreduce


MOST_BYTES = 2**62
"""The end of all ranges that have one."""


class Rule(NamedTuple):
    """`algorithm` runs `collective` for blocks of `begin` bytes or more and, unless None, less than `end`."""

    collective: str
    algorithm: str
    begin: int = 0
    end: int | None = None
    slice_bytes: int = 0

    def __str__(self) -> str:
        slices = f":{self.slice_bytes}" if self.slice_bytes else ""
        return f"{self.collective}:{self.algorithm}:{self.begin}-{'' if self.end is None else self.end}{slices}"


class Range(NamedTuple):
    """An entry of a table: up to the block size `end`, exclusive, this algorithm runs, in slices of so many bytes."""

    end: int | None
    algorithm: str
    slice_bytes: int = 0


Table = dict[str, list[Range]]
"""Per collective, ascending; the last range is open."""


@lru_cache(maxsize=64)
def parse_algorithms(text: str) -> tuple[Rule, ...]:
    """The rules in `text`, by the grammar above, or PlanError naming the entry at fault and what is known."""
    rules: list[Rule] = []
    for entry in filter(None, (entry.strip() for entry in text.split(";"))):
        rule = _parse_entry(entry, rules[-1].collective if rules else None)
        for other in rules:
            if _overlap(rule, other):
                raise PlanError(f"algorithms: {entry!r} claims sizes that {str(other)!r} has; make the ranges disjoint")
        rules.append(rule)
    return tuple(rules)


def table(size: int, rules: Sequence[Rule] = (), decided: Sequence[Rule] = ()) -> Table:
    """What runs for which block size in a group of `size` ranks: by `rules`, else as `decided`, else "direct"."""
    return {collective: ranges(collective, size, rules, decided) for collective in BUILDERS}


def lookup(ranges: Sequence[Range], block_bytes: int) -> Range:
    """The entry of a table that serves blocks of so many bytes."""
    return next(entry for entry in ranges if entry.end is None or block_bytes < entry.end)


def one_shot_end(size: int) -> int:
    """Where "direct" turns from one_shot to two_shot.

    one_shot reads the tensor of each peer, ``size - 1`` times the bytes; scaling the limit with ``1 / size`` bounds
    what a rank reads in that one hop by the same number of bytes in every group.
    """
    return ONE_SHOT_BYTES * 2 // max(size, 2)


def ranges_between(collective: str, chosen: Sequence[tuple[int, str, int]]) -> Iterator[Rule]:
    """The rules for what was found best at some block sizes, given as (bytes, algorithm, slice), ascending.

    Between two sizes the geometric mean is where one ends and the other begins.
    """
    begin = 0
    for (size, algorithm, slice_bytes), following in zip(chosen, [*chosen[1:], None], strict=True):
        if following is None or following[1:] != (algorithm, slice_bytes):
            end = None if following is None else math.isqrt(size * following[0])
            yield Rule(collective, algorithm, begin, end, slice_bytes)
            begin = end or 0


def _plain(collective: str, size: int, block_bytes: int) -> str:
    if collective != "all_reduce":
        return "direct"
    return "one_shot" if block_bytes < one_shot_end(size) else "two_shot"


def _parse_entry(entry: str, before: str | None) -> Rule:
    name, *rest = (part.strip() for part in entry.split(":"))
    collective = SPELLINGS.get(name)
    if collective is None and before is not None and name in (*BUILDERS[before], "direct"):
        collective, rest = before, [name, *rest]
    if collective is None:
        or_else = "" if before is None else f", and algorithms of {before} are {', '.join(BUILDERS[before])}"
        raise PlanError(f"algorithms: {entry!r}: unknown collective {name!r}; known are {', '.join(BUILDERS)}{or_else}")
    if len(rest) not in (1, 2, 3):
        raise PlanError(
            f"algorithms: {entry!r} is not collective:algorithm, collective:algorithm:begin-end or "
            "collective:algorithm:begin-end:slice"
        )
    known = dict.fromkeys((*BUILDERS[collective], "direct"))
    if rest[0] not in known:
        raise PlanError(f"algorithms: {entry!r}: unknown algorithm {rest[0]!r}; {collective} has {', '.join(known)}")
    begin, end = _parse_range(entry, rest[1]) if len(rest) > 1 else (0, None)
    return Rule(collective, rest[0], begin, end, _parse_slice(entry, rest[2]) if len(rest) > 2 else 0)


def _parse_range(entry: str, text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"([0-9]{1,19})([KMG]?)-(?:([0-9]{1,19})([KMG]?))?", text.replace(" ", "").upper())
    if match is None:
        raise PlanError(f"algorithms: {entry!r}: {text!r} is not a range of bytes such as 0-32K or 32K-")
    begin = int(match[1]) * UNITS[match[2]]
    end = int(match[3]) * UNITS[match[4]] if match[3] else None
    if max(begin, end or 0) > MOST_BYTES:
        raise PlanError(f"algorithms: {entry!r}: the range {text!r} goes beyond 2^62 bytes; leave its end out")
    if end is not None and end <= begin:
        raise PlanError(f"algorithms: {entry!r}: the range {text!r} is empty; its end must be above its begin")
    return begin, end


def _parse_slice(entry: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,19})([KMG]?)", text.upper())
    size = int(match[1]) * UNITS[match[2]] if match else -1
    if size != 0 and not 64 <= size <= 1024**3:
        raise PlanError(f"algorithms: {entry!r}: {text!r} is not a slice of 64 to 1G bytes such as 64K, or 0")
    return size


def _overlap(rule: Rule, other: Rule) -> bool:
    return (
        rule.collective == other.collective
        and (rule.end is None or other.begin < rule.end)
        and (other.end is None or rule.begin < other.end)
    )


def ranges(collective: str, size: int, rules: Sequence[Rule], decided: Sequence[Rule]) -> list[Range]:
    """The entry of `table` for one collective.

    Walk up the sizes: at each point where a rule or a default begins or ends, ask who decides from there on.
    """
    own = [rule for rule in (*rules, *decided) if rule.collective == collective]  # in order of precedence
    points = {0, *(rule.begin for rule in own), *(rule.end for rule in own if rule.end is not None)}
    if collective == "all_reduce":
        points.add(one_shot_end(size))
    found: list[Range] = []
    for begin, end in zip(sorted(points), (*sorted(points)[1:], None), strict=True):
        algorithm, slice_bytes = _decide(collective, size, begin, own)
        if found and found[-1][1:] == (algorithm, slice_bytes):
            found.pop()
        found.append(Range(end, algorithm, slice_bytes))
    return found


def _decide(collective: str, size: int, block_bytes: int, rules: Sequence[Rule]) -> tuple[str, int]:
    """The algorithm and slice for blocks of so many bytes."""
    claims = (rule for rule in rules if rule.begin <= block_bytes and (rule.end is None or block_bytes < rule.end))
    rule = next(claims, Rule(collective, "direct"))
    algorithm = _plain(collective, size, block_bytes) if rule.algorithm == "direct" else rule.algorithm
    return algorithm, rule.slice_bytes
