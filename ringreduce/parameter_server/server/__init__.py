"""The servers of a process, their backups, and the door for those that connect to them. Imports nothing of `client`."""
