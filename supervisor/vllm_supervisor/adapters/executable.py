"""Programs and models on disk: whether what shall be started exists.

What is certain to fail is told before anything starts; the rest is left to the engine.
"""

import os
import pwd
import shutil
from pathlib import Path

from vllm_supervisor.core.errors import SetupError

# What a model's folder is known by: Hugging Face's format and Mistral's.
_MODEL_FILES = ("config.json", "params.json")


def find(command: str, *, search_path: str | None, mend: str) -> Path:
    """Return the absolute path of `command`, a name on `search_path` or a path; links are kept as they are.

    SetupError, ending in `mend`, when there is no such file or it, or its interpreter, may not be executed.
    """
    if not command:
        raise SetupError(f"the engine's command is empty; {mend}")
    found = shutil.which(command, path=search_path)
    if found is not None:
        _check_interpreter(Path(found))
        return Path(found).absolute()
    if "/" not in command:
        raise SetupError(f"{command} is not on PATH; {mend}")
    path = Path(command)
    _check_way(path, "engine.command")
    if not path.exists():
        raise SetupError(f"{command} does not exist; {mend}")
    if path.is_dir():
        raise SetupError(f"{command} is a directory; {mend}")
    raise SetupError(f"{command} may not be executed by {_user()}; {mend}")


def _check_interpreter(script: Path) -> None:
    """Raise SetupError for a script whose interpreter this user cannot start: the kernel would say no more than ENOENT."""
    try:
        with script.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return  # a program that may be executed and not be read
    words = first.removeprefix(b"#!").split(None, 1) if first.startswith(b"#!") else []
    if not words:
        return
    interpreter = Path(os.fsdecode(words[0]))
    _check_way(interpreter, f"the interpreter of {script}")
    if not os.access(interpreter, os.X_OK):
        raise SetupError(
            f"{script}: its interpreter {interpreter} does not exist, or {_user()} may not execute it; make its "
            "environment anew where this user can read it"
        )


def _check_way(path: Path, what: str) -> None:
    """Raise SetupError if a directory on the way to `path`, links followed, is closed to this user."""
    for start in (path.absolute(), Path(os.path.realpath(path))):
        for directory in reversed(start.parents):
            if not os.access(directory, os.F_OK):
                break  # not there at all, which is the caller's to say
            if not os.access(directory, os.X_OK):
                raise SetupError(
                    f"{_user()} cannot read {directory}, on the way to {what} {path}; set User= in the unit "
                    "(with DynamicUser=no) or run as a user who can, or move it to a place that everybody can read"
                )


def _user() -> str:
    number = os.geteuid()
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


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
    _check_way(path, "model")
    where = model if path.is_absolute() else f"{model} (in {Path.cwd()})"
    if not path.exists():
        raise SetupError(f"model {where} does not exist; name a folder with a config.json, or a model of the Hub")
    if path.is_dir() and not any(os.access(path / name, os.F_OK) for name in _MODEL_FILES):
        if not os.access(path, os.X_OK):
            _check_way(path / _MODEL_FILES[0], "model")
        raise SetupError(f"model {where} has no config.json; name the folder that holds it")
    for file in [path] if path.is_file() else [path / name for name in _MODEL_FILES]:
        if file.exists() and not os.access(file, os.R_OK):
            raise SetupError(f"{_user()} cannot read {file}; chmod a+rX {model}, or set User= in the unit to its owner")
