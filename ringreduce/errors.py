"""What can go wrong. Every class derives from torch's `DistBackendError`, so from `RuntimeError`.

After `InvalidArgument` nothing has moved and the group works on; so it does after errors of `monitored_barrier`, and
when the timeout given to a `work.wait()` passes. After any other the group is unusable on all its ranks: further calls
raise the first error again. The process and other groups are unharmed; make a new group to go on.
The tensors of a failed call hold undefined values, but inputs that are not outputs too are untouched.
"""

from torch.distributed import DistBackendError


class RingReduceError(DistBackendError):
    """Base class. `culprit` is the rank in the group that the error is about, or -1."""

    def __init__(self, message: str, culprit: int = -1) -> None:
        super().__init__(message)
        self.culprit = culprit


class InvalidArgument(RingReduceError, ValueError):
    """This rank's call is wrong: the message names the argument, its value and what it must be."""


class PeerLost(RingReduceError):
    """A process of the group died or left; `culprit` is its rank."""


class ServerLost(PeerLost):
    """A server of the parameter server died or ended, and with it the blocks that it served; `culprit` is its number.
    The process lives, and other servers' blocks can be read."""


class UpdateFailed(RingReduceError):
    """An update function of the parameter server raised an error; the value is what it was before."""


class CollectiveTimeout(RingReduceError):
    """The timeout passed; `culprit` is the rank that the others wait for."""


class CollectiveMismatch(RingReduceError):
    """The ranks made different calls; the message describes both. A `recv` raises it for a message of another size or
    dtype, and `all_to_all` for split sizes that do not fit each other; these leave the group usable."""


class Aborted(RingReduceError):
    """A rank called `abort()`, or destroyed the group while calls were under way."""


class SystemFailure(RingReduceError):
    """The operating system refused something; the message has its reason."""


class TopologyError(RingReduceError):
    """The ranks cannot be joined as they are placed."""
