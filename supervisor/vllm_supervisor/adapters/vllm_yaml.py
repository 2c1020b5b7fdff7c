"""vLLM's own `--config` file: YAML, read as vLLM reads it (vllm/utils/argparse_utils.py, `load_config_file`)."""

from pathlib import Path
from typing import Any

from vllm_supervisor.core.errors import SetupError

LIMIT = 1024 * 1024  # bytes; a device that never ends is named by mistake, too


def read(path: Path) -> dict[str, Any]:
    """Return the entries of `path`; SetupError when it cannot be read or is no table of options."""
    import yaml  # noqa: PLC0415  # most command lines name no such file, and starting must stay quick

    try:
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
        if len(content) > LIMIT:
            raise SetupError(f"vLLM's --config {path}: larger than 1 MiB; name a configuration file")
        entries = yaml.safe_load(content.decode("utf-8"))
    except OSError as error:
        raise SetupError(f"vLLM's --config {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"vLLM's --config {path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or "it cannot be parsed"
        raise SetupError(f"vLLM's --config {path}: not valid YAML{where}: {what}") from None
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise SetupError(f"vLLM's --config {path}: expected lines of the form `option: value`")
    return entries
