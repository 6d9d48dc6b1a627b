"""VLLM_PLUGINS, which vLLM reads each time."""

import os
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "VLLM_PLUGINS":
        raise AttributeError(name)
    return os.environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in os.environ else None
