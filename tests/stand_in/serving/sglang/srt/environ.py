"""SGLANG_PLUGINS."""

import os


class _Text:
    def get(self):
        return os.environ.get("SGLANG_PLUGINS", "")


class envs:
    SGLANG_PLUGINS = _Text()
