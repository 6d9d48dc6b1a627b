"""Tables of rows: the bits of a module in one process, rows that are made on first use, memory, and wrong arguments."""

from __future__ import annotations

import functools
import signal
from typing import Any

import numpy as np
import pytest
import torch
from bodies.parameter_server import APART, NEAR, SMALL, join, on_any_hosts, placed
from distributed.harness import Rank, Ranks, in_threads, on_ranks, run
from processes import no_memory
from torch.utils.checkpoint import checkpoint

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument, ServerLost, UpdateFailed

VOCABULARY, DIM, STEPS = 50, 12, 6
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, 2**32 + 1, 7]


def finalised(x: np.ndarray) -> np.ndarray:
    """splitmix64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def first_rows(ids: list[int], dim: int, seed: int, low: float, high: float) -> np.ndarray:
    keys = finalised(np.uint64(seed) ^ finalised(np.array(ids, np.int64).view(np.uint64)))
    with np.errstate(over="ignore"):
        random = finalised(keys[:, None] + np.arange(dim, dtype=np.uint64)) >> np.uint64(40)
    low, span = np.float32(low), np.float32(high) - np.float32(low)
    return (np.float64(low) + np.float64(span) * (random.astype(np.float64) / 2**24)).astype(np.float32)


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with many of the same, in bags of three, and a factor for each bag: eighths, whose sums are exact, as
    torch adds the gradients of a row in an order of its own."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    ids = torch.randint(0, VOCABULARY, (8, 3), generator=generator)
    return ids, torch.randint(-20, 20, (8, DIM), generator=generator) / 8


# ---- bits ------------------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def trains(me: Rank, rule: str, bag: bool, everywhere: bool) -> Any:
    kind, arguments = RULES[rule]
    with join(me) as kv:
        update = ps.optimizer(kind, **arguments)
        make = functools.partial(ps.EmbeddingBag, bag="sum") if bag else ps.Embedding
        table = make(kv, "t", DIM, update=update, mode=ps.sync(average=False), initial=(-0.5, 0.5), seed=3)
        for step in range(STEPS):
            ids, factors = batch(me.rank, step)
            if everywhere:
                ids = torch.cat([ids, torch.arange(VOCABULARY).repeat(3, 1).T])
                factors = torch.cat([factors, torch.ones(VOCABULARY, DIM)])
            rows = torch.cat([table(ids[:5]), table(ids[5:])]) if step % 2 else table(ids)
            ((rows if bag else rows.sum(1)) * factors).sum().backward()
            if step % 2 and not everywhere:
                table.prefetch(batch(me.rank, step + 1)[0])
        table.flush()
        kv.barrier()
        assert table.pull(torch.arange(VOCABULARY + 5)).shape == (VOCABULARY + 5, DIM)
        return table.pull(torch.arange(VOCABULARY)).numpy()


def alone(rule: str, bag: bool, workers: int, everywhere: bool) -> np.ndarray:
    kind, arguments = RULES[rule]
    weight = torch.from_numpy(first_rows(list(range(VOCABULARY)), DIM, 3, -0.5, 0.5))
    module: Any = nn_bag(weight) if bag else torch.nn.Embedding.from_pretrained(weight, freeze=False)
    optimizer = kind(module.parameters(), foreach=False, **arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        for worker in range(workers):
            ids, factors = batch(worker, step)
            if everywhere:
                ids = torch.cat([ids, torch.arange(VOCABULARY).repeat(3, 1).T])
                factors = torch.cat([factors, torch.ones(VOCABULARY, DIM)])
            rows = module(ids)
            ((rows if bag else rows.sum(1)) * factors).sum().backward()
        optimizer.step()
    return module.weight.detach().numpy()


def nn_bag(weight: torch.Tensor) -> torch.nn.EmbeddingBag:
    return torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum")


@pytest.mark.parametrize("size", (1, 3))
@pytest.mark.parametrize("bag", (True, False), ids=("bag", "rows"))
@pytest.mark.parametrize(("rule", "everywhere"), (("sgd", False), ("adagrad", False), ("adam", True)))
def test_sync_has_the_bits_of_one_process(rule: str, everywhere: bool, bag: bool, size: int) -> None:
    """Dense Adam also moves rows without a gradient, so all rows have one in its test."""
    wanted = alone(rule, bag, size, everywhere)
    for values in run(trains, size, rule, bag, everywhere):
        np.testing.assert_array_equal(values, wanted)


def test_the_same_over_tcp() -> None:
    wanted = alone("adagrad", True, 2, False)
    for values in run(placed, 2, APART, trains, "adagrad", True, False):
        np.testing.assert_array_equal(values, wanted)


def test_adam_without_dense_steps_is_near_sparse_adam() -> None:
    weight = torch.nn.Parameter(torch.from_numpy(first_rows(list(range(VOCABULARY)), DIM, 0, -0.5, 0.5)))
    optimizer = torch.optim.SparseAdam([weight], lr=0.01)
    with ps.join(**SMALL) as kv:
        update = ps.optimizer(torch.optim.Adam, lr=0.01)
        table = ps.Embedding(kv, "t", DIM, update=update, initial=(-0.5, 0.5))
        for step in range(STEPS):
            ids, factors = batch(0, step)
            optimizer.zero_grad()
            (torch.nn.functional.embedding(ids, weight, sparse=True).sum(1) * factors).sum().backward()
            optimizer.step()
            (table(ids).sum(1) * factors).sum().backward()
        torch.testing.assert_close(table.pull(torch.arange(VOCABULARY)), weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("dim", (1, 7, 8, 33))
def test_rowwise_adagrad(dim: int, dtype: torch.dtype) -> None:
    with ps.join(**SMALL) as kv:
        update = ps.rowwise_adagrad(lr=0.5, eps=1e-3)
        table = ps.Embedding(kv, "t", dim, update=update, initial=(0, 0), dtype=dtype)
        value, total = torch.zeros(len(EXTREMES), dim, dtype=dtype), torch.zeros(len(EXTREMES), 1, dtype=dtype)
        for step in range(4):
            gradient = torch.randn(len(EXTREMES), dim, dtype=dtype, generator=torch.Generator().manual_seed(step))
            table.push(torch.tensor(EXTREMES), gradient).wait()
            total += gradient.square().mean(1, keepdim=True)
            value -= 0.5 * gradient / (total.sqrt() + 1e-3)
        torch.testing.assert_close(table.pull(torch.tensor(EXTREMES)), value)


# ---- ids -------------------------------------------------------------------------------------------------------------


def sums(me: Rank, mode: ps.Mode) -> list[Any]:
    """Worker w's pushes add powers of 8, so a sum says how often each was applied."""
    with join(me) as kv:
        table = ps.Embedding(kv, "t", 3, update=ps.reduce("sum"), mode=mode, initial=(0, 0))
        ids = torch.tensor(EXTREMES)
        for _ in range(5):
            # Every id twice, in another order, not contiguous, and one of this worker's own.
            twice = torch.stack([ids, ids.flip(0)], 1)[:, 1].repeat(2)
            own = torch.cat([twice, torch.tensor([1000 + me.rank])])
            table.push(own, torch.full((len(own), 3), float(8**me.rank))).wait()
            if mode.mode == "ssp":
                kv.clock()
        kv.barrier()
        return [table.pull(ids).tolist(), table.pull(torch.tensor([1000, 1001, 1002, 1003])).tolist()]


@pytest.mark.parametrize(
    ("mode", "hosts"),
    [(ps.sync(average=False), NEAR), (ps.asynchronous(), NEAR), (ps.ssp(1), NEAR), (ps.asynchronous(), APART)],
    ids=str,
)
def test_every_push_of_every_id_counts_once(mode: ps.Mode, hosts: tuple[int, ...]) -> None:
    for shared, own in run(placed, 3, hosts, sums, mode):
        assert shared == [[10.0 * (1 + 8 + 64)] * 3] * len(EXTREMES)
        assert own == [[5.0] * 3, [40.0] * 3, [320.0] * 3, [0.0] * 3]


@on_ranks(2, returns=[[[7.0, 7.0], [1.0, 1.0], [6.0, 6.0]]] * 2)
def test_sync_divides_by_the_weights_of_all(me: Rank) -> Any:
    with join(me) as kv:
        table = ps.Embedding(kv, "t", 2, update=ps.assign())
        ids = torch.tensor([5, 6 + me.rank])
        table.push(ids, torch.full((2, 2), 4.0 * (me.rank + 1)), weight=1.0 + 2 * me.rank).wait()
        return table.pull(torch.tensor([5, 6, 7])).tolist()


def pulls(me: Rank) -> Any:
    with join(me) as kv:
        table = ps.Embedding(kv, "t", 5, update=ps.rowwise_adagrad(), initial=(-2, 3), seed=11)
        return table.pull(torch.tensor(EXTREMES)).numpy()


def test_first_values_are_the_same_on_any_server() -> None:
    wanted = first_rows(EXTREMES, 5, 11, -2, 3)
    assert np.unique(wanted).size == wanted.size and (wanted >= -2).all() and (wanted < 3).all()
    for size in (1, 3):
        for values in run(pulls, size):
            np.testing.assert_array_equal(values, wanted)


def test_any_shape_and_none() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), initial=(0, 0))
        none = torch.empty(0, 3, dtype=torch.int64)
        assert table.pull(none).shape == (0, 3, 4)
        table.push(none, torch.empty(0, 3, 4)).wait()
        table(none).sum().backward()
        every_other = torch.arange(24).view(2, 12)[:, ::2]
        table.push(every_other, torch.ones(4, 6, 2).permute(2, 1, 0)).wait()
        assert table.pull(every_other.numpy()).tolist() == torch.ones(2, 6, 4).tolist()
        assert kv.stats()["servers"].popitem()[1]["rows"] == 12  # pulls make none
        table.pull(torch.arange(100, 200))
        assert kv.stats()["servers"].popitem()[1]["rows"] == 12


def test_many_rows_in_any_order() -> None:
    count = 300_000  # several slabs, and indices that have grown
    with ps.join(window=64 << 20, memory=256 << 20) as kv:
        table = ps.Embedding(kv, "t", 2, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        ids = torch.randperm(count, generator=torch.Generator().manual_seed(0)) * 7919 - 1_000_000
        values = torch.stack([ids, -ids], 1).float()
        for part in range(0, count, 50_000):
            table.push(ids[part : part + 50_000], values[part : part + 50_000])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        assert torch.equal(table.pull(ids[order]), values[order])
        assert not table.pull(ids[:1000] + 1).any()


def test_prefetched_rows_are_of_the_time_of_the_call() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        ids = torch.tensor([1, 2])
        table.prefetch(ids)
        table.push(ids, torch.ones(2, 4)).wait()
        assert not table.pull(ids).any() and table.pull(ids).all()
        for i in range(100):  # those that are never used do not fill the window
            table.prefetch(torch.arange(i, i + 10_000))
        table.push(torch.arange(20_000), torch.ones(20_000, 4)).wait()


def test_prefetched_rows_leave_room_for_requests() -> None:
    with ps.join(memory=64 << 20, window=1 << 20, block_bytes=1 << 16, timeout=5.0) as kv:
        tables = [
            ps.Embedding(kv, name, 8, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous()) for name in "ab"
        ]
        for i in range(10):
            for table in tables:
                table.prefetch(torch.arange(i, i + 10_000))  # 400 KB
        for table in tables:
            table.push(torch.arange(20_000), torch.ones(20_000, 8)).wait()  # 800 KB
            table.prefetch(torch.arange(10_000))
        assert not tables[0].pull(torch.arange(20_000, 40_000)).any()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("amid a backward pass")


def test_a_backward_pass_that_raises_pushes_nothing() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        ids = torch.tensor([1, 2])
        factor = Fails.apply(torch.ones(4, requires_grad=True))
        with pytest.raises(ArithmeticError):
            (table(ids) * factor).sum().backward()  # which computes the gradient of the rows first
        for _ in range(2):
            (table(ids) + table(ids.flip(0))).sum().backward()
        table.flush()
        assert table.pull(ids).tolist() == torch.full((2, 4), 4.0).tolist()
        assert kv.stats()["servers"].popitem()[1]["updates"] == 2


def test_backward_passes_in_several_threads_and_within_each_other() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        updates = 0

        def pushed() -> int:
            nonlocal updates
            table.flush()
            before, updates = updates, kv.stats()["servers"].popitem()[1]["updates"]
            return updates - before

        def in_a_thread(ids: torch.Tensor) -> None:
            for _ in range(200):
                (table(ids) + table(ids.flip(0))).sum().backward()

        both = torch.arange(8).view(2, 4)
        in_threads([functools.partial(in_a_thread, ids) for ids in both])
        assert pushed() == 400 and table.pull(both).eq(400).all()

        def inner(factor: torch.Tensor) -> torch.Tensor:
            return table(both[0]) * factor

        factor, outer = torch.ones((), requires_grad=True), table(both[1])
        within = checkpoint(inner, outer.sum() + factor, use_reentrant=True)  # its backward runs one of its own
        (within.sum() + table(both[1]).sum()).backward()
        assert pushed() == 2  # a pass pushes once, whatever runs amid it
        assert table.pull(both).eq(400 + 16 * 400 + 1).all()


def test_eval_mode_pushes_too() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        table.eval()
        table(torch.tensor([3])).sum().backward()
        table.flush()
        with torch.no_grad():
            assert (table(torch.tensor([3])) == 1).all()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_server_without_room_says_so_and_has_changed_nothing() -> None:
    with ps.join(memory=12 << 20, window=64 << 20) as kv:
        table = ps.Embedding(kv, "t", 64, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        table.push(torch.arange(1000), torch.ones(1000, 64)).wait()
        with pytest.raises(UpdateFailed, match=r"no room for 99000 new rows beside its 1000.* a larger memory="):
            table.push(torch.arange(100_000), torch.ones(100_000, 64)).wait()
        assert table.pull(torch.arange(2000)).sum() == 1000 * 64
        table.push(torch.arange(1000), torch.ones(1000, 64)).wait()  # those that there are have room
        assert table.pull(torch.arange(2000)).sum() == 2 * 1000 * 64
        table(torch.arange(100_000)).sum().backward()
        with pytest.raises(UpdateFailed, match="no room"):
            table.flush()
        assert table.flush() == 0  # which raises for each push once
        with pytest.raises(InvalidArgument, match=r"left: join with a larger memory="):
            kv.init("w", torch.zeros(3 << 20))


def test_a_refused_push_is_no_step_of_adam() -> None:
    with ps.join(memory=12 << 20, window=64 << 20) as kv:
        adam = ps.optimizer(torch.optim.Adam, lr=0.01)
        table = ps.Embedding(kv, "t", 64, update=adam, initial=(0, 0), mode=ps.asynchronous())
        with pytest.raises(UpdateFailed, match="no room"):
            table.push(torch.arange(100_000), torch.ones(100_000, 64)).wait()
        table.push(torch.tensor([1]), torch.ones(1, 64)).wait()
        assert torch.allclose(table.pull(torch.tensor([1])), torch.full((1, 64), -0.01))  # the first step's


def test_more_rows_than_the_window_holds_are_refused() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 1024, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        with pytest.raises(InvalidArgument, match=r"2000 rows of 4096 bytes for server 0 .* fewer ids at once"):
            table.push(torch.arange(2000), torch.ones(2000, 1024))
        with pytest.raises(InvalidArgument, match="fewer ids at once"):
            table.pull(torch.arange(2000))
        table.push(torch.zeros(2000, dtype=torch.int64), torch.ones(2000, 1024)).wait()  # one row
        assert table.pull(torch.tensor([0])).sum() == 2000 * 1024


def test_wrong_arguments_are_named() -> None:
    with ps.join(**SMALL) as kv:
        table = ps.Embedding(kv, "t", 4, update=ps.rowwise_adagrad())
        ids, ones = torch.tensor([1, 2]), torch.ones(2, 4)
        for call, said in (
            (lambda: table.pull(ids.int()), r"ids are torch\.int32"),
            (lambda: table.pull([1.5]), r"ids are torch\.float32"),
            (lambda: table.pull(None), "ids are a NoneType"),
            (lambda: table.pull(ids.to_sparse()), r"ids: a tensor has layout Sparse; .* its to_dense\(\)"),
            (lambda: table.pull(ids, out=torch.empty(2, 4, device="meta")), "out is .* on meta"),
            (lambda: table.pull(ids, out=ones.numpy()), "out is a ndarray"),
            (lambda: table.push(ids, ones.to_sparse()), "gradients are .* and layout torch.sparse_coo"),
            (lambda: table.push(ids, None), "gradients are a NoneType"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.assign(), initial=(1,)), r"initial is \(1,\)"),
            (lambda: table.pull(ids, out=torch.empty(2, 5)), r"out is torch\.float32 of shape \(2, 5\)"),
            (lambda: table.push(ids, torch.ones(2, 5)), r"gradients are torch\.float32 of shape \(2, 5\)"),
            (lambda: table.push(ids, ones.double()), r"gradients are torch\.float64"),
            (lambda: table.push(ids, ones, weight=-1), "weight is -1"),
            (lambda: ps.Embedding(kv, "t", 5, update=ps.rowwise_adagrad()), r"shape of 't' is \['rows', 5\] here"),
            (lambda: ps.Embedding(kv, "t", 4, update=ps.assign()), "update of 't' differs: its kind is 'assign' here"),
            (lambda: ps.Embedding(kv, "", 4, update=ps.assign()), "key is ''"),
            (lambda: ps.Embedding(kv, "u", 0, update=ps.assign()), "dim is 0"),
            (lambda: ps.Embedding(kv, "v", 2**62 + 1, update=ps.assign()), "larger than the 16777216 bytes"),
            (lambda: ps.Embedding(kv, "x", 4_000_000, update=ps.assign()), "for its first row"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.assign(), dtype=torch.float16), "dtype is torch.float16"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.assign(), initial=(1, 0)), r"initial is \(1, 0\)"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.assign(), seed=-1), "seed is -1"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.reduce("min")), "rows of a table take"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.function("f")), "update is 'f'"),
            (lambda: ps.Embedding(kv, "u", 4, update=ps.optimizer(torch.optim.NAdam)), "update is 'NAdam'"),
            (lambda: ps.Embedding(kv, "u", 4, update=sgd_with_momentum()), "SGD has momentum"),
            (lambda: ps.EmbeddingBag(kv, "u", 4, bag="min", update=ps.assign()), "bag is 'min'"),
            (lambda: kv.push("t", ones), "'t' is a table of rows: use the ps.Embedding"),
            (lambda: kv.init("t", ones), r"shape of 't' is \[2, 4\] here"),
            (lambda: kv.init("w", ones, update=ps.rowwise_adagrad()), "use ps.Embedding"),
            (lambda: ps.rowwise_adagrad(lr=-1), "lr is -1"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                call()
        table.push(ids, ones).wait()  # nothing of it did harm


def sgd_with_momentum() -> ps.UpdateRule:
    return ps.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def outlives_a_server(me: Rank) -> str:
    if me.rank == 1:
        kv = join(me)
        ps.Embedding(kv, "t", 16, update=ps.reduce("sum"), mode=ps.asynchronous())
        me.report("ready")
        signal.pause()
    kv = join(me)
    table = ps.Embedding(kv, "t", 16, update=ps.reduce("sum"), mode=ps.asynchronous())
    me.report("ready")
    ids = torch.arange(1000)
    with pytest.raises(ServerLost) as raised:
        while True:
            table.push(ids, torch.ones(1000, 16))
            table.prefetch(ids)
            table.pull(ids[:7])
    with pytest.raises(ServerLost):
        table.pull(ids + 1)  # which has not been prefetched
    kv.calls.close()
    return str(raised.value)


@on_any_hosts
def test_a_server_killed_amid_pushes_is_named(hosts: tuple[int, ...]) -> None:
    with Ranks(placed, 2, hosts, outlives_a_server) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        (said,) = ranks.results(but=(1,))
    assert said.startswith("server 1 (")


@on_ranks(1, returns=[(0.0, 0.0)])
def test_a_push_without_memory_for_its_rows_changes_nothing(me: Rank) -> tuple[float, float]:
    """Of rows that are there and of new ones: what they have after a push for which there was no memory."""
    with ps.join(me.store, rank=0, size=1, memory=1 << 30, window=8 << 20) as kv:
        table = ps.Embedding(kv, "t", 64, update=ps.reduce("sum"), initial=(0, 0), mode=ps.asynchronous())
        ids, ones = torch.arange(8000), torch.ones(8000, 64)
        table.push(ids[:100], ones[:100]).wait()

        first = 0
        with no_memory(24 << 20), pytest.raises(UpdateFailed, match="no memory left for the rows"):
            for first in range(100, 1_000_000, 7900):
                ids[100:] = torch.arange(first, first + 7900)
                table.push(ids, ones).wait()
        there = table.pull(ids)
        pushes = 1 + (first - 100) // 7900
        return (there[:100] - pushes).abs().max().item(), there[100:].abs().max().item()
