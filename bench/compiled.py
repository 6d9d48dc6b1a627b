"""What an all_reduce costs in a compiled graph: a tensor-parallel decoder as one graph, one token, one thread a rank.

    python bench/compiled.py --rounds 501

Decoder layers with two all_reduces each run in several ways, which take turns, round by round. Compiled with
fullgraph=True: with torch.ops.ringreduce, with torch's functional collectives, and without communication. Without a
compiler: with ringreduce.all_reduce, the direct call, and without communication. A figure is the median over the rounds
of the slowest rank's mean of a round, in microseconds.

  step  a step, divided by its number of all_reduces (two a layer)
  adds  what an all_reduce adds to the same layers without communication: the call, and waiting for the other ranks
  over  how much more it adds than the direct call does: the median of the rounds' differences
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

LAYERS, HIDDEN, HEAD = 4, 64, 16  # their number, their width, and features of an attention head
REPEAT = 10  # steps in a turn
ALONE = {"torch.ops.ringreduce": "compiled", "functional": "compiled", "direct call": "eager"}
"""Ways to reduce, and what each is compared with: the same layers without communication."""

Reduce = Callable[[Tensor], Tensor]


def reducing(kind: str, group: dist.ProcessGroup) -> Reduce:
    """What a layer does to the part of a sum that this rank has."""
    import ringreduce
    from ringreduce import ops

    name = group.group_name

    def in_place(x: Tensor) -> Tensor:
        ops.all_reduce_(x, name)
        return x

    def functional(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", name)

    def direct(x: Tensor) -> Tensor:
        ringreduce.all_reduce(x, group=group)
        return x

    ways = {"torch.ops.ringreduce": in_place, "functional": functional, "direct call": direct}
    return ways.get(kind, lambda x: x)


class Layer(nn.Module):
    """This rank's share of a decoder layer over a cache of keys and values: a token of one sequence."""

    def __init__(self, ranks: int, reduce: Reduce) -> None:
        super().__init__()
        self.reduce = reduce
        part = HIDDEN // ranks
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * part, bias=False), nn.Linear(part, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 4 * part, bias=False), nn.Linear(2 * part, HIDDEN, bias=False)
        self.register_buffer("keys", torch.randn(part // HEAD, 8, HEAD))
        self.register_buffer("values", torch.randn(part // HEAD, 8, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(-1, 1, HEAD) for each in self.qkv(nn.functional.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        )
        keys, values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        attended = (q @ keys.transpose(1, 2)).softmax(-1) @ values
        x = x + self.reduce(self.out(attended.view(1, -1)))
        gate, up = self.gate_up(nn.functional.rms_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        return x + self.reduce(self.down(nn.functional.silu(gate) * up))


def measure(ranks: int, rounds: int) -> dict[str, list[float]]:
    """One rank: microseconds by round of each way, per all_reduce."""
    group = dist.new_group(backend="ringreduce", timeout=harness.TIMEOUT)
    calls: dict[str, harness.Call] = {}
    outputs, times = {}, {}
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for kind in (*ALONE, *sorted(set(ALONE.values()))):
            torch.manual_seed(dist.get_rank())
            reduce = reducing(kind, group)
            net: nn.Module = nn.Sequential(*(Layer(ranks, reduce) for _ in range(LAYERS)))
            if "compiled" in (kind, ALONE.get(kind)):
                net = torch.compile(net, fullgraph=True, dynamic=False)
            calls[kind] = partial(net, x)
            outputs[kind], times[kind] = net(x), []
        for kind in ALONE:
            torch.testing.assert_close(outputs[kind], outputs["direct call"], rtol=1e-4, atol=1e-4)
        for _ in range(rounds):
            for kind, call in calls.items():
                call()
                times[kind].append(harness.seconds(call, REPEAT) / (2 * LAYERS) * 1e6)
    return times


def compiled(ranks: int = 2, rounds: int = 301) -> Iterator[dict[str, Any]]:
    if ranks not in (2, 4) or rounds < 1:
        raise harness.CannotRun("need 2 or 4 --ranks, which share 4 heads, and 1 of --rounds or more")
    times = harness.start_ranks(ranks, measure, ranks, rounds)
    adds = {kind: [a - b for a, b in zip(times[kind], times[ALONE[kind]], strict=True)] for kind in ALONE}
    for kind, how in ALONE.items():
        over = statistics.median(a - b for a, b in zip(adds[kind], adds["direct call"], strict=True))
        row = {"all_reduce by": kind, "layers": how, "step": statistics.median(times[kind])}
        yield {**row, "adds": statistics.median(adds[kind]), "over": over}
    for how in sorted(set(ALONE.values())):
        yield {"all_reduce by": "nothing", "layers": how, "step": statistics.median(times[how])}


if __name__ == "__main__":
    sys.exit(harness.main(compiled))
