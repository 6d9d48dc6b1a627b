"""What can go wrong, without torch: the classes that `ringreduce.errors` joins with torch's own.

All code raises these. Once `ringreduce.errors` has been imported, raising one of them makes an error of the class of
the same name there, which is one of torch's too. So `except ringreduce.errors.TopologyError` catches what planning
raises, and planning needs no torch.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PlanError(ValueError):
    """A plan, or the description of one, is wrong; the message says where and what would be right."""


class RingReduceError(RuntimeError):
    """Base class. `culprit` is the rank in the group that the error is about, or -1."""

    _with_torch: ClassVar[type[RingReduceError] | None] = None
    """The class of this name in `ringreduce.errors`."""

    def __new__(cls, *arguments: Any, **named: Any) -> RingReduceError:
        kind: type[RingReduceError] = cls.__dict__.get("_with_torch") or cls
        return super().__new__(kind, *arguments)

    def __init__(self, message: str, culprit: int = -1) -> None:
        super().__init__(message)
        self.culprit = culprit


class InvalidArgument(RingReduceError, ValueError):
    """This rank's call is wrong: the message names the argument, its value and what it must be."""


class PeerLost(RingReduceError):
    """A process of the group died or left; `culprit` is its rank."""


class ServerLost(PeerLost):
    """A server of the parameter server died or ended, and with it the blocks that it served; `culprit` is its number.
    This worker's process lives on, and blocks of other servers can be read."""


class UpdateFailed(RingReduceError):
    """An update function of the parameter server raised an error; the value is what it was before."""


class OperatorFailed(RingReduceError):
    """An operator of `ringreduce.Op` raised an error on the rank `culprit`, or is not what it claims to be. All ranks
    that get what it was to make raise this, and the group stays usable."""


class SampleFailed(RingReduceError):
    """The dataset of a `data.Loader` raised an error, whose traceback is in the message, or took longer than `timeout`.
    `id` is the example's, or -1. The Loader stays usable."""

    def __init__(self, message: str, id: int = -1) -> None:
        super().__init__(message)
        self.id = id


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


class Expelled(RingReduceError):
    """The other members of a changing group went on without this process; a world lets in a new one."""


class TooFewRanks(RingReduceError):
    """A changing group has had fewer ranks than it may have, for longer than its patience."""
