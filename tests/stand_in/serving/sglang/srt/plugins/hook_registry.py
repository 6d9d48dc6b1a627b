"""Hooks that replace functions, or are called with them."""

import functools
import pkgutil
from enum import Enum

_hooks = []


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type):
        _hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        while _hooks:
            target, hook, hook_type = _hooks.pop()
            where, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(where)
            setattr(owner, name, _around(getattr(owner, name), hook) if hook_type == HookType.AROUND else hook)


def _around(original, hook):
    @functools.wraps(original)
    def called(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return called
