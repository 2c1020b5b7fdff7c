"""Everything we ask an engine over HTTP: one request a connection, one whole and bounded answer, nothing decided.

Rules:
* What is expected is a value: a refusal, a time that passed and a broken answer are `Reach`es, never exceptions.
* A request ends with its connection: cancelling the caller closes the socket, and vLLM then aborts the work (measured
  on 0.32), so a probe is withdrawn by cancelling it. We never half-close: vLLM takes that for a client that left.
* No time limit of our own where the caller gives none: a first token may compile for minutes.
* The client is ours and small: importing httpx costs 120 ms and 9 MB, more than the supervisor may spend on it.
"""

import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import httptools
import trio

from vllm_supervisor.core.address import Address, UnixAddress
from vllm_supervisor.core.probe import (
    HEALTH_PATH,
    METRICS_PATH,
    MODELS_PATH,
    PROBE_PATHS,
    Capabilities,
    ProbeOutcome,
    ProbeResult,
    Reach,
    ReadyCheck,
    ReadyResult,
    TlsFault,
    capabilities_of,
    first_model,
    probe_body,
    probe_outcome,
)

# A vLLM exposition is 30 to 150 KB, and grows with data parallelism; past this an answer is not one of an engine.
MAX_BODY = 16 * 1024 * 1024
_CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True)
class Site:
    """How a server is addressed beyond host and port: Host header, path prefix ("" or "/x"), TLS, key."""

    host: str = "localhost"
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """How an exchange ended; `status` and `body` mean something only when `reach` is ANSWERED.

    `tls`: why it is BROKEN, where TLS is the reason.
    """

    reach: Reach
    status: int | None = None
    body: bytes = b""
    tls: TlsFault | None = None

    @property
    def ok(self) -> bool:
        """Whether a whole answer of status 200 came."""
        return self.reach is Reach.ANSWERED and self.status == 200


async def exchange(
    address: Address,
    method: str,
    path: str,
    *,
    site: Site | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout: float | None = None,  # noqa: ASYNC109 - the end is a value here; a caller's scope could not tell it apart
) -> Reply:
    """Send one request and read its whole answer. `timeout` in seconds; None waits as long as the caller does."""
    site = site or Site()
    with trio.move_on_after(float("inf") if timeout is None else timeout):
        try:
            stream = await _connect(address, site)
        except ssl.SSLError as fault:  # an OSError, too
            return Reply(Reach.BROKEN, tls=_tls_fault(fault))
        except OSError as fault:
            return Reply(_reach_of(fault))
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError, OSError):  # an early answer may still wait to be read
                await stream.send_all(
                    _head(method, site, path, {**_who(address), **(headers or {})}, body) + (body or b"")
                )
            return await _read(stream)
    return Reply(Reach.TIMEOUT)


async def health(address: Address, *, site: Site | None = None, timeout: float | None = None) -> Reply:  # noqa: ASYNC109 - as in `exchange`
    """GET /health. vLLM answers 200 until it knows that its engine is dead: needed for readiness, proof of nothing."""
    return await exchange(address, "GET", HEALTH_PATH, site=site, timeout=timeout)


async def metrics(address: Address, *, site: Site | None = None, timeout: float | None = None) -> Reply:  # noqa: ASYNC109 - as in `exchange`
    """GET /metrics: the body is the exposition as bytes."""
    return await exchange(address, "GET", METRICS_PATH, site=site, timeout=timeout)


async def models(address: Address, api_key: str | None = None, *, site: Site | None = None) -> Reply:
    """GET /v1/models."""
    return await exchange(address, "GET", MODELS_PATH, site=_keyed(site, api_key))


async def capabilities(address: Address, api_key: str | None = None, *, site: Site | None = None) -> Capabilities:
    """Find the endpoint a probe may use, by GETs that cost the engine nothing."""
    site = _keyed(site, api_key)
    statuses: dict[str, int] = {}
    for path in PROBE_PATHS:
        reply = await exchange(address, "GET", path, site=site)
        if reply.status is None:
            return Capabilities(None, reach=reply.reach)
        statuses[path] = reply.status
        if reply.status in {401, 403, 405}:
            break
    return capabilities_of(statuses)


async def probe(
    address: Address,
    api_key: str | None = None,
    model: str | None = None,
    *,
    request_id: str,
    path: str | None = None,
    site: Site | None = None,
) -> ProbeResult:
    """Ask for one token. `request_id` begins with `PROBE_ID_PREFIX`; `path` and `model` are found out when not given.

    Waits as long as the engine does; cancel it to withdraw the probe.
    """
    site = _keyed(site, api_key)
    if path is None:
        offered = await capabilities(address, site=site)
        if offered.reach is not Reach.ANSWERED:
            return ProbeResult(probe_outcome(offered.reach, None))
        if not offered.authorized:
            return ProbeResult(ProbeOutcome.UNAUTHORIZED)
        if offered.probe_path is None:
            return ProbeResult(ProbeOutcome.NOT_OFFERED)
        path = offered.probe_path
    if model is None:
        model = first_model((await models(address, site=site)).body)
    reply = await exchange(
        address,
        "POST",
        path,
        site=site,
        headers={"X-Request-Id": request_id, "Content-Type": "application/json"},
        body=probe_body(path, model),
    )
    return ProbeResult(probe_outcome(reply.reach, reply.status), reply.status, path)


async def ready_check(
    address: Address, api_key: str | None = None, model: str | None = None, *, request_id: str
) -> ReadyResult:
    """Check once whether the engine is ready: it accepts, /health is 200, and a first completion comes back.

    No time limit of its own. An engine without /health (404, 405) is asked for the completion at once.
    """
    alive = await health(address)
    if alive.reach in {Reach.REFUSED, Reach.NO_ROUTE}:
        return ReadyResult(ReadyCheck.REFUSED, "the engine does not listen yet")
    if alive.status not in {200, 404, 405}:
        said = f"status {alive.status}" if alive.reach is Reach.ANSWERED else "no whole answer"
        return ReadyResult(ReadyCheck.NOT_HEALTHY, f"the engine listens, but its /health gave {said}", alive.status)
    result = await probe(address, api_key, model, request_id=request_id)
    if result.outcome is ProbeOutcome.ANSWERED:
        return ReadyResult(ReadyCheck.ANSWERED, f"a first request to {result.path} came back", result.status)
    if result.outcome is ProbeOutcome.UNAUTHORIZED:
        return ReadyResult(ReadyCheck.UNPROVEN, "healthy; no completion was asked for: the key is not accepted")
    if result.outcome is ProbeOutcome.NOT_OFFERED:
        return ReadyResult(
            ReadyCheck.UNPROVEN, "healthy; no completion was asked for: no endpoint takes one", result.status
        )
    if result.outcome is ProbeOutcome.REFUSED:
        return ReadyResult(ReadyCheck.REFUSED, "the engine stopped listening")
    said = f"status {result.status}" if result.status is not None else "no whole answer"
    return ReadyResult(ReadyCheck.FAILED, f"healthy, but its first request to {result.path} gave {said}", result.status)


# -- the wire ------------------------------------------------------------------------------------------------------


def _who(address: Address) -> Mapping[str, str]:
    """Name ourselves where the connection cannot: on a Unix socket, whose peer has no address (`core/forwarding.py`)."""
    return {"X-Forwarded-For": "127.0.0.1"} if isinstance(address, UnixAddress) else {}


def _keyed(site: Site | None, api_key: str | None) -> Site:
    site = site or Site()
    return site if api_key is None else Site(site.host, site.prefix, site.tls, api_key)


async def _connect(address: Address, site: Site) -> trio.abc.Stream:
    if isinstance(address, UnixAddress):
        return await trio.open_unix_socket(address.path)
    plain = await trio.open_tcp_stream(address.host or "127.0.0.1", address.port)
    if site.tls is None:
        return plain
    # https_compatible: servers close without the TLS farewell, and the framing already says where an answer ends.
    secured = trio.SSLStream(plain, site.tls, server_hostname=address.host, https_compatible=True)
    try:
        await secured.do_handshake()
    except trio.BrokenResourceError as fault:
        await trio.aclose_forcefully(plain)
        if isinstance(fault.__cause__, ssl.SSLError):
            raise fault.__cause__ from None
        raise ConnectionResetError from fault
    except trio.Cancelled:
        await trio.aclose_forcefully(plain)
        raise
    return secured


# verify_code of OpenSSL's x509_vfy.h; reasons of its err.h, as the module ssl names them.
_NAMES = {62, 64}
_DATES = {9, 10}
_OTHER_PROTOCOL = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_ASKED_FOR_OURS = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "BAD_CERTIFICATE")


def _tls_fault(fault: ssl.SSLError) -> TlsFault:
    if isinstance(fault, ssl.SSLCertVerificationError):
        if fault.verify_code in _NAMES:
            return TlsFault.WRONG_NAME
        return TlsFault.OUT_OF_DATE if fault.verify_code in _DATES else TlsFault.UNTRUSTED
    reason = fault.reason or ""
    if reason in _OTHER_PROTOCOL:
        return TlsFault.NO_TLS
    return TlsFault.CLIENT_CERTIFICATE if reason.endswith(_ASKED_FOR_OURS) else TlsFault.FAILED


async def speaks_tls(address: Address, *, timeout: float) -> bool:  # noqa: ASYNC109 - the end is a value here
    """Whether a TLS handshake, whose certificate nobody looks at, leads anywhere within `timeout` seconds."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    with trio.move_on_after(timeout):
        try:
            stream = await _connect(address, Site(tls=anybody))
        except ssl.SSLError as fault:
            return _tls_fault(fault) is TlsFault.CLIENT_CERTIFICATE
        except OSError:
            return False
        await trio.aclose_forcefully(stream)
        return True
    return False


def _reach_of(fault: OSError) -> Reach:
    """Tell a refusal from a broken connection; a Unix socket that is not there refuses, too."""
    causes: tuple[BaseException, ...] = (fault,)
    if isinstance(fault.__cause__, BaseExceptionGroup):
        causes = fault.__cause__.exceptions
    elif fault.__cause__ is not None:
        causes = (fault, fault.__cause__)
    if any(isinstance(cause, ConnectionRefusedError | FileNotFoundError) for cause in causes):
        return Reach.REFUSED
    if any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes):
        return Reach.BROKEN
    return Reach.NO_ROUTE


def _head(method: str, site: Site, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    lines = [f"{method} {site.prefix}{path} HTTP/1.1", f"Host: {site.host}", "Connection: close", "Accept: */*"]
    if site.api_key is not None:
        lines.append(f"Authorization: Bearer {site.api_key}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


class _Answer:
    """Collects one answer from httptools' callbacks."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.headers_done = False
        self.framed = False  # the answer itself says where it ends
        self.done = False

    def on_header(self, name: bytes, _value: bytes) -> None:
        self.framed = self.framed or name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        self.headers_done = True

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.done = True


async def _read(stream: trio.abc.Stream) -> Reply:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.done:
        try:
            data = await stream.receive_some(_CHUNK)
        except (trio.BrokenResourceError, OSError) as fault:
            refused = fault.__cause__  # with TLS 1.3 a missing certificate of ours is told only now
            return Reply(Reach.BROKEN, tls=_tls_fault(refused) if isinstance(refused, ssl.SSLError) else None)
        if not data:
            break
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            return Reply(Reach.BROKEN)
        if answer.size > MAX_BODY:
            return Reply(Reach.BROKEN)
    if answer.done or (answer.headers_done and not answer.framed):
        return Reply(Reach.ANSWERED, parser.get_status_code(), b"".join(answer.parts))
    return Reply(Reach.BROKEN)
