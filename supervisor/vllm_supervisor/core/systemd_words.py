"""What systemd prints, as values: time spans, commands with their variables, environment files.

Source of facts: systemd.time(7), systemd.service(5) on command lines, systemd.exec(5) on EnvironmentFile=.
"""

import re
from collections.abc import Mapping

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(y|month|w|d|h|min|s|ms|us)(?![a-z])")
_UNITS = {
    "y": 31_557_600.0, "month": 2_629_800.0, "w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0,
    "ms": 1e-3, "us": 1e-6,
}  # fmt: skip
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_WRITTEN_UNITS = {
    **_UNITS, "": 1.0, "m": 60.0, "usec": 1e-6, "msec": 1e-3, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "minute": 60.0, "minutes": 60.0, "hr": 3_600.0, "hour": 3_600.0, "hours": 3_600.0, "day": 86_400.0,
    "days": 86_400.0, "week": 604_800.0, "weeks": 604_800.0,
}  # fmt: skip
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_ARGV = re.compile(r"argv\[\]=(.*?) ; ignore_errors=")


def span(text: str) -> float | None:
    """Read a time span such as "1min 30s" as seconds; None for "infinity". Raises ValueError for anything else."""
    text = text.strip()
    if text == "infinity":
        return None
    if text == "0" or not text:
        raise ValueError(f"no time span: {text!r}")
    rest = _SPAN.sub("", text).strip()
    if rest:
        raise ValueError(f"no time span: {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in _SPAN.findall(text))


def setting_span(text: str) -> float | None:
    """Read a time limit as a unit's file has it, such as "90" or "2min"; None for no limit. ValueError for anything else."""
    text = text.strip()
    found = _WRITTEN.findall(text)
    if text == "infinity":
        return None
    if not found or _WRITTEN.sub("", text).strip() or any(unit not in _WRITTEN_UNITS for _, unit in found):
        raise ValueError(f"no time limit: {text!r}")
    return sum(float(number) * _WRITTEN_UNITS[unit] for number, unit in found) or None


def command(exec_start: str, environ: Mapping[str, str]) -> str:
    """Return the first command line of an ExecStart as `systemctl show` prints it, variables filled in."""
    found = _ARGV.search(exec_start)
    if found is None:
        return ""
    return _VARIABLE.sub(lambda match: environ.get(match[1] or match[2], ""), found[1])


def environment(text: str) -> dict[str, str]:
    """Read NAME=value lines of an environment file; what is no such line is passed over."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            found[name] = value.strip().removeprefix('"').removesuffix('"')
    return found
