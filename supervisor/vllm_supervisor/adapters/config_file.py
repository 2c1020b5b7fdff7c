"""The configuration file: TOML, read once.

A file that cannot be read or parsed is a ConfigError that names it, the line where there is one, and the mend.
"""

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import ConfigError

LIMIT = 1024 * 1024  # bytes; the file with every key and its comments has a fiftieth of it


def read(path: Path) -> dict[str, Any]:
    """Return the tables of `path`: a file, a pipe, or the null device, up to `LIMIT` bytes."""
    try:
        with path.open("rb") as file:
            kind = os.fstat(file.fileno())
            device = stat.S_ISCHR(kind.st_mode) or stat.S_ISBLK(kind.st_mode)
            if device and kind.st_rdev != Path(os.devnull).stat().st_rdev:
                raise ConfigError([f"--config {path}: this is a device; name a file"])
            content = file.read(LIMIT + 1)
        if len(content) > LIMIT:
            raise ConfigError([f"--config {path}: larger than 1 MiB; name a configuration file"])
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror}; name a file that can be read"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: byte {error.start} is not UTF-8; save the file as UTF-8"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"--config {path}: not valid TOML: {error}"]) from None
