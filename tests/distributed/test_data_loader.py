"""Loaders: what arrives, who prepares it, and what happens when a process ends."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bodies.data import Noise, Rows, is_alive, open_files, servers_of
from distributed.harness import Rank, Ranks, on_ranks, run
from processes import ROOT, until
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, Subset, TensorDataset

from ringreduce.data import Loader, Order, Sampler, connections, supervisor
from ringreduce.errors import InvalidArgument, SampleFailed, SystemFailure

# what arrives


class Point(NamedTuple):
    x: Any
    y: Any


class Mixed:
    """Samples of all kinds."""

    def __getitem__(self, number: int) -> Any:
        return {
            "image": torch.full((3, 2), number, dtype=torch.bfloat16, device="cpu"),
            "point": Point(np.float32(number), np.array([number], np.uint16)),
            "flag": number % 2 == 0,
            "weight": number / 2,
            "label": number,
            "name": f"sample {number}",
            "none": torch.empty(0, device="cpu"),
        }


@on_ranks(1)
def test_samples_of_all_kinds(me: Rank) -> None:
    order = Order(20, 6, 3)
    with torch.device("meta"):  # where new tensors go by default, in the servers too
        loader = Loader(Mixed(), order, servers=2)
    with loader:
        for step in (0, 1, 2, 9, 3):
            ids = order.ids(step)
            with torch.device("meta"):
                batch = loader.get(step)
            assert batch["image"].dtype == torch.bfloat16
            assert torch.equal(batch["image"], torch.tensor(ids)[:, None, None].expand(6, 3, 2).bfloat16())
            assert isinstance(batch["point"], Point)
            assert torch.equal(batch["point"].x, torch.tensor(ids).float())
            assert batch["point"].y.dtype == torch.uint16 and batch["point"].y.tolist() == [[each] for each in ids]
            assert torch.equal(batch["flag"], torch.tensor(ids % 2 == 0))
            assert batch["weight"].dtype == torch.float64 and batch["weight"].tolist() == (ids / 2).tolist()
            assert batch["label"].dtype == torch.int64 and batch["label"].tolist() == ids.tolist()
            assert batch["name"] == [f"sample {each}" for each in ids]
            assert batch["none"].shape == (6, 0)


class Whole:
    """Returns a whole batch."""

    def __init__(self) -> None:
        self.values = torch.arange(60).reshape(30, 2)

    def __getitems__(self, ids: list[int]) -> Any:
        return self.values[ids], [f"{each}" for each in ids]


class Listed(Whole):
    """Returns the samples in a list."""

    def __getitems__(self, ids: list[int]) -> Any:
        return [*self.values[ids]]


@on_ranks(1)
def test_datasets_that_return_many_at_a_time(me: Rank) -> None:
    order = Order(30, 4)
    with Loader(Whole(), order) as whole, Loader(Listed(), order) as listed:
        for step in range(8):
            values, names = whole.get(step)
            assert values[:, 0].tolist() == (2 * order.ids(step)).tolist()
            assert names == [str(each) for each in order.ids(step)]
            assert torch.equal(listed.get(step), values)


class Short(Whole):
    """Returns a sample too few."""

    def __getitems__(self, ids: list[int]) -> Any:
        return [*self.values[ids[1:]]]


class Ragged:
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((number * 500,), number)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@on_ranks(1)
def test_batches_that_grow(me: Rank) -> None:
    order = Order(40, 3, shuffle=False)
    before = open_files()
    with Loader(Ragged(), order, collate=padded) as loader:
        for step in range(13):  # each batch is larger than all before
            batch = loader.get(step)
            assert batch.shape == (3, int(order.ids(step)[-1]) * 500)
            assert [int(row.max()) for row in batch[:, :500]] == [*order.ids(step)][:3] or step == 0
        assert open_files() <= before + 10  # slots that are too small are given up: 13 batches had one each
    with Loader(Whole(), order, collate=list) as loader:
        assert [type(each) for each in loader.get(0)] == [torch.Tensor, list]  # a batch of two parts, not two samples
    with Loader(Short(), order) as loader, pytest.raises(SampleFailed, match="returned 2 samples for 3 ids"):
        loader.get(0)
    with Loader(Ragged(), order) as loader, pytest.raises(SampleFailed, match=r"sample 1 of the batch is .* \[500\]"):
        loader.get(0)


def shuffled(dataset: Any, size: int) -> dict[int, list[float]]:
    """What readers that share each batch between `size` ranks get, by id."""
    order, found = Order(40, 8, 1), {}
    with Loader(dataset, order) as reader:
        for step in range(5):
            for rank in range(size):
                found |= dict(
                    zip(order.ids(step, rank, size).tolist(), reader.get(step, rank, size).tolist(), strict=True)
                )
    return found


@on_ranks(1)
def test_parts_of_a_dataset_are_seeded_by_example(me: Rank) -> None:
    noise = Noise(40)
    halves = Subset(noise, [*range(1, 40, 2), *range(0, 40, 2)])
    for dataset in (noise, halves, Subset(halves, range(40))):
        assert shuffled(dataset, 1) == shuffled(dataset, 3), "the augmentation depends on the number of ranks"
    with Loader(Subset(Whole(), range(29, -1, -1)), Order(30, 4, shuffle=False)) as reader:
        assert reader.get(0)[0][:, 0].tolist() == [58, 56, 54, 52]


class Augmented(Rows):
    """As libraries do that have a generator of their own."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, number: int) -> float:
        return number + self.generator.random()

    def reseed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@on_ranks(1)
def test_a_library_with_a_generator_of_its_own_is_seeded_by_a_function(me: Rank, context: str) -> None:
    dataset, order = Augmented(40), Order(40, 8, 1)
    found = []
    for servers in (1, 3):
        with Loader(dataset, order, servers, seeded=dataset.reseed, multiprocessing_context=context) as reader:
            found.append([reader.get(step).tolist() for step in range(5)])
    assert found[0] == found[1]
    assert sorted(map(int, itertools.chain(*found[0]))) == [*range(40)]
    with pytest.raises(InvalidArgument, match="seeded is 3; give True, False, or a function that takes a seed"):
        Loader(dataset, order, seeded=3)  # type: ignore[arg-type]


# an iteration


@on_ranks(1)
def test_an_iteration_is_an_epoch_and_resumes(me: Rank) -> None:
    rows, order = Rows(50), Order(50, 8, 1)
    with Loader(rows, order, 3) as loader:
        assert len(loader) == 7 and loader.ahead == 6
        seen = [batch[:, 0].tolist() for batch in loader]
        assert seen == [order.ids(step).tolist() for step in range(7)]
        assert len(loader) == 6  # step 6 was the first of the second epoch, too
        first = next(iter(loader))[:, 0].tolist()
        assert first == order.ids(7).tolist()
        saved = loader.state_dict()
    with Loader(rows, order) as resumed:
        resumed.load_state_dict(saved)
        assert next(iter(resumed))[:, 0].tolist() == order.ids(8).tolist()
    with Loader(rows, Order(50, 8, 2)) as other, pytest.raises(InvalidArgument, match="says nothing about the other"):
        other.load_state_dict(saved)


@on_ranks(2)
def test_the_default_share_is_the_ranks_own(me: Rank) -> None:
    """Of the default group."""
    order = Order(50, 8, 1)
    sampler = Sampler(order)
    assert next(iter(sampler)) == order.ids(0).tolist()
    with Loader(Rows(50), order) as reader, me.join():
        assert next(iter(sampler)) == order.ids(1, me.rank, 2).tolist() == reader.get(1)[:, 0].tolist()


# sharing


class Costly(Rows):
    """Preparation takes longer than reading, so a reader that is behind catches up."""

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.001)
        return super().__getitem__(number)


def replicas(me: Rank, steps: int) -> tuple[int, list[list[int]]]:
    rows = Costly(1000)
    order = Order(1000, 10)
    loader = Loader(rows, order, servers=2, name=f"replicas {me.store.get('name').decode()}")
    me.meet("made")
    batches = [loader.get(step, 0, 1)[:, 0].tolist() for step in range(steps)]
    me.meet("read")
    return int(rows.counts.sum()), batches


def test_ranks_that_read_the_same_share_one_preparation() -> None:
    with Ranks(replicas, 3, 60) as ranks:
        ranks.store.set("name", f"{os.getpid()} {time.monotonic_ns()}")
        results = ranks.results()
    prepared = [count for count, _ in results]
    assert sorted(prepared)[:2] == [0, 0], "two ranks have started servers"
    assert 600 <= max(prepared) <= 800, f"{max(prepared)} samples were prepared, for three ranks with 600 each"
    assert results[0][1] == results[1][1] == results[2][1]


@on_ranks(1)
def test_a_reader_that_is_a_little_behind_shares(me: Rank) -> None:
    rows, order, name = Rows(2000), Order(2000, 10), f"a little behind {os.getpid()}"
    with Loader(rows, order, name=name) as first, Loader(rows, order, name=name) as second:
        second.get(0)
        for step in range(12):
            first.get(step)
        for step in range(1, 100):
            assert second.get(step)[:, 0].tolist() == order.ids(step).tolist()
            first.get(step + 11)
    assert rows.counts.max() == 1


@on_ranks(1)
def test_a_reader_that_was_behind_shares_again(me: Rank) -> None:
    """Two readers, one of which is 30 steps behind."""
    rows, order, name = Rows(2000), Order(2000, 10), f"behind {os.getpid()}"
    with Loader(rows, order, name=name) as first, Loader(rows, order, name=name) as second:
        ours, theirs = first.get(0), second.get(0)
        ours[0, 1] = -5
        assert theirs[0, 1] == -5, "it is a copy"
        del ours, theirs
        for step in range(30):
            first.get(step)
        for step in range(31):  # what the first one has used is prepared again, but for the latest ones
            second.get(step)
        before = rows.counts.copy()
        for step in range(31, 100):
            assert torch.equal(first.get(step), second.get(step))
        new = rows.counts - before
        assert new.max() == 1 and before.max() == 2


@on_ranks(1)
def test_loaders_of_one_name_must_agree(me: Rank) -> None:
    name = f"terms {os.getpid()}"
    with Loader(Rows(100), Order(100, 10), name=name):
        for arguments, message in [
            ((Rows(100), Order(100, 20)), "order is .*'batch': 20"),
            ((Rows(100), Order(100, 10), 2), "servers is 2, and a Loader named .* has 1; give this one another name"),
        ]:
            with pytest.raises(InvalidArgument, match=message):
                Loader(*arguments, name=name)


class Phase:
    """Samples of two datasets differ, and nothing in their pickles does: they cannot be pickled."""

    def __init__(self, phase: int) -> None:
        self.phase = phase

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    def __getitem__(self, number: int) -> int:
        return self.phase


@on_ranks(1)
def test_servers_whose_readers_have_gone_serve_nobody(me: Rank) -> None:
    """Each Loader of a name has another dataset; the one before was closed, has gone, or its process was killed.

    In the worst case, the supervisor wakes when the next reader has come.
    """
    order, name, next_message = Order(100, 10), f"phases {os.getpid()}", connections.next_message
    for phase in range(12):
        ours, theirs = os.pipe()
        if phase % 3 == 2:
            if (pid := os.fork()) == 0:
                reader = Loader(Phase(-1), order, 2, name=name)
                os.write(theirs, b"%d" % loader_supervisor())
                signal.pause()
            sleeper = int(os.read(ours, 100))
        else:
            reader = Loader(Phase(-1), order, 2, name=name)
            sleeper = loader_supervisor()

        def wakes_the_supervisor(connection: socket.socket, sleeper: int = sleeper) -> tuple[bytes, list[int]]:
            connections.next_message = next_message
            os.kill(sleeper, signal.SIGCONT)
            return next_message(connection)

        if phase % 2:
            os.kill(sleeper, signal.SIGSTOP)
            connections.next_message = wakes_the_supervisor
        if phase % 3 == 2:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        elif phase % 3 == 1:
            reader.close()
        else:
            del reader
        with Loader(Phase(phase), order, 2, name=name) as reader:
            assert reader.get(0).tolist() == [phase] * 10, f"phase {phase} has samples of another one"


def padded_whole(samples: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([each for (each,) in samples])]


@on_ranks(1)
def test_a_name_means_one_dataset(me: Rank) -> None:
    """Loaders of one name, and all at the same time."""
    order, name = Order(50, 10, shuffle=False), f"/one name {os.getpid()}"
    whole = TensorDataset(torch.arange(100))
    folds = [Loader(Subset(whole, range(start, start + 50)), order, name=name) for start in (0, 50)]
    folds.append(Loader(Subset(whole, range(50)), order, name=name, collate=padded_whole))
    assert [each.get(0)[0].tolist() for each in folds] == [[*range(10)], [*range(50, 60)], [*range(10)]]
    same = Loader(Subset(TensorDataset(torch.arange(100)), range(50)), order, name=name)
    assert same.get(0)[0].data_ptr() != folds[0].get(0)[0].data_ptr() and len(supervisor.started) == 3
    same.get(0)[0][0] = 77
    assert folds[0].get(0)[0][0] == 77, "equal datasets share no memory"
    for each in (*folds, same):
        each.close()


# views


def held(me: Rank) -> None:
    rows, order = Rows(1000), Order(1000, 4)
    with Loader(rows, order) as loader:
        kept = [loader.get(0), loader.get(1)]
        with pytest.raises(InvalidArgument, match=r"step is 2, and the batch of step 0 is still held.*clone\(\)"):
            loader.get(2)
        assert kept[0][:, 0].tolist() == order.ids(0).tolist()
        kept[0] = kept[0][1:, 0].clone()  # a view would not do
        kept[1] = kept[1][2:, 1]
        for step in range(2, 40):
            loader.get(step)
        assert kept[0].tolist() == order.ids(0)[1:].tolist()
        assert kept[1].tolist() == rows.values[order.ids(1)[2:], 1].tolist(), "the slot was filled again"
        assert torch.equal(loader.get(1)[2:, 1], kept[1])
        cycle: list[Any] = [loader.get(40), loader.get(1)]
        cycle.append(cycle)
        del cycle
        loader.get(41)  # collects it
        kept.append(loader.get(42))
    gc.collect()
    assert kept[2][:, 0].tolist() == order.ids(42).tolist()  # also after close()


def test_a_batch_that_is_held_is_never_overwritten() -> None:
    run(held, 1)


@on_ranks(1)
def test_what_was_let_go_is_not_taken_for_what_is_asked_again(me: Rank) -> None:
    """Step 1 is asked for and let go, and its slot used for step 21, while the first answer is still unread."""
    rows, order = Rows(4000), Order(4000, 10)
    with Loader(rows, order, servers=2) as loader:
        for start in range(0, 300, 100):
            loader.get(start)
            time.sleep(0.05)
            loader.get(start + 20)  # the other server's answers stay unread
            time.sleep(0.05)
            assert loader.get(start + 1)[:, 0].tolist() == order.ids(start + 1).tolist()


class Row:
    def __getitem__(self, number: int) -> np.ndarray:
        return np.full(100, number)


@on_ranks(1)
def test_a_reader_may_leave_out_servers(me: Rank) -> None:
    """Its answers are not read. Another reader reads them all."""
    order, name = Order(100_000, 1, shuffle=False), f"leaves out {os.getpid()}"
    with (
        Loader(Row(), order, 2, name=name, timeout=20) as every_second,
        Loader(Row(), order, 2, name=name) as all_steps,
    ):
        for step in range(0, 1500, 2):  # after some 550, the socket was full
            assert every_second.get(step)[0, 0] == step
        for step in range(1501):
            assert all_steps.get(step)[0, 0] == step
        for step in (1499, 1501, 3):
            assert every_second.get(step)[0, 0] == step


# errors and ends


class Bad(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        if number == 17:
            raise KeyError("no such picture")
        return super().__getitem__(number)


def bad_sample(me: Rank) -> list[str]:
    order, errors = Order(20, 5, shuffle=False), []
    with Loader(Bad(20), order) as loader:
        for step in range(8):
            try:
                assert loader.get(step)[:, 0].tolist() == order.ids(step).tolist()
            except SampleFailed as error:
                assert error.id == 17
                errors.append(f"{step} {error}")
    return errors


def test_an_error_of_the_dataset_arrives_with_its_id() -> None:
    (errors,) = run(bad_sample, 1)
    assert [each[0] for each in errors] == ["3", "7"]
    for each in errors:
        assert "id 17" in each and "KeyError: 'no such picture'" in each and "in __getitem__" in each


def loader_supervisor() -> int:
    return supervisor.started[-1]


@on_ranks(1)
def test_what_a_dead_server_had_prepared_is_prepared_again(me: Rank) -> None:
    noise, order = Noise(400), Order(400, 8, 5)
    with Loader(noise, order, servers=2) as whole:
        expected = [whole.get(step).clone() for step in range(50)]
    with Loader(noise, order, servers=2) as loader:
        pids = servers_of(loader_supervisor())
        found = []
        for step in range(50):
            if step % 10 == 5:
                os.kill(servers_of(loader_supervisor())[step // 10 % 2], signal.SIGKILL)
            if step == 28:
                held, servers = loader.get(26), servers_of(loader_supervisor())  # 26 and 28 are of the same server
                os.kill(loader_supervisor(), signal.SIGKILL)
                until(lambda: not any(map(is_alive, servers)))  # noqa: B023
            found.append(loader.get(step).clone())
        assert torch.equal(held, found[26])
        assert not any(map(is_alive, pids))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len({row[3].item() for batch in found for row in batch}) == 400, "augmentation repeats itself"


class Deadly(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(number)


class Slow(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        if number == 3:
            time.sleep(2)
        return super().__getitem__(number)


@on_ranks(1)
def test_no_wait_is_endless(me: Rank) -> None:
    order = Order(20, 2, shuffle=False)
    with Loader(Deadly(20), order, ahead=1) as loader:
        with pytest.raises(
            SystemFailure, match=r"died 4 times while it prepared ids 2, 3, the last time by SIGSEGV, in dataset\[3\]"
        ):
            loader.get(1)
        assert loader.get(4)[:, 0].tolist() == [8, 9]
    with Loader(Slow(20), order, ahead=1, timeout=timedelta(seconds=0.3)) as reader:
        (server,) = servers_of(loader_supervisor())
        where = rf"server 0 \(process {server}, in dataset\[3\]\)"
        with pytest.raises(SampleFailed, match=rf"{where} has not prepared ids 2, 3 in timeout=0.3 s; .*pid {server}"):
            reader.get(1)
        time.sleep(2)
        assert reader.get(1)[:, 0].tolist() == [2, 3]


def reads_until_told(me: Rank, name: str) -> None:
    order = Order(1000, 10)
    loader_of_rank = Loader(Rows(1000), order, servers=2, name=name)
    me.meet("made")
    if supervisor.started:
        me.store.set("pids", " ".join(map(str, [loader_supervisor(), *servers_of(loader_supervisor())])))
        me.store.set("starter", str(me.rank))
    for step in range(10):
        assert loader_of_rank.get(step, me.rank, 2)[:, 0].tolist() == order.ids(step, me.rank, 2).tolist()
    me.report("reading")
    for step in range(10, 400):
        assert loader_of_rank.get(step, me.rank, 2)[:, 0].tolist() == order.ids(step, me.rank, 2).tolist()
        time.sleep(0.002)


def test_servers_outlive_the_rank_that_started_them_and_end_with_the_last() -> None:
    before = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
    with Ranks(reads_until_told, 2, f"outlive {os.getpid()}") as ranks:
        ranks.reports()
        starter = int(ranks.store.get("starter"))
        ranks.signal(starter, signal.SIGKILL)
        ranks.results(but=(starter,))
        pids = [int(each) for each in ranks.store.get("pids").split()]
        assert len(pids) == 3
    until(lambda: not any(map(is_alive, pids)))
    left = {*os.listdir("/dev/shm"), *os.listdir("/tmp")} - before
    assert not [each for each in left if "ringreduce" in each]


@on_ranks(1)
def test_forks_take_nothing_with_them(me: Rank) -> None:
    ours, theirs = socket.socketpair()
    with Loader(Rows(100), Order(100, 10)) as loader:
        loader.get(0)
        ours.close()
        theirs.settimeout(10)
        assert theirs.recv(1) == b"", "a server has the socket of its parent"
        pid = os.fork()
        if pid == 0:
            try:
                loader.get(1)
            except InvalidArgument as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert loader.get(1)[:, 0].tolist() == Order(100, 10).ids(1).tolist()
    with pytest.raises(InvalidArgument, match="closed"):
        loader.get(2)


def test_works_where_shared_memory_is_small() -> None:
    program = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import os
from bodies.data import Rows
from ringreduce.data import Loader, Order
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
loader = Loader(Rows(64, 100_000), Order(64, 16))
for step in range(8):
    assert loader.get(step)[:, 0].tolist() == Order(64, 16).ids(step).tolist()
print(loader.get(3).nbytes, os.listdir("/dev/shm"))
"""
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, program]
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small /dev/shm")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.stdout, ran.returncode) == ("12800000 []\n", 0), ran.stderr


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("timeout", [0, -1, None, "5", float("inf"), float("nan")])
def test_wrong_timeouts(timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"Loader: timeout is .*; it must be a timedelta or seconds, above 0"):
        Loader(Rows(10), Order(10, 2), timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, Order(10, 2)), "dataset is a int, without __getitem__ .*; give an object that has one"),
        ((Stream(), Order(10, 2)), r"dataset is a Stream, without __getitem__ .*; give list\(dataset\)"),
        (
            (Subset(Stream(), [3, 1]), Order(2, 2)),
            r"dataset is a Subset of a Stream, .*; give a Subset of list\(dataset.dataset\)",
        ),
        ((ChainDataset([Stream()]), Order(10, 2)), "dataset is a ChainDataset, without __getitem__"),
        ((DataLoader(Rows(10)), Order(10, 2)), "dataset is a DataLoader, without __getitem__"),
        ((Rows, Order(10, 2)), "dataset is a type, without __getitem__"),
        ((iter(range(10)), Order(10, 2)), "dataset is a range_iterator, without __getitem__"),
        ((Rows(10), 10), "order is 10; give a ringreduce.data.Order"),
        ((Rows(10), Order(10, 2), 0), "servers is 0; give an integer from 1 to 256"),
        ((Rows(10), Order(10, 2), 1, 65), "ahead is 65; give an integer from 1 to 64"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    before = supervisor_processes()
    with pytest.raises(InvalidArgument, match=message):
        Loader(*arguments)
    assert supervisor_processes() <= before


def test_one_of_several_processes_does_not_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with Loader(Rows(10), Order(10, 2)) as loader:
        monkeypatch.setenv("PMI_SIZE", "2")
        with pytest.raises(InvalidArgument, match=r"get: PMI_SIZE is 2, .* give rank= and size=, or make the default"):
            loader.get(0)
        loader.get(0, 0, 2)
    with pytest.raises(InvalidArgument, match="Sampler: PMI_SIZE is 2"):
        Sampler(Order(10, 2)).batch_of(0)


def supervisor_processes() -> set[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {each for each in children if Path(f"/proc/{each}/comm").read_text().strip() == supervisor.TITLE}
