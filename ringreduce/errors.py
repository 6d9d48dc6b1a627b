"""What can go wrong. Every class derives from torch's `DistBackendError`, so from `RuntimeError`.

After `InvalidArgument` nothing has moved and the group works on; so it does after errors of `monitored_barrier`, and
when the timeout given to a `work.wait()` passes. After any other the group is unusable on all its ranks: further calls
raise the first error again. The process and other groups are unharmed; make a new group to go on.
The tensors of a failed call hold undefined values, but inputs that are not outputs too are untouched.

`ringreduce.common.failures` has the same classes without torch, and says when which. Without torch these derive from
`RuntimeError` alone.
"""

from typing import Any

from ringreduce.common import failures

try:
    from torch.distributed import DistBackendError
except ImportError:
    DistBackendError = RuntimeError  # type: ignore[assignment, misc]


class RingReduceError(failures.RingReduceError, DistBackendError):
    __doc__ = failures.RingReduceError.__doc__

    def __init_subclass__(cls, **named: Any) -> None:
        """Takes the place of the class of the same name, from now on."""
        super().__init_subclass__(**named)
        if cls.__module__ == __name__:
            cls.__doc__ = cls.__bases__[0].__doc__
            cls.__bases__[0]._with_torch = cls  # type: ignore[attr-defined]


failures.RingReduceError._with_torch = RingReduceError


class InvalidArgument(failures.InvalidArgument, RingReduceError): ...


class PeerLost(failures.PeerLost, RingReduceError): ...


class CollectiveTimeout(failures.CollectiveTimeout, RingReduceError): ...


class CollectiveMismatch(failures.CollectiveMismatch, RingReduceError): ...


class Aborted(failures.Aborted, RingReduceError): ...


class SystemFailure(failures.SystemFailure, RingReduceError): ...


class TopologyError(failures.TopologyError, RingReduceError): ...
