"""Bundles on disk: complete, private, bounded, and never in the way."""

import errno
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest
import trio
from trio.testing import trio_test

from vllm_supervisor.adapters import child, evidence
from vllm_supervisor.adapters.evidence import Starter, Written, write_bundle

MINE = [os.getpid()]


class Rest:
    """Takes the tools that were given up on, as a supervisor's own nursery does."""

    def __init__(self) -> None:
        self.left: list[Callable[[], Awaitable[object]]] = []
        self.starter = Starter(child.spawn, self.left.append)

    async def reap(self) -> None:
        """Wait for all of them."""
        for wait in self.left:
            await wait()


def tool(directory: Path, name: str, script: str) -> None:
    """Put an executable script on the search path of this test."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


async def write(tmp_path: Path, **more: int) -> Written:
    """Write one bundle about this process."""
    bounds = {"keep": 20, "max_size": 10**9} | more
    rest = Rest()
    path = f"{tmp_path}:/usr/bin:/bin"
    written = await write_bundle(
        tmp_path / "incidents", {"cause": "stuck"}, MINE, search_path=path, starter=rest.starter, **bounds
    )
    await rest.reap()
    assert not child.owned()
    return written


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the two looks at CPU times right after each other."""
    monkeypatch.setattr(evidence, "BETWEEN_CPU", 0.01)


@trio_test
async def test_a_bundle_is_complete_and_private(tmp_path: Path) -> None:
    """A bundle holds threads with state and wchan, memory, and its document; nobody else may read it."""
    tool(tmp_path, "nvidia-smi", "echo all well; echo $HOME $SECRET")
    os.environ["SECRET"] = "secret"
    written = await write(tmp_path)
    del os.environ["SECRET"]
    assert (written.number, written.path.name) == (1, "1")
    assert written.path.stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in written.path.iterdir()}
    assert set(files) == {"incident.json", "threads.txt", "meminfo.txt", "nvidia-smi.txt"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files.values())
    document = json.loads(files["incident.json"].read_text())
    assert (document["number"], document["cause"], document["complete"]) == (1, "stuck", True)
    assert document["problems"] == ["py-spy is not installed: no stack dumps"]
    assert f"{os.getpid():>8} {os.getpid():>8}" in files["threads.txt"].read_text()
    assert "MemAvailable" in files["meminfo.txt"].read_text()
    assert files["nvidia-smi.txt"].read_text() == "all well\n\n"


@trio_test
async def test_a_tool_that_is_not_allowed_is_noted(tmp_path: Path) -> None:
    """A py-spy without the right to trace leaves its words and its status, and the bundle is complete."""
    tool(tmp_path, "py-spy", "echo Permission denied >&2; exit 1")
    written = await write(tmp_path)
    assert written.problems == (f"py-spy-{os.getpid()} ended with status 1",)
    assert (written.path / f"py-spy-{os.getpid()}.txt").read_text() == "Permission denied\n"


@trio_test
async def test_a_tool_that_hangs_is_killed_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool over its time is killed, and the rest of the bundle does not wait for it."""
    monkeypatch.setattr(evidence, "TOOL_LIMIT", 0.1)
    tool(tmp_path, "nvidia-smi", "exec sleep 1000")
    with trio.fail_after(5):
        written = await write(tmp_path)
    assert "nvidia-smi gave no answer within 0 s" in written.problems
    assert json.loads((written.path / "incident.json").read_text())["complete"]


@trio_test
async def test_a_talkative_tool_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a bundle grows over its bound."""
    monkeypatch.setattr(evidence, "FILE_LIMIT", 1000)
    tool(tmp_path, "nvidia-smi", "head -c 5000 /dev/zero")
    written = await write(tmp_path)
    assert (written.path / "nvidia-smi.txt").stat().st_size == 1000


@trio_test
async def test_tools_are_children_that_somebody_owns(tmp_path: Path) -> None:
    """While a tool runs it is known as a child of ours, and gets no signal mask of ours."""
    seen: list[frozenset[int]] = []

    def spawn(argv: Sequence[str], env: Mapping[str, str]) -> child.Child:
        started = child.spawn(argv, env)
        seen.append(child.owned())
        assert started.pid in seen[-1]
        return started

    tool(tmp_path, "nvidia-smi", "grep SigBlk /proc/self/status")
    starter = Starter(spawn, lambda _wait: None)
    written = await write_bundle(
        tmp_path / "i", {}, MINE, search_path=f"{tmp_path}:/usr/bin:/bin", starter=starter, keep=1, max_size=10**9
    )
    assert len(seen) == 1
    said = (written.path / "nvidia-smi.txt").read_text()
    assert said.startswith("SigBlk:\t0000000000000000\n")


@trio_test
async def test_two_bundles_begun_at_once_are_two(tmp_path: Path) -> None:
    """A bundle of the judgement and one that QUIT asked for do not take each other's place."""
    numbers: list[int] = []

    async def one() -> None:
        written = await write_bundle(
            tmp_path, {}, MINE, search_path=str(tmp_path), starter=Rest().starter, keep=9, max_size=10**9
        )
        numbers.append(written.number)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert sorted(numbers) == [1, 2, 3, 4]


@trio_test
async def test_bundles_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    """Numbers rise, also over removed bundles, and no more than the bound are kept."""
    numbers = [(await write(tmp_path, keep=2)).number for _ in range(4)]
    assert numbers == [1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "incidents").iterdir()) == ["3", "4"]


@trio_test
async def test_a_place_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path) -> None:
    """Where no bundle can be made its absence is reported, and nothing is raised."""
    (tmp_path / "incidents").write_text("a file")
    written = await write(tmp_path)
    assert written.number == 0
    assert written.problems[0].startswith("the bundle could not be written")


@trio_test
async def test_a_disk_that_fills_up_meanwhile_is_a_problem_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be written, whoever writes it, is reported, and nothing is raised."""

    def full(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evidence, "_write", full)
    written = await write(tmp_path)
    assert "the bundle could not be written: No space left on device" in written.problems
    assert (written.number, written.unwritten) == (1, True)
    assert not json.loads((written.path / "incident.json").read_text())["complete"]


class Full:
    """A file of a full disk: it can be made, and takes no byte."""

    def __init__(self, fd: int, _mode: str) -> None:
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, _data: bytes) -> int:
        """Take nothing."""
        raise OSError(errno.ENOSPC, "No space left on device")


@trio_test
async def test_a_bundle_of_which_nothing_could_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk no bundle is named, no empty directory and no draft stays."""
    monkeypatch.setattr(evidence, "open", Full, raising=False)
    written = await write(tmp_path)
    assert (written.number, written.path, written.unwritten) == (0, tmp_path / "incidents", True)
    assert list((tmp_path / "incidents").iterdir()) == []


@trio_test
async def test_a_draft_that_could_not_be_finished_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up before the last write leaves the first account of the incident, and no draft beside it."""
    real = evidence._write_json

    def last_fails(path: Path, document: Mapping[str, object]) -> None:
        with monkeypatch.context() as patch:
            if document["complete"]:
                patch.setattr(evidence, "open", Full, raising=False)
            real(path, document)

    monkeypatch.setattr(evidence, "_write_json", last_fails)
    written = await write(tmp_path)
    assert (written.number, written.unwritten) == (1, True)
    assert {path.name for path in written.path.iterdir()} == {"incident.json", "threads.txt", "meminfo.txt"}


def test_what_an_earlier_run_could_not_write_is_tidied_away(tmp_path: Path) -> None:
    """A start removes bundles without an account and drafts beside one; whole bundles and strange files stay."""
    for name in ("1/incident.new", "2/incident.json", "2/incident.new", "3/incident.json", "notes/incident.new"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    evidence.tidy(tmp_path)
    evidence.tidy(tmp_path / "missing")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["2/incident.json", "3/incident.json", "notes/incident.new"]


@trio_test
async def test_processes_that_are_gone_leave_a_note(tmp_path: Path) -> None:
    """An engine that died meanwhile still gets its bundle."""
    written = await write_bundle(
        tmp_path, {}, [2**22 + 1], search_path=str(tmp_path), starter=Rest().starter, keep=1, max_size=10**9
    )
    assert "no thread of the engine could be read" in written.problems
    assert json.loads((written.path / "incident.json").read_text())["complete"]
