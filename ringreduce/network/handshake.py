"""How the two ends of a TCP connection prove to each other that they know the group's secret, and which rank they are.

Of two ranks one connects, the dialer, and the other's door lets it in:

    door   -> dialer  CHALLENGE  a nonce
    dialer -> door    HELLO      both ranks, the number of this connection, a nonce; and a proof
    door   -> dialer  ANSWER     welcome, and a proof; or why not
    dialer -> door    JOIN       "connection 2 of 4", and a proof
    door   -> dialer  READY      all 4 are here

A proof is an HMAC-SHA-256, by the group's secret, of the sender's role, the group's name, the door's nonce and the
HELLO, which has the protocol's version too. So a proof that was overheard proves nothing later, in the other direction
or on another connection; and the door proves nothing to a dialer that has not proved itself. After READY the connection
carries no more of this protocol. Nothing is encrypted: who can change packets on their way can take over a connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ringreduce.network.paths import Path

Result = TypeVar("Result")

VERSION = 2
"""Of all that goes over a link. Ranks with different ones refuse each other."""

MAGIC = b"ringrdc\n"
_NONCE = 32
SESSION = 16
CHALLENGE = struct.Struct(f"!8sH{_NONCE}s")  # magic, version, nonce
HELLO = struct.Struct(f"!8sHIII{SESSION}s{_NONCE}s")  # magic, version, from, to, number, session, nonce
JOIN = struct.Struct("!II")  # which connection of the session this is, and of how many
_DIGEST = hashlib.sha256().digest_size
WELCOME, READY = b"W", b"R"

# Why a door refuses: the word it counts under, what it answers, and what the other side makes of the answer.
ANSWERS = {
    "version": (b"V", "it speaks another version of the protocol: ranks have different versions of ringreduce"),
    "proof": (b"P", "it refused this rank's proof: the ranks have different secrets, or it is of another group"),
    "rank": (b"N", "it does not wait for this rank"),
}
_SAID = {code: text for code, text in ANSWERS.values()}


class Refused(Exception):
    """What is at the other end is not, or does not take this for, the rank it should be. Trying again is in vain."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text)
        self.reason = reason


@dataclass
class Connection:
    """A connection whose ends have proved who they are; `hello` and `nonce` are what further proofs are about."""

    socket: socket.socket
    hello: bytes
    nonce: bytes
    path: Path


class Handshake:
    """One rank's side of every handshake."""

    def __init__(self, rank: int, group: str, secret: bytes) -> None:
        self.rank, self._group, self._secret = rank, hashlib.sha256(group.encode()).digest(), secret

    async def admit(
        self, connection: socket.socket, path: Path, expects: Callable[[int], bool]
    ) -> tuple[int, bytes, Connection]:
        """As the door: has a dialer prove who it is. Returns its rank and its session. Raises `Refused`."""
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(_NONCE)
        await loop.sock_sendall(connection, CHALLENGE.pack(MAGIC, VERSION, nonce))
        hello = await _read(connection, len(MAGIC))
        if hello != MAGIC:
            raise Refused("garbage")
        hello += await _read(connection, HELLO.size - len(MAGIC))
        proof = await _read(connection, _DIGEST)
        _, version, peer, to, _, session, _ = HELLO.unpack(hello)
        try:
            if version != VERSION:
                raise Refused("version")
            if not hmac.compare_digest(proof, self._proof(b"comes", hello, nonce)):
                raise Refused("proof")
            if to != self.rank or not expects(peer):
                raise Refused("rank")
        except Refused as refused:
            await loop.sock_sendall(connection, ANSWERS[refused.reason][0])
            raise
        await loop.sock_sendall(connection, WELCOME + self._proof(b"answers", hello, nonce))
        return peer, session, Connection(connection, hello, nonce, path)

    async def introduce(
        self, connection: socket.socket, path: Path, peer: int, number: int, session: bytes
    ) -> Connection:
        """As the dialer: has both sides prove who they are. Raises `Refused`."""
        magic, version, nonce = CHALLENGE.unpack(await _read(connection, CHALLENGE.size))
        if magic != MAGIC:
            raise Refused("garbage", "what answers is not a rank")
        if version != VERSION:
            raise Refused("version", ANSWERS["version"][1])
        hello = HELLO.pack(MAGIC, VERSION, self.rank, peer, number, session, secrets.token_bytes(_NONCE))
        await asyncio.get_running_loop().sock_sendall(connection, hello + self._proof(b"comes", hello, nonce))
        answer = await _read(connection, 1)
        if answer != WELCOME:
            raise Refused("answer", _SAID.get(answer, "it sent something else than expected"))
        if not hmac.compare_digest(await _read(connection, _DIGEST), self._proof(b"answers", hello, nonce)):
            raise Refused("proof", "its proof is wrong: it does not know the group's secret")
        return Connection(connection, hello, nonce, path)

    async def joins(self, one: Connection, index: int, total: int) -> None:
        """As the dialer: says that this is connection `index` of `total`."""
        join = JOIN.pack(index, total)
        proof = self._proof(b"joins" + join, one.hello, one.nonce)
        await asyncio.get_running_loop().sock_sendall(one.socket, join + proof)

    async def joined(self, one: Connection) -> tuple[int, int]:
        """As the door: what the dialer has said by `joins`. Raises `Refused`."""
        join = await _read(one.socket, JOIN.size)
        proof = await _read(one.socket, _DIGEST)
        if not hmac.compare_digest(proof, self._proof(b"joins" + join, one.hello, one.nonce)):
            raise Refused("proof")
        index, total = JOIN.unpack(join)
        return index, total

    async def is_ready(self, one: Connection) -> bool:
        """As the dialer: waits until the door has all connections; False: it has not taken them."""
        return await _read(one.socket, 1) == READY

    def _proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, b"%d:%b" % (len(role), role) + self._group + hello + nonce, "sha256")


async def say_ready(connection: socket.socket) -> None:
    """As the door: all connections of the session are here."""
    await asyncio.get_running_loop().sock_sendall(connection, READY)


async def within(seconds: float, what: Awaitable[Result]) -> Result:
    """What `what` returns. Raises `OSError` if that takes longer than `seconds`."""
    try:
        return await asyncio.wait_for(what, seconds)
    except asyncio.TimeoutError:
        raise OSError(f"no answer in {seconds:g} s") from None


async def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, so that nothing of what follows is taken."""
    data = b""
    while len(data) < size:
        some = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not some:
            raise ConnectionResetError("it closed the connection")
        data += some
    return data
