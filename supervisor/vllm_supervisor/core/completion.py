"""Did the answer really complete? Judged while it passes, per endpoint, from the bytes alone.

| answer | completed when |
|---|---|
| chat, completions, streamed | every choice seen (and every one asked for, where known) has a `finish_reason` other than `abort`, no error event, `[DONE]` |
| chat, completions, whole | parsable, no `finish_reason` of `abort` |
| responses, streamed / whole | final event `response.completed` or `response.incomplete` / a `status` other than `failed`, `cancelled` |
| messages, streamed / whole | `message_stop` after a `stop_reason`, no error event / a non-null `stop_reason` |
| any other event stream | no error event |
| everything else | the status alone |

Rules:
* Whether the framing ended cleanly is the caller's knowledge; a judge only reads the body.
* Bytes may be cut anywhere: judgement depends on the whole, never on the pieces. Work is linear, memory bounded.
* `[DONE]` alone proves nothing: vLLM sends it after an error event and after an abort too.
* In JSON a quote inside a string is escaped, so `"finish_reason":"` with bare quotes is always a real key. This lets most
  chunks be judged by a few searches without parsing them.
"""

import json
import re
from typing import Any, NamedTuple, Protocol

from vllm_supervisor.core.event_lines import EventLines
from vllm_supervisor.core.words import Outcome, RequestClass

MAX_WHOLE = 256 * 1024  # bytes of a whole answer that are parsed; above, it is searched as it passes
_MAX_CHOICES = 65536
_OVERLAP = 64  # longer than any key and value searched for in pieces

_COLON = rb"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}"  # bounded, so that a match always fits the overlap
_ABORTED = re.compile(rb'"finish_reason"' + _COLON + rb'"abort"')
_STOP_REASON = re.compile(rb'"stop_reason"' + _COLON + rb'"')
_RESPONSE_ID = re.compile(rb'"id"' + _COLON + rb'"(resp_[0-9A-Za-z]{1,64})"')
_FINAL_RESPONSE = re.compile(rb'"type"' + _COLON + rb'"response\.(completed|incomplete|failed|cancelled)"')


class Judgement(NamedTuple):
    """`why` is one word, "" for a plain completion; `marker` is the end that was seen; `running`: the engine works on.

    `engine_id` is the id under which the engine does the work, where only its answer tells (`/v1/responses`).
    """

    outcome: Outcome
    why: str = ""
    marker: str = ""
    running: bool = False
    engine_id: str = ""


class Judge(Protocol):
    """Reads the body of one answer."""

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body."""

    def judge(self) -> Judgement:
        """Judge a body whose framing ended cleanly."""


_PLAINLY = Judgement(Outcome.COMPLETED)
_WITH_DONE = Judgement(Outcome.COMPLETED, marker="[DONE]")


def _completed(marker: str = "", *, running: bool = False) -> Judgement:
    if not marker and not running:
        return _PLAINLY
    return Judgement(Outcome.COMPLETED, marker=marker, running=running)


def _failed(why: str, marker: str = "") -> Judgement:
    return Judgement(Outcome.FAILED, why, marker)


def judge_for(request_class: RequestClass, status: int, *, event_stream: bool, choices: int | None = None) -> Judge:
    """Choose the judge of an answer; `choices` is how many the request asked for, where that is known."""
    if status >= 300:
        return _ByStatus(status)
    if event_stream:
        if request_class in _CHOICE_CLASSES:
            return _ChoiceStream(choices)
        if request_class is RequestClass.RESPONSES:
            return _ResponseStream()
        if request_class is RequestClass.MESSAGES:
            return _MessageStream()
        return _OtherStream()
    if request_class in _CHOICE_CLASSES or request_class in {RequestClass.RESPONSES, RequestClass.MESSAGES}:
        return _Whole(request_class)
    return _ByStatus(status)


_CHOICE_CLASSES = frozenset({RequestClass.CHAT, RequestClass.COMPLETIONS})


class _ByStatus:
    def __init__(self, status: int) -> None:
        self._status = status

    def feed(self, data: bytes) -> None:
        pass

    def judge(self) -> Judgement:
        if self._status >= 500:
            return _failed("engine_error")
        if self._status >= 400:
            return Judgement(Outcome.COMPLETED, "client_error")
        return Judgement(Outcome.COMPLETED, "redirect" if self._status >= 300 else "")


class _ChoiceStream(EventLines):
    def __init__(self, choices: int | None) -> None:
        super().__init__()
        self._asked = choices
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self._aborted = False
        self._error = False
        self._done = False

    def usual(self, events: bytes) -> bool:
        """Whether these are tokens of choice 0: no end, no error, no other index. Many events at once are judged as one.

        The test holds for many exactly when it holds for each of them. (`in` would first try to read the needle as a
        number, and a byte that is rare in lower-case JSON is found faster than a word.) A key is counted without its
        colon, and must be spelled in one of the two usual ways throughout, with a space behind the colon or without; any
        other way is left to the parser.
        """
        find, count = events.find, events.count
        reasons, indices = count(b'"finish_reason"'), 0 if self._asked == 1 else count(b'"index"')
        if (
            (reasons == count(b'"finish_reason":null') or reasons == count(b'"finish_reason": null'))
            and find(b'error"') < 0
            and (find(b"D") < 0 or find(b"[DONE]") < 0)
            and (not indices or indices == count(b'"index":0') or indices == count(b'"index": 0'))
        ):
            if 0 not in self._seen and (find(b'"index":0') >= 0 or find(b'"index": 0') >= 0):
                self._seen.add(0)
            return True
        return False

    def event_data(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        if self.usual(payload):
            return
        event = _parsed(payload)
        if not isinstance(event, dict):
            return
        if event.get("error") or event.get("object") == "error":
            self._error = True
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") if self._asked != 1 else 0  # who asked for one choice gets one
        if not isinstance(index, int) or len(self._seen) >= _MAX_CHOICES:
            return
        self._seen.add(index)
        reason = choice.get("finish_reason")
        if reason == "abort":
            self._aborted = True
        elif reason is not None:
            self._finished.add(index)

    def judge(self) -> Judgement:
        self.end()
        marker = "[DONE]" if self._done else ""
        if self._error:
            return _failed("error_event", marker)
        if self._aborted:
            return _failed("abort", marker)
        if not self._done:
            return _failed("no_done", marker)
        missing = not self._seen or self._finished != self._seen
        if missing or (self._asked is not None and len(self._finished) < self._asked):
            return _failed("no_finish_reason", marker)
        return _WITH_DONE


class _ResponseStream(EventLines):
    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        self._final = ""
        self._error = False

    def event_line(self, name: bytes) -> None:
        if name == b"error":
            self._error = True
        elif name in _FINAL_EVENTS:
            self._final = name.decode()

    def event_data(self, payload: bytes) -> None:
        if not self._id and (found := _RESPONSE_ID.search(payload)):
            self._id = found[1].decode()
        if match := _FINAL_RESPONSE.search(payload):
            self._final = "response." + match[1].decode()
        elif b'"error"' in payload and _is_error(_parsed(payload)):
            self._error = True

    def judge(self) -> Judgement:
        self.end()
        if self._final in {"response.completed", "response.incomplete"} and not self._error:
            return _completed(self._final)._replace(engine_id=self._id)
        why = "error_event" if self._error or self._final else "no_final_event"
        return _failed(why, self._final)._replace(engine_id=self._id)


_FINAL_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"})


class _MessageStream(EventLines):
    def __init__(self) -> None:
        super().__init__()
        self._reason = False
        self._stopped = False
        self._error = False

    def event_line(self, name: bytes) -> None:
        if name == b"error":
            self._error = True
        elif name == b"message_stop":
            self._stopped = True

    def event_data(self, payload: bytes) -> None:
        if _STOP_REASON.search(payload):
            self._reason = True
        if b'"message_stop"' in payload:
            event = _parsed(payload)
            if isinstance(event, dict) and event.get("type") == "message_stop":
                self._stopped = True
        elif b'"error"' in payload and _is_error(_parsed(payload)):
            self._error = True

    def judge(self) -> Judgement:
        self.end()
        marker = "message_stop" if self._stopped else ""
        if self._error:
            return _failed("error_event", marker)
        if not self._stopped:
            return _failed("no_message_stop", marker)
        return _completed(marker) if self._reason else _failed("abort", marker)


class _OtherStream(EventLines):
    def __init__(self) -> None:
        super().__init__()
        self._error = False

    def event_line(self, name: bytes) -> None:
        if name == b"error":
            self._error = True

    def event_data(self, payload: bytes) -> None:
        if b'"error"' in payload and _is_error(_parsed(payload)):
            self._error = True

    def judge(self) -> Judgement:
        self.end()
        return _failed("error_event") if self._error else _completed()


class _Whole:
    """A whole JSON answer: parsed when small, else searched as it passes and only its last byte looked at."""

    # What begins so stands here, once, not in every judge.
    _size = 0
    _large = False
    _tail = b""
    _aborted = False
    _reason = False

    def __init__(self, request_class: RequestClass) -> None:
        self._class = request_class
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> None:
        if not self._large:
            self._pieces.append(data)
            self._size += len(data)
            if self._size <= MAX_WHOLE:
                return
            self._large = True
            data = b"".join(self._pieces)
            self._pieces.clear()
        window = self._tail + data
        self._aborted = self._aborted or _ABORTED.search(window) is not None
        self._reason = self._reason or _STOP_REASON.search(window) is not None
        self._tail = window[-_OVERLAP:]

    def judge(self) -> Judgement:
        if self._large:
            return self._judge_large()
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        value = _parsed(body)
        if not isinstance(value, _CONTAINERS):
            return _failed("unparsable")
        if self._class in _CHOICE_CLASSES:
            return _failed("abort") if body.find(b"abort") >= 0 and _ABORTED.search(body) else _PLAINLY
        answer: dict[str, Any] = value if isinstance(value, dict) else {}
        if self._class is RequestClass.MESSAGES:
            return _completed() if answer.get("stop_reason") is not None else _failed("abort")
        status = answer.get("status")
        if status in {"failed", "cancelled"}:
            return _failed(str(status), str(status))
        marker = status if isinstance(status, str) and status in _RESPONSE_STATES else ""
        found = _RESPONSE_ID.search(body) if self._class is RequestClass.RESPONSES else None
        judged = _completed(marker, running=status in {"queued", "in_progress"})
        return judged if found is None else judged._replace(engine_id=found[1].decode())

    def _judge_large(self) -> Judgement:
        if self._aborted or (self._class is RequestClass.MESSAGES and not self._reason):
            return _failed("abort")
        return _completed() if self._tail.rstrip()[-1:] in {b"}", b"]"} else _failed("unparsable")


_RESPONSE_STATES = frozenset({"completed", "incomplete", "queued", "in_progress"})


def _parsed(payload: bytes) -> Any:
    try:
        text = payload.decode().strip(_JSON_SPACE)
        value, end = _DECODE(text)
    except (ValueError, RecursionError):
        return None
    return value if end == len(text) else None


_DECODE = json.JSONDecoder().raw_decode  # what `decode` calls, without its two searches for space
_CONTAINERS = (dict, list)
_JSON_SPACE = " \t\n\r"


def _is_error(event: Any) -> bool:
    return isinstance(event, dict) and (bool(event.get("error")) or event.get("type") == "error")
