"""How processes agree on who they are: stores, views of a changing group, what a process tells of itself.

- `store` says what a directory and a store must do. `ledger` is one in memory that the processes of a host share,
  `etcd` one that outlives any single host, and `torch_store` makes a store of torch of either.
- `protocol` decides who is a member of a changing group: a pure function of events, without a clock, processes or
  sockets. `rounds` carries its decisions out against a directory. docs/elastic.md has the promises.
- `process`: which process this is, and whether another one has ended. `endpoint`: what a process has ready for others,
  and tells of itself. `watch`: a thread that notices ends. `wait`: waiting with a deadline.
- `founding`: beginning something together, by attempts. `join_queue`: where processes wait to be let in.

Nothing here knows groups or tensors. Only `torch_store` and what imports it need torch.
"""
