"""The limit of open files: raised where we may, never lowered, and never beyond the hard one."""

import errno
import os
import resource
from pathlib import Path

import pytest

from vllm_supervisor.adapters import descriptors

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "holds", "set_to"),
    [
        ((1024, 524288), 8448, 8448, (8448, 524288)),
        ((1024, 4096), 8448, 4096, (4096, 4096)),
        ((1024, INFINITE), 8448, 8448, (8448, INFINITE)),
        ((65536, 524288), 8448, 65536, None),
        ((1024, 1024), 8448, 1024, None),
        ((INFINITE, INFINITE), 8448, 8448, None),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    limits: tuple[int, int],
    wanted: int,
    holds: int,
    set_to: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is returned is what holds; the kernel is asked only for a change."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _which, pair: asked.append(pair))
    assert descriptors.allow(wanted) == holds
    assert asked == ([] if set_to is None else [set_to])


def test_what_is_open_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more open file is one more; where none is left to count with, all are in use."""
    before, limit = descriptors.in_use()
    assert before is not None
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with Path(os.devnull).open("rb"):
        assert descriptors.in_use() == (before + 1, limit)

    def full(_path: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", full)
    assert descriptors.in_use() == (limit, limit)
