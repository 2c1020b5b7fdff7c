"""What an installed systemd unit does to a supervisor or an engine, compared with the running configuration.

Source of facts: systemd.service(5), systemd.kill(5), systemd.resource-control(5); vLLM 0.32 under KillMode=control-group.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_supervisor.core.doctor import Finding, Level, ok
from vllm_supervisor.core.own_status import MEANINGS

FINAL = tuple(sorted(set(MEANINGS) - {0, 1, 3, 130}))  # our statuses after which a restart would meet the same end

TRIGGERS = ("TriggeredBy", "WantedBy", "RequiredBy", "OnFailureOf", "OnSuccessOf")
_NOT_ENABLED = {"disabled", "static", "masked", "masked-runtime"}
_OURS = re.compile(r"vllm[-_]supervisor\b.* (?:serve|run)\b")
_ASKS_TO_STOP = re.compile(r"vllm[-_]supervisor\b.* stop\b")
_BARE = re.compile(r"(?:^|[/ ])vllm serve\b|vllm\.entrypoints|\bvllm-openai\b")


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """A service: its name, whether a user's manager runs it, and what `systemctl show` says.

    `command` is its ExecStart with the variables of its environment filled in; `stop_s` is TimeoutStopSec in seconds,
    None for no limit.
    """

    name: str
    user: bool
    properties: Mapping[str, str]
    command: str
    environ: Mapping[str, str]
    stop_s: float | None
    off: bool = False  # it does not run, and nothing starts it

    @property
    def ours(self) -> bool:
        """Whether it runs a supervisor."""
        return bool(_OURS.search(self.command))

    @property
    def bare(self) -> bool:
        """Whether it runs vLLM without one."""
        return not self.ours and bool(_BARE.search(self.command))

    def words(self) -> list[str]:
        """Return its command line, word by word."""
        try:
            return shlex.split(self.command)
        except ValueError:
            return self.command.split()

    def serve_arguments(self) -> list[str] | None:
        """Return what follows `serve`, or None where there is no such command."""
        words = self.words()
        return words[words.index("serve") + 1 :] if "serve" in words else None

    def own_options(self) -> dict[str, list[str]]:
        """Return our options of it that stand before `serve` or `run`: "--config", "--set", "--name", "--engine"."""
        found: dict[str, list[str]] = {}
        words = iter(self.words()[1:])
        for word in words:
            if word in {"serve", "run"}:
                break
            name, equals, value = word.partition("=")
            if name in {"--config", "--set", "--name", "--engine"}:
                found.setdefault(name, []).append(value if equals else next(words, ""))
        return found


def is_off(name: str, blocks: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a unit does not run and nothing will start it; `blocks` are the properties of it and of its triggers.

    A unit that systemd does not know is none: whoever wrote its file may have it started by another manager.
    """
    block = blocks.get(name, {})
    if block.get("ActiveState") not in {"inactive", "failed"} or block.get("UnitFileState") not in _NOT_ENABLED:
        return False
    if block["UnitFileState"].startswith("masked"):
        return True
    return all(is_off(one, blocks) for key in TRIGGERS for one in block.get(key, "").split())


def limit_of_files(facts: UnitFacts) -> int | None:
    """Return LimitNOFILE, which systemd sets as the hard limit; None where it is not told or there is none."""
    value = facts.properties.get("LimitNOFILE", "")
    return int(value) if value.isdecimal() else None


def unit(facts: UnitFacts, needed_s: float, needed_files: int = 0) -> list[Finding]:
    """Judge one of our units; by the configuration a stop takes `needed_s`, and `needed_files` may be open at once."""
    found = [finding for rule in _RULES if (finding := rule(facts, needed_s)) is not None]
    allowed = limit_of_files(facts)
    if allowed is not None and allowed < needed_files:
        found.append(
            Finding(
                Level.WARNING,
                "unit",
                f"{facts.name}: LimitNOFILE={allowed}, and {needed_files} may be wanted (front_door.max_connections)",
                "at the limit new connections wait until old ones end",
                f"LimitNOFILE={max(needed_files, 65536)}",
            )
        )
    return found or [ok("unit", f"{facts.name} fits the configuration")]


def bare(facts: UnitFacts) -> Finding:
    """Judge a unit that runs vLLM without us."""
    if facts.off:
        return ok("rival", f"{facts.name} runs vLLM without a supervisor, but is switched off")
    restart = facts.properties.get("Restart", "no")
    return Finding(
        Level.WARNING,
        "rival",
        f"{facts.name} runs vLLM without a supervisor (Restart={restart})",
        "two servers want one GPU; and systemd takes the exit 0 of a vLLM whose engine died for success",
        f"systemctl {'mask' if facts.properties.get('UnitFileState') == 'static' else 'disable'} --now {facts.name}; "
        f"vllm-supervisor doctor --migrate {facts.name} shows what to run instead",
    )


def _kill_mode(facts: UnitFacts, _needed_s: float) -> Finding | None:
    mode = facts.properties.get("KillMode", "control-group")
    if mode == "mixed":
        return None
    if mode in {"process", "none"}:
        return Finding(
            Level.WARNING,
            "unit",
            f"{facts.name}: KillMode={mode}",
            "if we are killed, the engine lives on, holds the GPU, and nobody removes it before our next start",
            "KillMode=mixed",
        )
    return Finding(
        Level.ERROR,
        "unit",
        f"{facts.name}: KillMode={mode}",
        "TERM goes to every process at once: vLLM's EngineCore ends before the requests that we wait for",
        "KillMode=mixed",
    )


def _stop_limit(facts: UnitFacts, needed_s: float) -> Finding | None:
    if facts.stop_s is None or facts.stop_s >= needed_s:
        return None
    return Finding(
        Level.WARNING,
        "unit",
        f"{facts.name}: TimeoutStopSec is {facts.stop_s:g} s, and a stop takes up to {needed_s:g} s",
        "the drain is shortened to fit, so requests are cut that the configuration would let finish",
        f"TimeoutStopSec={needed_s + 20:.0f}s, or a shorter drain.budget or engine.stop_grace",
    )


def _stop_command(facts: UnitFacts, _needed_s: float) -> Finding | None:
    """Flag a command of ExecStop that asks for the stop: systemd asks as well, as soon as the command has ended."""
    command = facts.properties.get("ExecStop", "")
    asks = re.search(r"(?:^|[ /=])p?kill(?:all)?\b", command) or _ASKS_TO_STOP.search(command)
    if not asks or "--wait" in command:
        return None
    return Finding(
        Level.WARNING,
        "unit",
        f"{facts.name}: ExecStop asks for the stop, and systemd sends TERM itself when that command has ended",
        "a second request more than a second after the first ends the drain: what is open is cut",
        "no ExecStop: TERM by systemd is a stop in order",
    )


def _notify(facts: UnitFacts, _needed_s: float) -> Finding | None:
    if facts.properties.get("Type") in {"notify", "notify-reload"}:
        return None
    return Finding(
        Level.WARNING,
        "unit",
        f"{facts.name}: Type={facts.properties.get('Type', 'simple')}",
        "systemd cannot know when the model answers, kills no deadlocked loop, and does not learn the plan of a stop",
        "Type=notify, and WatchdogSec=60s",
    )


def _oom_policy(facts: UnitFacts, _needed_s: float) -> Finding | None:
    policy = facts.properties.get("OOMPolicy", "continue")
    if policy == "continue":
        return None
    return Finding(
        Level.WARNING,
        "unit",
        f"{facts.name}: OOMPolicy={policy}",
        "one worker killed for memory takes the supervisor with it, where a restart of the engine would do",
        "OOMPolicy=continue",
    )


def _restart(facts: UnitFacts, _needed_s: float) -> Finding | None:
    restart = facts.properties.get("Restart", "no")
    if restart == "no":
        return None
    if restart == "always":
        return Finding(
            Level.WARNING,
            "unit",
            f"{facts.name}: Restart=always",
            "`vllm-supervisor stop` is undone at once, and a start that cannot work is tried for ever",
            f"Restart=on-failure, and RestartPreventExitStatus={' '.join(map(str, FINAL))}",
        )
    prevented = set(facts.properties.get("RestartPreventExitStatus", "").split())
    missing = [str(status) for status in FINAL if str(status) not in prevented]
    if not missing or restart in {"on-abnormal", "on-abort", "on-watchdog"}:
        return None
    return Finding(
        Level.WARNING,
        "unit",
        f"{facts.name}: Restart={restart} also after status {', '.join(missing)}",
        "these mean that we gave up, or were stopped on request: systemd would fight the decision",
        f"RestartPreventExitStatus={' '.join(map(str, FINAL))}",
    )


def _watchdog(facts: UnitFacts, _needed_s: float) -> Finding | None:
    usec = facts.properties.get("WatchdogUSec", "0")
    # systemd 252 shows 0 for a service that has not been started, whatever its unit says.
    if usec in {"0", "infinity"} and facts.properties.get("ActiveState", "inactive") != "inactive":
        return Finding(
            Level.NOTE,
            "unit",
            f"{facts.name}: no WatchdogSec",
            "a deadlock of our own loop would go unnoticed",
            "WatchdogSec=60s",
        )
    return None


def _delegate(facts: UnitFacts, _needed_s: float) -> Finding | None:
    if facts.properties.get("Delegate") == "yes":
        return None
    return Finding(
        Level.NOTE,
        "unit",
        f"{facts.name}: no Delegate=yes",
        "the engine gets no control group of its own: no memory figures, and OOM kills are guessed",
        "Delegate=yes",
    )


_RULES: tuple[Callable[[UnitFacts, float], Finding | None], ...] = (
    _kill_mode,
    _stop_limit,
    _stop_command,
    _notify,
    _oom_policy,
    _restart,
    _watchdog,
    _delegate,
)
