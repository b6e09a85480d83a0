"""An S3-compatible server on loopback (moto), behind a proxy that answers 503, stalls, cuts and restarts."""

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from moto.server import ThreadedMotoServer

Kind = Literal["503", "drop", "stall", "cut", "restart"]
DOWN_SECONDS = 0.5


@dataclass
class Fault:
    """What the proxy does to the next `times` requests whose method and path match; `done` counts them."""

    kind: Kind
    method: str = "GET"
    path: str = ""
    times: int = 1
    done: int = 0


@dataclass
class FaultyProxy:
    """Forwards HTTP to `upstream` (host:port), but for the faults asked for.

    503: an answer without the server. drop: a reset connection, without the server. The others let the server do what
    is asked, then give half of its answer, or none if that is empty: stall: and then silence. cut: and reset the
    connection. restart: and reset every connection; for a while nobody listens at the port.
    """

    upstream: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self._listen(0)
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, *args, **kwargs) -> Fault:
        fault = Fault(*args, **kwargs)
        self.faults.append(fault)
        return fault

    def count(self, method: str, path: str = "") -> int:
        """Requests so far with this method and a path that holds `path`."""
        return sum(method == m and path in p for m, p in self.requests)

    def close(self) -> None:
        self._over.set()
        self._stop()

    def take(self, method: str, path: str) -> Kind | None:
        """Note a request; the fault that it meets."""
        with self._lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.done < fault.times and fault.method == method and fault.path in path:
                    fault.done += 1
                    return fault.kind
        return None

    def restart(self) -> None:
        """Drop every connection and the port; listen again a while later."""
        self._stop()
        time.sleep(DOWN_SECONDS)
        self._listen(self.port)

    def stall(self) -> None:
        """Wait until the proxy is closed."""
        self._over.wait()

    def _listen(self, port: int) -> None:
        proxy = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def process_request(self, request, client_address):
                proxy._open.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request):
                proxy._open.discard(request)
                super().shutdown_request(request)

            def handle_error(self, request, client_address):
                """A connection that was reset is what this server is for."""

        self._server = Server(("127.0.0.1", port), type("Bound", (_Handler,), {"proxy": self}))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            reset(connection)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.take(self.command, self.path)
        self.proxy.authorizations += self.headers.get_all("Authorization", [])
        if fault == "503":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "drop":
            self.close_connection = True
            reset(self.connection)
            return
        upstream = HTTPConnection(self.proxy.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        self._answer(answer.status, headers, content, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def _answer(self, status: int, headers: dict[str, str], content: bytes, fault: Kind | None = None) -> None:
        if fault is None or content:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if fault is None else content[: len(content) // 2])
        if fault is not None:
            self.close_connection = True
        if fault == "stall":
            self.proxy.stall()
        elif fault == "cut":
            reset(self.connection)
        elif fault == "restart":
            self.proxy.restart()


def reset(connection: socket.socket) -> None:
    """Close with RST, as a server does that dies."""
    with suppress(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


@contextmanager
def faulty_s3(bucket: str) -> Iterator[FaultyProxy]:
    """A moto server with an empty bucket behind a `FaultyProxy`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = FaultyProxy(f"{host}:{port}")
    try:
        connection = HTTPConnection(urlsplit(proxy.url).netloc)
        # moto keeps its buckets in this process, from one server to the next.
        for method, path, headers in (
            ("POST", "/moto-api/reset", {}),
            ("PUT", f"/{bucket}", {"x-amz-acl": "public-read"}),
        ):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        connection.close()
        proxy.requests.clear()
        yield proxy
    finally:
        proxy.close()
        server.stop()
