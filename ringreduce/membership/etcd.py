"""Values under keys in etcd, for jobs that must outlive any one host: its JSON gateway, by the standard library alone.

    Etcd("etcd://node1:2379,node2:2379,node3:2379/job7")

Requests go to one server until it fails, then to the next one. Is a `Directory`, and what `rendezvous` wants of a
store.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringreduce.common.failures import InvalidArgument
from ringreduce.membership.directory import append_by

SECONDS = 3.0
"""For one request to one server."""
ROUNDS = 2
"""How often all servers are asked before a request fails. Who asks has patience of its own."""
MOST = 100
"""Keys in one request; a server takes 128, unless it is told otherwise."""
FORM = "etcd://HOST:PORT[,HOST:PORT...]/NAME, where NAME is the job's own"


class Etcd:
    """Thread-safe. Raises `ConnectionError` when no server answers; whether the request was carried out is not known
    then."""

    def __init__(self, address: str) -> None:
        """Raises `InvalidArgument` for what is no such address."""
        servers, slash, self._prefix = address.removeprefix("etcd://").partition("/")
        found = [each.rpartition(":") for each in servers.split(",")]
        if not (address.startswith("etcd://") and slash and self._prefix):
            raise InvalidArgument(f"store is {address!r}; it must be {FORM}")
        if not all(host and port.isdecimal() for host, _, port in found):
            raise InvalidArgument(f"store is {address!r}: a server there is not HOST:PORT; it must be {FORM}")
        self._servers = [(host.strip("[]"), int(port)) for host, _, port in found]
        self._of_thread = threading.local()

    def get(self, key: str) -> str:
        """The value under a key; '': there is none."""
        return (self.value(key) or b"").decode()

    def value(self, key: str) -> bytes | None:
        """The value under a key; None: there is none."""
        return _first(self._ask("range", {"key": self._name(key)}))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values."""
        ranges = [{"request_range": {"key": self._name(key), "count_only": True}} for key in keys]
        return all(
            answer["response_range"].get("count")
            for some in range(0, len(ranges), MOST)
            for answer in self._ask("txn", {"success": ranges[some : some + MOST]})["responses"]
        )

    def names(self) -> list[str]:
        """All that have a value."""
        begin, after = self._name(""), _text(f"{self._prefix}0")  # "0" follows "/"
        answer = self._ask("range", {"key": begin, "range_end": after, "keys_only": True})
        return [base64.b64decode(each["key"]).decode()[len(self._prefix) + 1 :] for each in answer.get("kvs", ())]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("put", {"key": self._name(key), "value": _text(value)})

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Makes `desired` the value if it is `expected` ('': there is none); returns the value that is there then."""
        answer = self._ask("txn", self._exchange(key, expected, desired))
        if answer.get("succeeded"):
            return desired
        return (_first(answer["responses"][0]["response_range"]) or b"").decode()

    def append(self, key: str, text: str) -> str:
        """Puts `text` after what is there; returns all that is there then. The text may be there twice where a server
        has failed."""
        return append_by(lambda expected, desired: self.compare_set(key, expected, desired), text)

    def add(self, key: str, number: int) -> int:
        """Adds to a number; returns the sum. Raises `ConnectionError` where it is not known whether it was added."""
        while True:
            now = self.get(key)
            changed = str(int(now or "0") + number)
            if not number or self._ask("txn", self._exchange(key, now, changed), repeat=False).get("succeeded"):
                return int(changed)

    def _exchange(self, key: str, expected: str, desired: str) -> dict[str, Any]:
        """A request that says, where there is something else than expected, what is there."""
        name = self._name(key)
        same = {"key": name, "result": "EQUAL", "target": "VALUE", "value": _text(expected)}
        none = {"key": name, "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": name, "value": _text(desired)}}
        otherwise = {"request_range": {"key": name}}
        return {"compare": [same if expected else none], "success": [put], "failure": [otherwise]}

    def _name(self, key: str) -> str:
        return _text(f"{self._prefix}/{key}")

    def _ask(self, what: str, request: dict[str, Any], repeat: bool = True) -> dict[str, Any]:
        """`repeat`: whether a request may be made again that may have been carried out."""
        body, mine = json.dumps(request).encode(), self._of_thread
        if not hasattr(mine, "server"):
            mine.server, mine.connection = 0, None
        for attempt in range(ROUNDS * len(self._servers)):
            host, port = self._servers[mine.server]
            sent = False
            try:
                if mine.connection is None:
                    mine.connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
                    mine.connection.connect()
                sent = True
                mine.connection.request("POST", f"/v3/kv/{what}", body, {"Content-Type": "application/json"})
                response = mine.connection.getresponse()
                text = response.read()
                if response.status == http.client.OK:
                    return dict(json.loads(text))
                error: Exception = ConnectionError(f"it answers {response.status}: {text[:200]!r}")
            except (OSError, http.client.HTTPException, ValueError) as failed:
                error = failed
            mine.connection.close()
            mine.connection, mine.server = None, (mine.server + 1) % len(self._servers)
            if sent and not repeat:
                break
            time.sleep(0.05 * (attempt >= len(self._servers)))
        raise ConnectionError(f"etcd: {what} failed, at last by {host}:{port}: {error}")


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _first(answer: dict[str, Any]) -> bytes | None:
    found = answer.get("kvs")
    return base64.b64decode(found[0].get("value", "")) if found else None
