from torch.distributed import Backend

class Geometry:
    def __init__(
        self,
        *,
        ranks: int,
        channels: int,
        depth: int,
        slot_bytes: int,
        mailbox_depth: int,
        mailbox_slot_bytes: int,
    ) -> None: ...
    def segment_bytes(self) -> int: ...

class ProcessGroupRing(Backend):
    def __init__(
        self,
        *,
        memfd: int,
        geometry: Geometry,
        rank: int,
        pidfds: list[int],
        names: list[tuple[str, int]],
        spins: int,
        slices: int | None,
        least_slice_bytes: int | None,
        timeout: float,
    ) -> None: ...
    def add_plan(self, collective: str, lowered: list[int], digest: int, most_bytes: int) -> None: ...

def kernel_supports(dtype: str, op: str) -> bool: ...
def accumulate(dtype: str, op: str, dst: int, srcs: list[int], count: int, divisor: float = 1.0) -> None: ...
def scale(dtype: str, dst: int, src: int, count: int, factor: float) -> None: ...
def instruction_set() -> str: ...
def select_instruction_set(name: str) -> bool: ...
def split(begin: int, end: int, parts: int, index: int, unit: int) -> tuple[int, int]: ...
def stripe(count: int, begin: int, end: int, total: int, unit: int) -> tuple[int, int]: ...
