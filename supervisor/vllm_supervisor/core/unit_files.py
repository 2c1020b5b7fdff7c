"""What a service's own files say of its stop limit, for where systemd cannot be asked.

Rules:
* A unit's file, then its drop-ins in the order of their file names; the last assignment wins. A drop-in hides those of
  the same name of a less specific unit name, or of a directory that comes later.
* An instance without a file of its own has its template's.
* Edits that systemd has not read yet (daemon-reload) are seen here already.

Sources: systemd.unit(5) on the load path and drop-ins, systemd.service(5) on TimeoutStopSec, systemd-system.conf(5).
"""

from collections.abc import Iterable, Mapping

from vllm_supervisor.core.systemd_words import setting_span

# Of the system's manager, the first counts most.
DIRECTORIES = (
    "/etc/systemd/system.control", "/run/systemd/system.control", "/run/systemd/transient",
    "/run/systemd/generator.early", "/etc/systemd/system", "/etc/systemd/system.attached", "/run/systemd/system",
    "/run/systemd/system.attached", "/run/systemd/generator", "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system", "/lib/systemd/system", "/run/systemd/generator.late",
)  # fmt: skip
MANAGER = ("/etc/systemd/system.conf", "/usr/lib/systemd/system.conf")  # the first that is there
MANAGER_DROP_INS = ("/etc/systemd/system.conf.d", "/run/systemd/system.conf.d", "/usr/lib/systemd/system.conf.d")

_DEFAULT_S = 90.0


def file_names(unit: str) -> tuple[str, ...]:
    """Return the names under which the unit's file may stand, the one that counts first."""
    stem, _, kind = unit.rpartition(".")
    template, at, _instance = stem.partition("@")
    return (unit, f"{template}@.{kind}") if at else (unit,)


def drop_in_names(unit: str) -> tuple[str, ...]:
    """Return the names of the unit's drop-in directories, the most specific first."""
    stem, _, kind = unit.rpartition(".")
    parts = stem.partition("@")[0].split("-")
    prefixes = ["-".join(parts[:count]) + "-" for count in range(len(parts) - 1, 0, -1)]
    return tuple(f"{name}.d" for name in (*file_names(unit), *(f"{prefix}.{kind}" for prefix in prefixes), kind))


def drop_ins(found: Iterable[Mapping[str, str]]) -> list[str]:
    """Put drop-ins into their order. `found`: their texts by file name, a mapping a directory, what counts most first."""
    seen: dict[str, str] = {}
    for directory in found:
        for name, text in directory.items():
            seen.setdefault(name, text)
    return [seen[name] for name in sorted(seen) if name.endswith(".conf")]


def stop_limit(unit_texts: Iterable[str], manager_texts: Iterable[str]) -> float | None:
    """Return TimeoutStopSec in seconds, None for no limit; both kinds of texts in the order in which they count.

    Raises ValueError for a value that is no time.
    """
    keys = {"TimeoutStopSec", "TimeoutSec"}
    written = _last(unit_texts, "Service", keys) or _last(manager_texts, "Manager", {"DefaultTimeoutStopSec"})
    return setting_span(written) if written else _DEFAULT_S


def _last(texts: Iterable[str], section: str, keys: set[str]) -> str:
    found = ""
    for text in texts:
        inside = False
        for line in map(str.strip, text.splitlines()):
            if line.startswith("["):
                inside = line == f"[{section}]"
            key, equals, value = line.partition("=")
            if inside and equals and key.strip() in keys:
                found = value.strip()
    return found
