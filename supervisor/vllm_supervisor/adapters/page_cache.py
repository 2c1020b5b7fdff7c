"""Gives the page cache back: of a model's files (no privilege needed), or of the whole machine (root).

Rules:
* Only clean pages go, so nothing is lost but the speed of the next read.
* Bounded: at most `MOST_FILES` files, found in the model's own directory or in the hub's cache for its name.

Sources: posix_fadvise(2), proc_sys_vm(5) on drop_caches, huggingface_hub's cache layout (models--ORG--NAME/blobs).
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_FILES = 10_000


def model_directory(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return where the files of `model` (a directory, or a name at the hub) are, or None."""
    if not model:
        return None
    local = Path(model)
    if local.is_dir():
        return local
    home = environ.get("HOME", "/root")
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    hub = environ.get("HF_HUB_CACHE") or f"{environ.get('HF_HOME') or f'{cache}/huggingface'}/hub"
    blobs = Path(hub) / f"models--{model.replace('/', '--')}" / "blobs"
    return blobs if blobs.is_dir() else None


def evict(directory: Path) -> tuple[int, int]:
    """Tell the kernel that the files below `directory` are not needed; return how many there were, and their bytes."""
    files = size = 0
    for path in _files(directory):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(fd).st_size
            files += 1
        except OSError:
            continue
        finally:
            os.close(fd)
    return files, size


def _files(directory: Path) -> Iterator[str]:
    found = 0
    for root, _, names in os.walk(directory):
        for name in names:
            if found == MOST_FILES:
                return
            found += 1
            yield os.path.join(root, name)  # noqa: PTH118 - os.walk gives strings


def drop_all(proc: Path = Path("/proc")) -> str:
    """Drop the page cache of the whole machine; return "" or why that is not allowed."""
    try:
        (proc / "sys/vm/drop_caches").write_text("1\n", encoding="ascii")
    except OSError as fault:
        return f"{proc / 'sys/vm/drop_caches'} cannot be written: {fault.strerror}"
    return ""
