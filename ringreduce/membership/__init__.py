"""Who is in a changing group: views, decided by the order of lines in a directory. docs/elastic.md has the semantics.

- `protocol`: the decisions, as a pure function of events, without a clock, processes or sockets.
- `directory`: where views are kept: in memory that the ranks of a host share (`ledger`), in the launcher's store, or in
  `etcd`.
- `rounds`: carries out what the protocol says.

Nothing here knows groups, tensors or torch, so parameter servers can use it as groups do.
"""
