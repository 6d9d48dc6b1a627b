"""A worker's side of a parameter server: its calls, and what they are made of. Imports nothing of `server`."""
