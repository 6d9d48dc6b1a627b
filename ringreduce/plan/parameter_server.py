"""The parameter server, as a plan to be compared with collectives: workers push to servers, and pull the sum.

Ranks ``0 .. workers - 1`` have a tensor each; the others are servers, each with a *shard*, an equal part of the tensor.
A worker pushes every shard to its server, beginning with another one than its neighbours do; the server adds all
workers' and sends the sum to each of them.  A server's link carries ``workers / shards`` tensors in and as many out:
with m workers the time of one server is O(m), that of n servers O(m / n), until the workers' own links are the
narrowest (one tensor out, one in).  In a ring a rank sends less than two tensors, however many there are.

This is a plan for `simulate` only: servers have no input, which no collective of c10d knows, and `verify` says so.
"""

from ringreduce.common.failures import PlanError
from ringreduce.plan.model import Channel, Plan, Program, Read, Step
from ringreduce.plan.network import switch
from ringreduce.plan.simulate import Simulated, simulate


def parameter_server(workers: int, shards: int, size_bytes: float, bandwidth: float, latency: float = 0.0) -> Simulated:
    """One push and pull of `size_bytes` by every worker, all machines on one switch, a server for each shard.

    Servers wait for a whole shard of all workers before they answer.  Links of the result are those of
    `network.switch`: two for every worker, then two for every server.  If there are no more shards than workers, the
    time is ``2 * (latency + workers / shards * size_bytes / bandwidth)``; with more, the first answer before the last
    are pushed.
    """
    plan = push_pull(workers, shards)
    whole = max(size_bytes, 1.0)
    return simulate(plan, switch(plan.size, bandwidth, latency), size_bytes, slice_bytes=whole)


MOST_PUSHES = 2**18
"""Of all workers to all shards; as many pulls come back."""


def push_pull(workers: int, shards: int) -> Plan:
    """The plan described above, of ``workers + shards`` ranks, one chunk a shard."""
    if workers < 1 or shards < 1:
        raise PlanError(f"a parameter server of {workers} workers and {shards} shards; both must be at least 1")
    if workers * shards > MOST_PUSHES:
        raise PlanError(
            f"a parameter server of {workers} workers and {shards} shards has {workers * shards} pushes; at most "
            f"{MOST_PUSHES} are planned: use fewer"
        )

    def worker(rank: int) -> Program:
        order = [(rank + hop) % shards for hop in range(shards)]
        push = (Step(shard, Read.INPUT, send=(workers + shard,)) for shard in order)
        pull = (Step(shard, recv=(workers + shard,), write=True) for shard in order)
        return (*push, *pull)

    def server(shard: int) -> Program:
        everyone = tuple((shard + hop) % workers for hop in range(workers))
        return (Step(shard, recv=everyone, send=everyone),)

    programs = (*map(worker, range(workers)), *map(server, range(shards)))
    return Plan("parameter_server", "all_reduce", workers + shards, (Channel(1, shards, programs),))
