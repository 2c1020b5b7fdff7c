"""Which of our answers a path gets: from memory, through the gate, passed along, or refused.

Rules:
* What is cheap or answered by us is known by its exact spelling; every other POST is gated. A new inference route of
  the engine therefore cannot slip by, whatever its name.
* What is dangerous is refused in every spelling that any server between here and the engine could read as the same
  path: percent-encoding (also nested), `//`, `.` and `..`, backslashes, other case, parameters, a trailing slash, with
  or without a root path. The engine itself decodes once and compares exactly, so this refuses a superset: whatever
  Starlette would give to an admin route (tests ask Starlette itself).
* Nothing leads out of a dangerous folder again: Starlette knows no `..` and takes it for a name in the folder.
* Paths and their kinds are vLLM 0.32's (`vllm/entrypoints/**/api_router.py`).
"""

from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import unquote

from vllm_supervisor.core.http_semantics import EVERYWHERE
from vllm_supervisor.core.words import RequestClass


class Kind(Enum):
    """How a request is treated."""

    LIVE = auto()
    READY = auto()
    STARTED = auto()
    METRICS = auto()
    GATED = auto()
    CHEAP = auto()
    DANGEROUS = auto()
    SERVER = auto()  # OPTIONS *: about the server itself


@dataclass(frozen=True, slots=True)
class Route:
    """The treatment of a path and the class it is counted under."""

    kind: Kind
    request_class: RequestClass = RequestClass.OTHER
    admin: bool = False  # dangerous and allowed: it runs on the engine's loop


_INFERENCE: dict[str, RequestClass] = {
    "/v1/chat/completions": RequestClass.CHAT,
    "/v1/chat/completions/batch": RequestClass.CHAT,
    "/v1/completions": RequestClass.COMPLETIONS,
    "/v1/responses": RequestClass.RESPONSES,
    "/v1/messages": RequestClass.MESSAGES,
    "/v1/embeddings": RequestClass.EMBEDDINGS,
    "/v2/embed": RequestClass.EMBEDDINGS,
    "/pooling": RequestClass.POOLING,
    "/classify": RequestClass.POOLING,
    "/score": RequestClass.POOLING,
    "/v1/score": RequestClass.POOLING,
    "/rerank": RequestClass.POOLING,
    "/v1/rerank": RequestClass.POOLING,
    "/v2/rerank": RequestClass.POOLING,
    "/v1/audio/transcriptions": RequestClass.AUDIO,
    "/v1/audio/translations": RequestClass.AUDIO,
    "/v1/realtime": RequestClass.REALTIME,
    "/inference/v1/generate": RequestClass.GENERATE,
    "/generative_scoring": RequestClass.GENERATE,
    "/v1/systemone": RequestClass.GENERATE,
    "/cohere/v2/chat": RequestClass.GENERATE,
    "/invocations": RequestClass.OTHER,
}

# POSTs that only use the CPU of the API server, or only ask.
_CHEAP_POSTS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/is_scaling_elastic_ep"})
_CHEAP_SUFFIXES = ("/render", "/derender")

DANGEROUS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/server_info",
        "/pause",
        "/resume",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/update_weight_version",
        "/finish_weight_update",
        "/weight_checker",
        "/release_kv_cache_memory",
        "/scale_elastic_ep",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/adapters",
        "/fault_tolerance/apply",
    }
)

_LONGEST = max(map(len, DANGEROUS))

# Of these every path below is meant as well: the name of an adapter follows (model_hosting_container_standards).
_FOLDERS = ("/adapters",)
_FOLDER_NAMES = frozenset(folder.rpartition("/")[2] for folder in _FOLDERS)

_OURS: dict[str, Kind] = {
    "/livez": Kind.LIVE,
    "/readyz": Kind.READY,
    "/health": Kind.READY,
    "/ping": Kind.READY,
    "/startupz": Kind.STARTED,
    "/metrics": Kind.METRICS,
}
_FOLLOW_HEALTH = ("/health", "/ping")
_READING = frozenset({b"GET", b"HEAD"})
_HARMLESS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


# The engine decodes once and a proxy before it may have done so once or twice more; a bound keeps this linear.
_DECODINGS = 4


def plainest(path: str) -> str:
    """Return the plainest spelling of `path` that any server could mean by it."""
    for _ in range(_DECODINGS):
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    parts: list[str] = []
    for part in path.lower().replace("\\", "/").split("/"):
        name = part.split(";", 1)[0].strip()
        if name == "..":
            if parts and (parts[-1] in _FOLDER_NAMES or parts[-1] == ".."):
                parts.append(name)
            else:
                del parts[-1:]
        elif name not in {"", "."}:
            parts.append(name)
    return "/" + "/".join(parts)


class Router:
    """Paths to routes under one configuration; decisions about usual paths are one look-up."""

    def __init__(
        self, *, root_paths: tuple[str, ...] = (), allow_paths: tuple[str, ...] = (), health_means_alive: bool = False
    ) -> None:
        """`root_paths` and `allow_paths` as in the front door's settings."""
        roots = sorted({root.rstrip("/") for root in root_paths} - {""}, key=len, reverse=True)
        self._roots = tuple(root + "/" for root in roots)
        self._plain_roots = tuple(plain + "/" for root in roots if (plain := plainest(root)) != "/")
        self._dangerous = DANGEROUS - {plainest(path) for path in allow_paths}
        self._allowed = DANGEROUS - self._dangerous
        self._ours = dict(_OURS)
        if health_means_alive:
            self._ours.update(dict.fromkeys(_FOLLOW_HEALTH, Kind.LIVE))
        self._usual = {(b"POST", path.encode()): Route(Kind.GATED, cls) for path, cls in _INFERENCE.items()}

    def route(self, method: bytes, target: bytes, *, upgrade: bool = False) -> Route:
        """Decide about one request; `target` begins with a slash and may have a query, or is `*`."""
        usual = self._usual.get((method, target))
        if usual is not None:
            return usual
        if target == EVERYWHERE:
            return Route(Kind.SERVER)
        path = target.split(b"?", 1)[0].decode("latin-1")
        if self._is_dangerous(path):
            return Route(Kind.DANGEROUS)
        path = self._under_root(path)
        kind = self._ours.get(path)
        if kind is not None and (method in _READING or (path == "/ping" and method == b"POST")):
            return Route(kind)
        request_class = _INFERENCE.get(path, RequestClass.OTHER)
        if upgrade:
            return Route(Kind.GATED, request_class)
        if method == b"OPTIONS":
            return Route(Kind.CHEAP)
        if path in _INFERENCE:
            return Route(Kind.GATED, request_class)
        if method in _HARMLESS or (method == b"POST" and _is_cheap_post(path)):
            return Route(Kind.CHEAP)
        return Route(Kind.GATED, admin=_listed(path) in self._allowed)

    def _under_root(self, path: str) -> str:
        """Take a root path off as Starlette's `get_route_path` does: once, and only before a slash."""
        for root in self._roots:
            if path.startswith(root):
                return path[len(root) - 1 :]
        return path

    def _is_dangerous(self, path: str) -> bool:
        plain = plainest(path)
        if _listed(plain) in self._dangerous:
            return True
        return bool(self._plain_roots) and self._is_dangerous_under_root(plain)

    def _is_dangerous_under_root(self, plain: str) -> bool:
        """Look behind every root path, in any order and as often as they stand before one another."""
        seen, waiting = {0}, [0]
        while waiting:
            at = waiting.pop()
            for root in self._plain_roots:
                behind = at + len(root) - 1
                if behind not in seen and plain.startswith(root, at):
                    if _listed(plain[behind : behind + _LONGEST + 1]) in self._dangerous:
                        return True
                    seen.add(behind)
                    waiting.append(behind)
        return False


def _listed(path: str) -> str:
    """Give the path under which this one would be listed."""
    for folder in _FOLDERS:
        if path.startswith(folder + "/"):
            return folder
    return path


def _is_cheap_post(path: str) -> bool:
    if path in _CHEAP_POSTS:
        return True
    if any(path.endswith(suffix) and path.removesuffix(suffix) in _INFERENCE for suffix in _CHEAP_SUFFIXES):
        return True
    # POST /v1/responses/ID/cancel takes work away from the engine.
    return path.startswith("/v1/responses/") and path.endswith("/cancel") and path.count("/") == 4
