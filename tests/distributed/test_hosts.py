"""Groups over several hosts on a machine without network namespaces: ranks of one host that are told to be on several,
by RINGREDUCE_HOST_ID or transport='tcp', do all that they do with shared memory. tests/net has real networks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies import collectives, faults, lifecycle, surface
from distributed.harness import Rank, Ranks, on_ranks, run, run_cases
from processes import Logged

import ringreduce
from ringreduce.errors import CollectiveTimeout, InvalidArgument, TopologyError
from ringreduce.groups.lookup import backend_of
from ringreduce.topology import hosts_file
from ringreduce.topology.hosts_file import HostsFile

NOTICED = 2.0
"""Seconds in which all ranks must know of a death or a mismatch."""

Hosts = Sequence[int] | None
"""The host of each rank; None: each is alone, by transport='tcp'; (): all are on this one."""
PLACEMENTS: dict[str, Hosts] = {"tcp": None, "2 x 2": [0, 0, 1, 1], "interleaved": [0, 1, 0, 1], "uneven": [0, 1, 1, 1]}


def placed(me: Rank, hosts: Hosts, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(me, *args)` where all groups are over these hosts."""
    if hosts is None:
        os.environ["RINGREDUCE_TRANSPORT"] = "tcp"
    elif hosts:
        os.environ["RINGREDUCE_HOST_ID"] = f"host {hosts[me.rank]}"
    return function(me, *args)


def each_placement(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)(test)


# results


def every_collective(me: Rank, options: ringreduce.Options, counts: Sequence[int]) -> None:
    with me.join(options=options):
        for name in collectives.COLLECTIVES.keys() - {"barrier"}:
            for call, count in enumerate(counts):
                try:
                    collectives.COLLECTIVES[name](me, count, call)
                except Exception as error:
                    raise AssertionError(f"{name} with {count} elements, call {call}") from error
        dist.barrier()


@each_placement
def test_all_collectives(hosts: Hosts) -> None:
    run(placed, 4, hosts, every_collective, collectives.SMALL_SLOTS, collectives.sizes(4))


def test_all_collectives_of_large_sizes() -> None:
    run(placed, 4, [0, 0, 1, 1], every_collective, None, (100_003,))


BODIES: dict[str, tuple[Callable[..., Any], int]] = {
    "asynchronous calls": (collectives.futures_and_callbacks, 3),
    "layouts": (collectives.every_layout, 3),
    "groups of some": (collectives.overlapping_groups, 4),
    "a group again": (collectives.many_lives, 3),
    "direct calls": (collectives.direct_calls, 3),
    "own plans": (collectives.own_plan, 3),
    "callbacks": (collectives.call_in_callback, 3),
    "in place": (collectives.all_to_all_in_place, 4),
    "messages": (surface.batches_of_messages, 3),
    "monitored barrier": (surface.missing_ranks, 4),
    "shrink": (surface.shrinking, 4),
    "split": (surface.splitting, 4),
    "meshes": (surface.subgroups_and_meshes, 4),
    "children": (lifecycle.drop_in_child, 2),
    "data loader": (lifecycle.load_and_reduce, 2),
    "destroyed early": (faults.destroy_early, 3),
    "arguments": (faults.wrong_arguments, 3),
    "messages of another size": (faults.recv_another_size, 2),
}


@pytest.mark.parametrize("hosts", ((), None, [0, 1, 1, 0]), ids=("one host", "tcp", "2 hosts"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_what_works_on_one_host_and_on_several(size: int, hosts: Hosts) -> None:
    run_cases(placed, size, {name: (hosts, body) for name, (body, ranks) in BODIES.items() if ranks == size})


def test_operations() -> None:
    dtypes = (torch.float32, torch.int64, torch.bfloat16)
    cases = {str(dtype): ([0, 1, 1, 0], collectives.every_operation, dtype) for dtype in dtypes}
    run_cases(placed, 4, cases)


# where ranks are


def peers_linked(me: Rank, options: ringreduce.Options | None) -> set[int]:
    with me.join(options=options):
        collectives.all_reduce(me, 10_000, 0)
        collectives.COLLECTIVES["all_to_all_single"](me, 100, 0)
        return {link.peer for link in backend_of(None).links()}


def test_links_are_with_ranks_on_other_hosts_alone() -> None:
    assert run(placed, 4, [0, 1, 0, 1], peers_linked, None) == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
    assert run(peers_linked, 3, ringreduce.Options(transport="tcp")) == [{1, 2}, {0, 2}, {0, 1}]
    assert run(peers_linked, 3, None) == [set()] * 3


@on_ranks(3, through=(placed, [0, 0, 1]))
def test_shared_memory_is_for_one_host(me: Rank) -> None:
    with pytest.raises(TopologyError, match="cannot share memory"):
        me.join(timeout=10, options=ringreduce.Options(transport="shared_memory")).__enter__()


def with_files_of_their_own(me: Rank, files: Sequence[str]) -> tuple[Any, ...]:
    os.environ["RINGREDUCE_HOSTS_FILE"] = files[me.rank]
    with me.join():
        for name in collectives.COLLECTIVES.keys() - {"barrier"}:
            collectives.COLLECTIVES[name](me, 1009, 0)
        some = dist.new_group([0, 1, 3])
        if me.rank != 2:
            dist.all_reduce(torch.ones(10), group=some)
        stats, said = ringreduce.stats(), ringreduce.topology()
        return said.hosts, said.wire, [stats[name].wire for name in sorted(stats) if stats[name].wire]


def test_the_file_of_rank_0_counts_for_all(tmp_path: Path) -> None:
    rates = ((0, 1, 9, 9), (1, 0, 9, 9), (9, 9, 0, 1), (9, 9, 1, 0))
    file = HostsFile("then", tuple(f"host {n}" for n in (0, 1, 3, 4)), ((1e-4,) * 4,) * 4, rates)
    hosts_file.save(file, str(tmp_path / "one"))
    hosts_file.save(HostsFile("now", file.hosts, file.latency, ((1, 1, 1, 1),) * 4), str(tmp_path / "other"))
    files = [str(tmp_path / "one"), str(tmp_path / "other"), "", "/nowhere"]
    values = run(placed, 4, [0, 1, 3, 4], with_files_of_their_own, files)
    assert values[0] == values[1] == values[3]
    on_hosts, wire, wires = values[0]
    assert values[2] == (on_hosts, wire, wires[:1])
    assert [host.ranks for host in on_hosts] in ([(0,), (2,), (1,), (3,)], [(0,), (3,), (1,), (2,)])
    assert wire == str(wires[0]) and wires[0][:2] == (1e-4, 9) and "one, then" in wire
    assert wires[1][:2] == (1e-4, 1)  # of the group of three, whose ring has to cross the slow line


def a_bad_file(me: Rank, path: str) -> None:
    os.environ["RINGREDUCE_HOSTS_FILE"] = path if me.rank == 0 else ""
    with pytest.raises(TopologyError, match=f"RINGREDUCE_HOSTS_FILE='{path}': .*doctor --peers --write"):
        me.join(timeout=10).__enter__()


def test_all_ranks_say_what_is_wrong_with_the_file_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text("[]")
    run(placed, 3, [0, 1, 1], a_bad_file, str(tmp_path / "hosts.json"))


@on_ranks(2)
def test_an_interface_that_is_not_there(me: Rank) -> None:
    options = ringreduce.Options(transport="tcp", socket_ifname="=nowhere0")
    with pytest.raises(InvalidArgument, match="RINGREDUCE_SOCKET_IFNAME='=nowhere0' leaves no interface"):
        me.join(timeout=10, options=options).__enter__()


# faults


@pytest.mark.parametrize("hosts", (None, [0, 0, 1], [0, 1, 0]), ids=str)
def test_survivors_of_a_kill_name_the_dead_rank_at_once(hosts: Hosts) -> None:
    with Ranks(placed, 3, hosts, faults.reduce_in_a_loop, 60.0, 20.0, [0, 1]) as ranks:
        faults.death_is_known(ranks, 2, NOTICED)


def test_a_stopped_rank_is_what_the_group_waits_for() -> None:
    with Ranks(placed, 3, None, faults.reduce_in_a_loop, 60.0, 2.0, [0, 1, 2]) as ranks:
        ranks.reports()
        stopped = ranks.signal(1, signal.SIGSTOP)
        for kind, message, culprit, when in ranks.reports(but=(1,)):
            assert (kind, culprit) == (CollectiveTimeout, 1), message
            assert stopped + 1.8 < when < stopped + 2.0 + NOTICED
        ranks.signal(1, signal.SIGCONT)
        ranks.results()


@pytest.mark.slow
@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("hosts", (None, [0, 1, 0]), ids=("tcp", "2 hosts"))
def test_a_rank_that_goes_on_after_the_timeout_changes_no_tensor_of_others(hosts: Hosts, shared: bool) -> None:
    with Ranks(placed, 3, hosts, faults.stop_in_the_middle, 1, shared) as ranks:
        faults.goes_on_late(ranks)


@pytest.mark.parametrize("shared", (True, False))
def test_a_rank_that_goes_on_after_the_timeout_takes_nothing_that_was_changed(shared: bool) -> None:
    for _ in range(2):  # the rank is not always stopped inside of a call
        with Ranks(placed, 2, None, faults.gather_late, shared) as ranks:
            faults.goes_on_late(ranks)


@pytest.mark.parametrize(("hosts", "late"), ((None, 0.0), ([0, 1, 0], 0.3)), ids=("tcp", "2 hosts, one rank late"))
def test_mismatches_are_known_to_all_ranks_at_once(hosts: Hosts, late: float) -> None:
    faults.mismatches_are_known(run(placed, 3, hosts, faults.call_something_else, late), NOTICED)


def test_a_rank_is_dead_though_a_child_of_it_lives() -> None:
    with Ranks(placed, 3, None, lifecycle.leave_a_child_behind) as ranks:
        lifecycle.outlived_by_a_child(ranks)


def test_waiting_for_a_late_rank_costs_almost_no_cpu_time() -> None:
    assert max(run(placed, 3, None, faults.wait_for_a_late_rank)) < 0.1


# fewer bytes on the wire

COUNTS = (1, 31, 1000, 100_003)
OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
ALGORITHMS = ("", "all_reduce:ring", "all_reduce:two_shot", "all_reduce:tree", "all_reduce:one_shot")


def normal(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def wire_results(me: Rank, wire_dtype: str) -> dict[tuple[str, str, int], Any]:
    """Of all_reduce, by algorithm, operation and count: NumPy arrays."""
    results = {}
    for algorithm in ALGORITHMS:
        options = ringreduce.Options(wire_dtype=wire_dtype, algorithms=algorithm, engine="channel_bytes=64K")
        with me.join(algorithm, options=options):
            for name, op in OPERATIONS.items():
                for count in COUNTS:
                    values = normal(me.rank, count)
                    dist.all_reduce(values, op)
                    results[algorithm, name, count] = values.numpy()
            for dtype in (torch.float64, torch.int32):  # these are not rounded, nor is another collective
                whole = torch.full((1000,), 2**20 + 1 + me.rank, dtype=dtype)
                dist.all_reduce(whole)
                assert (whole == me.size * (2**20 + 1) + sum(range(me.size))).all()
            gathered = torch.empty(me.size * 100)
            dist.all_gather_single(gathered, torch.full((100,), 1 + 2.0**-20 * me.rank))
            assert (gathered.view(-1, 100)[:, 0] == 1 + 2.0**-20 * torch.arange(me.size)).all()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", ("bfloat16", "int8", "int4"))
@pytest.mark.parametrize("hosts", (None, [0, 0, 1, 1], [0, 1, 1, 1]), ids=("tcp", "2 x 2", "uneven"))
def test_rounded_on_the_wire(hosts: Hosts, wire_dtype: str) -> None:
    """All ranks get the same, within the error that is stated, and what should be rounded is."""
    found = run(placed, 4, hosts, wire_results, wire_dtype)
    for key, array in found[0].items():
        (algorithm, op, count), values = key, torch.from_numpy(array)
        assert all(np.array_equal(array, other[key]) for other in found[1:]), f"{key}: ranks differ"
        inputs = torch.stack([normal(rank, count) for rank in range(4)]).double()
        right = inputs.amax(0) if op == "max" else inputs.sum(0) / (4 if op == "avg" else 1)
        most = inputs.abs().sum(0)  # no partial sum is larger
        if wire_dtype != "bfloat16":  # what counts is the largest of those packed together, wherever their block begins
            most = torch.nn.functional.max_pool1d(most[None], 63, 1, 31)[0]
        roundings = 4  # of 3 partial sums at most, and of the result
        bound = roundings * {"bfloat16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}[wire_dtype] * most
        error = (values.double() - right).abs()
        if algorithm == "all_reduce:one_shot":  # where all ranks complete the sum, rounding would make them differ
            bound = torch.full_like(bound, 1e-5)
        elif algorithm and count >= 1000:  # by default small ones take one_shot; fewer than 32 are not packed
            assert error.max() > 1e-5, f"{key}: not rounded"
            if wire_dtype == "bfloat16":  # the ends of chunks and slices, fewer than 32 values each, are not
                differ = int((values != values.bfloat16().float()).sum())
                assert differ < 32 * (4 + count // 4096), f"{key}: not all are rounded"
        assert (error <= bound + 1e-6).all(), key


def bytes_sent(me: Rank, wire_dtype: str) -> int:
    with me.join(options=ringreduce.Options(wire_dtype=wire_dtype)):
        before = sum(link.bytes_out for link in backend_of(None).links())
        dist.all_reduce(torch.ones(2_000_000))
        return sum(link.bytes_out for link in backend_of(None).links()) - before


def test_fewer_bytes_on_the_wire() -> None:
    shares = {"float32": 1.0, "bfloat16": 1 / 2, "int8": 33 / 128, "int4": 17 / 128}
    sent = run_cases(placed, 4, {name: ([0, 0, 1, 1], bytes_sent, name) for name in shares})
    for name, share in shares.items():
        found = sum(sent[name]) / sum(sent["float32"])
        assert 0.99 * share < found < 1.02 * share, name  # also frames of control, which time decides on


@pytest.mark.parametrize("wire_dtype", ("bfloat16", "int8"))
@on_ranks(3, through=(placed, None))
def test_what_is_not_finite_is_so_after_the_wire(me: Rank, wire_dtype: str) -> None:
    with me.join(options=ringreduce.Options(wire_dtype=wire_dtype, algorithms="all_reduce:ring")):
        values = torch.ones(1000)
        if me.rank == 1:
            values[500] = torch.inf
        dist.all_reduce(values)
        values = values.numpy()
        assert not np.isfinite(values[500])
        assert (values[:400] == 3).all() and (values[600:] == 3).all()


@on_ranks(2, through=(placed, None))
def test_ranks_must_agree_on_the_wire_dtype(me: Rank) -> None:
    options = ringreduce.Options(wire_dtype=("bfloat16", "int8")[me.rank])
    with pytest.raises(InvalidArgument, match="wire_dtype"), me.join(options=options):
        pass


def with_a_file_of_one_machine(me: Rank) -> list[str]:
    """What is logged."""
    logged = Logged()
    with me.join(options=ringreduce.Options(topo_file="/nowhere.json")):
        collectives.all_reduce(me, 1000, 0)
    return logged.messages


def test_a_topology_file_is_not_passed_over_in_silence() -> None:
    mine, theirs = run(placed, 2, [0, 1], with_a_file_of_one_machine)
    assert mine == [
        "RINGREDUCE_TOPO_FILE='/nowhere.json' is not read: it describes one machine, and ranks are on 2 hosts"
    ]
    assert theirs == []
