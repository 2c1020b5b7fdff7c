"""What an engine leaves behind is removed only if it was the engine's and nobody uses it."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.custody import async_test, end, python, read_line
from vllm_supervisor.adapters.leftovers import Named, Segments, named_like_segments, remove_homes, shm_space

# Maps one segment, holds another open, and says so; it cleans nothing up.
USER = (
    "import mmap, os, signal, sys\n"
    "mapped, held = {mapped!r}, {held!r}\n"
    "fd = os.open(mapped, os.O_RDWR | os.O_CREAT, 0o600); os.ftruncate(fd, 8192)\n"
    "map = mmap.mmap(fd, 8192); os.close(fd); map[:] = b'x' * 8192\n"
    "fd = os.open(held, os.O_RDWR | os.O_CREAT, 0o600); os.write(fd, b'x' * 4096)\n"
    "print('ready', flush=True)\n"
    "signal.pause()\n"
)


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    """Two segment names of this test, removed after it."""
    found = (f"/dev/shm/vsup-test-{os.getpid()}-mapped", f"/dev/shm/vsup-test-{os.getpid()}-held")
    yield found
    for name in found:
        Path(name).unlink(missing_ok=True)


@pytest.fixture
def place() -> Iterator[str]:
    """Give a directory in shared memory: an unused segment, a link called like one, a file of another name."""
    root = Path(f"/dev/shm/vsup-test-{os.getpid()}-place")
    root.mkdir(mode=0o700)
    for name in ("vllm_offload_dead", "other"):
        (root / name).write_bytes(b"x")
    (root / "psm_link").symlink_to(root / "other")
    yield str(root)
    shutil.rmtree(root)


def there(names: tuple[str, ...]) -> list[str]:
    """Return which of these files exist."""
    return [name for name in names if Path(name).exists()]


@async_test
async def test_segments_of_a_dead_engine_are_removed(names: tuple[str, str]) -> None:
    """What was seen mapped or open by it is removed after its death, and the bytes are told."""
    child = python(USER.format(mapped=names[0], held=names[1]))
    await read_line(child.stdout)
    segments = Segments()
    segments.note(segments.find([child.pid, 2**22 - 1]))  # a pid that is gone changes nothing
    assert await end(child) == -signal.SIGKILL
    removed = segments.remove_unused()
    assert (sorted(removed.names), removed.bytes, removed.kept) == (sorted(names), 12288, ())
    assert there(names) == []


@async_test
async def test_only_what_nobody_uses_is_named(place: str) -> None:
    """Of files called as segments what a process maps or has open is left out; nothing is removed."""
    mapped, held, dead = (f"{place}/{name}" for name in ("psm_mapped", "psm_held", "vllm_offload_dead"))
    child = python(USER.format(mapped=mapped, held=held))
    await read_line(child.stdout)
    assert named_like_segments(place) == Named((dead,), untold=1)
    await end(child)
    assert named_like_segments(place) == Named((held, mapped, dead), untold=1)
    assert there((mapped, held, dead)) == [mapped, held, dead]


@async_test
async def test_what_others_use_stays(names: tuple[str, str]) -> None:
    """A segment that another process still maps or opens is kept, and that is told."""
    first = python(USER.format(mapped=names[0], held=names[1]))
    await read_line(first.stdout)
    segments = Segments()
    segments.note(segments.find([first.pid]))
    second = python(USER.format(mapped=names[0], held=names[1]))
    await read_line(second.stdout)
    await end(first)
    removed = segments.remove_unused()
    assert removed.names == ()
    assert dict(removed.kept) == dict.fromkeys(names, "another process still uses it")
    assert there(names) == [*names]
    await end(second)


def test_what_was_never_seen_in_its_hands_stays(names: tuple[str, str]) -> None:
    """A stranger's segment, and one that took a seen one's name, are not touched."""
    mapped, held = map(Path, names)
    stranger = held.with_name(f"{held.name}-stranger")
    stranger.write_bytes(b"stranger")
    mapped.write_bytes(b"old")
    held.write_bytes(b"old")
    segments = Segments()
    with mapped.open("rb"), held.open("rb"):
        segments.note(segments.find([os.getpid()]))
    new = mapped.with_name(f"{mapped.name}-new")
    new.write_bytes(b"new")
    new.rename(mapped)
    try:
        assert segments.remove_unused().names == (str(held),)
        assert mapped.read_bytes() == b"new"
        assert stranger.exists()
    finally:
        stranger.unlink()


def test_what_engines_of_lost_runs_had_is_removed(tmp_path: Path) -> None:
    """Directories and sockets of other runs go; those of this run, links and strangers' files stay."""
    for name in ("engine-0123abcd-1", "engine-0123abcd-2", "engine-89abcdef-1"):
        (tmp_path / name / "steps").mkdir(parents=True)
    for name in ("engine-0123abcd-1.sock", "engine-89abcdef-1.sock", "control.sock"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / name))
    (tmp_path / "engine-notes").mkdir()
    (tmp_path / "engine-00000000-1").symlink_to(tmp_path / "engine-notes")
    remove_homes(tmp_path, "89abcdef")
    left = {"engine-89abcdef-1", "engine-89abcdef-1.sock", "control.sock", "engine-notes", "engine-00000000-1"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_the_fullness_of_shared_memory_is_told() -> None:
    """Total and available bytes of /dev/shm are numbers that can be."""
    space = shm_space()
    assert space is not None
    assert 0 <= space.available <= space.total
