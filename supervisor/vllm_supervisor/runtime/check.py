"""Checks servers that are not ours: reads, waits, reads again, and sends one probe where nobody is served.

Rules:
* Nothing is sent but reads unless the server is idle by its own metrics, read just before.
* A look has one deadline, waits on top, and all of it shares that: a monitoring system cuts off after 10 s.
* The first reads are made at once, so that a server that answers none costs their time once.
* Each read uses a new connection: a proxy that spreads them is found out.
* Several servers are checked at the same time; none waits for another.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import trio

from vllm_supervisor.adapters import engine_probe
from vllm_supervisor.adapters.engine_probe import Site
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.check import (
    Checked,
    Target,
    conclude,
    of_health,
    of_proxy,
    of_tls,
    policy,
    recall,
    remember,
    with_port,
    with_probe,
)
from vllm_supervisor.core.health import Judgement, Memory, judge
from vllm_supervisor.core.metrics_scan import metrics_sample
from vllm_supervisor.core.probe import (
    HEALTH_PATH,
    IS_PAUSED_PATH,
    METRICS_PATH,
    MODELS_PATH,
    PROBE_ID_PREFIX,
    Reach,
    TlsFault,
    says_paused,
)
from vllm_supervisor.core.samples import Observation
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.core.words import Verdict

# Verdicts that another read would not change.
_SETTLED = {Verdict.UNREACHABLE, Verdict.UNJUDGEABLE, Verdict.ASLEEP, Verdict.PAUSED, Verdict.STUCK}


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How to check. Times in seconds; `waits` None: two reads `short` apart."""

    waits: tuple[float, float] | None = None
    proxy: bool = False
    probe: bool = True
    model: str | None = None
    api_key: str | None = None
    short: float = 1.0
    again: float = 0.3  # between the reads that tell a restart from a proxy
    read_limit: float = 10.0  # of one read
    look_limit: float = 8.0  # of everything together, the probe included; explicit waits come on top


async def check_all(
    targets: list[Target], options: CheckOptions, remembered: Mapping[str, Any] | None
) -> tuple[list[Checked], dict[str, Any]]:
    """Check every target; return the results in their order, and what is to be remembered by URL.

    `remembered` None: nothing is kept between runs.
    """
    found: dict[int, Checked] = {}
    kept: dict[str, Any] = {}

    async def one(index: int, target: Target) -> None:
        check = _Check(target, options)
        memory = recall(remembered.get(target.url)) if remembered is not None else None
        found[index] = with_port(await check.run(memory, stateful=remembered is not None), target)
        kept[target.url] = remember(check.memory)

    async with trio.open_nursery() as nursery:
        for index, target in enumerate(targets):
            nursery.start_soon(one, index, target)
    return [found[index] for index in range(len(targets))], kept


class _Check:
    """The check of one server."""

    def __init__(self, target: Target, options: CheckOptions) -> None:
        self.target = target
        self.options = options
        self.memory = Memory()
        self.restarted = False
        self.until = time.monotonic() + options.look_limit
        self.site = Site(
            target.host, target.prefix, ssl.create_default_context() if target.tls else None, options.api_key
        )

    async def run(self, earlier: Memory | None, *, stateful: bool) -> Checked:
        """Return what the server is."""
        if self.options.proxy:
            reply = await self._get(MODELS_PATH, self.options.look_limit)
            if (fault := await self._tls_fault(reply)) is not None:
                return of_tls(self.target.url, fault)
            return of_proxy(self.target.url, reply.reach, reply.status, reply.body)
        health, pause, metrics = await self._first()
        if (fault := await self._tls_fault(health, pause, metrics)) is not None:
            return of_tls(self.target.url, fault)
        said = of_health(self.target.url, health.status, health.body)
        if said is not None:
            return _unless_scaling(said, metrics)
        paused = says_paused(pause.status, pause.body)
        if earlier is not None:
            self.memory = earlier
        waits, short = self.options.waits, self.options.short
        rules = policy(waits, remembered=stateful and earlier is not None)
        judgement = self._judge(metrics, rules, paused)
        if earlier is None:
            wait = short if waits is None or stateful else sum(waits)
            end = time.monotonic() + wait
            if waits is not None and not stateful:
                self.until += wait
            while judgement.verdict not in _SETTLED and (rest := end - time.monotonic()) > 0:
                await trio.sleep(min(short, rest))
                judgement = await self._read(rules, paused)
                if judgement.verdict is Verdict.IDLE or judgement.progress_at is not None or judgement.restarted:
                    break
        if self.restarted:
            for _ in range(3):
                await trio.sleep(self.options.again)
                judgement = await self._read(rules, paused)
        sure = waits is not None or earlier is not None
        result = conclude(self.target.url, judgement, restarted=self.restarted, sure=sure)
        read = judgement.evidence.get("scrape") == "ok" and judgement.running is not None
        if self.options.probe and read and not judgement.running and not judgement.waiting and judgement.wants_probe:
            return await self._probe(result)
        return result

    async def _tls_fault(self, *replies: engine_probe.Reply) -> TlsFault | None:
        """Return what is wrong between http and https, or with a certificate, if every answer may come of it."""
        told = next((reply.tls for reply in replies if reply.tls is not None), None)
        if told is not None or self.target.tls or isinstance(self.target.address, UnixAddress):
            return told
        # A TLS server ends a connection that begins with HTTP, or says so in plain HTTP with 400, as nginx does.
        if all(
            reply.reach is Reach.BROKEN or reply.status == 400 for reply in replies
        ) and await engine_probe.speaks_tls(self.target.address, timeout=self._left() / 2):
            return TlsFault.TLS_WANTED
        return None

    async def _first(self) -> tuple[engine_probe.Reply, engine_probe.Reply, engine_probe.Reply]:
        """Read /health, whether an operator paused it, and /metrics, all at once, in half of the time there is."""
        found: dict[str, engine_probe.Reply] = {}

        async def one(path: str) -> None:
            found[path] = await self._get(path, self.options.look_limit / 2)

        async with trio.open_nursery() as nursery:
            for path in (HEALTH_PATH, IS_PAUSED_PATH, METRICS_PATH):
                nursery.start_soon(one, path)
        return found[HEALTH_PATH], found[IS_PAUSED_PATH], found[METRICS_PATH]

    async def _read(self, rules: HealthPolicy, paused: bool | None) -> Judgement:
        return self._judge(await self._get(METRICS_PATH, self._left()), rules, paused)

    def _judge(self, reply: engine_probe.Reply, rules: HealthPolicy, paused: bool | None) -> Judgement:
        now = time.monotonic()
        seen = Observation(
            at=now,
            ready_at=0.0,
            metrics=metrics_sample(now, reply.reach, reply.status, reply.body),
            paused=paused,
        )
        self.memory, judgement = judge(self.memory, seen, rules)
        self.restarted = self.restarted or judgement.restarted
        return judgement

    def _left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    async def _get(self, path: str, within: float) -> engine_probe.Reply:
        limit = min(self.options.read_limit, within)
        return await engine_probe.exchange(self.target.address, "GET", path, site=self.site, timeout=limit)

    async def _probe(self, found: Checked) -> Checked:
        """Ask an idle server for one token, and wait as long as the waits say, or as long as the look may still take."""
        waits = self.options.waits
        limit = self._left() if waits is None else sum(waits)
        begin = trio.current_time()
        result = None
        with trio.move_on_after(limit):
            result = await engine_probe.probe(
                self.target.address,
                model=self.options.model,
                request_id=f"{PROBE_ID_PREFIX}check-{time.monotonic_ns():x}",
                site=self.site,
            )
        return with_probe(found, result, trio.current_time() - begin, sure=waits is not None)


def _unless_scaling(said: Checked, metrics: engine_probe.Reply) -> Checked:
    """Take a 503 of /health for what it says, unless every path says it: an engine that is being scaled does."""
    if said.verdict is Verdict.DEAD and metrics.status == 503 and not said.evidence:  # no supervisor said it
        return replace(said, verdict=Verdict.SUSPECT, sentence="every path answers 503: it scales, or goes down")
    return said
