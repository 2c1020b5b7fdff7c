"""Import nothing of ours from where the engine's own modules are: PYTHONPATH and the working directory.

Rules:
* As Python's -I has it, which the start script that pip writes cannot ask for. The variable itself stays: the engine
  inherits it.
* It has to be imported before anything else, and so imports nothing that is not loaded yet (os is, by Python's own start).
"""

import os
import sys


def leave_python_path() -> None:
    """Take the entries of PYTHONPATH and the first, the script's or the working directory, out of sys.path.

    What holds this package stays, and so does this Python's own library, though it be named there.
    """
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is not loaded yet
    installed = tuple({f"{sys.prefix}{os.sep}lib", f"{sys.base_prefix}{os.sep}lib"})
    kept = {ours, *(entry for entry in sys.path if entry.startswith(installed))}
    variable = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = {os.path.abspath(entry) for entry in variable.split(os.pathsep)} if variable else set()  # noqa: PTH100
    if not sys.flags.safe_path and sys.path:
        named.add(os.path.abspath(sys.path[0]))  # noqa: PTH100
    sys.path[:] = [entry for entry in sys.path if entry in kept or os.path.abspath(entry) not in named]  # noqa: PTH100
