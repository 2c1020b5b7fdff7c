"""One small JSON file of ours, read back whole and replaced whole.

Rules:
* Reading follows no link, waits for no pipe, and takes at most `LIMIT` bytes: what stands there may be anybody's work.
* A file is replaced at once, mode 0600, so that a reader never sees half of it.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from vllm_supervisor.core.json_text import JsonError, parse_json

LIMIT = 4 * 1024 * 1024  # bytes; a reading of one server has about a thousand


def read(path: Path) -> Any:
    """Return the value in the file.

    Raises FileNotFoundError, any other OSError with a strerror for people if that is no file to be read or replaced, and
    JsonError if its content is none of ours.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    with os.fdopen(fd, "rb") as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise JsonError(f"larger than {LIMIT // 2**20} MiB")
    return parse_json(content)


def replace(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Put `value` there in the place of whatever it was. Raises OSError."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)  # of a run that was killed while it wrote
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent)
        file.write("\n")
    draft.replace(path)
