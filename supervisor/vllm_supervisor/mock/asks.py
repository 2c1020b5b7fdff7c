"""What a request body asks for, read as vLLM reads it: a `Job`, or the refusal a client gets (bodies measured on 0.32).

Tokens are pretended: one for each four characters of a prompt, at least one.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.mock.engine import Work
from vllm_supervisor.mock.options import Options

DEFAULT_COMPLETION_TOKENS = 16  # the completions API's own default


class Refusal(Exception):  # noqa: N818 - not an error of ours but an answer
    """An answer instead of work: `status` and the JSON body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        """Keep both."""
        super().__init__(status)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Job:
    """A request that may run: its public id, and how its client wants the answer."""

    id: str
    model: str
    work: Work
    stream: bool = False
    include_usage: bool = False
    background: bool = False
    anthropic: bool = False


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """VLLM's error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, kind: str = "BadRequestError") -> Refusal:
    """Give a 400 with vLLM's body."""
    return Refusal(400, error_body(message, kind, 400, param))


def missing(*fields: str, size: int = 0) -> Refusal:
    """Give the 400 for fields that are required."""
    lines = [
        f"  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required', 'input': '<dict of {size} items>'}}"
        for name in fields
    ]
    count = f"{len(fields)} validation error" + ("s" if len(fields) > 1 else "")
    return bad_request(f"{count}:\n" + "\n".join(lines), f"body.{fields[0]}", "Bad Request")


def parse_body(body: bytes | bytearray, content_type: str) -> dict[str, Any]:
    """Give the JSON object of a body; raise Refusal as vLLM does."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise bad_request(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", None, "Bad Request"
        )
    try:
        value = json.loads(bytes(body))
    except ValueError as error:
        at = getattr(error, "pos", 0)
        text = getattr(error, "msg", "not UTF-8")
        detail = f"{{'type': 'json_invalid', 'loc': 'body.{at}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': '{text}'}}}}"
        raise bad_request(f"1 validation error:\n  {detail}", f"body.{at}", "Bad Request") from None
    if not isinstance(value, dict):
        detail = "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary or object to extract fields from'}"
        raise bad_request(f"1 validation error:\n  {detail}", "body", "Bad Request")
    return value


def count_tokens(value: Any) -> int:
    """Pretended tokens of a prompt: text, token ids, or messages with text somewhere in them."""
    return max(1, _size(value) // 4) if not _is_ids(value) else len(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    if isinstance(value, dict):
        return sum(
            _size(item) for key, item in value.items() if key in {"content", "text", "input", "prompt", "instructions"}
        )
    return 0


def new_id(prefix: str, given: str | None = None) -> str:
    """`PREFIX-ID`, with the client's X-Request-Id if it sent one."""
    return f"{prefix}{given or secrets.token_hex(8)}"


class Reader:
    """Reads the four generating APIs for one engine's options."""

    def __init__(self, options: Options) -> None:
        """`options` give the model's names and length."""
        self._options = options

    def model(self, body: dict[str, Any], *, anthropic: bool = False) -> str:
        """Give the model a body names; raise the 404 Refusal if it is not served."""
        name = body.get("model") or self._options.names[0]
        if name in self._options.names:
            return str(name)
        message = f"The model `{name}` does not exist. Valid aliases: {', '.join(self._options.names)}."
        if anthropic:
            raise Refusal(404, {"type": "error", "error": {"type": "NotFoundError", "message": message}})
        raise Refusal(404, error_body(message, "NotFoundError", 404, "model"))

    def chat(self, body: dict[str, Any], given: str | None) -> Job:
        """`/v1/chat/completions`."""
        if not isinstance(body.get("messages"), list):
            raise missing("messages")
        model = self.model(body)
        key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        work = self._work(body, [count_tokens(body["messages"])], key, None)
        return Job(new_id("chatcmpl-", given), model, work, bool(body.get("stream")), _wants_usage(body))

    def completions(self, body: dict[str, Any], given: str | None) -> Job:
        """`/v1/completions`."""
        prompt = body.get("prompt")
        if not prompt:
            raise bad_request(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"
            )
        model = self.model(body)
        several = isinstance(prompt, list) and not _is_ids(prompt)
        prompts = [count_tokens(item) for item in (prompt if several else [prompt])]
        work = self._work(body, prompts, "max_tokens", DEFAULT_COMPLETION_TOKENS)
        return Job(new_id("cmpl-", given), model, work, bool(body.get("stream")), _wants_usage(body))

    def responses(self, body: dict[str, Any], _given: str | None) -> Job:
        """`/v1/responses`, which takes no id from the client."""
        if not body.get("input"):
            raise missing("input", size=1)
        if body.get("prompt") is not None:
            raise bad_request("prompt template is not supported (parameter=prompt)", "prompt")
        model = self.model(body)
        background = bool(body.get("background"))
        if background and not self._options.store:
            message = (
                "This vLLM engine does not support `store=True` and therefore does not support the background mode. "
                "To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when "
                "launching the vLLM server."
            )
            raise bad_request(message, "background", "invalid_request_error")
        work = self._work(body, [count_tokens(body["input"])], "max_output_tokens", None)
        return Job(new_id("resp_"), model, work, bool(body.get("stream")), background=background)

    def messages(self, body: dict[str, Any], given: str | None) -> Job:
        """`/v1/messages`."""
        absent = [name for name in ("model", "messages", "max_tokens") if body.get(name) is None]
        if absent or not isinstance(body["messages"], list):
            raise missing(*(absent or ["messages"]))
        model = self.model(body, anthropic=True)
        work = self._work(body, [count_tokens(body["messages"])], "max_tokens", None)
        return Job(new_id("chatcmpl-", given), model, work, bool(body.get("stream")), anthropic=True)

    def _work(self, body: dict[str, Any], prompts: list[int], key: str, default: int | None) -> Work:
        limit = self._options.max_model_len
        longest = max(prompts)
        if longest >= limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, your request has {longest} input "
                "tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        wanted = body.get(key)
        room = limit - longest
        if wanted is None:
            wanted = min(room, default or room)
        if type(wanted) is not int:
            raise bad_request(
                f"1 validation error:\n  {{'type': 'int_parsing', 'loc': 'body.{key}'}}", f"body.{key}", "Bad Request"
            )
        if wanted < 1:
            raise bad_request(f"{key} must be at least 1, got {wanted}. (parameter={key}, value={wanted})", key)
        if wanted > limit:
            raise bad_request(
                f"{key}={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens. "
                f"(parameter={key}, value={wanted})",
                key,
            )
        n = body.get("n") or (1 if body.get("n") is None else 0)
        if type(n) is not int or n < 1:
            raise bad_request(f"n must be at least 1, got {n}.")
        return Work(tuple(prompts), min(wanted, room), n, bool(body.get("ignore_eos")))


def _wants_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))
