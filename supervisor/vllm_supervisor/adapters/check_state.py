"""Keeps the last reading of `check` between two runs, in one small JSON file.

Rules:
* Times in it are monotonic, so a reading of another boot is no reading. A file that cannot be read is none either:
  the next run writes a new one.
* The file is replaced whole, mode 0600. A place that cannot be written is the user's to mend, and said so.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import UsageError


def load(path: Path, boot: str) -> dict[str, Any]:
    """Return what is remembered, by URL; empty without a reading of this boot."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict) or kept.get("boot") != boot or not isinstance(kept.get("servers"), dict):
        return {}
    servers: dict[str, Any] = kept["servers"]
    return servers


def save(path: Path, boot: str, servers: Mapping[str, Any]) -> None:
    """Replace the file. Raises UsageError where it cannot be written."""
    draft = path.with_name(f"{path.name}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"boot": boot, "servers": dict(servers)}, file)
        draft.replace(path)
    except OSError as fault:
        raise UsageError(
            f"--state {path}: {fault.strerror or fault}; give a file in a directory you may write"
        ) from fault
