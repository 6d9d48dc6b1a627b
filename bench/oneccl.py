"""A rank of oneCCL for peers.py, started by Intel MPI's launcher as `oneccl.py WORKER NAME SOCKET`.

oneCCL comes as a library of C++; bench/oneccl.cpp makes functions of C of its collectives.
"""

import ctypes
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ringreduce/cli/bench"))

import worker


class OneCcl(worker.Mpi):
    """Its ranks find each other through MPI, which also carries what they exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.version = f"oneCCL {version('oneccl')} over {self.version}"
        self.library = ctypes.CDLL(str(Path(sys.prefix) / "oneccl.so"))
        address = ctypes.create_string_buffer(self.library.address_size())
        if self.rank == 0:
            self.library.make_address(address)
        self.library.join(self.ranks, self.rank, self.world.bcast(address.raw, 0))

    def call(self, collective: str, dtype: str, source: worker.Bits, output: worker.Bits) -> worker.Call:
        if dtype != "float32":
            raise ValueError(f"oneccl.cpp has no {dtype}")
        whole = collective in ("all_reduce", "broadcast", "all_gather")  # whose input is one part
        count = source.size if whole else source.size // self.ranks
        function = getattr(self.library, collective)
        return partial(
            function, *(ctypes.c_void_p(bits.ctypes.data) for bits in (source, output)), ctypes.c_size_t(count)
        )


if __name__ == "__main__":
    worker.serve(OneCcl(), sys.argv[3])
