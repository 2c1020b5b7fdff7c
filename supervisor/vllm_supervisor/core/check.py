"""Judging a server that is not ours: what a URL names, what the reads amount to, and the exit status of a plugin.

Rules:
* The judgement is the classifier's, on metrics alone: no account of ours, no processes, no beacon.
* Without explicit waits two short reads say at most `suspect`; explicit waits are the waits before `stuck`. With a
  remembered reading the waits are measured since then, and nobody sleeps.
* Exit status as monitoring plugins have it: 0 ok, 1 warning, 2 critical, 3 unknown. Of several servers the worst
  decides: 2, then 1, then 3, then 0.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.health import Judgement, Memory
from vllm_supervisor.core.probe import ProbeOutcome, ProbeResult, Reach, TlsFault
from vllm_supervisor.core.progress import Track
from vllm_supervisor.core.samples import EngineSeries
from vllm_supervisor.core.situation import HealthPolicy, Value
from vllm_supervisor.core.words import Verdict

EXITS: dict[Verdict, int] = {
    Verdict.IDLE: 0,
    Verdict.BUSY: 0,
    Verdict.SUSPECT: 1,
    Verdict.STARTING: 1,
    Verdict.ASLEEP: 1,
    Verdict.PAUSED: 1,
    Verdict.DEGRADED: 1,
    Verdict.STUCK: 2,
    Verdict.FAILING: 2,
    Verdict.DEAD: 2,
    Verdict.UNREACHABLE: 2,
    Verdict.UNJUDGEABLE: 3,
}
_WORST_FIRST = (2, 1, 3, 0)
STATUS_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
AT_ALL, NEVER = 0.001, 1e12  # seconds
_ENDINGS = ("/v1", "/v1/models", "/metrics", "/health")


@dataclass(frozen=True, slots=True)
class Target:
    """One server: `address` and `host` (the Host header), `prefix` before every path, whether it speaks TLS.

    `assumed`: the address's port was not given, it is the scheme's.
    """

    url: str
    address: Address
    host: str
    prefix: str
    tls: bool
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """What one server was found to be. `verdict` None: a proxy that answers, of which nothing more can be said."""

    url: str
    verdict: Verdict | None
    sentence: str
    evidence: Mapping[str, Value] = field(default_factory=dict)
    restarted: bool = False

    @property
    def exit(self) -> int:
        """Return the exit status for this server."""
        return 0 if self.verdict is None else EXITS[self.verdict]

    def line(self) -> str:
        """Return the line a person or a monitoring plugin reads."""
        return f"{STATUS_WORDS[self.exit]} - {self.url}: {self.sentence}"

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        verdict = None if self.verdict is None else self.verdict.value
        return {
            "url": self.url,
            "verdict": verdict,
            "exit": self.exit,
            "sentence": self.sentence,
            "restarted": self.restarted,
            "evidence": dict(self.evidence),
        }


def worst(exits: Iterable[int]) -> int:
    """Return the exit status that decides."""
    return min(exits, key=_WORST_FIRST.index)


def target(url: str) -> Target:
    """Read a URL: http, https, `unix:/path`, or a bare HOST:PORT. Raises UsageError with the mend."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise UsageError(f"{url!r}: a Unix socket is given as unix:/PATH")
        return Target(url, UnixAddress(path), "localhost", "", tls=False)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"}:
        raise UsageError(f"{url!r}: only http, https and unix can be checked")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a URL must not carry a key or password; set VLLM_API_KEY instead")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise UsageError(f"{url!r}: the port is no number from 1 to 65535")
    if not parts.hostname:
        raise UsageError(f"{url!r}: there is no host in it; give http://HOST:PORT")
    tls = parts.scheme == "https"
    prefix = unquote(parts.path).rstrip("/")
    for ending in sorted(_ENDINGS, key=len, reverse=True):
        if prefix.endswith(ending):
            prefix = prefix.removesuffix(ending)
            break
    if any(ord(letter) <= 0x20 or ord(letter) == 0x7F for letter in prefix):
        raise UsageError(f"{url!r}: there is a blank or control character in its path")
    address = TcpAddress(parts.hostname, port or (443 if tls else 80))
    return Target(url, address, parts.netloc, prefix, tls=tls, assumed=port is None)


def policy(waits: tuple[float, float] | None, *, remembered: bool) -> HealthPolicy:
    """Return the waits of the judgement; what came from two short reads alone is never stuck."""
    if waits is not None:
        return HealthPolicy(waits=waits, waits_slow=waits, settle=0.0)
    if remembered:
        slow = HealthPolicy().waits_slow
        return HealthPolicy(waits=slow, waits_slow=slow, settle=0.0)
    return HealthPolicy(waits=(AT_ALL, NEVER), waits_slow=(AT_ALL, NEVER), settle=0.0)


def conclude(url: str, judgement: Judgement, *, restarted: bool, sure: bool) -> Checked:
    """Put a judgement into words. `sure`: there were waits, so that a suspicion is more than two short reads."""
    sentence = judgement.sentence
    if judgement.verdict is Verdict.SUSPECT and not sure and "no_progress_s" in judgement.evidence:
        seconds = judgement.evidence["no_progress_s"]
        sentence = (
            f"suspect: work and no progress between two reads {seconds} s apart; give --wait S --wait S to be sure"
        )
    if restarted and not sentence.startswith("restarted"):
        sentence = f"restarted between two reads; {sentence}"
    return Checked(url, judgement.verdict, sentence, judgement.evidence, restarted)


def with_probe(found: Checked, result: ProbeResult | None, waited: float, *, sure: bool) -> Checked:
    """Return what an idle server is after its probe: None is one without an answer within `waited` seconds."""
    evidence = {**found.evidence, "probe_s": round(waited, 2)}
    if result is None:
        if sure:
            return replace(
                found,
                verdict=Verdict.STUCK,
                sentence=f"it looks idle, but a one-token request had no answer for {waited:.0f} s",
                evidence=evidence,
            )
        return replace(
            found,
            verdict=Verdict.SUSPECT,
            sentence=f"it looks idle, but a one-token request had no answer within {waited:.0f} s",
            evidence=evidence,
        )
    if result.outcome is ProbeOutcome.ANSWERED:
        before = "restarted between two reads; " if found.restarted else ""
        return replace(
            found,
            verdict=Verdict.IDLE,
            sentence=f"{before}idle: a one-token request was answered in {waited:.2f} s",
            evidence=evidence,
        )
    if result.outcome.is_proof:
        said = f"status {result.status}" if result.status is not None else "no whole answer"
        return replace(
            found,
            verdict=Verdict.FAILING,
            sentence=f"it looks idle, but a one-token request gave {said}",
            evidence=evidence,
        )
    why = "the key is not accepted" if result.outcome is ProbeOutcome.UNAUTHORIZED else "no endpoint takes one"
    return replace(found, sentence=f"{found.sentence}; not probed: {why}")


def with_port(found: Checked, asked: Target) -> Checked:
    """Name the port that was asked, where nobody gave one and what was found there is not well."""
    if found.exit == 0 or not asked.assumed:
        return found
    return replace(found, sentence=f"{found.sentence}; no port was given, so {asked.address} was asked")


# What a supervisor says of its engine, where no more is needed: nobody but a person changes the last two.
_SAID: dict[str, Verdict] = {"starting": Verdict.STARTING, "parked": Verdict.DEAD, "unkillable": Verdict.DEAD}


def of_health(url: str, status: int | None, body: bytes) -> Checked | None:
    """Read /health. Of 503 vLLM's says that its engine is dead, a supervisor's says why it is not ready.

    A supervisor whose `front_door.health` is "alive" says 200 of an engine that is gone for good.
    """
    if status not in {200, 503}:
        return None
    try:
        said = json.loads(body)
        engine, reason = str(said["engine"]), said["reason"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None if status == 200 else Checked(url, Verdict.DEAD, "its own /health says 503: the engine is dead")
    if status == 200 and _SAID.get(engine) is not Verdict.DEAD:
        return None
    verdict = _SAID.get(engine, Verdict.SUSPECT)
    return Checked(url, verdict, f"a supervisor answers, its engine is {engine}: {reason}", {"engine": engine})


_TLS = {
    TlsFault.UNTRUSTED: "its certificate is signed by nobody this machine trusts; give the authority: SSL_CERT_FILE=CA.pem vllm-supervisor check …",
    TlsFault.WRONG_NAME: "its certificate is for another name; ask by a name that stands in it (openssl s_client shows them)",
    TlsFault.OUT_OF_DATE: "its certificate is out of date, or this machine's clock is wrong; renew it",
    TlsFault.CLIENT_CERTIFICATE: "it wants a certificate of its client, which check has none of; check it on its own machine, or by --ssl-cert-reqs 0",
    TlsFault.NO_TLS: "it speaks no TLS; ask by http://",
    TlsFault.TLS_WANTED: "it speaks TLS; ask by https://",
    TlsFault.FAILED: "the TLS handshake failed; see what it offers: openssl s_client -connect HOST:PORT",
}


def of_tls(url: str, fault: TlsFault) -> Checked:
    """Say what stands between us and the server; of the engine nothing is known."""
    return Checked(url, Verdict.UNJUDGEABLE, f"nothing can be said of its engine: {_TLS[fault]}", {"tls": fault.value})


def of_proxy(url: str, reach: Reach, status: int | None, body: bytes) -> Checked:
    """Read /v1/models of a proxy, which says nothing of the engines behind it."""
    if reach is Reach.REFUSED or reach is Reach.NO_ROUTE:
        return Checked(url, Verdict.UNREACHABLE, "nobody listens at this address")
    if reach is not Reach.ANSWERED or status is None:
        return Checked(url, Verdict.SUSPECT, "/v1/models gave no whole answer in time")
    if status in {401, 403}:
        return Checked(url, Verdict.UNJUDGEABLE, f"/v1/models says {status}: set VLLM_API_KEY")
    if status >= 500:
        return Checked(url, Verdict.UNREACHABLE, f"the proxy answers {status}: it has no backend that does")
    try:
        count = len(json.loads(body)["data"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return Checked(url, Verdict.UNJUDGEABLE, f"/v1/models gave status {status} and no list of models")
    return Checked(
        url,
        None,
        f"the proxy answers and lists {count} model(s); the engines behind it are not judged",
        {"models": count},
    )


# -- the remembered reading ------------------------------------------------------------------------------------------


def remember(memory: Memory) -> dict[str, Any]:
    """Return what the next run needs, as plain values."""
    return {
        "starts": list(memory.starts),
        "unproven": memory.unproven,
        "tracks": {label: asdict(track) for label, track in memory.tracks.items()},
        "whole": None if memory.whole is None else asdict(memory.whole),
        "tokens": memory.tokens,
        "steps": memory.steps,
    }


def readings(kept: Any, boot: str) -> dict[str, Any]:
    """Return what is remembered, by URL: a reading of another boot is none, for its times are monotonic.

    Raises ValueError if `kept` is nothing that we keep.
    """
    if not isinstance(kept, dict) or not isinstance(kept.get("servers"), dict):
        raise ValueError("it holds no readings")  # noqa: TRY004 - what a file holds, not what a caller gave
    servers: dict[str, Any] = kept["servers"] if kept.get("boot") == boot else {}
    return servers


def recall(plain: Any) -> Memory | None:
    """Return the memory of an earlier run, or None if it cannot be read (another version wrote it)."""
    try:
        return Memory(
            tracks={label: _track(track) for label, track in plain["tracks"].items()},
            whole=None if plain["whole"] is None else _track(plain["whole"]),
            starts=tuple(_number(start) for start in plain["starts"]),
            unproven=bool(plain["unproven"]),
            tokens=_pair(plain["tokens"]),
            steps=_pair(plain["steps"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _track(plain: Mapping[str, Any]) -> Track:
    series = plain["series"]
    found = None if series is None else EngineSeries(**_typed(EngineSeries, series))
    return Track(**{**_typed(Track, {**plain, "beacon": None, "series": None}), "series": found})


def _typed(kind: type[Track | EngineSeries], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `plain`, each of the type it has in `kind`. Raises KeyError or TypeError."""
    types = {one.name: one.type for one in fields(kind)}
    found = {name: _number(value) if type(value) in (int, float) else value for name, value in plain.items()}
    if not all(isinstance(value, types[name]) for name, value in found.items()):  # type: ignore[arg-type]  # no strings
        raise TypeError
    return found


def _number(value: Any) -> float:
    """Return a finite float. Raises TypeError or ValueError."""
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise TypeError
    return float(value)


def _pair(plain: Any) -> tuple[float, float] | None:
    return None if plain is None else (_number(plain[0]), _number(plain[1]))
