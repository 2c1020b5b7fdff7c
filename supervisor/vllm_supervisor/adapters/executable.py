"""Programs and models on disk: whether what shall be started exists.

What is certain to fail is told before anything starts; the rest is left to the engine.
"""

import os
import shutil
from pathlib import Path

from vllm_supervisor.core.errors import SetupError

# What a model's folder is known by: Hugging Face's format and Mistral's.
_MODEL_FILES = ("config.json", "params.json")


def find(command: str, *, search_path: str | None, mend: str) -> Path:
    """Return the absolute path of `command`, a name on `search_path` or a path; links are kept as they are.

    SetupError, ending in `mend`, when there is no such file or it may not be executed.
    """
    if not command:
        raise SetupError(f"the engine's command is empty; {mend}")
    found = shutil.which(command, path=search_path)
    if found is not None:
        return Path(found).absolute()
    if "/" not in command:
        raise SetupError(f"{command} is not on PATH; {mend}")
    path = Path(command)
    if not path.exists():
        raise SetupError(f"{command} does not exist; {mend}")
    if path.is_dir():
        raise SetupError(f"{command} is a directory; {mend}")
    raise SetupError(f"{command} may not be executed by this user; {mend}")


def check_model(model: str) -> None:
    """Raise SetupError for a path that is certain to hold no model; other names are the engine's to judge.

    `/x`, `./x` and `../x` are paths and never names of the Hub; `~/x` is none that vLLM would expand.
    """
    if model.startswith("~"):
        home = os.path.expanduser(model)  # noqa: PTH111 - a user who is not there is left as written
        raise SetupError(f"model {model}: nobody expands the ~ here; write {home}")
    if model.partition("/")[0] not in {"", ".", ".."}:
        return
    path = Path(model)
    where = model if path.is_absolute() else f"{model} (in {Path.cwd()})"
    if not path.exists():
        raise SetupError(f"model {where} does not exist; name a folder with a config.json, or a model of the Hub")
    if path.is_dir() and not any(os.access(path / name, os.F_OK) for name in _MODEL_FILES):
        raise SetupError(f"model {where} has no config.json; name the folder that holds it")
