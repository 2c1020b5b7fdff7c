"""Requests to vLLM 0.32 of every kind there is, as bytes: inference, plain reads, mistakes, odd methods and framings."""

import json
from dataclasses import dataclass
from typing import Any

from fakes.sdk.turn_tool import FORCED, TOOL

KEY = "a-secret"
ROOT = "/root"

_SAME = {"model": "tiny", "temperature": 0, "seed": 7}
_CHAT = {**_SAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
_TEXT = {**_SAME, "prompt": "Hello", "max_tokens": 8}
_TWO = {"temperature": 1, "n": 2}  # greedy sampling has no second choice
_RESPONSE = {"model": "tiny", "temperature": 0, "input": "Hello", "max_output_tokens": 8}
_MESSAGE = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
_CALL = {
    **_CHAT,
    "max_tokens": 256,
    "tools": [TOOL],
    "tool_choice": FORCED,
}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Exchange:
    """A request. `gated`: it is one that the ledger counts."""

    name: str
    request: bytes
    gated: bool = True
    status: int = 200

    @property
    def own_id(self) -> bool:
        """Whether it brings an X-Request-Id of its own."""
        return b"\r\nX-Request-Id: " in self.request


def head(method: str, target: str, *fields: str, key: str | None = KEY) -> bytes:
    """Give the head of a request, with its empty line."""
    lines = [f"{method} {target} HTTP/1.1", "Host: tiny.test:8000", *fields]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def post(target: str, body: Any, *fields: str, key: str | None = KEY, kind: str = "application/json") -> bytes:
    """Give a whole POST; `body` is bytes, or made to JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", target, f"Content-Type: {kind}", f"Content-Length: {len(data)}", *fields, key=key) + data


def _chunked(target: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    pieces = [data[start : start + 11] for start in range(0, len(data), 11)]
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    return head("POST", target, *fields) + chunks + b"0\r\nX-Trailer: 1\r\n\r\n"


def _inference() -> list[Exchange]:
    chat, text, response, message = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
    named = "X-Request-Id: mine-7"
    return [
        Exchange("chat", post(chat, _CHAT)),
        Exchange("chat, own id", post(chat, _CHAT, named)),
        Exchange("chat, two choices", post(chat, {**_CHAT, **_TWO})),
        Exchange("chat, streamed", post(chat, {**_CHAT, **_USAGE})),
        Exchange("chat, streamed, own id", post(chat, {**_CHAT, "stream": True}, named)),
        Exchange("chat, chunked upload", _chunked(chat, _CHAT)),
        Exchange("chat, under the root path", post(ROOT + chat, _CHAT)),
        Exchange("chat, with a query", post(chat + "?api-version=1", _CHAT)),
        Exchange("chat, a tool", post(chat, _CALL)),
        Exchange("chat, a tool, streamed", post(chat, {**_CALL, "stream": True})),
        Exchange("completions", post(text, _TEXT)),
        Exchange("completions, two prompts", post(text, {**_TEXT, "prompt": ["Hello", "You"], "echo": True})),
        Exchange("completions, streamed, n=2", post(text, {**_TEXT, **_TWO, **_USAGE})),
        Exchange("responses", post(response, _RESPONSE)),
        Exchange("responses, streamed", post(response, {**_RESPONSE, "stream": True})),
        Exchange("messages", post(message, _MESSAGE)),
        Exchange("messages, streamed", post(message, {**_MESSAGE, "stream": True})),
        Exchange(
            "messages, a key of Anthropic's kind", post(message, _MESSAGE, f"X-Api-Key: {KEY}", key=None), status=401
        ),
        Exchange("invocations", post("/invocations", _CHAT)),
        Exchange(
            "generate",
            post(
                "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"temperature": 0, "max_tokens": 4}}
            ),
        ),
    ]


def _plain() -> list[Exchange]:
    reads = [
        *(("GET", target, 200) for target in ("/v1/models", ROOT + "/v1/models", "/version", "/load", "/openapi.json")),
        *(("GET", target, 200) for target in ("/docs", "/tokenizer_info", "/is_sleeping", "/v1/models?limit=1")),
        *(("GET", target, 404) for target in ("/nowhere", "/v1/responses/resp_none", "/%2e%2e/etc/passwd")),
        *(("GET", target, 404) for target in ("//v1/models", ROOT + ROOT + "/v1/models", "/V1/models")),
        ("GET", "/v1/chat/completions/", 307),
        ("HEAD", "/v1/models", 405),
        ("HEAD", "/openapi.json", 200),
        ("HEAD", "/nowhere", 404),
        ("OPTIONS", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ]
    cheap = [
        ("/tokenize", {"model": "tiny", "prompt": "Hello"}),
        ("/tokenize", {"model": "tiny", "messages": _CHAT["messages"]}),
        ("/detokenize", {"model": "tiny", "tokens": [70, 71]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": _MESSAGE["messages"]}),
        ("/v1/chat/completions/render", _CHAT),
        ("/v1/completions/render", _TEXT),
    ]
    from_app, to_post = "Origin: https://app.test", "Access-Control-Request-Method: POST"
    others = [
        ("preflight", head("OPTIONS", "/v1/chat/completions", from_app, to_post, key=None), 200),
        ("GET from another origin", head("GET", "/v1/models", from_app), 200),
        ("GET, compressed", head("GET", "/openapi.json", "Accept-Encoding: gzip, br"), 200),
        ("GET, no key", head("GET", "/v1/models", key=None), 401),
        ("GET, no key, root path", head("GET", ROOT + "/v1/models", key=None), 401),
        ("GET unguarded, no key", head("GET", "/version", key=None), 200),
    ]
    return [
        *(Exchange(f"{method} {target}", head(method, target), False, status) for method, target, status in reads),
        *(Exchange(f"POST {target}", post(target, body), False) for target, body in cheap),
        *(Exchange(name, request, False, status) for name, request, status in others),
    ]


def _mistakes() -> list[Exchange]:
    chat = "/v1/chat/completions"
    bodies: list[tuple[str, Any, int]] = [
        ("another model", {**_CHAT, "model": "huge"}, 404),
        ("no messages", {"model": "tiny"}, 400),
        ("a bad value", {**_CHAT, "temperature": -1}, 400),
        ("a wrong type", {**_CHAT, "max_tokens": "many"}, 400),
        ("too long", {**_CHAT, "max_tokens": 40_000}, 400),
        ("two greedy choices", {**_CHAT, "n": 2}, 400),
        ("streamed, a bad value", {**_CHAT, "stream": True, "temperature": -1}, 400),
        ("not JSON", b'{"model": ', 400),
        ("empty", b"", 400),
        ("deeper than a parser goes", b'{"model": "tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        ("not UTF-8", b'{"model": "t\xff"}', 400),
    ]
    targets: list[tuple[str, Any, int]] = [
        ("/v1/embeddings", {"model": "tiny", "input": "Hello"}, 404),
        ("/pooling", {"model": "tiny", "input": "Hello"}, 404),
        ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}, 404),
        ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}, 404),
        ("/v1/audio/transcriptions", {"model": "tiny"}, 404),
        ("/v1/completions/", _TEXT, 307),
        ("/v1/models", {}, 405),
        ("/nowhere", {}, 404),
    ]
    others = [
        ("chat, another type", post(chat, _CHAT, kind="text/plain"), 400),
        ("chat, no key", post(chat, _CHAT, key=None), 401),
        ("chat, a wrong key", post(chat, _CHAT, key="guess"), 401),
        ("chat, no key, root path", post(ROOT + chat, _CHAT, key=None), 401),
        ("completions, another model", post("/v1/completions", {**_TEXT, "model": "huge"}), 404),
        ("responses, another model", post("/v1/responses", {**_RESPONSE, "model": "huge"}), 404),
        ("messages, another model", post("/v1/messages", {**_MESSAGE, "model": "huge"}), 404),
        ("messages, no limit", post("/v1/messages", {"model": "tiny", "messages": []}), 400),
        ("GET chat", head("GET", chat), 405),
        ("HEAD chat", head("HEAD", chat), 405),
        ("PUT models", head("PUT", "/v1/models", "Content-Length: 0"), 405),
        ("DELETE a response", head("DELETE", "/v1/responses/resp_none"), 405),
        ("PATCH nowhere", head("PATCH", "/nowhere", "Content-Length: 2") + b"{}", 404),
    ]
    return [
        *(Exchange(f"chat, {name}", post(chat, body), status=status) for name, body, status in bodies),
        *(Exchange(f"POST {target}", post(target, body), status=status) for target, body, status in targets),
        *(Exchange(name, request, status=status) for name, request, status in others),
    ]


EXCHANGES = [*_inference(), *_plain(), *_mistakes()]
