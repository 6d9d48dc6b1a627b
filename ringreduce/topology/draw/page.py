"""A plan as a page that plays it: every message on every link, as `plan.simulate` has it, in one HTML file."""

from __future__ import annotations

import html
import json
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.common.failures import PlanError
from ringreduce.common.files import write_file
from ringreduce.common.units import bytes_text, time_text
from ringreduce.plan.simulate import hops, simulate
from ringreduce.topology.draw.machine import places
from ringreduce.topology.draw.style import colour, machine_name, rank_label

if TYPE_CHECKING:
    from ringreduce.topology.planned import Planned

MOST_HOPS = 20_000
"""Messages on links that a page holds. Of more, chunks are shown whole; if there are still more, no page is made."""


def page(planned: Planned, size_bytes: int, path: str | Path) -> None:
    """Writes a page that plays the plan for one size. It needs no other file.

    Raises PlanError for a plan that nothing is known of step by step, or that has more messages than a page holds.
    """
    template = Path(__file__).with_name("page.html").read_text()
    said = f"{machine_name(planned.graph)}: {planned.collective} of {bytes_text(size_bytes)}, {planned.plan.name}"
    data = json.dumps(_scenes(planned, size_bytes), separators=(",", ":"), allow_nan=False)
    parts = {"TITLE": html.escape(said), "DATA": data.replace("<", "\\u003c")}
    write_file(path, re.sub("@(TITLE|DATA)@", lambda found: parts[found[1]], template).encode(errors="replace"))


def _scenes(planned: Planned, size_bytes: int) -> dict[str, Any]:
    if planned.in_switches or planned.whole_hosts > 1 or planned.plan.size < 2:
        why = "switches reduce in it" if planned.in_switches else "nothing moves on one GPU"
        why = "one host stands for all of them in it" if planned.whole_hosts > 1 else why
        raise PlanError(f"{planned.plan.name} cannot be played: {why}")
    network, plan = planned.network, planned.plan
    per_slice = sum(len(step.send) for channel in plan.channels for program in channel.programs for step in program)
    for slice_bytes in (None, float(max(1, size_bytes))) if per_slice <= MOST_HOPS else ():  # else whole chunks
        best = simulate(plan, network, size_bytes, slice_bytes=slice_bytes)
        found = hops(plan, network, size_bytes, best.slice_bytes) if best.messages <= MOST_HOPS else []
        if 0 < len(found) <= MOST_HOPS:
            break
    else:
        raise PlanError(
            f"{plan.name} has more than {MOST_HOPS} messages on links, the most that a page can play; take fewer GPUs"
        )
    graph, links = planned.graph, planned.routes.links
    used = sorted({hop.link for hop in found})
    nodes = sorted({*planned.ranks, *chain.from_iterable((links[at].src, links[at].dst) for at in used)})
    where = places(graph, planned.ranks, planned.rings, planned.trees)
    rank_of = {name: rank for rank, name in enumerate(planned.ranks)}
    node_at, link_at = ({each: at for at, each in enumerate(listed)} for listed in (nodes, used))
    return {
        "note": f"{time_text(best.seconds)} simulated; links that carry a message are coloured by its ring, tree or "
        f"channel. A slice has {bytes_text(max(1, round(best.slice_bytes)))} at most.",
        "extent": where.extent,
        "nodes": [
            {
                "label": rank_label(graph, name),
                "x": round(where.at[name][0], 4),
                "y": round(-where.at[name][1], 4),
                "rank": rank_of.get(name, -1),
            }
            for name in nodes
        ],
        "links": [[node_at[links[at].src], node_at[links[at].dst]] for at in used],
        "colours": [colour(at) for at in range(len(plan.channels))],
        "seconds": best.seconds,
        # Of each message on a link: the link, from when to when, channel, source, target, chunk, slice.
        "hops": [[link_at[hop.link], hop.begin, hop.end, *hop[3:]] for hop in found],
    }
