"""How processes reach each other: Unix sockets within a host (`local`), TCP between hosts (`listener`). Needs no torch.

`interfaces`: the network interfaces that are used. `sockets`: listening and options. `secret`: by what
ranks know each other.
"""
