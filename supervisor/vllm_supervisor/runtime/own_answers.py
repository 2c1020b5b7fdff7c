"""The paths the front door answers itself: health from memory, the metrics page, and the refusal of dangerous ones.

Rules:
* Health never waits for anything.
* The metrics page is the engine's own exposition, unchanged, and then ours; ours alone when the engine cannot be read
  whole within the time and size given here. The engine is asked with the client's own fields: a middleware of the user's
  may want a token, and Prometheus may prefer OpenMetrics, whose page ends with a line that nothing may follow.
"""

import contextlib
from collections.abc import Callable

import trio

from vllm_supervisor.adapters.http1 import Answer
from vllm_supervisor.adapters.sockets import READ_SIZE
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core import exposition, replies
from vllm_supervisor.core.forwarding import Peer
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import ALLOW, BadAnswerError, Framing, RequestHead, page_head
from vllm_supervisor.core.routes import Kind
from vllm_supervisor.core.view import View

METRICS_TIMEOUT = 0.9  # seconds: whoever scrapes us gets its answer within one, however the engine fares
_MAX_EXPOSITION = 32 * 1024 * 1024
_MAX_HEAD = 64 * 1024
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_OPEN_METRICS = b"application/openmetrics-text"
_END = b"# EOF\n"


class OwnAnswers:
    """Everything that is answered here."""

    def __init__(
        self,
        settings: FrontDoorSettings,
        *,
        view: Callable[[], View],
        exposition: Callable[[], bytes],
        upstreams: Upstreams,
    ) -> None:
        """`view` and `exposition` are read at each request."""
        self._settings = settings
        self._view = view
        self._exposition = exposition
        self._upstreams = upstreams

    def health(self, kind: Kind, head: RequestHead, *, close: bool) -> bytes:
        """Answer a health path."""
        view = self._view()
        good = kind is Kind.LIVE or (view.ready if kind is Kind.READY else view.started)
        status, body = replies.health(view, good=good)
        return replies.reply(
            status, body, fields=self.cors_fields(head.fields), close=close, head_only=head.method == b"HEAD"
        )

    async def metrics(self, head: RequestHead, client: Peer, *, close: bool) -> bytes:
        """Answer the metrics page."""
        media_type, theirs = _TEXT, b""
        with trio.move_on_after(METRICS_TIMEOUT):
            # Where the engine's own metrics cannot be read, ours still say something.
            with contextlib.suppress(OSError, BadAnswerError):
                media_type, theirs = await self._engine_exposition(
                    page_head(head, self._settings.forwarding.lines(client, head.forwarded))
                )
        if theirs and not theirs.endswith(b"\n"):
            theirs += b"\n"
        ours, end = self._exposition(), b""
        if media_type.startswith(_OPEN_METRICS):
            theirs, end = theirs.removesuffix(_END), _END
            ours = exposition.as_open_metrics(ours)
        return replies.reply(
            200,
            theirs + ours + end,
            media_type=media_type,
            fields=self.cors_fields(head.fields),
            close=close,
            head_only=head.method == b"HEAD",
        )

    async def _engine_exposition(self, request: bytes) -> tuple[bytes, bytes]:
        sock = await self._upstreams.connect()
        with trio.socket.from_stdlib_socket(sock) as stream:
            answer = Answer(to_head=False)
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

    def methods(self, head: RequestHead, *, close: bool) -> bytes:
        """Answer `OPTIONS *`."""
        return replies.reply(200, b"", fields=ALLOW + self.cors_fields(head.fields), close=close)

    def cors_fields(self, lines: bytes) -> bytes:
        """Return what lets a browser show our answer to a request with these header lines."""
        cors = self._settings.cors
        return b"" if cors is None else cors.fields(lines)

    def forbidden(self, head: RequestHead) -> bytes:
        """Refuse a dangerous path."""
        return replies.refusal(
            403,
            "forbidden_path",
            "this path changes the engine itself and is refused here; front_door.allow_paths can list it",
            fields=self.cors_fields(head.fields),
            head_only=head.method == b"HEAD",
        )
