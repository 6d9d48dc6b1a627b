"""What torch and users call this backend."""

NAME = "ringreduce"
AS_GLOO = "RINGREDUCE_AS_GLOO"
"""The variable that lets groups of gloo run on it."""
