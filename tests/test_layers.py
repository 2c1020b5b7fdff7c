"""The layers: cli, runtime, adapters, core, each knowing only what is below it; the stand-in and the beacon beside them.

Imports are read from the source, those inside functions and for type checkers as well.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "supervisor"
PACKAGE = "vllm_supervisor"

# What each part may import of ours. An adapter knows itself alone, which is told apart below.
MAY_IMPORT = {
    "core": {"core"},
    "adapters": {"core", "beacon"},  # the beacon's reader knows its layout
    "runtime": {"core", "adapters", "runtime"},
    "cli": {"core", "adapters", "runtime", "cli"},
    "mock": {"core", "mock"},
    "beacon": set(),
}
# The world: what a pure decision has no use for.
WORLD = {
    "asyncio", "logging", "multiprocessing", "os", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "subprocess", "tempfile", "threading", "time", "trio",
}  # fmt: skip


def modules() -> list[Path]:
    """Return every module of the package, relative to the source root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py"))


def part_of(module: Path) -> str:
    """Return the part a module belongs to; "" for the package's own `__init__`."""
    return module.parts[1] if len(module.parts) > 2 else ""


def imports(source: str, module: Path) -> Iterator[str]:
    """Yield the absolute dotted names that `source` imports."""
    package = module.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def faults(source: str, module: Path) -> list[str]:
    """Return what in `source`, as the text of `module`, breaks the layers."""
    part = part_of(module)
    own = ".".join(module.with_suffix("").parts)
    found = []
    for name in imports(source, module):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0]
            if target not in MAY_IMPORT.get(part, set()) | {"__version__", "isolation"} and not f"{name}.".startswith(
                f"{own}."
            ):
                found.append(f"{module}: {part or 'the package'} must not import {name}")
        elif part == "core" and top in WORLD:
            found.append(f"{module}: core must not import {name}")
        elif part in {"core", "beacon"} and top not in sys.stdlib_module_names:
            found.append(f"{module}: {part} must do with the standard library, not {name}")
    return found


@pytest.mark.parametrize("module", modules(), ids=str)
def test_layers_hold(module: Path) -> None:
    """No module imports what stands above or beside it."""
    assert faults((ROOT / module).read_text(), module) == []


def test_the_source_root_is_no_package() -> None:
    """The source root is called like a package of PyPI, so it must never become one."""
    assert not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/a.py", "import os"),
        ("core/a.py", "def f():\n    from time import monotonic"),
        ("core/a.py", "import os.path"),
        ("core/a.py", "import httpx"),
        ("core/a.py", "from vllm_supervisor.adapters import proc"),
        ("core/a.py", "from ..adapters import proc"),
        ("adapters/a.py", "from vllm_supervisor.adapters import proc"),
        ("adapters/a.py", "from vllm_supervisor.adapters.proc import read"),
        ("adapters/a.py", "from .proc import read"),
        ("adapters/a.py", "import vllm_supervisor.runtime.app"),
        ("runtime/a.py", "from vllm_supervisor.cli.main import main"),
        ("cli/a.py", "from vllm_supervisor.mock import faults"),
        ("mock/a.py", "from vllm_supervisor.adapters import proc"),
        ("beacon/a.py", "from vllm_supervisor.core import words"),
        ("beacon/a.py", "import numpy"),
        ("__init__.py", "from vllm_supervisor.core import words"),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    """The test itself sees every kind of breach."""
    assert len(faults(source, Path(PACKAGE) / module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/a.py", "import re, dataclasses\nfrom vllm_supervisor.core.words import Phase"),
        ("adapters/a.py", "import os, trio\nfrom vllm_supervisor.core import words"),
        ("cli/a.py", "from vllm_supervisor import __version__\nfrom vllm_supervisor.runtime import app"),
        ("mock/a.py", "from .faults import TABLE\nfrom vllm_supervisor.core import words"),
    ],
)
def test_what_is_allowed_is_not_reported(module: str, source: str) -> None:
    """Imports that point down are no breach."""
    assert faults(source, Path(PACKAGE) / module) == []
