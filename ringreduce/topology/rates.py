"""What links carry: GB/s in one direction by generation, and what has to be assumed where a source does not say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumed:
    """What a user says about a machine because its listing does not.  None: the reader's own assumption, which it says.

    `gpu` is a model such as "v100"; the others are GB/s in one direction: of one NVLink, of a GPU's PCIe slot, and of
    what joins two CPUs.
    """

    gpu: str | None = None
    nvlink: float | None = None
    pcie: float | None = None
    smp: float | None = None
