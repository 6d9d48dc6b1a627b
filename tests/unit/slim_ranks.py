"""64 ranks as processes without torch: `python slim_ranks.py FOLDER RANKS`.

Each meets the others as a host of its own and connects with its neighbours in a ring and in a binary tree, within 5 s;
then every connection carries its rank, both ways. Ends with the number of ranks that failed, after their tracebacks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

from bench.meeting import FolderStore
from ringreduce.coordination.endpoint import Location
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.meet import meet
from ringreduce.network.listener import Peer


def neighbours(rank: int, size: int) -> set[int]:
    tree = {(rank - 1) // 2, 2 * rank + 1, 2 * rank + 2}
    return {r for r in tree if 0 <= r < size} | {(rank - 1) % size, (rank + 1) % size}


def run(rank: int, size: int, folder: str) -> None:
    meeting = meet(
        Exchange(FolderStore(folder), rank, size, 60.0), lambda _: 4096, {}, lambda *_: "", location=Location("tcp")
    )
    assert meeting.door is not None
    links: dict[int, list[socket.socket]] = {}
    peers = {r: Peer(*meeting.names[r], meeting.doors[r]) for r in range(size) if r != rank}
    meeting.door.open(
        rank,
        "slim",
        meeting.secret,
        peers,
        lambda peer, fd, _: links.setdefault(peer, []).append(socket.socket(fileno=fd)),
        connections=2,
    )
    meeting.door.connect(neighbours(rank, size), time.monotonic() + 5.0)
    assert links.keys() == neighbours(rank, size)
    for peer, connections in links.items():
        assert len(connections) == 2, (peer, connections)
        for connection in connections:
            connection.setblocking(True)
            connection.settimeout(60)
            connection.sendall(bytes([rank]))
    for peer, connections in links.items():
        assert [connection.recv(1) for connection in connections] == 2 * [bytes([peer])]
    meeting.door.close()


def main(folder: str, size: int) -> int:
    assert "torch" not in sys.modules
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            failed = True
            try:
                run(rank, size, folder)
                failed = False
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(failed)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
