"""The services that systemd knows and that run a supervisor or vLLM, with what it has loaded of them.

Rules:
* Asked of `systemctl`, which the caller runs; a manager that does not answer has no units, and that is told.
* Installed units that are not loaded are found by their files' names.

Sources: systemctl(1), systemd.unit(5).
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_supervisor.core.doctor_units import TRIGGERS, UnitFacts, is_off
from vllm_supervisor.core.systemd_words import command, environment, span

_PROPERTIES = (
    "Id", "ActiveState", "Type", "KillMode", "TimeoutStopUSec", "OOMPolicy", "Restart", "RestartPreventExitStatus", "WatchdogUSec",
    "Delegate", "LimitNOFILE", "ExecStart", "ExecStop", "Environment", "EnvironmentFiles", "UnitFileState",
)  # fmt: skip
_MOST = 200  # units looked at
_DEPTH = 3  # a service, its timer, and what wants that

Ask = Callable[[Sequence[str]], str]


def services(ask: Ask, *, user: bool, also: Sequence[str] = ()) -> list[UnitFacts] | None:
    """Return the services of one manager that run a supervisor or vLLM; None if it does not answer. Blocks for seconds.

    `also` names units to look at whether loaded or not: an instance of a template that does not run is in no list.
    """
    scope = ["--user"] if user else []
    wanted = f"--property={','.join(_PROPERTIES)}"
    try:
        printed = ask([*scope, "show", wanted, "--", "*.service"])
        listed = ask([*scope, "list-unit-files", "--no-legend", "--plain", "--type=service", "--", "*vllm*"])
        loaded = {block.get("Id", "") for block in _blocks(printed)}
        names = [line.split()[0] for line in listed.splitlines() if line.split()]
        missing = [name for name in dict.fromkeys([*names, *also]) if name not in loaded and "@." not in name][:_MOST]
        if missing:
            printed += "\n\n" + ask([*scope, "show", wanted, "--", *missing])
    except (OSError, subprocess.SubprocessError):
        return None
    found = [_facts(block, user=user) for block in _blocks(printed)]
    kept = [facts for facts in found if facts.ours or facts.bare][:_MOST]
    idle = switched_off(ask, [facts.name for facts in kept], user=user)
    return [replace(facts, off=facts.name in idle) for facts in kept]


def switched_off(ask: Ask, names: Sequence[str], *, user: bool) -> set[str]:
    """Return those of the units that do not run and that nothing will start; empty where systemd does not answer."""
    wanted = f"--property=Id,ActiveState,UnitFileState,{','.join(TRIGGERS)}"
    blocks: dict[str, Mapping[str, str]] = {}
    rest = list(dict.fromkeys(names))[:_MOST]
    for _ in range(_DEPTH):
        if not rest:
            break
        try:
            printed = ask([*(["--user"] if user else []), "show", wanted, "--", *rest])
        except (OSError, subprocess.SubprocessError):
            return set()
        blocks |= {block.get("Id", ""): block for block in _blocks(printed)}
        named = [one for block in blocks.values() for key in TRIGGERS for one in block.get(key, "").split()]
        rest = [one for one in dict.fromkeys(named) if one not in blocks][:_MOST]
    return {name for name in names if is_off(name, blocks)}


def triggers(ask: Ask, names: Sequence[str]) -> dict[str, list[str]]:
    """Return for each of the services that a timer or the like starts what starts it."""
    found = {}
    for name in dict.fromkeys(filter(None, names)):
        if started_by := property_of(ask, name, "TriggeredBy").split():
            found[name] = started_by
    return found


def property_of(ask: Ask, name: str, key: str) -> str:
    """Return one property of a unit, or "" where systemd does not answer."""
    try:
        return ask(["show", f"--property={key}", "--value", "--", name]).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _blocks(printed: str) -> list[dict[str, str]]:
    """Take apart what `show` printed: one block a unit, NAME=VALUE lines, blocks apart by an empty line.

    A name may have several lines, as EnvironmentFiles has: their values are joined by a blank.
    """
    blocks = []
    for block in printed.split("\n\n"):
        found: dict[str, str] = {}
        for name, equals, value in (line.partition("=") for line in block.splitlines()):
            if equals:
                found[name] = f"{found[name]} {value}" if name in found else value
        if found:
            blocks.append(found)
    return blocks


def _facts(block: dict[str, str], *, user: bool) -> UnitFacts:
    environ = environment("\n".join(block.get("Environment", "").split(" ")))
    for word in block.get("EnvironmentFiles", "").split():
        if word.startswith("/"):
            with suppress(OSError):  # one that only root may read hides its variables
                environ |= environment(Path(word).read_text("utf-8", "replace"))
    stop_s = None
    with suppress(ValueError):
        stop_s = span(block.get("TimeoutStopUSec", "infinity"))
    return UnitFacts(
        name=block.get("Id", "?"),
        user=user,
        properties=block,
        command=command(block.get("ExecStart", ""), environ),
        environ=environ,
        stop_s=stop_s,
    )
