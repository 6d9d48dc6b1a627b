"""What a launcher's variables say about the processes that it has started."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ringreduce.common.failures import InvalidArgument


def check_alone(call: str, instead: str) -> None:
    """Raises `InvalidArgument` if a launcher has started several processes, each of which `call` takes to be alone.

    `instead` is what helps, beside the launcher's variables. A process that is to be alone has WORLD_SIZE=1.
    """
    if (world_size := os.environ.get("WORLD_SIZE")) is not None:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        what = f"set {', '.join(missing)}, too, or {instead}" if missing else instead
        if world_size != "1":
            raise InvalidArgument(f"{call}: WORLD_SIZE is {world_size}, and this process would be alone: {what}")
        return
    for count, size, rank in _launchers():
        if count.isdecimal() and int(count) > 1:
            raise InvalidArgument(
                f"{call}: {size} is {count}, and each of these processes would be alone. Have each set RANK=${rank} "
                f"WORLD_SIZE=${size}, and MASTER_ADDR and MASTER_PORT alike; or {instead}; or, if they are to be "
                "alone, set WORLD_SIZE=1"
            )


def _launchers() -> Iterator[tuple[str, str, str]]:
    """How many processes each launcher says that it has started with this one, and its names of the size and a rank."""
    if "SLURM_STEP_ID" in os.environ:  # otherwise it is the script of the job, and not started by srun
        size = next((each for each in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if each in os.environ), "")
        yield os.environ.get(size, ""), size, "SLURM_PROCID"
    for size, rank in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")):
        yield os.environ.get(size, ""), size, rank
