"""What can go wrong. Every class derives from torch's `DistBackendError`, so from `RuntimeError`.

After `InvalidArgument` nothing has moved and the group works on; so it does after errors of `monitored_barrier`, and
when the timeout given to a `work.wait()` passes. After any other the group is unusable on all its ranks: further calls
raise the first error again. The process and other groups are unharmed; make a new group to go on.
The tensors of a failed call hold undefined values, but inputs that are not outputs too are untouched.

`ringreduce.common.failures` has the same classes without torch, and says when which; `errors.pyi` lists them. Without
torch these derive from `RuntimeError` alone.
"""

from ringreduce.common import failures

try:
    from torch.distributed import DistBackendError
except ImportError:
    DistBackendError = RuntimeError

_of_torch: dict[type, type] = {RuntimeError: DistBackendError}
for _plain in [each for each in vars(failures).values() if isinstance(each, type)]:
    if not issubclass(_plain, failures.RingReduceError):
        continue
    _bases = (_plain, _of_torch[_plain.__bases__[0]])
    _of_torch[_plain] = type(_plain.__name__, _bases, {"__doc__": _plain.__doc__, "__module__": __name__})
    globals()[_plain.__name__] = _plain._with_torch = _of_torch[_plain]
