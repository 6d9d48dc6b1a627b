"""A directory in etcd, for jobs that must survive the loss of any one host.

    Etcd("etcd://node1:2379,node2:2379,node3:2379/job7")

It speaks to etcd's JSON gateway with the standard library alone: over HTTP, or with etcds:// over TLS. Certificates and
the login are those of etcdctl, in the same variables: ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY name files, and
ETCDCTL_USER is USER:PASSWORD. Requests go to one server until that one fails, then to the next one.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringreduce.common import units
from ringreduce.common.descriptors import above_streams
from ringreduce.common.failures import InvalidArgument
from ringreduce.coordination.store import Values

SECONDS = 3.0
"""Timeout of one request to one server."""
ROUNDS = 2
"""How often all servers are tried before a request fails. Callers repeat it for as long as they have patience."""
MOST = 100
"""The most keys in one request. A server accepts 128, unless it is configured otherwise."""
FORM = "etcd://HOST:PORT[,HOST:PORT...]/NAME, or etcds:// for TLS, where NAME is the job's own"


class Etcd(Values):
    """A `store.Values` in etcd. Thread-safe: each thread has a connection of its own.

    Calls raise `ConnectionError` if no server answers. Then it is not known whether the request was carried out.
    """

    def __init__(self, address: str) -> None:
        """`address`: see `FORM`. Raises `InvalidArgument` for any other, and for certificates that cannot be read."""
        scheme, _, rest = address.partition("://")
        servers, _, self._prefix = rest.partition("/")
        if not (scheme in ("etcd", "etcds") and self._prefix):
            raise InvalidArgument(f"store is {address!r}; it must be {FORM}")
        try:
            self._servers = [units.address(each) for each in servers.split(",")]
        except ValueError as error:
            raise InvalidArgument(f"store is {address!r}: {error}; it must be {FORM}") from None
        self._tls = _tls() if scheme == "etcds" else None
        self._user, _, self._password = os.environ.get("ETCDCTL_USER", "").partition(":")
        self._token = ""
        """What a server has given for the login. It is forgotten after some minutes without a request."""
        self._of_thread = threading.local()

    def value(self, key: str) -> bytes | None:
        return _first(self._ask("range", {"key": self._name(key)}))

    def check(self, keys: Sequence[str]) -> bool:
        ranges = [{"request_range": {"key": self._name(key), "count_only": True}} for key in keys]
        return all(
            answer["response_range"].get("count")
            for some in range(0, len(ranges), MOST)
            for answer in self._ask("txn", {"success": ranges[some : some + MOST]})["responses"]
        )

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("put", {"key": self._name(key), "value": _text(value)})

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        answer = self._ask("txn", self._exchange(key, expected, desired))
        if answer.get("succeeded"):
            return desired
        return (_first(answer["responses"][0]["response_range"]) or b"").decode()

    def add(self, key: str, number: int) -> int:
        """Adds to the number under a key and returns the sum.

        Raises `ConnectionError` if it is not known whether the number was added; it is not added again.
        """
        while True:
            now = self.get(key)
            changed = str(int(now or "0") + number)
            if not number or self._ask("txn", self._exchange(key, now, changed), repeat=False).get("succeeded"):
                return int(changed)

    def _exchange(self, key: str, expected: str, desired: str) -> dict[str, Any]:
        """A compare-and-set as a transaction. If the value is not the expected one, the answer contains it."""
        name = self._name(key)
        same = {"key": name, "result": "EQUAL", "target": "VALUE", "value": _text(expected)}
        none = {"key": name, "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": name, "value": _text(desired)}}
        otherwise = {"request_range": {"key": name}}
        return {"compare": [same if expected else none], "success": [put], "failure": [otherwise]}

    def _name(self, key: str) -> str:
        return _text(f"{self._prefix}/{key}")

    def _ask(self, what: str, request: dict[str, Any], repeat: bool = True) -> dict[str, Any]:
        """Asks the servers in turn. `repeat`: whether to repeat a request that may have been carried out."""
        mine = self._of_thread
        if not hasattr(mine, "server"):
            mine.server, mine.connection = 0, None
        for attempt in range(ROUNDS * len(self._servers)):
            host, port = self._servers[mine.server]
            sent = False
            try:
                if mine.connection is None:
                    mine.connection = _Connection(host, port, self._tls)
                    mine.connection.connect()
                if self._user and not self._token:
                    self._log_in(mine.connection)
                sent = True
                status, text = mine.connection.post(f"kv/{what}", request, self._token)
                if status == http.client.OK:
                    return dict(json.loads(text))
                sent = status != http.client.UNAUTHORIZED
                self._token = ""  # it may be out of date
                error: Exception = ConnectionError(f"it answers {status}: {text[:200]!r}")
            except InvalidArgument:
                raise
            except (OSError, http.client.HTTPException, ValueError) as failed:
                error = failed
            mine.connection.close()
            mine.connection, mine.server = None, (mine.server + 1) % len(self._servers)
            if sent and not repeat:
                break
            time.sleep(0.05 * (attempt >= len(self._servers)))
        raise ConnectionError(f"etcd: {what} failed, at last by {host}:{port}: {error}")

    def _log_in(self, connection: _Connection) -> None:
        status, text = connection.post("auth/authenticate", {"name": self._user, "password": self._password}, "")
        if status == http.client.BAD_REQUEST:
            raise InvalidArgument(f"etcd: ETCDCTL_USER is {self._user}:..., which the server refuses: {text[:200]!r}")
        self._token = json.loads(text).get("token", "")


def _tls() -> ssl.SSLContext:
    files = {name: os.environ.get(f"ETCDCTL_{name}") for name in ("CACERT", "CERT", "KEY")}
    try:
        context = ssl.create_default_context(cafile=files["CACERT"])
        if files["CERT"]:
            context.load_cert_chain(files["CERT"], files["KEY"])
    except OSError as error:
        given = ", ".join(f"ETCDCTL_{name}={file}" for name, file in files.items() if file)
        raise InvalidArgument(f"etcd: cannot use the certificates of {given}: {error}") from None
    return context


class _Connection(http.client.HTTPConnection):
    """Also connects by itself, when the server has closed the connection after an answer."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=SECONDS)
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        self.sock = above_streams(self.sock)
        if self._tls:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)

    def post(self, what: str, request: dict[str, Any], token: str) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        self.request("POST", f"/v3/{what}", json.dumps(request).encode(), headers)
        response = self.getresponse()
        return response.status, response.read()


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _first(answer: dict[str, Any]) -> bytes | None:
    found = answer.get("kvs")
    return base64.b64decode(found[0].get("value", "")) if found else None
