"""A JSON file of ours: whatever stands in its place, it is read, or one reason says why not, at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_supervisor.adapters import json_file
from vllm_supervisor.core.json_text import JsonError

CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "cut short": (b'{"boot": "x", "ser', "not JSON"),
    "zero bytes": (bytes(4096), "NUL bytes in it"),
    "no JSON": (b"hello", "not JSON"),
    "Latin-1": (b'{"a": "\xe4"}', "not UTF-8"),
    "two values": (b"{} {}", "not JSON"),
    "large": (b'"' + b"x" * 5_000_000 + b'"', "larger than 4 MiB"),
    "large and sparse": (b"", "larger than 4 MiB"),
    "deep": (b"[" * 1_000_000, "nested too deep"),
    "17 deep": (b"[" * 17 + b"]" * 17, "nested too deep"),
    "a number of 5,000 digits": (b"1" * 5000, "a number has too many digits"),
    "NaN": (b"[NaN]", "not JSON"),
    "a field twice": (b'{"a": 1, "a": 2}', "a field stands twice"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_content_that_is_none_of_ours_has_a_reason(tmp_path: Path, name: str) -> None:
    """One reason, no other error, in time and memory that the limit bounds."""
    content, told = CONTENTS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    if name == "large and sparse":
        os.truncate(path, 1 << 40)
    with pytest.raises(JsonError) as caught:
        json_file.read(path)
    assert str(caught.value) == told


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda _path: None, "No such file or directory"),
    "directory": (Path.mkdir, "it is no regular file"),
    "pipe": (os.mkfifo, "it is no regular file"),
    "link": (lambda path: path.symlink_to("/etc/hostname"), "it is a symbolic link"),
    "link to itself": (lambda path: path.symlink_to(path), "it is a symbolic link"),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file_has_a_reason(tmp_path: Path, name: str) -> None:
    """Nothing is followed, and nothing waits for somebody to write."""
    make, told = PLACES[name]
    make(tmp_path / "file")
    with pytest.raises(OSError, match=told):
        json_file.read(tmp_path / "file")


def test_a_device_is_no_file() -> None:
    """Not even the null device, which writing would put a file in the place of."""
    with pytest.raises(OSError, match="it is no regular file"):
        json_file.read(Path(os.devnull))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Private, whole, in the place of what was there, with nothing left beside it."""
    path = tmp_path / "file"
    for value in ({"a": [1, None, "\ud800"]}, {}):
        json_file.replace(path, value)
        assert json_file.read(path) == value
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text(encoding="utf-8")) == {}


@pytest.mark.parametrize("name", [name for name in PLACES if name not in {"nothing", "directory"}])
def test_what_stands_in_the_place_of_the_draft_is_put_away(tmp_path: Path, name: str) -> None:
    """It is not followed, not waited for and not written: a run that was killed may have left a draft as well."""
    json_file.replace(tmp_path / "file", 1)
    PLACES[name][0](tmp_path / "file.new")
    json_file.replace(tmp_path / "file", 2)
    assert json_file.read(tmp_path / "file") == 2
    assert not (tmp_path / "file.new").is_symlink()


def test_a_directory_in_the_place_of_the_draft_stays(tmp_path: Path) -> None:
    """It is none of ours, so it is an error; the file stays as it was."""
    json_file.replace(tmp_path / "file", 1)
    (tmp_path / "file.new").mkdir()
    with pytest.raises(OSError, match=r"."):
        json_file.replace(tmp_path / "file", 2)
    assert json_file.read(tmp_path / "file") == 1
