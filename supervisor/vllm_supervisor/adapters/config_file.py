"""The configuration file: TOML, read once.

Rules:
* A file that cannot be read or parsed is a ConfigError that names it, the line where there is one, and the mend.
* Nothing is waited for without an end: a named pipe is refused, an open one (`<(…)`, standard input) has `PATIENCE`.
"""

import os
import select
import stat
import time
import tomllib
from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import ConfigError

LIMIT = 1024 * 1024  # bytes; the file with every key and its comments has a fiftieth of it
PATIENCE = 10.0  # seconds for whoever writes into a pipe


def read(path: Path) -> dict[str, Any]:
    """Return the tables of `path`: a file, a pipe, or the null device, up to `LIMIT` bytes."""
    try:
        content = _content(path)
        if len(content) > LIMIT:
            raise ConfigError([f"--config {path}: larger than 1 MiB; name a configuration file"])
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror}; name a file that can be read"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: byte {error.start} is not UTF-8; save the file as UTF-8"]) from None
    except RecursionError:
        raise ConfigError([f"--config {path}: nested too deeply; a section is one table of keys"]) from None
    except ValueError as error:  # of TOML, and of a number with thousands of digits
        raise ConfigError([f"--config {path}: not valid TOML: {str(error)[:200]}"]) from None


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = os.fstat(fd)
        device = stat.S_ISCHR(kind.st_mode) or stat.S_ISBLK(kind.st_mode)
        if device and kind.st_rdev != Path(os.devnull).stat().st_rdev:
            raise ConfigError([f"--config {path}: this is a device; name a file"])
        if not stat.S_ISFIFO(kind.st_mode):
            return _read(fd)
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):  # noqa: PTH115 - it is no path
            raise ConfigError([f"--config {path}: this is a named pipe; name a file"])
        return _read(fd, time.monotonic() + PATIENCE, path)
    finally:
        os.close(fd)


def _read(fd: int, deadline: float | None = None, path: Path | None = None) -> bytes:
    """Read to the end or past the limit. Raises OSError; ConfigError where a pipe does not end in time."""
    content = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(content) <= LIMIT:
        if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ConfigError([f"--config {path}: the pipe did not end within {PATIENCE:g} s; name a file"])
        data = os.read(fd, LIMIT + 1 - len(content))
        if not data:
            break
        content += data
    return bytes(content)
