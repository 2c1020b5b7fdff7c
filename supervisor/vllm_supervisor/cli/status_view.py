"""The status on one screen: rows of a label and a text, made from the status object.

Rules: a missing part is a missing row, never an error, since the supervisor that answers may be of another version.
Colours repeat what the words say; without a terminal only the words are left.
"""

from collections.abc import Mapping
from typing import Any

from vllm_supervisor.core.units import show_duration
from vllm_supervisor.core.words import verdict_line

Row = tuple[str, str, str]  # label, text, style ("" or a colour)

FEW_DESCRIPTORS = 64
_ENGINE_STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "down": "yellow"}
_VERDICT_STYLES = {"idle": "green", "busy": "green", "stuck": "red", "failing": "red", "dead": "red"}


def rows(status: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `status` (the object `GET /status` answers), the most telling first."""
    made = [
        _supervisor(status),
        _admission(_part(status, "admission")),
        _engine(_part(status, "engine")),
        *_processes(_part(status, "engine")),
        *_orphans(status.get("orphans")),
        *_health(_part(status, "health")),
        _drain(_part(status, "drain")),
        _restarts(_part(status, "restarts")),
        _counts("requests", _part(status, "requests")),
        _counts("executions", _part(status, "executions")),
        _ledger(_part(status, "ledger")),
        _memory(_part(status, "memory")),
        _descriptors(_part(status, "descriptors")),
    ]
    return [row for row in made if row[1]]


def _part(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = status.get(name)
    return part if isinstance(part, Mapping) else {}


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _number(value: object, words: str) -> str:
    return words.format(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _span(value: object, words: str) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    seconds = round(value)
    minutes, hours = seconds // 60, seconds // 3600
    if seconds < 120:
        text = f"{seconds} s"
    elif minutes < 120:
        text = f"{minutes} min {seconds % 60} s"
    else:
        text = f"{hours} h {minutes % 60} min"
    return words.format(text)


def _bytes(value: object, words: str) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    return words.format(f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB")


def _supervisor(status: Mapping[str, Any]) -> Row:
    text = _joined(
        str(status.get("name", "")),
        f"phase {status['phase']}" if "phase" in status else "",
        _number(status.get("pid"), "pid {}"),
        _span(status.get("uptime_s"), "up {}"),
        f"version {status['version']}" if "version" in status else "",
        f"release {status['release']}" if status.get("release") else "",
    )
    return ("supervisor", text, "" if status.get("phase") == "running" else "yellow")


def _ledger(part: Mapping[str, Any]) -> Row:
    """Say what is wrong with the evidence; of a ledger that is whole nothing is to be said."""
    failed, missing = part.get("failed"), part.get("missing")
    text = _joined(
        f"CANNOT BE WRITTEN: {part.get('error') or 'no reason given'}" if failed else "",
        "EVIDENCE MISSING" if missing else "",
        _number(part.get("lost") or None, "{} lines lost"),
        _number(part.get("late") or None, "{} late"),
        _number(part.get("at_risk") or None, "{} not surely on the disk"),
    )
    return ("ledger", text, "red")


def _admission(part: Mapping[str, Any]) -> Row:
    if "open" not in part:
        return ("admission", "", "")
    gate = "open" if part["open"] else f"closed: {part.get('reason') or 'no reason given'}"
    flight = _number(part.get("in_flight"), "{} in flight")
    held = _number(part.get("held") or None, "{} more still in the engine")
    limit = _number(part.get("limit"), "limit {}")
    return ("admission", _joined(gate, flight, held, limit), "green" if part["open"] else "yellow")


def _engine(part: Mapping[str, Any]) -> Row:
    state = str(part.get("state", ""))
    text = _joined(
        state,
        _number(part.get("incarnation"), "incarnation {}"),
        _number(part.get("pid"), "pid {}"),
        _span(part.get("uptime_s"), "up {}"),
        str(part.get("address") or ""),
        {True: "with beacon", False: "without beacon"}.get(part.get("beacon"), ""),  # type: ignore[arg-type]  # None: ""
    )
    return ("engine", text, _ENGINE_STYLES.get(state, "red"))


def _processes(part: Mapping[str, Any]) -> list[Row]:
    listed = part.get("processes")
    processes = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    return [
        (
            "",
            _joined(
                str(process.get("name", "")),
                _number(process.get("pid"), "pid {}"),
                _bytes(process.get("rss_bytes"), "{}"),
            ),
            "dim",
        )
        for process in processes[:12]
    ]


def _health(part: Mapping[str, Any]) -> list[Row]:
    verdict = str(part.get("verdict", ""))
    text = verdict_line(
        verdict, str(part.get("sentence") or ""), _span(part.get("since_s"), "for {}") if verdict else ""
    )
    work = _joined(
        _number(part.get("running"), "{:.0f} running"),
        _number(part.get("waiting"), "{:.0f} waiting"),
        _number(part.get("tokens_per_s"), "{:.1f} tokens/s"),
        _number(part.get("steps_per_s"), "{:.1f} steps/s"),
    )
    return [("health", text, _VERDICT_STYLES.get(verdict, "yellow")), ("work", work, "")]


def _drain(part: Mapping[str, Any]) -> Row:
    text = _joined(
        _number(part.get("in_flight"), "{} in flight"),
        _span(part.get("oldest_s"), "oldest {}"),
        _span(part.get("remaining_s"), "{} left"),
        _span(part.get("budget_s"), "of {}"),
    )
    return ("drain", text, "yellow")


def _restarts(part: Mapping[str, Any]) -> Row:
    causes, budget, last = (_part(part, name) for name in ("by_cause", "budget", "last"))
    text = _joined(
        _number(part.get("total"), "{}"),
        " ".join(f"{cause} {count}" for cause, count in causes.items()),
        _budget("crashes", budget),
        _budget("hangs", _part(budget, "stuck")),
        f"last: {last['cause']}" if "cause" in last else "",
        _span(last.get("ago_s"), "{} ago"),
        _number(last.get("requests_lost"), "{} requests lost"),
        _span(last.get("ready_after_s"), "ready after {}"),
    )
    return ("restarts", text, "")


def _budget(what: str, part: Mapping[str, Any]) -> str:
    """Say how much of a budget is used; "" for one that a supervisor of another version does not tell."""
    within = part.get("within_s")
    used = f"{what} {part.get('used')} of {part.get('max')}" if "max" in part else ""
    return f"{used} within {show_duration(within)}" if used and isinstance(within, int | float) else used


def _orphans(listed: object) -> list[Row]:
    """Name engines of others that nobody seems to look after."""
    found = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    return [
        (
            "orphan",
            _joined(str(one.get("name", "")), _number(one.get("pid"), "pid {}"), str(one.get("why") or "")),
            "yellow",
        )
        for one in found[:12]
    ]


def _counts(label: str, part: Mapping[str, Any]) -> Row:
    return (label, _joined(*(f"{count} {name.replace('_', ' ')}" for name, count in part.items())), "")


def _descriptors(part: Mapping[str, Any]) -> Row:
    """Warn when few are left: without one no connection is accepted. Of plenty nothing is to be said."""
    used, limit = part.get("open"), part.get("limit")
    few = isinstance(used, int) and isinstance(limit, int) and limit - used < FEW_DESCRIPTORS
    text = f"{used} of {limit} open: new connections may be refused; raise LimitNOFILE=" if few else ""
    return ("descriptors", text, "red")


def _memory(part: Mapping[str, Any]) -> Row:
    text = _joined(
        _bytes(part.get("available_bytes"), "{} available"),
        _bytes(part.get("floor_bytes"), "floor {}"),
        f"pressure {part['pressure']}" if part.get("pressure") is not None else "",
        _bytes(part.get("minimum_bytes"), "least {} since the engine's start"),
        str(part.get("waiting_for") or ""),
    )
    return ("memory", text, "")
