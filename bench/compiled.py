"""What an all_reduce costs in a compiled graph: a tensor-parallel decoder as one graph, one token, one thread a rank.

    python bench/compiled.py                                       2 ranks on this machine
    python bench/compiled.py --layers 8 --hidden 512

--layers decoder layers of width --hidden, with two all_reduces each, run in several ways, which take turns, round by
round, --repeat steps in a turn. Compiled with fullgraph=True: with torch.ops.ringreduce, with torch's functional
collectives, and without communication. Without a compiler: with ringreduce.all_reduce, the direct call, and without
communication. A figure is the median over the rounds of the slowest rank's mean of a round, in microseconds.

  step  a step, divided by its number of all_reduces (two a layer)
  adds  what an all_reduce adds to the same layers without communication: the call, and waiting for the other ranks
  over  how much more it adds than the direct call does: the median of the rounds' differences

Exit code: 0, 1 if a rank failed or a result was wrong, 2 if the request makes no sense here.
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

HEAD = 16  # features of an attention head
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

    def __init__(self, hidden: int, ranks: int, reduce: Reduce) -> None:
        super().__init__()
        self.reduce = reduce
        part = hidden // ranks
        self.qkv, self.out = nn.Linear(hidden, 3 * part, bias=False), nn.Linear(part, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 4 * part, bias=False), nn.Linear(2 * part, hidden, bias=False)
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


def measure(ranks: int, layers: int, hidden: int, rounds: int, repeat: int) -> dict[str, list[float]]:
    """One rank: microseconds by round of each way, per all_reduce."""
    group = dist.new_group(backend="ringreduce", timeout=harness.TIMEOUT)
    calls: dict[str, harness.Call] = {}
    outputs, times = {}, {}
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for kind in (*ALONE, *sorted(set(ALONE.values()))):
            torch.manual_seed(dist.get_rank())
            reduce = reducing(kind, group)
            net: nn.Module = nn.Sequential(*(Layer(hidden, ranks, reduce) for _ in range(layers)))
            if "compiled" in (kind, ALONE.get(kind)):
                net = torch.compile(net, fullgraph=True, dynamic=False)
            calls[kind] = partial(net, x)
            outputs[kind], times[kind] = net(x), []
        for kind in ALONE:
            torch.testing.assert_close(outputs[kind], outputs["direct call"], rtol=1e-4, atol=1e-4)
        for _ in range(rounds):
            for kind, call in calls.items():
                call()
                times[kind].append(harness.seconds(call, repeat) / (2 * layers) * 1e6)
    return times


def compiled(
    ranks: int = 2, layers: int = 4, hidden: int = 64, rounds: int = 301, repeat: int = 10
) -> Iterator[dict[str, Any]]:
    if min(ranks - 1, layers, rounds, repeat) < 1:
        raise harness.CannotRun("need 2 --ranks or more, and --layers, --rounds and --repeat of 1 or more")
    if hidden < 1 or hidden % (HEAD * ranks):
        raise harness.CannotRun(f"need --hidden in multiples of {HEAD * ranks} for {ranks} ranks")
    times = harness.start_ranks(ranks, measure, ranks, layers, hidden, rounds, repeat)
    adds = {kind: [a - b for a, b in zip(times[kind], times[ALONE[kind]], strict=True)] for kind in ALONE}
    for kind, how in ALONE.items():
        over = statistics.median(a - b for a, b in zip(adds[kind], adds["direct call"], strict=True))
        row = {"all_reduce by": kind, "layers": how, "step": statistics.median(times[kind])}
        yield {**row, "adds": statistics.median(adds[kind]), "over": over}
    for how in sorted(set(ALONE.values())):
        yield {"all_reduce by": "nothing", "layers": how, "step": statistics.median(times[how])}


if __name__ == "__main__":
    sys.exit(harness.main(compiled))
