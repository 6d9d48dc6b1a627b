"""The errors. Every class derives from torch's `DistBackendError`, so from `RuntimeError`.

The group stays usable after `InvalidArgument` (nothing has moved), after any error of `monitored_barrier`, when the
timeout given to a `work.wait()` passes, after `OperatorFailed`, and after a `CollectiveMismatch` of `recv`, of the
split sizes of `all_to_all`, or of calls with an `Op` outside of the engine. After any other error of a call the group
is unusable on all its ranks: further calls raise the first error again. The process and other groups are unharmed; make
a new group to go on.

Ctrl-C ends a wait of the main thread within a fifth of a second, as KeyboardInterrupt. The rank has left the call then:
the group is unusable, and the others raise a `PeerLost` that names the rank. So does the rank itself if it goes on with
the group. A SIGINT handler of the program's own runs when the call has ended, since it may make calls. It takes until
the end of the call, too, over Gloo's messages, on GPUs, and where torch waits for a future, as in DDP's `backward`.

After a failed call, outputs hold undefined values, and inputs that are not also outputs are unchanged. What the errors
of a parameter server mean is in docs/parameter_server.md.

`ringreduce.common.failures` has the same classes without torch, and says when each is raised; `errors.pyi` lists them.
Without torch, these classes derive from `RuntimeError` alone.
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
