"""Decides who is a member of a changing group, by the order of lines in a directory. docs/elastic.md has the promises.

- `protocol` makes the decisions: a pure function of events, without a clock, processes or sockets.
- `directory` says what a directory must do, and makes one of a store of torch. `ledger` is one in memory that the
  processes of a host share, and `etcd` one that outlives any single host.
- `rounds` carries out what the protocol decides, against a directory and with a clock.

Nothing here knows groups, tensors or torch, so parameter servers use it as groups do.
"""
