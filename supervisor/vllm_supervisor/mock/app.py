"""The table of routes, and what stands before every one of them: keys, faults that hit all paths, 404 and 405.

Rules (vLLM 0.32, measured): a key guards only paths under `/v1`, `/v2`, `/inference` and `/cohere`; HEAD is 405 except
on `/metrics`; generating routes exist on generating models, embedding routes on pooling models.
"""

import re
from collections.abc import Awaitable, Callable

from vllm_supervisor.mock.control import Control
from vllm_supervisor.mock.engine import Engine
from vllm_supervisor.mock.faults import FaultSet
from vllm_supervisor.mock.inference import Inference
from vllm_supervisor.mock.options import Options
from vllm_supervisor.mock.web import Exchange

Handler = Callable[[Exchange], Awaitable[None]]
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_STORED = re.compile(r"/v1/responses/([^/]+)(/cancel)?")


class App:
    """Answers one exchange: finds the route, applies what comes first."""

    def __init__(
        self, options: Options, faults: FaultSet, engine: Engine, control: Control, inference: Inference
    ) -> None:
        """Build the table for these options."""
        self._engine = engine
        self._options = options
        self._faults = faults
        self._inference = inference
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": control.health},
            "/ping": {"GET": control.health, "POST": control.health},
            "/metrics": {"GET": control.metrics, "HEAD": control.metrics},
            "/version": {"GET": control.version},
            "/load": {"GET": control.load},
            "/v1/models": {"GET": control.models},
            "/tokenize": {"POST": control.tokenize},
            "/detokenize": {"POST": control.detokenize},
        }
        if options.pooling:
            self._routes["/v1/embeddings"] = {"POST": inference.embeddings}
        else:
            self._routes |= {
                "/v1/chat/completions": {"POST": inference.chat},
                "/v1/completions": {"POST": inference.completions},
                "/v1/responses": {"POST": inference.responses},
                "/v1/messages": {"POST": inference.messages},
                "/v1/messages/count_tokens": {"POST": control.count_tokens},
            }
        if options.dev_mode:
            self._routes |= {
                "/sleep": {"POST": control.sleep},
                "/wake_up": {"POST": control.wake_up},
                "/is_sleeping": {"GET": control.is_sleeping},
                "/pause": {"POST": control.pause},
                "/resume": {"POST": control.resume},
                "/is_paused": {"GET": control.is_paused},
            }
        if options.local:
            self._routes["/mock/fault"] = {"GET": control.list_faults, "POST": control.set_fault}

    async def __call__(self, exchange: Exchange) -> None:
        """Answer."""
        request = exchange.request
        path = self._strip_root(request.path)
        if path != "/mock/fault":
            await self._engine.until(lambda: not self._faults.on("hang_http"))
            status = self._faults.count("every_status")
            if status is not None:
                await exchange.answer(status)
                return
        if not self._allowed(path, request.headers.get("authorization", "")):
            await exchange.json(401, {"error": "Unauthorized"}, vary=False)
            return
        stored = _STORED.fullmatch(path)
        if stored is not None and not self._options.pooling and request.method == ("POST" if stored[2] else "GET"):
            await self._inference.stored_response(exchange, stored[1], cancel=bool(stored[2]))
            return
        methods = self._routes.get(path)
        if methods is None:
            await exchange.json(404, {"detail": "Not Found"})
        elif request.method in methods:
            await methods[request.method](exchange)
        else:
            allow = [("allow", next(iter(methods)))]
            await exchange.json(405, {"detail": "Method Not Allowed"}, allow)

    def _strip_root(self, path: str) -> str:
        root = self._options.root_path.rstrip("/")
        return path.removeprefix(root) or "/" if root and (path == root or path.startswith(root + "/")) else path

    def _allowed(self, path: str, authorization: str) -> bool:
        if not self._options.api_keys or not any(path == head or path.startswith(head + "/") for head in GUARDED):
            return True
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and key in self._options.api_keys
