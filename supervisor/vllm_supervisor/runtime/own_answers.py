"""The paths the front door answers itself: health from memory, the metrics page, and the refusal of dangerous ones.

Rules:
* Health never waits for anything.
* The metrics page is the engine's own exposition, unchanged, and then ours; ours alone when the engine cannot be read
  whole within the time and size given here.
"""

import contextlib
from collections.abc import Callable

import trio

from vllm_supervisor.adapters.http1 import Answer
from vllm_supervisor.adapters.sockets import READ_SIZE
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import replies
from vllm_supervisor.core.http_semantics import BadAnswerError, Framing, RequestHead
from vllm_supervisor.core.routes import Kind
from vllm_supervisor.core.view import View

METRICS_TIMEOUT = 5.0
_MAX_EXPOSITION = 32 * 1024 * 1024
_MAX_HEAD = 64 * 1024
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_FETCH = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class OwnAnswers:
    """Everything that is answered here."""

    def __init__(self, *, view: Callable[[], View], exposition: Callable[[], bytes], upstreams: Upstreams) -> None:
        """`view` and `exposition` are read at each request."""
        self._view = view
        self._exposition = exposition
        self._upstreams = upstreams

    def health(self, kind: Kind, head: RequestHead, *, close: bool) -> bytes:
        """Answer a health path."""
        view = self._view()
        good = kind is Kind.LIVE or (view.ready if kind is Kind.READY else view.started)
        status, body = replies.health(view, good=good)
        return replies.reply(status, body, close=close, head_only=head.method == b"HEAD")

    async def metrics(self, head: RequestHead, *, close: bool) -> bytes:
        """Answer the metrics page."""
        media_type, theirs = _TEXT, b""
        with trio.move_on_after(METRICS_TIMEOUT):
            # Where the engine's own metrics cannot be read, ours still say something.
            with contextlib.suppress(OSError, BadAnswerError):
                media_type, theirs = await self._engine_exposition(head.target)
        if theirs and not theirs.endswith(b"\n"):
            theirs += b"\n"
        return replies.reply(
            200, theirs + self._exposition(), media_type=media_type, close=close, head_only=head.method == b"HEAD"
        )

    async def _engine_exposition(self, target: bytes) -> tuple[bytes, bytes]:
        sock = await self._upstreams.connect()
        with trio.socket.from_stdlib_socket(sock) as stream:
            answer = Answer(to_head=False)
            request = _FETCH % target
            while request:
                request = request[await stream.send(request) :]
            body = bytearray()
            while not answer.complete:
                data = await stream.recv(READ_SIZE)
                if not data:
                    break
                body += answer.feed(data, _MAX_HEAD)
                if len(body) > _MAX_EXPOSITION:
                    raise BadAnswerError("an exposition without end")
            whole, found = answer.complete, answer.head
            answer.close()
        if found is None or found.status != 200 or not (whole or found.framing is Framing.CLOSE):
            raise BadAnswerError("no whole exposition")
        return found.media_type or _TEXT, bytes(body)

    @staticmethod
    def forbidden(head: RequestHead) -> bytes:
        """Refuse a dangerous path."""
        return replies.refusal(
            403,
            "forbidden_path",
            "this path changes the engine itself and is refused here; front_door.allow_paths can list it",
            head_only=head.method == b"HEAD",
        )
