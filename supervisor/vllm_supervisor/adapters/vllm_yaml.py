"""vLLM's own `--config` file: YAML, read as vLLM reads it (vllm/utils/argparse_utils.py, `load_config_file`).

Rules:
* Only a regular file: vLLM reads it after us, and what we took out of a pipe would be missing there.
* Depth and aliases are counted before anything is built: both can cost without a bound, in memory, time or stack.
"""

import os
import stat
from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import SetupError

LIMIT = 256 * 1024  # bytes; a file of options has a hundredth of it, and the parser takes seconds for a mebibyte
_DEEPEST = 50
_MOST_ALIASES = 16


def read(path: Path) -> dict[str, Any]:
    """Return the entries of `path`; SetupError when it cannot be read or is no table of options."""
    import yaml  # noqa: PLC0415  # most command lines name no such file, and starting must stay quick

    try:
        text = _content(path).decode("utf-8-sig")
        depth = aliases = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or aliases > _MOST_ALIASES:
                what = "nested too deeply" if depth > _DEEPEST else "more than a few aliases (*name)"
                raise SetupError(f"vLLM's --config {path}: {what}; write one line an option")
        entries = yaml.safe_load(text)
    except OSError as error:
        raise SetupError(f"vLLM's --config {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"vLLM's --config {path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or "it cannot be parsed"
        raise SetupError(f"vLLM's --config {path}: not valid YAML{where}: {what}") from None
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # What the library's converters raise for a value that is not of its tag: a date, a number of thousands of digits.
        raise SetupError(f"vLLM's --config {path}: a value cannot be read: {str(error)[:200]}") from None
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise SetupError(f"vLLM's --config {path}: expected lines of the form `option: value`")
    return entries


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123 - opened above, without waiting
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise SetupError(f"vLLM's --config {path}: this is a device or a pipe; name a file, vLLM reads it as well")
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise SetupError(f"vLLM's --config {path}: larger than {LIMIT // 1024} KiB; name a configuration file")
    return content
