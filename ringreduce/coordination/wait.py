"""How long this package waits between two looks."""

CHECK_PROCESSES, CHECK_BY_RANK = 0.25, 0.001
"""Seconds between two looks whether processes have ended, and the same for each rank."""
