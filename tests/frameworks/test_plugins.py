"""The plugins for vLLM and SGLang, with these where they are installed, else with stand-ins for what plugins touch.

The stand-ins, in tests/stand_in/serving, have the classes, signatures and conditions of vLLM 0.33.0 and SGLang 0.5.23.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from processes import ROOT
from torch import Tensor

from ringreduce import plugins
from ringreduce.errors import InvalidArgument

STAND_IN = str(ROOT / "tests/stand_in/serving")


def use(name: str, variable: str, listed: str | None) -> None:
    """Lets the framework be imported, and its variable list these plugins."""
    if find_spec(name) is None:
        sys.path.insert(0, STAND_IN)
    os.environ.pop(variable, None)
    if listed is not None:
        os.environ[variable] = listed


def given(me: Rank) -> Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * me.rank


def sums(me: Rank) -> Tensor:
    return me.size * torch.arange(6.0).view(2, 3) + 10 * sum(range(me.size))


def as_graph(call: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.compile(lambda x: call(x * 2) + 1, backend="aot_eager", fullgraph=True)(x)


def vllm_communicator(group: Any) -> Any:
    from vllm.platforms.cpu import CpuPlatform

    communicator = pkgutil.resolve_name(CpuPlatform.get_device_communicator_cls())
    return communicator(cpu_group=group, device=torch.device("cpu"), device_group=group, unique_name="tp:0")


def plugins_off_again() -> None:
    """For groups to come."""
    import ringreduce

    ringreduce.as_gloo(False)


@on_ranks(2)
def test_vllm(me: Rank) -> None:
    use("vllm", "VLLM_PLUGINS", "other,ringreduce")
    os.environ["VLLM_DIST_IDENT"] = "test"
    plugins.register_vllm()
    plugins.register_vllm()  # vLLM may load plugins again
    with me.join(backend="gloo"):
        its, x = vllm_communicator(dist.group.WORLD), given(me)
        assert torch.equal(its.all_reduce(x.clone()), sums(me))
        assert torch.equal(its.all_gather(x, dim=1), torch.cat([x + 10 * (r - me.rank) for r in range(me.size)], 1))
        gathered = its.gather(x, dst=1, dim=0)
        assert (gathered is not None) == (me.rank == 1)
        assert torch.equal(as_graph(its.all_reduce, x), 2 * sums(me) + 1)
        plugins_off_again()
        other: Any = dist.new_group(backend="gloo")
        with pytest.raises(InvalidArgument, match="group's backend is 'gloo'; it must be 'ringreduce'"):
            vllm_communicator(other)
        dist.barrier()  # Gloo fails a peer that ends first
        del its, other


@on_ranks(2)
def test_sglang(me: Rank) -> None:
    use("sglang", "SGLANG_PLUGINS", "other, ringreduce")
    plugins.register_sglang()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    with me.join(backend="gloo"):
        its: Any = GroupCoordinator.__new__(GroupCoordinator)
        its.world_size = its.local_size = me.size
        its.device_group = dist.group.WORLD
        x = given(me)
        assert torch.equal(its.all_reduce(x.clone()), sums(me))
        assert torch.equal(as_graph(its.all_reduce, x), 2 * sums(me) + 1)
        its.world_size = 1
        assert torch.equal(its.all_reduce(x), x)
        del its


@pytest.mark.parametrize("listed", (None, "", "other"))
@on_ranks(1)
def test_do_nothing_unless_listed(me: Rank, listed: str | None) -> None:
    import torch.distributed.distributed_c10d as c10d

    use("vllm", "VLLM_PLUGINS", listed)
    use("sglang", "SGLANG_PLUGINS", listed)
    before = c10d._new_process_group_helper
    plugins.register_vllm()
    plugins.register_sglang()
    from vllm.platforms.cpu import CpuPlatform

    assert "ringreduce" not in CpuPlatform.get_device_communicator_cls()
    assert c10d._new_process_group_helper is before


@on_ranks(1)
def test_a_vllm_that_is_too_different_is_refused(me: Rank) -> None:
    use("vllm", "VLLM_PLUGINS", "ringreduce")
    sys.modules["vllm.platforms.cpu"] = SimpleNamespace(CpuPlatform=type("CpuPlatform", (), {}))  # type: ignore[assignment]
    with pytest.raises(ImportError, match=r"does not suit this vLLM: .*leave ringreduce out of VLLM_PLUGINS"):
        plugins.register_vllm()


def test_entry_points_name_them() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = dict(re.findall(r'entry-points\."([\w.]+)"\]\nringreduce = "([\w.:]+)"', text))
    assert found["vllm.general_plugins"] == "ringreduce.plugins:register_vllm"
    assert found["sglang.srt.plugins"] == "ringreduce.plugins:register_sglang"
    for target in found.values():
        assert callable(pkgutil.resolve_name(target))
