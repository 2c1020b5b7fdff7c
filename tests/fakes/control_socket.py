"""A control socket with fixed answers, in a thread of its own."""

import contextlib
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Server(socketserver.ThreadingUnixStreamServer):
    """Answers each path with what `answers` holds for it, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, path: Path, answers: dict[str, tuple[int, bytes]]) -> None:
        """Listen on `path`."""
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []
        super().__init__(str(path), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    """One exchange."""

    server: Server

    def do_GET(self) -> None:
        """Answer from the table."""
        self.answer(None)

    def do_POST(self) -> None:
        """Answer from the table."""
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: object) -> None:
        """Keep the request and write the answer; an empty one is a connection that breaks off."""
        self.server.asked.append((self.command, self.path, body))
        status, content = self.server.answers[self.path.partition("?")[0]]
        if content:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(content)

    def address_string(self) -> str:
        """Name the peer, which has no address here."""
        return "control"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@contextlib.contextmanager
def serving(path: Path, answers: dict[str, tuple[int, bytes]]) -> Iterator[Server]:
    """Serve `answers` on `path` in a thread."""
    with Server(path, answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
