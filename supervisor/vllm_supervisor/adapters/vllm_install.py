"""What can be told of a vLLM without running it: its version, and whether its neighbours in site-packages are whole."""

from collections.abc import Iterator
from pathlib import Path

_VERSION = "-"


def version(program: Path) -> str:
    """Return the version of the vLLM whose command this is, from its metadata, or ""."""
    for site in _site_packages(program):
        for found in sorted(site.glob("vllm-*.dist-info")):
            return found.name.removesuffix(".dist-info").partition(_VERSION)[2]
    return ""


def clobbered_supervisor(program: Path) -> str:
    """Return the site-packages in which PyPI's `supervisor` is installed but not whole, or ""."""
    for site in _site_packages(program):
        if any(site.glob("supervisor-*.dist-info")) and not (site / "supervisor" / "supervisord.py").is_file():
            return str(site)
    return ""


def _site_packages(program: Path) -> Iterator[Path]:
    """Yield the site-packages of the environment a command stands in; links to the command are followed second."""
    for path in dict.fromkeys((program, program.resolve())):
        yield from sorted((path.parent.parent / "lib").glob("python3.*/site-packages"))
        yield from sorted((path.parent.parent / "lib").glob("python3*/dist-packages"))
