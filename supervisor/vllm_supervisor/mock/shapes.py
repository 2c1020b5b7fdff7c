"""How answers look: one shape for each API, from pieces of text to bytes (vLLM 0.32, bodies measured).

Rules: a shape is made for one request and only turns values into bytes. A stream is `start()`, `piece()` for each
piece, `end()`; `start` comes with the first piece, as in vLLM, so an abort before the first token leaves only the end.
`end(done=False)` leaves the last event out. Nothing here waits or sends.
"""

import json
import secrets
from typing import Any, Protocol

from vllm_supervisor.mock.asks import Job, error_body
from vllm_supervisor.mock.engine import Generation, Piece
from vllm_supervisor.mock.web import now

FINGERPRINT = "vllm-0.32.0-00000000"
_PER_TURN_IN = ("input_tokens_per_turn", "cached_tokens_per_turn")
_PER_TURN_OUT = ("output_tokens_per_turn", "tool_output_tokens_per_turn")
DONE = b"data: [DONE]\n\n"


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class Shape(Protocol):
    """What each API's answer can be turned into."""

    def start(self) -> bytes:
        """Everything before the first piece."""

    def piece(self, piece: Piece) -> bytes:
        """One piece."""

    def end(self, generation: Generation, *, done: bool) -> bytes:
        """Everything after the last piece."""

    def end_unstarted(self, *, done: bool) -> bytes:
        """Give the end of a stream that never had a piece."""

    def fail(self, message: str, *, done: bool) -> bytes:
        """Give everything after an engine failure in the middle."""

    def whole(self, generation: Generation, texts: list[str], finishes: list[str | None]) -> dict[str, Any]:
        """Give the body of an answer in one."""


class OpenAI:
    """`/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, job: Job, *, chat: bool) -> None:
        """`chat` chooses between the two."""
        self._job = job
        self._chat = chat
        self._created = now()

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._created,
            "model": self._job.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._frame("chat.completion.chunk" if self._chat else "text_completion", choices) | more)

    def start(self) -> bytes:
        """Open the stream."""
        if not self._chat:
            return b""
        choices = len(self._job.work.prompts) * self._job.work.n
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                prompt_token_ids=None,
                prompt_text=None,
            )
            for index in range(choices)
        )

    def piece(self, piece: Piece) -> bytes:
        """Carry one piece."""
        choice: dict[str, Any] = {"index": piece.choice}
        if self._chat:
            choice |= {"delta": {"content": piece.text}, "logprobs": None, "finish_reason": piece.finish}
            if piece.finish is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = None
        else:
            choice |= {"text": piece.text, "logprobs": None, "finish_reason": piece.finish, "stop_reason": None}
            choice |= {"prompt_token_ids": None, "token_ids": None}
        last = piece.finish is not None and not self._job.include_usage
        return self._chunk([choice], **({"system_fingerprint": FINGERPRINT} if last else {}))

    def end(self, generation: Generation, *, done: bool) -> bytes:
        """Close the stream."""
        last = b""
        if self._job.include_usage:
            last = self._chunk([], usage=self._usage(generation), system_fingerprint=FINGERPRINT)
        return last + (DONE if done else b"")

    def end_unstarted(self, *, done: bool) -> bytes:
        """Close a stream that had no piece."""
        return DONE if done else b""

    def fail(self, message: str, *, done: bool) -> bytes:
        """Put the error object where a chunk would be; vLLM sends [DONE] all the same."""
        return event(error_body(message, "InternalServerError", 500)) + self.end_unstarted(done=done)

    @staticmethod
    def _usage(generation: Generation) -> dict[str, Any]:
        prompt, made = generation.prompt_tokens, generation.made
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def whole(self, generation: Generation, texts: list[str], finishes: list[str | None]) -> dict[str, Any]:
        """Give the answer in one body."""
        choices = []
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            choice: dict[str, Any] = {"index": index}
            if self._chat:
                message = {"role": "assistant", "content": text}
                choice["message"] = message | dict.fromkeys(
                    ("refusal", "annotations", "audio", "function_call", "reasoning")
                )
            else:
                choice["text"] = text
            choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
            if not self._chat:
                choice |= {"prompt_logprobs": None, "prompt_token_ids": None}
            choices.append(choice | {"routed_experts": None})
        usage = self._usage(generation) | {"prompt_tokens_details": None, "completion_tokens_details": None}
        body = self._frame("chat.completion" if self._chat else "text_completion", choices)
        body |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
        if self._chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Messages:
    """`/v1/messages`, Anthropic's API."""

    def end_unstarted(self, *, done: bool) -> bytes:
        """Close a stream that had no piece."""
        return event({"type": "message_stop"}, "message_stop") if done else b""

    def fail(self, message: str, *, done: bool) -> bytes:  # noqa: ARG002 - vLLM sends no message_stop here
        """Send the error event, which is the last."""
        return event({"type": "error", "error": {"type": "internal_error", "message": message}}, "error")

    _STOP = {"stop": "end_turn", "length": "max_tokens"}  # noqa: RUF012 - read only

    def __init__(self, job: Job, prompt_tokens: int) -> None:
        """`prompt_tokens` stand in the first event."""
        self._job = job
        self._prompt = prompt_tokens
        self._finish: str | None = None

    def start(self) -> bytes:
        """Open the stream."""
        message: dict[str, Any] = {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._job.model,
        }
        message |= {
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt, "output_tokens": 0},
        }
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return event({"type": "message_start", "message": message}, "message_start") + event(
            block, "content_block_start"
        )

    def piece(self, piece: Piece) -> bytes:
        """Carry one piece."""
        self._finish = piece.finish
        if not piece.text:
            return b""
        delta = {"type": "text_delta", "text": piece.text}
        return event({"type": "content_block_delta", "delta": delta, "index": 0}, "content_block_delta")

    def end(self, generation: Generation, *, done: bool) -> bytes:
        """Close the stream."""
        delta: dict[str, Any] = {"stop_reason": self._STOP.get(self._finish or ""), "stop_sequence": None}
        usage = {"input_tokens": self._prompt, "output_tokens": generation.made}
        last = event({"type": "message_stop"}, "message_stop") if done else b""
        return (
            event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
            + last
        )

    def whole(self, generation: Generation, texts: list[str], finishes: list[str | None]) -> dict[str, Any]:
        """Give the answer in one body."""
        body = {"id": self._job.id, "type": "message", "role": "assistant"}
        return body | {
            "content": [{"type": "text", "text": texts[0]}],
            "model": self._job.model,
            "stop_reason": self._STOP.get(finishes[0] or ""),
            "usage": {"input_tokens": self._prompt, "output_tokens": generation.made},
        }


class Responses:
    """`/v1/responses`."""

    def __init__(self, job: Job) -> None:
        """Begin with event 0."""
        self._job = job
        self._item = f"msg_{secrets.token_hex(8)}"
        self._created = now()
        self._number = 0
        self._text = ""
        self._finish: str | None = None

    def body(self, status: str, generation: Generation | None = None, text: str | None = None) -> dict[str, Any]:
        """Give the response object in this state; with `text` once there is an output."""
        usage: dict[str, Any] | None = None
        if generation is not None:
            prompt, made = generation.prompt_tokens, generation.made
            cached = {"cached_tokens": 0, "cache_write_tokens": 0} | dict.fromkeys(_PER_TURN_IN, ())
            reasoned = {"reasoning_tokens": 0, "tool_output_tokens": 0} | dict.fromkeys(_PER_TURN_OUT, ())
            usage = {"input_tokens": prompt, "input_tokens_details": cached, "output_tokens": made}
            usage |= {"output_tokens_details": reasoned, "total_tokens": prompt + made}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {"id": self._job.id, "created_at": self._created, "incomplete_details": incomplete, "instructions": None}
        return head | {
            "metadata": None,
            "model": self._job.model,
            "object": "response",
            "output": [] if text is None else [self._output(text, "completed")],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": self._job.background,
            "max_output_tokens": self._job.work.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _output(self, text: str, status: str) -> dict[str, Any]:
        content = [self._part(text)] if status == "completed" else []
        return {
            "id": self._item,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event(fields | {"sequence_number": self._number - 1, "type": name}, name)

    def _at(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item, "output_index": 0}

    def start(self) -> bytes:
        """Open the stream."""
        part = self._part("") | {"logprobs": []}
        return b"".join(
            (
                self._event("response.created", response=self.body("in_progress")),
                self._event("response.in_progress", response=self.body("in_progress")),
                self._event("response.output_item.added", item=self._output("", "in_progress"), output_index=0),
                self._event("response.content_part.added", **self._at(), part=part),
            )
        )

    def piece(self, piece: Piece) -> bytes:
        """Carry one piece."""
        self._text += piece.text
        self._finish = piece.finish
        return (
            self._event("response.output_text.delta", **self._at(), delta=piece.text, logprobs=[])
            if piece.text
            else b""
        )

    def end(self, generation: Generation, *, done: bool) -> bytes:
        """Close the stream."""
        status = self.status(self._finish)
        events = [
            self._event("response.output_text.done", **self._at(), text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._at(), part=self._part(self._text)),
            self._event("response.output_item.done", item=self._output(self._text, "completed"), output_index=0),
        ]
        if done:
            events.append(self._event("response.completed", response=self.body(status, generation, self._text)))
        return b"".join(events)

    def end_unstarted(self, *, done: bool) -> bytes:
        """Close a stream that had no piece."""
        return self._event("response.completed", response=self.body("cancelled")) if done else b""

    def fail(self, message: str, *, done: bool) -> bytes:  # noqa: ARG002 - no response.completed follows
        """Send the error event, which is the last."""
        return self._event("error", code="500", message=message, param=None)

    @staticmethod
    def status(finish: str | None) -> str:
        """Name the state of a response whose generation ended like this."""
        return {"stop": "completed", "length": "incomplete"}.get(finish or "", "cancelled")

    def whole(self, generation: Generation, texts: list[str], finishes: list[str | None]) -> dict[str, Any]:
        """Give the answer in one body."""
        return self.body(self.status(finishes[0]), generation, texts[0])
