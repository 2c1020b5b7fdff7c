"""The configuration file: TOML, read once.

A file that cannot be read or parsed is a ConfigError that names it, the line where there is one, and the mend.
"""

import tomllib
from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """Return the tables of `path`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror}; name a file that can be read"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: byte {error.start} is not UTF-8; save the file as UTF-8"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"--config {path}: not valid TOML: {error}"]) from None
