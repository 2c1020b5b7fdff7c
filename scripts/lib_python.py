"""Shared by the Python scripts beside it, imported, never run: the environment they need."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def own_environment(needed: str) -> None:
    """Go on in the clone's own environment, which is made if need be, unless this interpreter has `needed`."""
    if importlib.util.find_spec(needed) is None:
        commands = subprocess.check_output([Path(__file__).resolve().parent / "venv"], text=True).strip()
        python = f"{commands}/python"
        if sys.prefix != sys.base_prefix and Path(sys.prefix) == Path(commands).parent:
            sys.exit(f"{python} has no {needed}; remove {Path(commands).parent} and run this again")
        os.execv(python, [python, *sys.argv])  # noqa: S606 - no shell is what is wanted
