"""How the ranks of a group find each other, once, when it is made. It needs no torch but for the memory of one host.

`host`: who is where, and the ranks of one host. `links`: TCP connections between hosts, over the `interfaces`, by the
group's `secret`. `roster`: ranks that another backend joins. `store`: what is needed of a store.
"""

from ringreduce.rendezvous.host import Meeting, Place, meet
from ringreduce.rendezvous.links import Address, Contact, Door, Peer
from ringreduce.rendezvous.roster import Roster, call_roll

__all__ = ["Address", "Contact", "Door", "Meeting", "Peer", "Place", "Roster", "call_roll", "meet"]
