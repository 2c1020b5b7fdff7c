"""A unit that somebody else wrote, with everything it refers to: its file and drop-ins, environment files, users' homes.

Rules:
* A name is asked of systemd (`systemctl cat`), and looked for in the directories of units where that does not answer; a
  path is read, with the drop-ins beside it.
* Only read, never changed.

Sources: systemctl(1), systemd.unit(5).
"""

import pwd
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core import migrate, unit_files
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.migrate import OldUnit
from vllm_supervisor.core.systemd_words import environment

Ask = Callable[[Sequence[str]], str]


def read(unit: str, ask: Ask) -> OldUnit:
    """Read `unit`, a name such as vllm.service or a path. Raises SetupError where there is no such thing."""
    path = Path(unit)
    name = path.name if path.name.endswith(".service") else f"{path.name}.service"
    texts = _beside(path) if "/" in unit or path.is_file() else _asked(name, ask) or _found(name)
    if not texts:
        raise SetupError(
            f"--migrate {unit}: there is no such unit; give its name (vllm.service) or the path of its file"
        )
    found = migrate.settings(texts)
    files = {value.removeprefix("-") for _, value in found.get("EnvironmentFile", [])}
    users = {value for _, value in found.get("User", [])} | {"root"}
    return OldUnit(
        name=name,
        texts=tuple(texts),
        files={file: environment(_text(Path(file)) or "") for file in files},
        homes={user: home for user in users if (home := _home(user))},
    )


def _beside(path: Path) -> list[str]:
    text = _text(path)
    drop_ins = sorted(path.with_name(f"{path.name}.d").glob("*.conf"))
    return [] if text is None else [text, *(one for drop_in in drop_ins if (one := _text(drop_in)) is not None)]


def _asked(name: str, ask: Ask) -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        return [ask(["cat", "--", name])]
    return []


def _found(name: str) -> list[str]:
    for directory in unit_files.DIRECTORIES:
        for file in unit_files.file_names(name):
            if texts := _beside(Path(directory, file)):
                return texts
    return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _home(user: str) -> str:
    try:
        return (pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)).pw_dir
    except KeyError:
        return ""
