"""Which algorithm and slice the cost model would run for which size: `by_cost`."""

from collections.abc import Iterable, Iterator, Mapping

from ringreduce.plan.builders import BUILDERS, build
from ringreduce.plan.choose import ROOTED, Rule, ranges_between
from ringreduce.plan.cost import Cost, Machine, chunk_bytes
from ringreduce.plan.model import Slicing

BLOCKS = tuple(64 * 4**power for power in range(12))
"""Bytes of a block, 64 B to 256 MB: where algorithms are compared.  What is found serves up to the next size."""

SLICES = tuple(2**power * 1024 for power in range(4, 10))
"""Bytes, 16 KB to 512 KB: slices that are compared, with that of the options' rule."""

MARGIN = 0.8
"""The model must promise less than this share of a direct algorithm's time to be followed to one that is not."""

SLICE_MARGIN = 0.9
"""The same for slices of another size than the rule's."""

MODELLED, DIRECT_MODELLED = 8, 32
"""Up to so many ranks the model looks at all algorithms, and at the direct ones: it walks every rank's steps, which
takes a while in larger groups.  They keep the built-in rules."""

DIRECT: Mapping[str, tuple[str, ...]] = {"all_reduce": ("one_shot", "two_shot")}
"""The direct algorithms of a collective, where there are several: that for small blocks first."""


def by_cost(
    size: int,
    machine: Machine,
    slicing: Slicing,
    collectives: Iterable[str] = tuple(BUILDERS),
    fetch_from: int | None = None,
) -> tuple[Rule, ...]:
    """What the cost model would run in a group of `size` ranks.

    The model knows of copies through slots only.  Chunks of `fetch_from` bytes or more are read in the peer's memory,
    where the direct algorithm always wins, since every further hop adds a copy.  For rooted collectives this holds only
    for chunks that fit one slice.

    Within a few per cent it is no better than a guess, so only a clear promise leads away from the direct algorithms
    and from the slices of the rule.
    """
    if size > DIRECT_MODELLED:
        return ()
    rules: list[Rule] = []
    for collective in collectives:
        direct = DIRECT.get(collective, ("direct",))
        names = BUILDERS[collective] if size <= MODELLED else direct
        costs = {name: Cost(build(collective, name, size), machine, slicing) for name in names}
        chosen = []
        for block in BLOCKS:
            chunk = chunk_bytes(costs[direct[-1]].plan, block)
            fetched = fetch_from is not None and chunk >= fetch_from
            if fetched and (collective not in ROOTED or chunk <= slicing.slice_bytes(chunk)):
                chosen.append((block, direct[-1], 0))
                continue
            seconds = {name: cost.seconds(block) for name, cost in costs.items()}
            plain = min(direct, key=seconds.__getitem__)
            direct = direct[direct.index(plain) :]
            best = min(names, key=seconds.__getitem__)
            name = best if seconds[best] < MARGIN * seconds[plain] else plain
            cut = {
                each: costs[name].seconds(block, each) for each in slices(chunk_bytes(costs[name].plan, block), slicing)
            }
            slice_bytes = min(cut, key=cut.__getitem__, default=0)
            worth_it = slice_bytes > 0 and cut[slice_bytes] < SLICE_MARGIN * seconds[name]
            chosen.append((block, name, slice_bytes if worth_it else 0))
        rules += ranges_between(collective, chosen)
    return tuple(rules)


def slices(chunk_bytes: int, slicing: Slicing) -> Iterator[int]:
    """The slices worth a try for a chunk, beside that of the rule."""
    usual = slicing.slice_bytes(chunk_bytes)
    yield from (size for size in SLICES if size < chunk_bytes and size <= slicing.most_slice_bytes and size != usual)
