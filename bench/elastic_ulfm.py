"""One rank of Open MPI's user-level failure mitigation, for bench/elastic.py. Started by `mpirun --with-ft ulfm`.

elastic_ulfm.py VICTIM FOLDER

Rank VICTIM writes the time to FOLDER/RANK and kills itself. The others write when their next all_reduce has ended.
"""

import os
import signal
import sys
import time
from array import array
from pathlib import Path

from mpi4py import MPI

ELEMENTS, READY = 1000, 50


def main() -> None:
    victim, folder = int(sys.argv[1]), Path(sys.argv[2])
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    tensor, result = array("f", [1.0] * ELEMENTS), array("f", bytes(4 * ELEMENTS))
    rank, calls = world.rank, 0
    try:
        while True:
            world.Allreduce(tensor, result)
            calls += 1
            if rank == victim and calls == READY:
                (folder / str(rank)).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
    except MPI.Exception:
        world.Revoke()
    left = world.Shrink()
    left.Allreduce(tensor, result)
    ended = time.monotonic()
    if result[0] != world.size - 1:
        raise ValueError(f"the sum is {result[0]}")
    (folder / str(rank)).write_text(str(ended))


if __name__ == "__main__":
    main()
