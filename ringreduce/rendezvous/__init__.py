"""How the ranks of a group find each other, once, when it is made. See `host` for ranks of one host."""

from ringreduce.rendezvous.host import Meeting, meet

__all__ = ["Meeting", "meet"]
