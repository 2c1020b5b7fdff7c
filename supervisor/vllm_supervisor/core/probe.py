"""What is asked of an engine when we ask anything at all, and how its answers are read. Nothing is sent from here.

Rules:
* A probe is the smallest work the engine can do: one token of the mounted endpoint, or one input for a pooling model.
* What is mounted is told by the status of a GET: 405 where the path takes POST, 404 where it does not exist
  (FastAPI's answers; vLLM 0.32). `/v1/models` does not tell generating models from pooling ones.
* Every probe carries a request id that begins with `PROBE_ID_PREFIX`: vLLM keeps it inside its own ids, so the beacon
  can tell our requests from users'.
* 401 and 403 mean that a probe is not possible, other 4xx that it was not accepted; neither says anything of health.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PROBE_ID_PREFIX = "vsup-probe-"

HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
MODELS_PATH = "/v1/models"
IS_PAUSED_PATH = "/is_paused"

# The endpoints that can carry a probe, the preferred first. Bare completions need no chat template.
PROBE_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/pooling", "/classify", "/score")


UNREADY_FOR_S = 20.0  # of bad answers, after which they are told
UNREADY_AGAIN_S = 300.0  # and told again


class Reach(StrEnum):
    """How far a request came: four different things that are never taken for one another."""

    ANSWERED = "answered"  # a whole HTTP answer, of whatever status
    REFUSED = "refused"  # nobody listens
    TIMEOUT = "timeout"  # the given time passed first
    BROKEN = "broken"  # closed before the answer was whole, or not HTTP
    NO_ROUTE = "no_route"  # the name or the network does not lead there


class TlsFault(StrEnum):
    """Why no HTTP was spoken although somebody listens: a matter of certificates and schemes, never of the engine."""

    UNTRUSTED = "untrusted"  # nobody we trust has signed its certificate
    WRONG_NAME = "wrong_name"
    OUT_OF_DATE = "out_of_date"
    CLIENT_CERTIFICATE = "client_certificate"  # it wants one of ours
    NO_TLS = "no_tls"  # https was asked of a server that speaks something else
    TLS_WANTED = "tls_wanted"  # http was asked of a server that speaks TLS
    FAILED = "failed"


class ProbeOutcome(StrEnum):
    """What one probe showed."""

    ANSWERED = "answered"  # the engine did the work
    FAILED = "failed"  # it answered 5xx
    BROKEN = "broken"  # it broke off
    REFUSED = "refused"  # nobody listens
    UNAUTHORIZED = "unauthorized"  # 401 or 403: not possible without another key
    NOT_OFFERED = "not_offered"  # no endpoint that can carry a probe, or a 4xx

    @property
    def is_proof(self) -> bool:
        """Whether the outcome says that the engine works or does not, rather than nothing."""
        return self in {ProbeOutcome.ANSWERED, ProbeOutcome.FAILED, ProbeOutcome.BROKEN, ProbeOutcome.REFUSED}


class ReadyCheck(StrEnum):
    """What the check for a first readiness showed."""

    REFUSED = "refused"  # not listening yet
    NOT_HEALTHY = "not_healthy"  # listens, but /health is not 200
    FAILED = "failed"  # healthy, but the first completion was answered with an error or broke off
    ANSWERED = "answered"  # healthy, and a first completion came back
    UNPROVEN = "unproven"  # healthy, but a completion cannot be asked for (no key, or no endpoint for it)

    @property
    def ready(self) -> bool:
        """Whether users' requests may come in."""
        return self in {ReadyCheck.ANSWERED, ReadyCheck.UNPROVEN}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The end of one probe: `status` is the HTTP status or None, `path` the endpoint it went to ("" for none)."""

    outcome: ProbeOutcome
    status: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """The end of one ready check, with one sentence for a person."""

    check: ReadyCheck
    sentence: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is mounted: `probe_path` is the endpoint for a probe (None: none), `authorized` is False on 401 and 403.

    `reach` is how far the question came; only ANSWERED says anything of what is mounted.
    """

    probe_path: str | None
    authorized: bool = True
    reach: Reach = Reach.ANSWERED


def capabilities_of(statuses: Mapping[str, int]) -> Capabilities:
    """Read what GETs on `PROBE_PATHS` answered: {path: status}."""
    for path in PROBE_PATHS:
        status = statuses.get(path)
        if status in {401, 403}:
            return Capabilities(None, authorized=False)
        if status == 405:
            return Capabilities(path)
    return Capabilities(None)


def probe_body(path: str, model: str | None) -> bytes:
    """Return the JSON body of the smallest request `path` accepts; without a model vLLM takes the one it serves."""
    body: dict[str, object] = {} if model is None else {"model": model}
    if path == "/v1/completions":
        body |= {"prompt": "a", "max_tokens": 1, "temperature": 0}
    elif path == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    elif path == "/score":
        body |= {"text_1": "a", "text_2": "a"}
    else:
        body |= {"input": "a"}
    return json.dumps(body).encode()


def first_model(body: bytes) -> str | None:
    """Read the first model id of a `/v1/models` answer, or None."""
    try:
        name = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def says_paused(status: int | None, body: bytes) -> bool | None:
    """Read an answer of `/is_paused`; None: it is not offered."""
    try:
        return json.loads(body)["is_paused"] is True if status == 200 else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def probe_outcome(reach: Reach, status: int | None) -> ProbeOutcome:
    """Read the end of a probe's exchange."""
    if reach in {Reach.REFUSED, Reach.NO_ROUTE}:
        return ProbeOutcome.REFUSED
    if reach is not Reach.ANSWERED or status is None:
        return ProbeOutcome.BROKEN
    if status in {401, 403}:
        return ProbeOutcome.UNAUTHORIZED
    if 200 <= status < 300:
        return ProbeOutcome.ANSWERED
    return ProbeOutcome.FAILED if status >= 500 else ProbeOutcome.NOT_OFFERED


class Unready:
    """Ready checks of a load that were answered, but badly: an engine may be late at first, but not for long."""

    def __init__(self) -> None:
        self._tell_at: float | None = None

    def look(self, result: ReadyResult, now: float) -> str:
        """Take a result (`now` in monotonic seconds); return the reason when it is time to tell it, else ""."""
        if result.check is ReadyCheck.REFUSED:
            self._tell_at = None
        elif self._tell_at is None:
            self._tell_at = now + UNREADY_FOR_S
        elif now >= self._tell_at:
            self._tell_at = now + UNREADY_AGAIN_S
            return f"{result.sentence}; its own lines say why"
        return ""
