"""Which algorithm runs for which size: built-in defaults, overridden by rules that a user writes.

    rules = entry { ";" entry }      entry = collective ":" algorithm [ ":" range ]      range = begin "-" [ end ]

as in ``all_reduce:one_shot:0-32K;all_reduce:two_shot:32K-;broadcast:tree``.  A range counts the bytes of one block of
the collective: the whole tensor for all_reduce, broadcast and reduce, one rank's part of it for the others.  It
includes its begin and not its end; without an end it is open.  K, M and G are powers of 1024.  Without a range an
entry is for all sizes.  No two entries may claim the same size of the same collective; sizes that none claims keep
their default.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ringreduce.plan.builders import BUILDERS
from ringreduce.plan.model import PlanError

ONE_SHOT_BYTES = 32 * 1024
"""Below this size a group of two runs one_shot; larger groups get proportionally less, see `one_shot_end`.

A first guess, not measured: it awaits tuning with bench/.
"""

SPELLINGS = {spelling: name for name in BUILDERS for spelling in (name, name.replace("_", ""))}  # c10d: allreduce
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True)
class Rule:
    """`algorithm` runs `collective` for blocks of `begin` bytes or more and, unless None, less than `end`."""

    collective: str
    algorithm: str
    begin: int = 0
    end: int | None = None

    def __str__(self) -> str:
        return f"{self.collective}:{self.algorithm}:{self.begin}-{'' if self.end is None else self.end}"


Table = dict[str, list[tuple[int | None, str]]]
"""Per collective, ascending: (the block size in bytes that ends the algorithm's range, or None; the algorithm)."""


def parse_algorithms(text: str) -> tuple[Rule, ...]:
    """The rules in `text`, by the grammar above, or PlanError naming the entry at fault and what is known."""
    rules: list[Rule] = []
    for entry in filter(None, (entry.strip() for entry in text.split(";"))):
        rule = _parse_entry(entry)
        for other in rules:
            if _overlap(rule, other):
                raise PlanError(f"algorithms: {entry!r} claims sizes that {str(other)!r} has; make the ranges disjoint")
        rules.append(rule)
    return tuple(rules)


def table(size: int, rules: Sequence[Rule] = ()) -> Table:
    """Which algorithm runs for which block size in a group of `size` ranks."""
    return {collective: _ranges(collective, size, rules) for collective in BUILDERS}


def one_shot_end(size: int) -> int:
    """Where all_reduce turns from one_shot to two_shot.

    one_shot reads the tensor of each peer, ``size - 1`` times the bytes; scaling the limit with ``1 / size`` bounds
    what a rank reads in that one hop by the same number of bytes in every group.
    """
    return ONE_SHOT_BYTES * 2 // max(size, 2)


def _parse_entry(entry: str) -> Rule:
    name, *rest = (part.strip() for part in entry.split(":"))
    collective = SPELLINGS.get(name)
    if collective is None:
        raise PlanError(f"algorithms: {entry!r}: unknown collective {name!r}; known are {', '.join(BUILDERS)}")
    if len(rest) not in (1, 2):
        raise PlanError(f"algorithms: {entry!r} is not collective:algorithm or collective:algorithm:begin-end")
    known = dict.fromkeys((*BUILDERS[collective], "direct"))
    if rest[0] not in known:
        raise PlanError(f"algorithms: {entry!r}: unknown algorithm {rest[0]!r}; {collective} has {', '.join(known)}")
    return Rule(collective, rest[0], *(_parse_range(entry, rest[1]) if len(rest) == 2 else ()))


def _parse_range(entry: str, text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d+)([KMG]?)-(?:(\d+)([KMG]?))?", text.replace(" ", "").upper())
    if match is None:
        raise PlanError(f"algorithms: {entry!r}: {text!r} is not a range of bytes such as 0-32K or 32K-")
    begin = int(match[1]) * UNITS[match[2]]
    end = int(match[3]) * UNITS[match[4]] if match[3] else None
    if end is not None and end <= begin:
        raise PlanError(f"algorithms: {entry!r}: the range {text!r} is empty; its end must be above its begin")
    return begin, end


def _overlap(rule: Rule, other: Rule) -> bool:
    return (
        rule.collective == other.collective
        and (rule.end is None or other.begin < rule.end)
        and (other.end is None or rule.begin < other.end)
    )


def _ranges(collective: str, size: int, rules: Sequence[Rule]) -> list[tuple[int | None, str]]:
    """Walk up the sizes: at each point where a rule or a default begins or ends, ask who decides from there on."""
    own = [rule for rule in rules if rule.collective == collective]
    points = {0, *(rule.begin for rule in own), *(rule.end for rule in own if rule.end is not None)}
    if collective == "all_reduce":
        points.add(one_shot_end(size))
    ranges: list[tuple[int | None, str]] = []
    for begin, end in zip(sorted(points), (*sorted(points)[1:], None), strict=True):
        algorithm = _decide(collective, size, begin, own)
        if ranges and ranges[-1][1] == algorithm:
            ranges.pop()
        ranges.append((end, algorithm))
    return ranges


def _decide(collective: str, size: int, count: int, rules: Sequence[Rule]) -> str:
    """The algorithm for blocks of `count` bytes; "direct" is the default, which for all_reduce depends on the size."""
    claims = (rule.algorithm for rule in rules if rule.begin <= count and (rule.end is None or count < rule.end))
    algorithm = next(claims, "direct")
    if (collective, algorithm) == ("all_reduce", "direct"):
        return "one_shot" if count < one_shot_end(size) else "two_shot"
    return algorithm
