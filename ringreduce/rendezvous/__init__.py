"""How the ranks of a group find each other, once, when it is made. It needs no torch but for the memory of one host.

`store`: how ranks tell each other things. `card`: what a rank has ready, and tells of itself first. `host`: who is
where, and the ranks of one host. `links`: TCP connections between hosts, over the `interfaces`, by the group's
`secret`. `roster`: ranks that another backend joins.
"""
