"""An Ethernet switch between TAP devices: frames arrive after a fixed time, and some do not.

    python switch.py OWNER_PID SUBNETS DELAY LOSS SEED FD...

The file descriptors are TAP devices, nonblocking; port p is the p-th and belongs to subnet p modulo SUBNETS. DELAY is
in seconds, LOSS a share. A frame goes to the port of its hardware address, whose last byte counts the hosts from 1, or,
with a group's address, to all others of its subnet. Lines on stdin, "down PORT" and "up PORT", are done and repeated on
stdout. Ends with its owner or its stdin.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETCARRIER = 0x400454E2  # linux/if_tun.h
BATCH = 64
"""Frames taken from one port before others get their turn."""


class Switch:
    def __init__(self, subnets: int, delay: float, loss: float, seed: int, taps: list[int]) -> None:
        self.subnets, self.delay, self.loss, self.taps = subnets, delay, loss, taps
        self.ports = {tap: port for port, tap in enumerate(taps)}
        self.random = random.Random(seed).random
        self.up = [True] * len(taps)
        self.waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # (when, port, frame), in order

    def take(self, port: int) -> None:
        """Takes the frames that a host has sent."""
        tap, waiting = self.taps[port], self.waiting
        with contextlib.suppress(BlockingIOError):
            for _ in range(BATCH):
                frame = os.read(tap, 1 << 16)
                due = time.monotonic() + self.delay
                if frame[0] & 1:
                    for receiver in range(port % self.subnets, len(self.taps), self.subnets):
                        if receiver != port:
                            waiting.append((due, receiver, frame))
                elif self.random() >= self.loss and self.up[port]:
                    receiver = (frame[5] - 1) * self.subnets + port % self.subnets
                    if receiver < len(self.taps):
                        waiting.append((due, receiver, frame))

    def deliver(self) -> float | None:
        """Delivers what is due; returns the seconds until the next is, or None."""
        waiting = self.waiting
        while waiting:
            due, port, frame = waiting[0]
            if (left := due - time.monotonic()) > 0:
                return left
            waiting.popleft()
            if self.up[port]:
                with contextlib.suppress(OSError):  # the host's interface is down, or its memory is full
                    os.write(self.taps[port], frame)
        return None

    def obey(self, line: str) -> None:
        verb, port = line.split()
        self.up[int(port)] = verb == "up"
        fcntl.ioctl(self.taps[int(port)], TUNSETCARRIER, struct.pack("i", verb == "up"))
        print(line, end="", flush=True)


def main() -> None:
    owner = os.pidfd_open(int(sys.argv[1]))
    subnets, delay, loss, seed = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    switch = Switch(subnets, delay, loss, seed, list(map(int, sys.argv[6:])))
    inputs = [*switch.taps, sys.stdin, owner]
    while True:
        ready, _, _ = select.select(inputs, [], [], switch.deliver())
        for source in ready:
            if source is sys.stdin:
                if not (line := sys.stdin.readline()):
                    return
                switch.obey(line)
            elif source == owner:
                return
            else:
                switch.take(switch.ports[source])


if __name__ == "__main__":
    main()
