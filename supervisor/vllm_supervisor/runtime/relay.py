"""The bytes of one exchange, both ways, between the client's connection and the engine's, until one end.

Rules:
* Everything here is plain code called by the pump; `over` is called at the end, from wherever it came.
* Each read is passed on at once: head first, then body pieces as they come, and judged after they have gone out.
* Both directions have back-pressure: who cannot be written to stops the other side from being read.
* What shows work is a byte of a good answer's body, but not a comment of an event stream: vLLM's front end can send
  those while its engine hangs (`--sse-keep-alive-interval`).
* A relay ends exactly once, with one `Ending`. At any end but a clean one the engine's connection is closed on the
  spot, since that is what stops the engine's work.
"""

from vllm_supervisor.adapters.http1 import Answer
from vllm_supervisor.adapters.sockets import READ_SIZE
from vllm_supervisor.core import replies
from vllm_supervisor.core.completion import Judge, judge_for
from vllm_supervisor.core.ending import MEANINGS, Ending, overdue
from vllm_supervisor.core.event_lines import only_comments
from vllm_supervisor.core.http_semantics import (
    AnswerHead,
    BadAnswerError,
    Framing,
    client_head,
    interim_heads,
    trailer_lines,
)
from vllm_supervisor.runtime.pump import DOZE_S
from vllm_supervisor.runtime.request_half import RequestHalf
from vllm_supervisor.runtime.tunnel import Tunnel

_COMMENT = ord(":")  # begins a line of an event stream that may be a comment
_RAPID_S = 0.001  # between two reads of a stream: a thousand single tokens a second is more than engines make
_RAPID_READS = 16  # in a row, which is more than the end of a stream has
_RAPID_AGAIN = 2  # after a rest
_LAST_CHUNK = b"0\r\n"  # before the trailer section and an empty line


class Relay(RequestHalf):
    """See the module's rules. What the account of the exchange needs stands in the public attributes."""

    # What begins so stands here, once, not in every relay.
    judge: Judge | None = None
    choices: int | None = None
    keep = False  # the client's connection may serve another request
    must_reset = False  # only a reset tells the client that its answer is not whole
    status: int | None = None  # of the head that went to the client
    bytes_out = 0
    _answer: Answer | None = None  # the parser of an answer that did not come whole at once
    _answer_head: AnswerHead | None = None
    _surplus = False  # bytes came after its end
    _chunked_out = False
    _tail = b""  # the last bytes of the answer's body: is the client between two events?
    _tunnel: Tunnel | None = None
    _good = False  # the answer's status is a success
    _read_at = 0.0  # when the last event of a stream was read, or can be again
    _rapid = 0  # events of a stream that came close behind the one before

    # -- engine to client --------------------------------------------------------------------------------------

    def _first_from_engine(self, data: bytes) -> None:
        """Take the beginning of the answer, which usually is all of it, with a head that was seen before."""
        engine, client = self._engine, self._client
        if engine is None:
            return
        self._again = b""
        to_head = self.head.method == b"HEAD"
        whole = None if to_head else self._desk.heads.whole(data)
        if whole is None:
            self._answer = Answer(to_head=to_head, heads=self._desk.heads)
            engine.on_bytes = self._from_engine
            self._from_engine(data)
            return
        engine.on_bytes = self._beyond_the_end
        head, body = whole
        out = self._start_answer(head)
        if body:
            self.bytes_out = len(body)
            if self._good:
                self._request.last_byte_at = self._pump.now
        client.write(out + body)
        if self.judge is not None:
            self.judge.feed(body)
        self._complete = True
        self._answer_complete()

    def _beyond_the_end(self, _data: bytes) -> None:
        self._surplus = True

    def _from_engine(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        try:
            body = answer.feed(data, self._settings.max_head)
            out = self._open_answer(answer) if self.status is None else b""
        except BadAnswerError:
            self.end(Ending.ENGINE_FAILED)
            return
        self._pass_on(answer, out, body)

    def _pass_on(self, answer: Answer, out: bytes, body: bytes) -> None:
        """Send `out` and what `body` makes, in one piece."""
        client = self._client
        if body:
            request, size = self._request, len(body)
            if self._good and not (request.stream and only_comments(body)):
                request.last_byte_at = self._pump.now
            self.bytes_out += size
            if request.stream:
                self._tail = body[-4:] if size >= 4 else (self._tail + body)[-4:]
            out += b"%x\r\n%b\r\n" % (size, body) if self._chunked_out else body
        if answer.complete and self._chunked_out:
            out += _LAST_CHUNK + trailer_lines(answer.trailers) + b"\r\n"
        if out:
            client.write(out)
        if body and self.judge is not None:
            self.judge.feed(body)
        self._surplus = answer.surplus
        if answer.complete:
            self._complete = True
            if self._engine is not None:
                self._engine.on_bytes = self._beyond_the_end
            self._answer_complete()
        elif client.outbox and self._engine is not None:
            self._engine.pause()
            self._take_turns()

    def _more_events(self, data: bytes) -> None:
        """Do the same with what follows the head of a good event stream: by far the most frequent case."""
        answer, client = self._answer, self._client
        if answer is None:
            return
        try:
            body = answer.feed(data, self._settings.max_head)
        except BadAnswerError:
            self.end(Ending.ENGINE_FAILED)
            return
        size = len(body)
        if size < 4 or answer.complete or body[0] == _COMMENT:
            self._pass_on(answer, b"", body)
            return
        now = self._pump.now
        self._rapid = self._rapid + 1 if now - self._read_at < _RAPID_S else 0
        self._read_at = self._request.last_byte_at = now
        self.bytes_out += size
        self._tail = body[-4:]
        client.write(b"%x\r\n%b\r\n" % (size, body))
        if self.judge is not None:
            self.judge.feed(body)
        if self._engine is None:
            return
        if client.outbox:
            self._engine.pause()
            self._take_turns()
        elif self._rapid >= _RAPID_READS and len(data) < READ_SIZE:
            self._rapid = _RAPID_READS - _RAPID_AGAIN
            self._read_at = now + DOZE_S
            self._engine.doze()

    def _open_answer(self, answer: Answer) -> bytes:
        """Return the head for the client once the engine's is complete; before that, interim heads or nothing."""
        out = b"" if self.head.old else interim_heads(answer.interim)
        answer.interim = ()
        head = answer.head
        if head is None:
            return out
        if head.switches and not self.head.upgrade:
            raise BadAnswerError("an upgrade nobody asked for")
        return out + self._start_answer(head)

    def _start_answer(self, head: AnswerHead) -> bytes:
        """Return the head for the client, and note what it means for the rest."""
        request = self._request
        request.first_byte_at = self._pump.now
        stream = request.stream = head.event_stream
        # A body that is still coming leaves no way to find the next request: the connection ends with this answer.
        self.keep = self.head.keep_alive and self.upload.complete and not self._desk.closing()
        old, status = self.head.old, head.status
        self._answer_head = head
        self.status = status
        self._good = status < 300
        if head.length is None and head.open_ended:
            self._chunked_out = not old
            self.must_reset = old
            if stream and self._good and not old and self._engine is not None:
                self._engine.on_bytes = self._more_events
        ledger_id = None
        if self._ledgered:
            ledger_id = request.id.encode()
            self.judge = judge_for(request.request_class, status, event_stream=stream, choices=self.choices)
        return client_head(head, old=old, close=not self.keep, ledger_id=ledger_id)

    def _answer_complete(self) -> None:
        answer, engine = self._answer, self._engine
        if answer is not None and answer.head is not None and answer.head.switches and engine is not None:
            self.keep = False
            self._tunnel = Tunnel(self._client, engine, end=self.end, passed=self._passed)
            early, self.upload.rest = self.upload.rest, b""
            self._tunnel.begin(to_engine=early, to_client=answer.tunnelled)
        elif not self._client.outbox:
            self.end(Ending.ANSWERED)
        else:
            self._take_turns()

    def _client_drained(self) -> None:
        if self._complete:
            self.end(Ending.ANSWERED)
        elif self._engine is not None:
            self._engine.resume()
            self._take_turns()

    def _passed(self, size: int) -> None:
        self.bytes_out += size

    def _engine_gone(self, clean: bool) -> None:
        engine = self._engine
        if self._again and engine is not None and self._send_again(unread=engine.refused):
            return
        if not self._complete:
            if clean and self._answer_head is not None and self._answer_head.framing is Framing.CLOSE:
                self._complete = True
                if self._chunked_out:
                    self._client.write(_LAST_CHUNK + b"\r\n")
                self._answer_complete()
            else:
                self.end(Ending.ENGINE_FAILED)

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the engine's answer came whole, whatever became of it on the client's side."""
        return self._complete and self._tunnel is None

    def end(self, ending: Ending) -> bool:
        """End now, unless it has ended already (False). What the client is told depends on how far its answer had come."""
        if self.ending is not None:
            return False
        self.ending = ending
        engine, self._engine = self._engine, None
        if ending is not Ending.ANSWERED:
            self._break_off(ending)
        if engine is not None:
            head = self._answer_head
            if self._surplus:
                self._desk.links.unsolicited()
            clean = ending is Ending.ANSWERED and self.upload.complete and not self._surplus
            # One that was asked to become a websocket, and has said no, may be in the hands of another parser by now.
            if clean and head is not None and head.keep_alive and not self.head.upgrade:
                self._desk.links.give_back(engine)
            else:
                engine.close()
        if self._answer is not None:
            self._answer.close()
        self._over()
        return True

    def _break_off(self, ending: Ending) -> None:
        """Tell the client, as far as its answer still allows it."""
        self.keep = False
        meaning = MEANINGS[ending]
        if not meaning.status:
            return
        if self.status is None:
            self.status = meaning.status
            head, cors = self.head, self._settings.cors
            fields = b"" if cors is None else cors.fields(head.fields)
            self._client.write(
                replies.failure(
                    meaning.status, meaning.why, meaning.message, fields=fields, head_only=head.method == b"HEAD"
                )
            )
        elif self._request.stream and not self._complete:
            event = replies.error_event(self._request.request_class, meaning.why, meaning.message, after=self._tail)
            self._client.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked_out else event)

    def tick(self, now: float) -> None:
        """End what has taken too long; called every now and then by the sweep."""
        if self.ending is not None:
            return
        client = self._client
        late = overdue(
            self._settings,
            now,
            deadline=self._deadline,
            blocked_since=client.blocked_since if client.outbox else None,
            body=None if self.upload.complete else self._progress,
        )
        if late is not None:
            self.end(late)
