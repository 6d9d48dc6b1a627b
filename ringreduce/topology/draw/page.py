"""A plan as a page that plays it: every message on every link, as `plan.simulate` has it, in one HTML file."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.common.failures import PlanError
from ringreduce.common.files import write_file
from ringreduce.common.units import bytes_text
from ringreduce.plan.model import Channel, Read
from ringreduce.plan.simulate import Hop, Simulated, hops, simulate
from ringreduce.topology.draw.placing import places
from ringreduce.topology.draw.style import colour, machine_name, rank_label, spoken
from ringreduce.topology.graph import NodeKind

if TYPE_CHECKING:
    from ringreduce.topology.planned import Planned

MOST_HOPS = 20_000
"""Messages on links that a page holds. A plan with more is played in larger slices; if whole chunks are still too many,
no page is made."""


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
    best, played, found = _played(planned, size_bytes)
    graph, plan, links = planned.graph, planned.plan, planned.routes.links
    rank_of = {name: rank for rank, name in enumerate(planned.ranks)}
    orders = [_order(channel) for channel in plan.channels]
    used = _rows(planned, found, orders)
    ends = {*planned.ranks, *(name for at in used for name in (links[at].src, links[at].dst))}
    nodes = [node for node in graph.nodes if node.name in ends]
    node_at, link_at = {node.name: at for at, node in enumerate(nodes)}, {link: at for at, link in enumerate(used)}
    where = places(graph, planned.ranks, planned.rings)
    labels = [rank_label(graph, name) for name in planned.ranks]
    shapes = [_shape(channel, order, labels) or plan.name for channel, order in zip(plan.channels, orders, strict=True)]
    shares = sum(channel.share for channel in plan.channels)
    return {
        "seconds": played.seconds,
        "slice": max(1, round(played.slice_bytes)),
        "whole": None if best is played else [best.seconds, best.slice_bytes],
        "hosts": [[host, x, -y] for host, (x, y) in where.centre.items()] if graph.several_hosts else [],
        "nodes": [
            {
                "name": f"host{node.host}/" * (graph.several_hosts and node.kind != NodeKind.NETWORK) + spoken(node),
                "x": round(where.at[node.name][0], 4),
                "y": round(-where.at[node.name][1], 4),
                "rank": rank_of.get(node.name, -1),
            }
            for node in nodes
        ],
        "links": [[node_at[links[at].src], node_at[links[at].dst], links[at].capacity] for at in used],
        "channels": [
            {"colour": colour(at), "share": channel.share / shares, "shape": shapes[at]}
            for at, channel in enumerate(plan.channels)
        ],
        # Of each message on a link: the link, from when to when, channel, source, target, chunk, slice. Nine digits:
        # what begins together does so here too, whatever the order of the sums.
        "hops": [[link_at[hop.link], float(f"{hop.begin:.9g}"), float(f"{hop.end:.9g}"), *hop[3:]] for hop in found],
    }


def _rows(planned: Planned, found: list[Hop], orders: list[list[int]]) -> list[int]:
    """The links that carry messages: those of one ring alone as they follow there, others by the rank that sends."""
    channels: dict[int, set[int]] = {}
    for hop in found:
        channels.setdefault(hop.link, set()).add(hop.channel)
    rank_of = {name: rank for rank, name in enumerate(planned.ranks)}

    def place(link: int) -> tuple[int, int, int]:
        only = min(channels[link]) if len(channels[link]) == 1 else -1
        rank = rank_of.get(planned.routes.links[link].src, planned.plan.size)
        order = orders[only] if only >= 0 else []
        return only, order.index(rank) if rank in order else rank, link

    return sorted(channels, key=place)


def _played(planned: Planned, size_bytes: int) -> tuple[Simulated, Simulated, list[Hop]]:
    """The plan as it runs, and as it is played: in larger slices where those of the first are too many for a page."""
    network, plan = planned.network, planned.plan
    if planned.in_switches or planned.whole_hosts > 1 or plan.size < 2:
        why = "switches reduce in it" if planned.in_switches else "nothing moves on one GPU"
        why = "one host stands for all of them in it" if planned.whole_hosts > 1 else why
        raise PlanError(f"{plan.name} cannot be played: {why}")
    per_slice = sum(len(step.send) for channel in plan.channels for program in channel.programs for step in program)
    if per_slice <= MOST_HOPS:
        best = played = simulate(plan, network, size_bytes)
        while True:
            found = hops(plan, network, size_bytes, played.slice_bytes) if played.messages <= MOST_HOPS else []
            if 0 < len(found) <= MOST_HOPS:
                return best, played, found
            if played.rounds == 1:
                break
            played = simulate(plan, network, size_bytes, slice_bytes=2 * played.slice_bytes)
    raise PlanError(
        f"{plan.name} has more than {MOST_HOPS} messages on links, the most that a page can play; take fewer GPUs"
    )


def _order(channel: Channel) -> list[int]:
    """The ranks as a ring or chain has them, from rank 0 on; of other shapes, none."""
    after = [{peer for step in program for peer in step.send} for program in channel.programs]
    order = [0]
    while len(after[order[-1]]) == 1 and not after[order[-1]] <= set(order):
        order += after[order[-1]]
    return order if len(order) == len(after) and len(after[order[-1]]) <= 1 else []


def _shape(channel: Channel, order: list[int], labels: list[str]) -> str:
    """A ring or chain as its ranks, a tree by its root; of other shapes, nothing."""
    programs = channel.programs
    pairs = {frozenset((rank, peer)) for rank, program in enumerate(programs) for step in program for peer in step.send}
    if order:
        return " → ".join(labels[rank] for rank in (*order, *order[: len(pairs) - len(order) + 1]))
    roots = [rank for rank, program in enumerate(programs) if all(step.read != Read.NONE for step in program)]
    return f"tree, root {labels[roots[0]]}" if len(pairs) == len(programs) - 1 and len(roots) == 1 else ""
