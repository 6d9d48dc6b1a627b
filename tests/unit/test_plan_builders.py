"""Every builder's plans are proved right, and are what their documentation says."""

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce.plan.ring as ring
from ringreduce.plan import BUILDERS, Plan, PlanError, Read, Step, build, layout, slot_depth, verify
from ringreduce.plan.compose import compose
from ringreduce.plan.tree import Tree, children, complementary_trees, heap_tree, inorder_tree

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
RING_BUILDERS = [ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast, ring.reduce]


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_plan_is_right_with_the_slots_it_gets(collective: str, algorithm: str) -> None:
    for size in range(1, 34):
        plan = build(collective, algorithm, size)
        assert (plan.name, plan.collective, plan.size) == (algorithm, collective, size)
        verify(plan)


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_a_group_of_one_only_moves_its_data(collective: str, algorithm: str) -> None:
    for channel in build(collective, algorithm, 1).channels:
        assert channel.programs == ((Step(0, Read.INPUT, write=True),),)


def documented_slots(collective: str, algorithm: str, size: int) -> int:
    """How many slots the builders' docstrings say a plan needs at least."""
    if algorithm == "two_shot":
        return size
    if algorithm == "direct" and collective in ("reduce_scatter", "reduce", "all_to_all"):
        return max(size - 1, 1)
    if algorithm == "halving_doubling":
        return (1 << (size.bit_length() - 1)) // 2 + 1
    if algorithm.endswith("ring") and collective in ("all_reduce", "reduce_scatter", "all_gather"):
        return 2 if size > 2 or (collective, size) == ("all_reduce", 2) else 1
    return 1


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 13])
def test_a_plan_needs_the_slots_its_file_documents_and_no_fewer(collective: str, algorithm: str, size: int) -> None:
    plan = build(collective, algorithm, size)
    needed = documented_slots(collective, algorithm, size)
    assert needed <= slot_depth(size)
    verify(plan, depth=needed)
    if needed > 1:
        with pytest.raises(PlanError, match=r"channel 0: deadlock: rank \d+, step \d+ .* slots"):
            verify(plan, depth=needed - 1)


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_a_round_fits_in_the_outbox(collective: str, algorithm: str) -> None:
    for size in range(1, 34):
        for channel in build(collective, algorithm, size).channels:
            for program in channel.programs:
                assert sum(1 for step in program if step.send) <= slot_depth(size)


@st.composite
def rings(draw: st.DrawFn) -> ring.Rings:
    """One to four rings of one size, in any orders, with any weights."""
    size = draw(st.integers(1, 12))
    one = st.tuples(st.permutations(range(size)), st.integers(1, 7))
    return draw(st.lists(one, min_size=1, max_size=4))


@pytest.mark.parametrize("builder", RING_BUILDERS)
@settings(max_examples=25)
@given(given_rings=rings())
def test_any_rings_in_any_order_make_a_right_plan(builder: object, given_rings: ring.Rings) -> None:
    plan = builder(given_rings, name="mine")  # type: ignore[operator]
    assert plan.name == "mine"
    assert [channel.share for channel in plan.channels] == [weight for _, weight in given_rings]
    verify(plan, depth=2)


def test_ranks_talk_to_their_ring_neighbours_only() -> None:
    order = (3, 0, 4, 1, 2)
    for builder in RING_BUILDERS:
        (channel,) = builder([(order, 1)]).channels
        for position, rank in enumerate(order):
            for step in channel.programs[rank]:
                assert set(step.recv) <= {order[position - 1]}
                assert set(step.send) <= {order[(position + 1) % 5]}


@pytest.mark.parametrize("orders", [[(0, 2, 2)], [(0, 1, 2), (1, 0)], [(1, 2, 3)]])
@pytest.mark.parametrize("builder", RING_BUILDERS)
def test_a_ring_that_misses_a_rank_is_refused(builder: object, orders: list[tuple[int, ...]]) -> None:
    with pytest.raises(PlanError, match=rf"ring {len(orders) - 1} is .*; it must visit each rank 0..2 once"):
        builder([(order, 1) for order in orders])  # type: ignore[operator]


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "bidirectional_ring", "halving_doubling"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_bandwidth_optimal_all_reduce_reads_the_lower_bound(algorithm: str, size: int) -> None:
    """2 (size - 1) / size of the tensor, by every rank: the least that an all_reduce can do."""
    for channel in build("all_reduce", algorithm, size).channels:
        for program in channel.programs:
            assert sum(len(step.recv) for step in program) * size == 2 * (size - 1) * channel.chunks


def longest_path(plan: Plan) -> int:
    """The most hops that any value depends on, by running the programs in any order that their receives allow."""
    longest = 0
    for channel in plan.channels:
        hops = [0] * plan.size  # of the last step of each rank
        arrived: dict[tuple[int, int], list[int]] = {}
        todo = [list(program) for program in channel.programs]
        while any(todo):
            for rank, steps in enumerate(todo):
                while steps and all(arrived.get((peer, rank)) for peer in steps[0].recv):
                    step = steps.pop(0)
                    hops[rank] = max([hops[rank], *(arrived[peer, rank].pop(0) + 1 for peer in step.recv)])
                    for peer in step.send:
                        arrived.setdefault((rank, peer), []).append(hops[rank])
        longest = max(longest, *hops)
    return longest


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_hops_are_as_few_as_the_algorithm_promises(size: int) -> None:
    levels = size.bit_length() - 1
    assert longest_path(build("all_reduce", "one_shot", size)) == 1
    assert longest_path(build("all_reduce", "two_shot", size)) == 2
    assert longest_path(build("all_reduce", "ring", size)) == 2 * (size - 1)
    assert longest_path(build("all_reduce", "halving_doubling", size)) == 2 * levels
    assert longest_path(build("all_reduce", "tree", size)) == 2 * levels
    assert longest_path(build("broadcast", "tree", size)) == levels
    assert longest_path(build("broadcast", "direct", size)) == 1
    assert longest_path(build("all_to_all", "direct", size)) == 1


def depth(tree: Tree, rank: int) -> int:
    parent = tree[rank]
    return 0 if parent is None else 1 + depth(tree, parent)


def test_trees_are_binary_and_balanced() -> None:
    for size in range(1, 70):
        for tree in (heap_tree(size), inorder_tree(size), *complementary_trees(size)):
            assert tree.count(None) == 1, tree
            assert all(len(below) <= 2 for below in children(tree)), tree
            assert max(depth(tree, rank) for rank in range(size)) <= size.bit_length(), tree


def test_no_rank_is_interior_in_both_trees() -> None:
    for size in range(1, 70):
        first, second = ({parent for parent in tree if parent is not None} for tree in complementary_trees(size))
        assert not first & second, size


def test_composition_fuses_the_step_that_ends_one_phase_and_begins_the_other() -> None:
    send = Step(1, Read.INPUT, send=(1,))
    combine = Step(0, Read.INPUT, recv=(1,), write=True)
    publish = Step(0, Read.INPUT, write=True, send=(1, 2))
    collect = Step(1, recv=(1,), write=True)
    fused = Step(0, Read.INPUT, recv=(1,), write=True, send=(1, 2))
    assert compose((send, combine), (publish, collect)) == (send, fused, collect)
    assert compose((send,), (collect,)) == (send, collect)


def test_rooted_layouts_and_pairs_are_numbered_as_documented() -> None:
    scatter, pairs = layout("scatter", 3), layout("all_to_all", 3)
    assert [scatter.has_input(rank, 2) for rank in range(3)] == [True, False, False]
    assert [scatter.needs_output(rank, 2) for rank in range(3)] == [False, False, True]
    assert pairs.blocks == 9
    assert pairs.has_input(1, 1 * 3 + 2)
    assert pairs.needs_output(2, 1 * 3 + 2)
    assert layout("all_reduce", 3).contributors(0) == 0b111
    assert layout("gather", 3).contributors(1) == 0b010


def test_unknown_names_are_refused_with_what_is_known() -> None:
    with pytest.raises(PlanError, match=r"'all_sum' is unknown; known are all_reduce, .*all_to_all"):
        build("all_sum", "ring", 2)
    with pytest.raises(PlanError, match=r"gather has no algorithm 'ring'; known are direct"):
        build("gather", "ring", 2)
    with pytest.raises(PlanError, match="at least 1"):
        build("gather", "direct", 0)


def test_slot_depth_is_a_power_of_two_that_holds_two_messages_per_rank() -> None:
    assert [slot_depth(size) for size in (1, 2, 4, 5, 8, 9, 33)] == [8, 8, 8, 16, 16, 32, 128]


def test_the_package_needs_nothing_but_the_standard_library() -> None:
    import ringreduce.plan.model as model

    folder = Path(model.__file__).parent
    common = [path for path in (folder.parent / "common").glob("*.py") if path.name != "compiled.py"]  # is about torch
    for path in (*folder.glob("*.py"), *common):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                own = module.startswith(("ringreduce.plan", "ringreduce.common"))
                assert own or module.split(".")[0] in sys.stdlib_module_names, path
