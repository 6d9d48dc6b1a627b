"""From what is known of the machine to the rules of a group.

Rank 0 of a group decides for all of it, and hands the decision round as text in the grammar of `plan.choose`: ranks
with other files, or none, agree anyway.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from ringreduce import plan
from ringreduce.common.cores import own_cores
from ringreduce.common.files import text_of
from ringreduce.config import (
    MOST_FETCH,
    MOST_FETCH_SLOW_KERNEL,
    Options,
    fetch_from,
    resolve,
    slicing_for,
)
from ringreduce.plan import Rule, Slicing
from ringreduce.plan.by_cost import DIRECT_MODELLED, by_cost
from ringreduce.plan.cost import Machine
from ringreduce.tuning.machine import Identity, identify, probe
from ringreduce.tuning.record import Cell, Measured, Tuning, default_path, load, save, tuned_otherwise

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
"""Unless it says 0, only root, parents and debuggers may read a process's memory."""

YIELD_FOR = 30
"""Wake-ups. Swept for 64 bytes with 4, 8 and 16 ranks on 2 cores (Xeon, Linux 6.18, November 2026), where a wake-up
takes 1.4 times as long as a yield: 40 and 10^6 yields took the same time, 10 up to 1.05 times, 3 up to 1.5 times. With
a sched_yield() that switches nothing, 10^6 yields took 30 to 60 times as long as 1 to 40."""

SLOW_KERNEL = 1.9
"""Times as long as a copy takes, the kernel's takes where MOST_FETCH_SLOW_KERNEL holds. Between two machines."""

log = logging.getLogger(__name__)


def decide(size: int, cores: Collection[int], fetch: bool, *, options: Options, slot_bytes: int) -> str:
    """What runs for which size in a group of `size` ranks on these cores; "" for the built-in defaults.

    `fetch` says whether ranks can read one another's memory.
    """
    if size == 1 or options.tuning == "off":
        return ""
    try:
        slicing = slicing_for(options, slot_bytes, fetch)
        least = fetch_from(options, size, cores, fetch)
        return _decision(size, options.tuning, frozenset(cores), slicing, least)
    except Exception as error:  # whatever it is: the other ranks wait for an answer
        log.warning("cannot tell what suits this machine: %s; the built-in rules decide", error)
        return ""


def fetches(options: Options) -> bool:
    """Whether ranks that this process starts could read one another's memory, as far as a single process can tell."""
    from ringreduce import _C

    allowed = os.geteuid() == 0 or text_of(YAMA) in ("", "0")  # "": the kernel has no such limit
    memory = _C.OpenMemory()
    return allowed and bool(options.fetch) and _C.can_access(*memory.key)


def yields(cores: Collection[int], options: Options) -> int:
    """How often a rank that shares its core yields it before it sleeps; 0 for the built-in default.

    As often as YIELD_FOR wake-ups last. Waits that end while it yields cost no wake-up. Where a yield does not bring
    another rank to the core (that is up to the kernel), a rank sleeps at once instead.
    """
    machine = _machine(cores, options)
    return max(1, round(YIELD_FOR * machine.wake / machine.turn)) if machine else 0


def most_fetch(cores: Collection[int], options: Options) -> int:
    """Up to how many bytes of all their tensors ranks read them where they are, if they are more than two."""
    machine = _machine(cores, options)
    if machine is None:
        return MOST_FETCH
    slow = machine.fetch_scratch > SLOW_KERNEL * machine.copy_scratch
    return MOST_FETCH_SLOW_KERNEL if slow else MOST_FETCH


def spread(cores: Collection[int], options: Options) -> int:
    """Over how many bytes of slots the ranks of a group spread their values; 0: over none."""
    machine = _machine(cores, options)
    return machine.spread if machine else 0


def _machine(cores: Collection[int], options: Options) -> Machine | None:
    """What is known of these cores, if that is wanted and can be had."""
    if options.tuning == "off":
        return None
    try:
        return current(options.tuning, frozenset(cores))[0].machine
    except Exception:  # decide() has told
        return None


def rules_for(tuning: Tuning, size: int, slicing: Slicing, least_fetch: int | None = None) -> tuple[Rule, ...]:
    """As measured, for what has been; by the model, for the rest.  See `by_cost`."""
    measured = tuning.measured[size].cells if size in tuning.measured else {}
    others = [name for name in plan.BUILDERS if name not in measured]
    rules = list(by_cost(size, tuning.machine, slicing, others, least_fetch))
    for collective, cells in measured.items():
        found = [(cell.bytes, cell.algorithm, cell.slice_bytes) for cell in cells]
        rules += plan.ranges_between(collective, found)
    return tuple(rules)


@functools.lru_cache(maxsize=8)
def current(where: str, cores: frozenset[int]) -> tuple[Tuning, str]:
    """What is known of this machine, and where from: the file, or else a probe, which then makes the machine's own
    file.

    `where` is "auto" or the file's path.  A file that cannot be used or written is told in the log, once.
    """
    identity = identify(cores)
    try:
        path = path_of(where, identity)
    except OSError as error:
        log.info("cannot keep what is found out about this machine: %s", error)
        return Tuning(identity, probe(cores), now()), "probe"
    try:
        return load(path), str(path)
    except (OSError, ValueError) as error:
        own = where == "auto" and isinstance(error, FileNotFoundError)
        for other in tuned_otherwise(identity) if own else ():
            log.warning(
                "`ringreduce tune` has measured this machine for jobs on %d cores; this one may use %d, for which the "
                "cost model decides until `ringreduce tune` runs on as many",
                other.identity.cores,
                identity.cores,
            )
        if not own:
            log.warning(
                "cannot use the tuning in %s: %s; the machine is probed instead; `ringreduce tune` writes it anew",
                path,
                error,
            )
    tuning = Tuning(identity, probe(cores), now())
    if own:
        try:
            save(tuning, path, replace=False)
        except OSError as error:
            log.info("cannot keep the tuning in %s: %s", path, error)
    return tuning, "probe"


def measured_memory() -> float | None:
    """`memory_gbps` of the cores that this process may use; None where tuning is off, or nothing can be measured."""
    try:
        where = resolve(None)[0].tuning
        return None if where == "off" else memory_gbps(where, own_cores())
    except Exception as error:  # whatever it is: there is an assumption instead
        log.info("cannot tell how fast the memory is: %s", error)
        return None


def memory_gbps(where: str | None, cores: frozenset[int]) -> float:
    """What one core copies in memory while the others do too, GB/s."""
    tuning, _ = current(where or "auto", cores)
    return 1e-9 / tuning.machine.copy_memory_all


def renew(where: str, cores: Collection[int]) -> tuple[Path, Tuning]:
    """Probes the machine anew and writes its file; what was measured stays.  Raises OSError if it cannot be written."""
    identity = identify(cores)
    path = path_of(where, identity)
    try:
        known = load(path)
        measured = known.measured if known.identity == identity else {}
    except (OSError, ValueError):
        measured = {}
    tuning = Tuning(identity, probe(cores), now(), measured)
    save(tuning, path, replace=True)
    return path, tuning


def keep(tuning: Tuning, size: int, cells: Mapping[str, tuple[Cell, ...]], path: Path) -> Tuning:
    """Writes what was measured with `size` ranks, in place of what there was for the same collectives."""
    with contextlib.suppress(OSError, ValueError):  # what others have measured meanwhile stays
        tuning = replace(tuning, measured=load(path).measured)
    before = tuning.measured[size].cells if size in tuning.measured else {}
    measured = Measured(now(), {**before, **cells})
    tuning = replace(tuning, measured={**tuning.measured, size: measured}, decided={})
    save(tuning, path, replace=True)
    return tuning


def path_of(where: str, identity: Identity) -> Path:
    return default_path(identity) if where == "auto" else Path(os.path.expanduser(where))


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


@functools.lru_cache(maxsize=64)
def _decision(size: int, where: str, cores: frozenset[int], slicing: Slicing, least_fetch: int | None) -> str:
    tuning, _ = current(where, cores)
    group = f"{size} ranks, {slicing}, {least_fetch}"
    with contextlib.suppress(KeyError, plan.PlanError):  # of algorithms that there are no more
        plan.parse_algorithms(tuning.decided[group])
        return tuning.decided[group]
    rules = ";".join(map(str, rules_for(tuning, size, slicing, least_fetch)))
    if where == "auto" and size <= DIRECT_MODELLED:
        with contextlib.suppress(OSError, ValueError):  # it is only worked out again
            path = path_of(where, tuning.identity)
            known = load(path)
            if replace(known, decided={}) == replace(tuning, decided={}):
                save(replace(known, decided={**known.decided, group: rules}), path, replace=True)
    return rules
