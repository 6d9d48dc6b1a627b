"""Plugins of frameworks that serve models, found by their entry points; nothing else imports this package.

Both frameworks run every plugin that is installed, unless a variable of theirs lists some. A plugin here does nothing
unless that variable names it: who has installed ringreduce for training need not want it there. docs/serving.md says
what the plugins change.
"""

from __future__ import annotations

from ringreduce.common.names import NAME


def register_vllm() -> None:
    """Called by vLLM in each of its processes; acts if VLLM_PLUGINS has `ringreduce`.

    Raises ImportError if ringreduce, or what it needs of vLLM, cannot be imported.
    """
    from vllm import envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    from ringreduce.groups.as_gloo import as_gloo

    try:
        from vllm.platforms.cpu import CpuPlatform

        if "get_device_communicator_cls" not in vars(CpuPlatform):
            raise ImportError("CpuPlatform names no class of communicators")
    except ImportError as error:
        raise ImportError(
            f"ringreduce's plugin does not suit this vLLM: {error}; leave ringreduce out of VLLM_PLUGINS and set "
            "RINGREDUCE_AS_GLOO=1, which changes only vLLM's groups"
        ) from error
    as_gloo()
    CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.vllm.Communicator")


def register_sglang() -> None:
    """Called by SGLang in each of its processes; acts if SGLANG_PLUGINS has `ringreduce`.

    Raises ImportError if ringreduce cannot be imported; SGLang logs what its plugins raise, and goes on without them.
    It looks for the functions that are replaced only later, and logs it if one is missing.
    """
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in (each.strip() for each in envs.SGLANG_PLUGINS.get().split(",")):
        return
    from ringreduce.groups.as_gloo import as_gloo
    from ringreduce.plugins import sglang

    where = "sglang.srt.distributed.parallel_state"
    HookRegistry.register(f"{where}.is_shm_available", sglang.is_shm_available, HookType.REPLACE)
    HookRegistry.register(f"{where}.GroupCoordinator.all_reduce", sglang.all_reduce, HookType.AROUND)
    as_gloo()
