"""The answers the front door gives itself: health, refusals, faults; each as the bytes that go out.

Rules:
* A refusal speaks OpenAI's error format and closes the connection: what the client may still be sending is not read.
* A refusal that is worth repeating carries `Retry-After` in whole seconds.
* An event stream that is cut ends with one error event, never with a `[DONE]` of ours.
"""

import json
from http import HTTPStatus

from vllm_supervisor.core.admission import SATURATED
from vllm_supervisor.core.view import View
from vllm_supervisor.core.words import RequestClass

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")  # between two events of a stream
_ERROR_TYPES = {
    400: "invalid_request_error",
    403: "forbidden",
    405: "invalid_request_error",
    408: "timeout",
    413: "invalid_request_error",
    414: "invalid_request_error",
    417: "invalid_request_error",
    431: "invalid_request_error",
}


def reply(
    status: int,
    body: bytes,
    *,
    media_type: bytes = JSON,
    fields: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """Build a whole answer; `fields` are further header lines, each ending with CRLF."""
    head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b\r\n" % (
        status,
        HTTPStatus(status).phrase.encode(),
        media_type,
        len(body),
        fields,
        b"Connection: close\r\n" if close else b"",
    )
    return head if head_only else head + body


def error_body(status: int, code: str, message: str) -> bytes:
    """Build OpenAI's error object for `code`."""
    error = {"message": message, "type": _ERROR_TYPES.get(status, "service_unavailable"), "code": code}
    return json.dumps({"error": error}).encode()


def refusal(status: int, code: str, message: str, *, fields: bytes = b"", head_only: bool = False) -> bytes:
    """Build an answer that refuses and closes."""
    return reply(status, error_body(status, code, message), fields=fields, close=True, head_only=head_only)


def preflight(status: int, body: bytes, fields: bytes) -> bytes:
    """Build the answer to a preflight that the engine cannot answer."""
    return reply(status, body, media_type=TEXT, fields=fields, close=True)


def retry_after(seconds: int) -> bytes:
    """Build the header line that tells when to come back."""
    return b"Retry-After: %d\r\n" % seconds


def crowded(fields: bytes = b"", *, head_only: bool = False) -> bytes:
    """Build the answer to a client for whom there is no connection left."""
    message = "too many connections are open; try again"
    return refusal(503, SATURATED, message, fields=retry_after(1) + fields, head_only=head_only)


def failure(status: int, code: str, message: str, *, fields: bytes = b"", head_only: bool) -> bytes:
    """Build the answer to a request that was taken and cannot be answered any more."""
    fields += retry_after(1) if status == 503 else b""
    return refusal(status, code, message, fields=fields, head_only=head_only)


def error_event(request_class: RequestClass, code: str, message: str, *, after: bytes = b"") -> bytes:
    """Build the one event that ends a cut stream, whose last bytes were `after`: it ends an event begun there.

    Anthropic's clients need it named to see an error in it.
    """
    if after and not after.endswith(_BOUNDARIES):
        return b"\n\n" + error_event(request_class, code, message)
    body: dict[str, object] = {"error": {"message": message, "type": "service_unavailable", "code": code}}
    if request_class is RequestClass.MESSAGES:
        return b"event: error\ndata: %b\n\n" % json.dumps(body | {"type": "error"}).encode()
    return b"data: %b\n\n" % json.dumps(body).encode()


def health(view: View, *, good: bool) -> tuple[int, bytes]:
    """Say how things are: 200 if `good`, else 503, with the reasons in the body."""
    body = {
        "status": "ok" if good else "unavailable",
        "phase": str(view.phase),
        "engine": str(view.engine),
        "reason": view.reason,
    }
    return (200 if good else 503), json.dumps(body).encode()
