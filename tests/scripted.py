"""An HTTP server that answers what a test tells it to, for what real servers seldom say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """``cut`` bytes of the body are withheld before the connection is closed; ``status`` 0 closes it at once."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0


@dataclass
class Script:
    """Gives its answers in turn, the last one again and again."""

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path, headers with lower-case names."""
    bodies: list[bytes] = field(default_factory=list)

    def clear(self) -> None:
        self.answers.clear()
        self.requests.clear()
        self.bodies.clear()


@contextmanager
def serve(script: Script) -> Iterator[None]:
    """Serve ``script`` at its ``url``, which is set, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            script.requests.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}))
            script.bodies.append(body)
            answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            self.close_connection = True
            if not answer.status:
                return
            self.send_response(answer.status)
            headers = {"Content-Length": str(len(answer.body)), "Connection": "close", **answer.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: len(answer.body) - answer.cut])

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_PATCH = answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
