"""What stands between a client and the server: it may send slowly, or say what only a cloud's server says."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_CHUNK_BYTES = 1 << 16


class Between:
    """Passes requests on; the attributes may be changed at any time."""

    rate: float | None = None
    """Bytes a second that all clients together can send; None: no limit."""
    error: tuple[int, str] | None = None
    """The status and code of the answer to every request; None: the server's own."""
    passes = 0
    """How many requests are passed on before `error` is the answer."""

    spares = "-"
    """The method of requests that are always passed on."""
    unanswered: str | None = None
    """A text in the request line of one request that is passed on, but answered with 503; then None."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pay(self, n_bytes: int) -> None:
        """Wait until so many bytes have come through."""
        if self.rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + n_bytes / self.rate
            seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, seconds))


@contextmanager
def between(environment: dict[str, str]) -> Iterator[tuple[Between, dict[str, str]]]:
    """One of them, and the environment of a client that goes through it."""
    way = Between(int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = bytearray()
            while left := int(self.headers.get("content-length", 0)) - len(body):
                body += self.rfile.read(min(left, _CHUNK_BYTES))
                way.pay(min(left, _CHUNK_BYTES))
            way.passes -= 1
            if way.error and way.passes < 0 and self.command != way.spares:
                status, code = way.error
                headers, content = [], f"<Error><Code>{code}</Code><Message>said</Message></Error>".encode()
            else:
                status, headers, content = self.passed_on(bytes(body))
            if way.unanswered and way.unanswered in self.requestline:
                way.unanswered = None
                status, headers, content = 503, [], b""
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

        def passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            server = HTTPConnection("127.0.0.1", way.port)
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            got = server.getresponse()
            content = got.read()
            server.close()
            return got.status, got.getheaders(), content

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield way, environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
    server.shutdown()
    server.server_close()
