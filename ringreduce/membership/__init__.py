"""Decides who is a member of a changing group, by the order of lines in a directory. docs/elastic.md has the promises.

- `protocol` makes the decisions: a pure function of events, without a clock, processes or sockets.
- `directory` says what a directory must do, and makes one of a store of torch. `ledger` is one in memory that the
  processes of a host share, and `etcd` one that outlives any single host.
- `rounds` carries out what the protocol decides, against a directory and with a clock.
- `key_store` makes a store of torch of a ledger or of etcd.

Nothing here knows groups or tensors, so parameter servers use directories as groups do. Only `key_store` imports torch.
"""
