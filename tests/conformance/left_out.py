"""What of PyTorch's suite is not asked of ringreduce as it stands, each with its reason. The report counts both."""

from __future__ import annotations

LEFT_OUT: dict[str, str] = {}
"""Tests that are not run."""

ADAPTED: dict[str, dict[str, str]] = {
    # What DDP logs about Gloo's network is asked for only where the backend is called Gloo; torch's C++ calls all
    # backends that are not its own "custom", whatever Python calls them.
    "test_ddp_logging_data_cpu": {"dist.get_backend(group_id)": "'custom'"},
}
"""Tests that run with an expression replaced by another."""
