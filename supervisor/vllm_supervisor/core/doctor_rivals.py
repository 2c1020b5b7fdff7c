"""Find rival watchdogs: cron lines, units, scripts and containers that restart, kill or probe what we supervise.

Rules:
* A text is a rival when it names our server (vllm, its port on this machine, our unit) and acts on servers; a text
  that only asks is a note.
* Comments name nothing. What we could not read is the gatherer's to say.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_supervisor.core.doctor import Finding, Level, ok
from vllm_supervisor.core.neighbours import REMEDY, Server


@dataclass(frozen=True, slots=True)
class Source:
    """A text that something else runs. `where` names it for people; `kind`: "cron", "unit", "script" or "watchdog"."""

    where: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container of this machine: its name, restart policy and command line with its image."""

    name: str
    restart: str
    command: str


_ACTS = re.compile(
    r"\b(?:systemctl|service)\b[^\n;|&]*\b(?:restart|try-restart|reload-or-restart|stop|kill)\b"
    r"|\b(?:pkill|killall|fuser\s+-k\w*|kill\s+-\w+|kill\s+[\"$`0-9(])"
    r"|\b(?:docker|podman|nerdctl)\b[^\n;|&]*\b(?:restart|kill|stop|rm)\b"
    r"|\bsupervisorctl\b[^\n;|&]*\b(?:restart|stop|signal)\b"
    r"|\b(?:reboot|shutdown)\b"
    r"|^\s*(?:autorestart\s*=\s*(?:true|unexpected)|if failed\b.*restart)",
    re.MULTILINE,
)
_ASKS = re.compile(r"\b(?:curl|wget|http|nc|urlopen|requests\.get|httpx)\b")
_OUR_UNIT = re.compile(r"^\s*ExecStart=.*vllm[-_]supervisor\b.* (?:serve|run)\b", re.MULTILINE)
_UNIT_FILE = re.compile(r"/(?P<unit>[^/\s]+\.(?:service|timer))(?:\.d/[^/\s]+)?\)?$")
_COMMENT = re.compile(r"^\s*[#;].*$", re.MULTILINE)


def unit_of(source: Source) -> str:
    """Return the unit a text belongs to, itself or as a script named in it; "" for none."""
    found = _UNIT_FILE.search(source.where)
    return found["unit"] if found else ""


def suspects(sources: Sequence[Source], ports: Sequence[int]) -> list[str]:
    """Return the units that would be found to be rivals, to be asked whether they are in use at all."""
    named = (unit_of(source) for source in sources if _judge(source, ports) is not None)
    return list(dict.fromkeys(name for name in named if name))


def rivals(sources: Sequence[Source], ports: Sequence[int], off: Collection[str] = ()) -> list[Finding]:
    """Judge every text; `ports` are the public ports of our servers, `off` the units that nothing starts."""
    used = (source for source in sources if unit_of(source) not in off)
    found = [finding for source in used if (finding := _judge(source, ports)) is not None]
    return found or [ok("rival", f"no rival watchdog among {len(sources)} cron files, units and scripts")]


def bare_servers(servers: Sequence[Server]) -> list[Finding]:
    """Name each vLLM server of this machine that no supervisor owns, whoever started it."""
    why = "it takes the memory of the next engine, and vLLM binds its port long before it listens there"
    return [
        Finding(Level.WARNING, "bare_vllm", f"{server} runs on this machine without a supervisor", why, REMEDY)
        for server in servers
    ] or [ok("bare_vllm", "no vLLM server runs here without a supervisor")]


def _judge(source: Source, ports: Sequence[int]) -> Finding | None:
    text = _COMMENT.sub("", source.text)
    if source.kind == "unit" and _OUR_UNIT.search(text):
        return None
    named = _named(text, ports)
    if not named:
        return None
    if act := _ACTS.search(text):
        does = " ".join(act[0].split())[:60]
        return Finding(
            Level.WARNING,
            "rival",
            f"{source.where} ({source.kind}) speaks of {named} and can do `{does}`",
            "a second authority cannot tell a long prefill from a hang, and cuts every open request when it is wrong",
            "let it call `vllm-supervisor report --source NAME --reason TEXT` instead, or disable it"
            + (f": systemctl disable --now {unit_of(source)} and what triggers it" if unit_of(source) else ""),
        )
    if _ASKS.search(text):
        return Finding(
            Level.NOTE,
            "rival",
            f"{source.where} ({source.kind}) asks {named}",
            "harmless by itself; /health here is readiness, and is 503 during a load and a drain",
            "let it ask /livez for life and /readyz for readiness, or use `vllm-supervisor check`",
        )
    return None


def _named(text: str, ports: Sequence[int]) -> str:
    """Say what of ours a text names, or ""."""
    for port in ports:
        if re.search(rf"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])?:{port}\b", text):
            return f"port {port}"
        if re.search(rf"\b(?:fuser|lsof|ss|PORT=)[^\n]*\b{port}\b", text):
            return f"port {port}"
    if re.search(r"vllm[-_]supervisor\b", text):
        return "vllm-supervisor"
    return "vllm" if re.search(r"\bvllm\b", text, re.IGNORECASE) else ""


def containers(found: Sequence[Container], ports: Sequence[int]) -> list[Finding]:
    """Judge the restart policies of containers that run vLLM."""
    findings = []
    for one in found:
        if one.restart in {"", "no"} or not _named(one.command, ports):
            continue
        ours = "vllm-supervisor" in one.command
        findings.append(
            Finding(
                Level.NOTE if ours else Level.WARNING,
                "rival",
                f"container {one.name} has the restart policy {one.restart}"
                + ("" if ours else " and runs vLLM without a supervisor"),
                "it starts again after every end of ours, a stop on request and a start that cannot work included"
                if ours
                else "a start that fails for a reason that repeats is tried for ever; on unified memory that wedges hosts",
                "use the policy on-failure with a small number of tries"
                if ours
                else "run vllm-supervisor in the container, with the policy on-failure",
            )
        )
    return findings
