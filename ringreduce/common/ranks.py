"""How messages call the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence


def numbers(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def call_ranks(ranks: Sequence[int], global_ranks: Sequence[int], process: str = "") -> str:
    """How messages call ranks of a group: "rank 3 (rank 1 of the group, node7, pid 4711)".

    The first number is the global rank. The second one is left out if the two are equal for all ranks of the group.
    `process`: host and pid, of one rank.
    """
    alike = list(global_ranks) == list(range(len(global_ranks)))
    inner = ", ".join(filter(None, ["" if alike else f"{numbers(ranks)} of the group", process]))
    return numbers([global_ranks[rank] for rank in ranks]) + (f" ({inner})" if inner else "")
