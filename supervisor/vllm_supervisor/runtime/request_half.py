"""The half of an exchange that goes from the client to the engine: the request head and its body.

Rules:
* What comes before there is a connection to the engine is kept, about one read of it; then nothing is.
* Chunks are costly to read: a large piece of them waits until those are served who ask for less.
* Whose turn it is stands in the request at any time: the engine's once it has the whole request (or takes no more of
  it), until its answer is whole or the client takes no more.
* The other half (`relay`) builds on this one: it says what follows from the engine's bytes and from an end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.chunked import ChunkError
from vllm_supervisor.core.ending import BodyProgress, Ending
from vllm_supervisor.core.http_semantics import REPEATABLE, RequestHead, engine_head
from vllm_supervisor.core.upload import BodyTooLargeError, Upload
from vllm_supervisor.runtime.desk import Desk
from vllm_supervisor.runtime.engine_links import EngineLink
from vllm_supervisor.runtime.link import Link

EARLY_BYTES = 64 * 1024  # of a body, before there is a connection to send it on
CHUNKS_AT_ONCE = 4 * 1024  # bytes of the chunked coding; more is put off


class RequestHalf(ABC):
    """See the module's rules."""

    # What begins so stands here, once, not in every one.
    sent_any = False  # bytes went to the engine
    ending: Ending | None = None
    _engine: EngineLink | None = None
    _complete = False  # the engine's answer is
    _deadline: float | None = None
    _again = b""  # the whole request, while it may have to be sent once more
    _put_off = b""  # chunks that are not read yet

    def __init__(
        self,
        desk: Desk,
        client: Link,
        head: RequestHead,
        request: OpenRequest,
        *,
        over: Callable[[], None],
        resend: Callable[[], None],
        ledgered: bool,
    ) -> None:
        """Relay `request`, and say `over` at its end; `resend` calls `start` again with a new connection."""
        settings = desk.settings
        self._desk = desk
        self._pump = desk.pump
        self._client = client
        self._request = request
        self._settings = settings
        self._ledgered = ledgered
        self._over = over
        self._resend = resend
        self.upload = Upload(head.length, max_body=settings.max_body)
        self._progress = BodyProgress(desk.pump.now, desk.pump.now)
        self._first = b""
        self.head = head
        if settings.request_deadline:
            self._deadline = request.admitted_at + settings.request_deadline

    # -- the beginning -----------------------------------------------------------------------------------------

    def begin(self, body: bytes) -> None:
        """Take the client over, with all of the body, or none."""
        self._take_client()
        if len(body) == self.head.length:  # all of it has come, as it usually does
            self.upload.take_whole()
            self._first += body
        elif body:
            self._first += self._feed_upload(body)
            if self.upload.rest:
                self._client.pause()

    def begin_with(self, upload: Upload, part: bytes, progress: BodyProgress) -> None:
        """Take the client over, with `part` of the body, all that `upload` has decoded; it is read on after `start`."""
        self._take_client()
        self.upload, self._progress = upload, progress
        self._first += upload.encode(part)
        self._stop_client()

    def _take_client(self) -> None:
        client, head, settings = self._client, self.head, self._settings
        told = client.peer.lines if head.forwarded is None else settings.forwarding.lines(client.peer, head.forwarded)
        self._first = engine_head(head, self._request.id.encode(), told)
        client.on_bytes = self._from_client
        client.on_gone = self._client_gone
        client.on_drained = self._client_drained

    def start(self, engine: EngineLink) -> bool:
        """Send the first bytes; False if the connection took not one of them, so another may be tried."""
        taken = engine.write(self._first)
        if engine.deaf and not taken:
            engine.close()
            return False
        if engine.reused and self.upload.complete and len(self._first) <= EARLY_BYTES:
            self._again = self._first
        self._first = b""
        self._engine = engine
        engine.on_bytes = self._first_from_engine
        engine.on_gone = self._engine_gone
        engine.on_drained = self._engine_drained
        request, upload = self._request, self.upload
        request.sent_at = now = self._pump.now
        request.engine_id = request.id if self.head.request_id is None else self.head.request_id.decode("latin-1")
        self.sent_any = True
        if engine.outbox or upload.rest:
            self._stop_client()
        else:
            self._read_client()
        if upload.complete or engine.outbox:
            request.engine_since = now
        return True

    # -- client to engine --------------------------------------------------------------------------------------

    def _from_client(self, data: bytes) -> None:
        if self.upload.chunked and (self._put_off or len(data) > CHUNKS_AT_ONCE) and not self.upload.complete:
            if not self._put_off:
                self._client.defer(self._read_chunks)
            self._put_off += data
            self._client.pause()
        else:
            self._pass_up(data)

    def _read_chunks(self) -> None:
        data, self._put_off = self._put_off, b""
        if self.ending is None:
            self._pass_up(data)
        if self.ending is None:
            self._read_client()

    def _pass_up(self, data: bytes) -> None:
        out = self._feed_upload(data)
        engine = self._engine
        if engine is None:
            self._first += out
        elif out:
            engine.write(out)
            if engine.outbox:
                self._stop_client()
        if self.upload.rest or len(self._first) > EARLY_BYTES:
            self._stop_client()
        self._take_turns()

    def _feed_upload(self, data: bytes) -> bytes:
        self._progress.came(len(data), self._pump.now)
        try:
            return self.upload.feed(data)
        except ChunkError:
            self.end(Ending.BODY_BROKEN)
        except BodyTooLargeError:
            self.end(Ending.BODY_TOO_LARGE)
        return b""

    def _stop_client(self) -> None:
        """Read no more of the client; the time counts for us, not for it."""
        self._progress.stop(self._pump.now)
        self._client.pause()

    def _read_client(self) -> None:
        """Read on, unless something stands against it."""
        engine = self._engine
        if self.upload.rest or self._put_off or (len(self._first) > EARLY_BYTES if engine is None else engine.outbox):
            return
        self._progress.go_on(self._pump.now)
        self._client.resume()

    def _engine_drained(self) -> None:
        self._take_turns()
        self._read_client()

    def _client_gone(self, _clean: bool) -> None:
        self.end(Ending.CLIENT_LEFT)

    def _send_again(self, *, unread: bool) -> bool:
        """Send the request once more on a new connection, if that cannot make the engine do it twice; False if it can.

        The engine may close a connection that it has kept idle just as a request is on its way (RFC 9112, 9.3.1).
        `unread`: the end of the request was never read.
        """
        again, self._again = self._again, b""
        engine = self._engine
        if not again or engine is None or not (unread or self.head.method in REPEATABLE):
            return False
        engine.close()
        self._engine = None
        self._first = again
        self.sent_any = not unread
        self._request.sent_at = self._request.engine_since = None
        self._resend()
        return True

    def _take_turns(self) -> None:
        """Note whose move is the next."""
        engine, request = self._engine, self._request
        waits = engine is not None and (self.upload.complete or bool(engine.outbox))
        if not waits or self._complete or self._client.outbox:
            request.engine_since = None
        elif request.engine_since is None:
            request.engine_since = self._pump.now

    # -- the other half ----------------------------------------------------------------------------------------

    @abstractmethod
    def end(self, ending: Ending) -> bool:
        """End the exchange, unless it has ended already (False)."""

    @abstractmethod
    def _first_from_engine(self, data: bytes) -> None:
        """Take the beginning of the answer."""

    @abstractmethod
    def _engine_gone(self, clean: bool) -> None:
        """Take note that the engine sends no more."""

    @abstractmethod
    def _client_drained(self) -> None:
        """Go on, now that the client has taken what it was sent."""
