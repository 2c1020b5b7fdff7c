"""The generating and embedding routes: a body is read, the engine works, an answer is delivered, faults are shown.

Rules: a request is in the engine until its answer has ended or its client has left, and is taken out in one `finally`;
answer faults act here and nowhere else; `max_tokens` counts for a fault are of all choices together.
"""

import base64
import math
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from vllm_supervisor.mock.asks import Job, Reader, Refusal, count_tokens, error_body, missing, new_id, parse_body
from vllm_supervisor.mock.engine import Engine, EngineDeadError, Generation, Piece, ShutdownError, Work
from vllm_supervisor.mock.faults import FaultSet
from vllm_supervisor.mock.options import Options
from vllm_supervisor.mock.shapes import Messages, OpenAI, Responses, Shape
from vllm_supervisor.mock.texts import ENGINE_DEAD
from vllm_supervisor.mock.web import Exchange, now

SHUT_DOWN = "cannot schedule new futures after shutdown"
KEPT_RESPONSES = 100  # background responses that can be asked for
DIMENSIONS = 16  # of an embedding


class Inference:
    """Handlers for everything that makes the engine work."""

    def __init__(self, options: Options, engine: Engine, faults: FaultSet, nursery: trio.Nursery) -> None:
        """Background responses run in `nursery`."""
        self._options = options
        self._engine = engine
        self._faults = faults
        self._nursery = nursery
        self._read = Reader(options)
        self._stored: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._background: dict[str, trio.CancelScope] = {}

    async def chat(self, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        await self._guard(exchange, lambda: self._generate(exchange, self._read.chat))

    async def completions(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        await self._guard(exchange, lambda: self._generate(exchange, self._read.completions))

    async def messages(self, exchange: Exchange) -> None:
        """`POST /v1/messages`."""
        await self._guard(exchange, lambda: self._generate(exchange, self._read.messages))

    async def responses(self, exchange: Exchange) -> None:
        """`POST /v1/responses`."""
        await self._guard(exchange, lambda: self._generate(exchange, self._read.responses))

    async def embeddings(self, exchange: Exchange) -> None:
        """`POST /v1/embeddings` of a pooling model."""
        await self._guard(exchange, lambda: self._embed(exchange))

    async def stored_response(self, exchange: Exchange, response: str, *, cancel: bool) -> None:
        """`GET /v1/responses/ID` and `POST /v1/responses/ID/cancel`."""
        if response not in self._stored:
            message = f"Response with id '{response}' not found."
            await exchange.json(404, error_body(message, "invalid_request_error", 404, "response_id"))
            return
        if cancel and response in self._background:
            self._background[response].cancel()
            self._stored[response]["status"] = "cancelled"
        await exchange.json(200, self._stored[response])

    # -- the common path ---------------------------------------------------------------------------------------

    async def _guard(self, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
        """Answer refusals and the engine's own failures; the answer's end is counted."""
        status = self._faults.count("inference_status")
        try:
            if status is not None:
                await exchange.json(status, error_body("a fault was asked for", "InternalServerError", status))
            else:
                await work()
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
        except EngineDeadError:
            await exchange.json(500, error_body(ENGINE_DEAD, "InternalServerError", 500))
        except ShutdownError:
            await exchange.json(500, error_body(SHUT_DOWN, "InternalServerError", 500), vary=False)
        if not exchange.dropped:
            self._engine.answered += 1
            self._engine.wake()

    def _body(self, exchange: Exchange) -> dict[str, Any]:
        return parse_body(exchange.request.body, exchange.request.headers.get("content-type", ""))

    async def _generate(self, exchange: Exchange, read: Callable[[dict[str, Any], str | None], Job]) -> None:
        job = read(self._body(exchange), exchange.request.headers.get("x-request-id"))
        generation = self._engine.submit(job.work)
        shape = self._shape(job, generation)
        if job.background and isinstance(shape, Responses):
            self._keep(job.id, shape.body("queued"))
            self._nursery.start_soon(self._in_background, job, generation, shape)
            await exchange.json(200, shape.body("queued"))
            return
        try:
            if job.stream:
                await self._stream(exchange, shape, generation)
            else:
                await self._whole(exchange, shape, generation)
        finally:
            self._engine.leave(generation)

    @staticmethod
    def _shape(job: Job, generation: Generation) -> Shape:
        if job.id.startswith("resp_"):
            return Responses(job)
        if job.anthropic:
            return Messages(job, generation.prompt_tokens)
        return OpenAI(job, chat=job.id.startswith("chatcmpl-"))

    def _reached(self, fault: str, generation: Generation) -> bool:
        limit = self._faults.count(fault)
        return limit is not None and generation.made >= limit

    def _abort_if_asked(self, generation: Generation, pieces: list[Piece]) -> list[Piece]:
        """Show the fault that aborts in the engine: what was taken, with every unfinished choice ended as `abort`."""
        if not self._reached("abort_answers", generation):
            return pieces
        self._engine.abort(generation)
        texts = {piece.choice: piece.text for piece in pieces}
        return [
            Piece(sequence.choice, texts.get(sequence.choice, ""), sequence.finish) for sequence in generation.sequences
        ]

    async def _stream(self, exchange: Exchange, shape: Shape, generation: Generation) -> None:
        await exchange.begin()
        started = False
        done = not self._faults.on("no_done")
        try:
            while not generation.done:
                pieces = self._abort_if_asked(generation, await generation.take())
                if not started and any(piece.text for piece in pieces):
                    started = True
                    await exchange.send(shape.start())
                if started:
                    await exchange.send(b"".join(map(shape.piece, pieces)))
                if self._reached("cut_answers", generation):
                    exchange.drop()
                    return
                if self._reached("error_event", generation):
                    await exchange.send(shape.fail(ENGINE_DEAD, done=done))
                    await exchange.finish()
                    return
        except EngineDeadError:
            if isinstance(shape, Responses):  # vLLM does not catch it on this route: the connection breaks off
                exchange.drop()
                return
            await exchange.send(shape.fail(ENGINE_DEAD, done=done))
        else:
            await exchange.send(shape.end(generation, done=done) if started else shape.end_unstarted(done=done))
        await exchange.finish()

    async def _collect(self, generation: Generation, stop: Callable[[], bool]) -> tuple[list[str], list[str | None]]:
        texts = [""] * len(generation.sequences)
        while not generation.done and not stop():
            for piece in self._abort_if_asked(generation, await generation.take()):
                texts[piece.choice] += piece.text
        return texts, [sequence.finish for sequence in generation.sequences]

    async def _whole(self, exchange: Exchange, shape: Shape, generation: Generation) -> None:
        def stop() -> bool:
            return self._reached("cut_answers", generation) or self._reached("error_event", generation)

        texts, finishes = await self._collect(generation, stop)
        if self._reached("error_event", generation):
            raise EngineDeadError
        body = shape.whole(generation, texts, finishes)
        if self._reached("cut_answers", generation):
            await exchange.answer_half(body)
        else:
            await exchange.json(200, body)

    # -- background responses ----------------------------------------------------------------------------------

    def _keep(self, response: str, body: dict[str, Any]) -> None:
        self._stored[response] = body
        while len(self._stored) > KEPT_RESPONSES:
            self._stored.popitem(last=False)

    async def _in_background(self, job: Job, generation: Generation, shape: Responses) -> None:
        with trio.CancelScope() as scope:
            self._background[job.id] = scope
            self._keep(job.id, shape.body("in_progress"))
            try:
                texts, finishes = await self._collect(generation, lambda: False)
                self._keep(job.id, shape.whole(generation, texts, finishes))
            except EngineDeadError:
                self._keep(job.id, shape.body("failed"))
            finally:
                del self._background[job.id]
                self._engine.leave(generation)

    # -- embeddings --------------------------------------------------------------------------------------------

    async def _embed(self, exchange: Exchange) -> None:
        body = self._body(exchange)
        given = body.get("input")
        if not given:
            raise missing("input")
        model = body.get("model") or self._options.names[0]
        if model not in self._options.names:
            raise Refusal(404, error_body(f"The model `{model}` does not exist.", "NotFoundError", 404))
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        prompts = tuple(count_tokens(item) for item in inputs)
        generation = self._engine.submit(Work(prompts, 1))
        try:
            await self._collect(generation, lambda: False)
        finally:
            self._engine.leave(generation)
        encoded = body.get("encoding_format") == "base64"
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(tokens, encoded=encoded)}
            for index, tokens in enumerate(prompts)
        ]
        usage: dict[str, Any] = {"prompt_tokens": sum(prompts), "total_tokens": sum(prompts)}
        usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
        answer = {
            "id": new_id("embd-", exchange.request.headers.get("x-request-id")),
            "object": "list",
            "created": now(),
        }
        await exchange.json(200, answer | {"model": model, "data": data, "usage": usage})


def _embedding(seed: int, *, encoded: bool) -> list[float] | str:
    values = [math.sin(seed + index) / math.sqrt(DIMENSIONS / 2) for index in range(DIMENSIONS)]
    return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *values)).decode() if encoded else values
