"""Priorities of lines for systemd's journal."""

import io
import json
import os
from pathlib import Path

import pytest

from vllm_supervisor.adapters import journal_stream, log
from vllm_supervisor.cli.errors import guarded
from vllm_supervisor.core.errors import UsageError


def named(fd: int) -> dict[str, str]:
    """What systemd sets for a stream that is this descriptor."""
    found = os.fstat(fd)
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


def test_only_the_very_stream_is_the_journal(tmp_path: Path) -> None:
    """A redirection below the unit, and a variable inherited from a parent, are no journal."""
    with (tmp_path / "a").open("wb") as stream, (tmp_path / "b").open("wb") as other:
        assert journal_stream.connected(named(stream.fileno()), stream.fileno())
        assert not journal_stream.connected(named(other.fileno()), stream.fileno())
        assert not journal_stream.connected({}, stream.fileno())
        assert not journal_stream.connected({"JOURNAL_STREAM": "x"}, 9999)


@pytest.mark.parametrize(("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3)])
def test_each_level_has_its_priority(level: str, priority: int) -> None:
    """A line in JSON, and each line of a readable traceback, begins with it; without a journal none does."""
    lines: list[bytes] = []
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    failed = caught.value
    for as_json, journal in ((True, True), (False, True), (True, False)):
        logger = log.build(
            lines.append, json=as_json, level="debug", stamp=lambda: "2026-01-01T00:00:00Z", journal=journal
        )
        getattr(logger, level)("event", sentence="it happened", exc_info=failed)
    prefix = f"<{priority}>".encode()
    assert lines[0].startswith(prefix)
    assert json.loads(lines[0].removeprefix(prefix))["level"] == level
    assert all(line.startswith(prefix) for line in lines[1].splitlines())
    assert len(lines[1].splitlines()) > 2
    assert lines[2].startswith(b"{")


def test_mistakes_and_faults_are_errors_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake of the user's is one error line; a fault of ours is its traceback, each line an error, and status 1."""

    def mistake() -> int:
        raise UsageError("wrong")

    def fault() -> int:
        raise KeyError("ours")

    monkeypatch.setattr(journal_stream, "connected", lambda _environ: True)
    assert guarded(mistake) == 2
    assert capsys.readouterr().err == "<3>vllm-supervisor: wrong\n"
    assert guarded(fault) == 1
    told = io.StringIO(capsys.readouterr().err).readlines()
    assert all(line.startswith("<3>") for line in told)
    assert told[-1] == "<3>KeyError: 'ours'\n"
    monkeypatch.setattr(journal_stream, "connected", lambda _environ: False)
    with pytest.raises(KeyError):
        guarded(fault)
