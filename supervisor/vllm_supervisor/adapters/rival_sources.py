"""Texts on this machine that somebody runs by the clock or in the background: where rival watchdogs live.

Rules:
* Only files a watchdog is usually made of, only small ones, a bounded number; what may not be read is counted.
* Scripts named in them are read as well, one level deep.
* Nothing is run and nothing is changed.

Sources: crontab(5), cron(8), systemd.unit(5), Docker's hostconfig.json.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_supervisor.core.doctor_rivals import Container, Source
from vllm_supervisor.core.json_text import parse_json

_MOST_FILES = 3000
_LARGEST = 256 * 1024
_CRON = (
    "etc/crontab", "etc/anacrontab", "etc/cron.d/*", "etc/cron.hourly/*", "etc/cron.daily/*", "etc/cron.weekly/*",
    "var/spool/cron/*", "var/spool/cron/crontabs/*",
)  # fmt: skip
_UNITS = (
    "etc/systemd/system/**/*.service", "etc/systemd/system/**/*.timer", "etc/systemd/system/**/*.conf",
    "run/systemd/system/*.service", "usr/local/lib/systemd/system/*.service", "usr/lib/systemd/system/*.service",
    "etc/systemd/user/*.service", "home/*/.config/systemd/user/*.service", "root/.config/systemd/user/*.service",
)  # fmt: skip
_WATCHDOGS = (
    "etc/supervisor/conf.d/*", "etc/supervisor/*.conf", "etc/supervisord.conf", "etc/supervisord.d/*", "etc/monit/**/*",
    "etc/monitrc", "etc/watchdog.conf", "etc/watchdog.d/*",
)  # fmt: skip
_CONTAINERS = ("var/lib/docker/containers/*/hostconfig.json",)
_PATH = re.compile(r"(?<![\w.])(/(?:[\w.@+-]+/)+[\w.@+-]+)")
_SYSTEM = (
    "/usr/bin/",
    "/bin/",
    "/sbin/",
    "/usr/sbin/",
    "/lib/",
    "/usr/lib/",
    "/dev/",
    "/proc/",
    "/sys/",
    "/run/",
    "/etc/",
)


@dataclass(frozen=True, slots=True)
class Sources:
    """What was read, and how many files may only be read by somebody else."""

    texts: list[Source]
    containers: list[Container]
    hidden: int


def gather(root: Path = Path("/")) -> Sources:
    """Read everything below `root`."""
    texts: list[Source] = []
    hidden = 0
    kinds: Sequence[tuple[str, Sequence[str]]] = (("cron", _CRON), ("unit", _UNITS), ("watchdog", _WATCHDOGS))
    for kind, patterns in kinds:
        for path in _matching(root, patterns):
            text = _read(path)
            if text is None:
                hidden += 1
                continue
            where = f"/{path.relative_to(root)}"
            texts.append(Source(where, kind, text))
            texts += _scripts(root, where, text)
    return Sources(texts, [found for path in _matching(root, _CONTAINERS) if (found := _container(path))], hidden)


def _matching(root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    count = 0
    for pattern in patterns:
        try:
            for path in sorted(root.glob(pattern)):
                if count < _MOST_FILES and path.is_file():
                    count += 1
                    yield path
        except OSError:  # a directory that only root may list
            continue


def _scripts(root: Path, where: str, text: str) -> Iterator[Source]:
    """Yield the scripts that a text names by their paths; programs of the system are none."""
    for named in dict.fromkeys(_PATH.findall(text)):
        if named.startswith(_SYSTEM) and not named.startswith(("/etc/cron", "/usr/lib/cron")):
            continue
        path = root / named.removeprefix("/")
        script = _read(path) if path.is_file() else None
        if script is not None and script.startswith("#!"):
            yield Source(f"{named} (named in {where})", "script", script)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST).decode("utf-8", "replace")
    except OSError:
        return None


def _container(path: Path) -> Container | None:
    try:
        host = parse_json((_read(path) or "").encode())
        config = parse_json((_read(path.with_name("config.v2.json")) or "").encode())
        words = [config["Config"].get("Image", ""), config.get("Path", ""), *config.get("Args", [])]
        policy = host.get("RestartPolicy", {}).get("Name", "")
        return Container(config.get("Name", path.parent.name).removeprefix("/"), policy, " ".join(words))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
