"""The routes that make no tokens: health, metrics, models, version, tokenize, dev mode, and the faults' own.

Rules: paths, methods, headers and bodies are vLLM's (0.32, measured); unknown paths are 404, known ones with another
method 405 with `allow`. `/mock/fault` is offered only where no other machine can connect.
"""

import os
import resource
import time
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from vllm_supervisor.mock.asks import Reader, Refusal, count_tokens, missing, parse_body
from vllm_supervisor.mock.engine import WORDS, Engine
from vllm_supervisor.mock.faults import FAULTS, FaultError, FaultSet
from vllm_supervisor.mock.metrics import Facts, Variant, render
from vllm_supervisor.mock.options import Options
from vllm_supervisor.mock.stats import Stats
from vllm_supervisor.mock.web import Exchange, now

VERSION = "0.32.0"
Handler = Callable[[Exchange], Awaitable[None]]


class Control:
    """Handlers for everything that is answered from memory."""

    def __init__(self, options: Options, engine: Engine, faults: FaultSet) -> None:
        """Remember the start for the metrics."""
        self._options = options
        self._engine = engine
        self._faults = faults
        self._read = Reader(options)
        self._created = now()
        self._started_at = time.time()
        self._scrapes = 0

    async def health(self, exchange: Exchange) -> None:
        """`/health`, `/ping`: 503 only once the engine is dead."""
        await self._engine.hold("health_slow")
        status = self._faults.count("health_status")
        if status == 404:
            await exchange.json(404, {"detail": "Not Found"})
        else:
            await exchange.answer(status or (503 if self._engine.dead else 200))

    async def metrics(self, exchange: Exchange) -> None:
        """`/metrics`."""
        await self._engine.hold("metrics_slow")
        if self._faults.on("metrics_absent"):
            await exchange.json(404, {"detail": "Not Found"})
            return
        status = self._faults.count("metrics_status")
        if status is not None:
            await exchange.answer(status, b"Internal Server Error", "text/plain; charset=utf-8")
            return
        counted = [core.stats for core in self._engine.cores]
        if self._faults.on("metrics_zero"):
            counted = [Stats(stats.max_model_len) for stats in counted]
        text = render(counted, self._facts(), self._variant())
        await exchange.answer(200, text.encode(), "text/plain; version=1.0.0; charset=utf-8")

    def _variant(self) -> Variant:
        return Variant(
            vllm=self._options.log_stats and not self._faults.on("metrics_python_only"),
            process=self._options.api_servers == 1 and not self._faults.on("metrics_multiprocess"),
            renamed=self._faults.on("metrics_renamed"),
        )

    def _facts(self) -> Facts:
        self._scrapes += 1
        used = resource.getrusage(resource.RUSAGE_SELF)
        other = self._faults.on("start_time_alternates") and self._scrapes % 2
        return Facts(
            model=self._options.names[0],
            started_at=self._started_at - (3600.0 if other else 0.0),
            cpu_seconds=used.ru_utime + used.ru_stime,
            resident_bytes=used.ru_maxrss * 1024,
            open_files=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names alone are enough
            sleep_level=self._engine.asleep,
            model_len=self._options.max_model_len,
        )

    async def models(self, exchange: Exchange) -> None:
        """`/v1/models`: never asks the engine."""
        grant = {"object": "model_permission", "created": self._created}
        grant |= {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
        grant |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}
        grant |= {"organization": "*", "group": None, "is_blocking": False}
        data = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self._options.model,
                "parent": None,
                "max_model_len": self._options.max_model_len,
                "permission": [{"id": f"modelperm-{name}"} | grant],
            }
            for name in self._options.names
        ]
        await exchange.json(200, {"object": "list", "data": data})

    async def version(self, exchange: Exchange) -> None:
        """`/version`."""
        await exchange.json(200, {"version": VERSION})

    async def load(self, exchange: Exchange) -> None:
        """`/load`."""
        await exchange.json(200, {"server_load": self._engine.open_requests})

    async def tokenize(self, exchange: Exchange) -> None:
        """`/tokenize` of a prompt or of messages."""
        try:
            body = parse_body(exchange.request.body, exchange.request.headers.get("content-type", ""))
            given = body.get("prompt", body.get("messages"))
            if given is None:
                raise missing("prompt", "messages")
            self._read.model(body)
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
            return
        count = count_tokens(given)
        answer = {"count": count, "max_model_len": self._options.max_model_len, "tokens": list(range(count))}
        await exchange.json(200, answer | {"token_strs": None})

    async def detokenize(self, exchange: Exchange) -> None:
        """`/detokenize` of token ids."""
        try:
            body = parse_body(exchange.request.body, exchange.request.headers.get("content-type", ""))
            tokens = body.get("tokens")
            if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
                raise missing("tokens")
            self._read.model(body)
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
            return
        await exchange.json(200, {"prompt": " ".join(WORDS[token % len(WORDS)] for token in tokens)})

    async def count_tokens(self, exchange: Exchange) -> None:
        """`/v1/messages/count_tokens`."""
        try:
            body = parse_body(exchange.request.body, exchange.request.headers.get("content-type", ""))
            if not isinstance(body.get("messages"), list):
                raise missing("messages")
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
            return
        count = count_tokens(body["messages"])
        await exchange.json(200, {"input_tokens": count, "context_management": {"original_input_tokens": count}})

    # -- dev mode (VLLM_SERVER_DEV_MODE=1) ---------------------------------------------------------------------

    async def sleep(self, exchange: Exchange) -> None:
        """`/sleep?level=N`."""
        level = int(parse_qs(exchange.request.query).get("level", ["1"])[0])
        self._engine.abort_all()
        self._engine.sleep_level = level
        self._engine.wake()
        await exchange.json(200, {"status": "sleeping", "level": level})

    async def wake_up(self, exchange: Exchange) -> None:
        """`/wake_up`."""
        self._engine.sleep_level = 0
        self._engine.wake()
        await exchange.json(200, {"status": "awake", "tags": None})

    async def is_sleeping(self, exchange: Exchange) -> None:
        """`/is_sleeping`."""
        await exchange.json(200, {"is_sleeping": bool(self._engine.asleep)})

    async def pause(self, exchange: Exchange) -> None:
        """`/pause?mode=abort|wait|keep`; waiting for the open ones is not imitated, they are kept."""
        if parse_qs(exchange.request.query).get("mode", ["abort"])[0] == "abort":
            self._engine.abort_all()
        self._engine.paused = True
        self._engine.wake()
        await exchange.json(200, {"status": "paused"})

    async def resume(self, exchange: Exchange) -> None:
        """`/resume`."""
        self._engine.paused = False
        self._engine.wake()
        await exchange.json(200, {"status": "resumed"})

    async def is_paused(self, exchange: Exchange) -> None:
        """`/is_paused`."""
        await exchange.json(200, {"is_paused": self._engine.is_paused})

    # -- the faults --------------------------------------------------------------------------------------------

    async def list_faults(self, exchange: Exchange) -> None:
        """`GET /mock/fault`: the table, with the value of each that is on."""
        rows = [
            {
                "name": fault.name,
                "kind": fault.kind.value,
                "default": fault.default,
                "sentence": fault.sentence,
                "start": fault.start,
                "value": self._faults.texts.get(fault.name),
            }
            for fault in FAULTS
        ]
        await exchange.json(200, {"faults": rows})

    async def set_fault(self, exchange: Exchange) -> None:
        """`POST /mock/fault` with `{"name", "value"}` or `{"name", "clear": true}`."""
        try:
            body = parse_body(exchange.request.body, "application/json")
            name, value = str(body.get("name", "")), body.get("value")
            if body.get("clear"):
                self._faults.clear(name)
            else:
                self._faults.set(name, None if value is None else str(value))
        except FaultError as error:
            await exchange.json(400, {"error": str(error)})
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
        else:
            await exchange.json(200, {"on": self._faults.texts})
