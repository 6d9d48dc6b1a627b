"""How the ranks of a group find each other, once, when it is made. `host`: ranks of one host. `roster`: others."""

from ringreduce.rendezvous.host import Meeting, meet
from ringreduce.rendezvous.roster import Roster, call_roll

__all__ = ["Meeting", "Roster", "call_roll", "meet"]
