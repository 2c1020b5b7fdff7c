"""Finding the engine's program and its model."""

from pathlib import Path

import pytest

from vllm_supervisor.adapters.executable import check_model, find
from vllm_supervisor.core.errors import SetupError


def program(path: Path, mode: int = 0o755) -> Path:
    """Write a script with `mode`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def test_a_name_is_searched_on_the_path(tmp_path: Path) -> None:
    """The first executable of that name on the given PATH is found, links kept as they are."""
    program(tmp_path / "a" / "tool", 0o644)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tool").symlink_to(program(tmp_path / "real"))
    found = find("tool", search_path=f"{tmp_path}/a:{tmp_path}/b", mend="x")
    assert found == tmp_path / "b" / "tool"


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is used without a search, and made absolute."""
    program(tmp_path / "tool")
    monkeypatch.chdir(tmp_path)
    assert find("./tool", search_path="", mend="x") == tmp_path / "tool"
    assert find(str(tmp_path / "tool"), search_path=None, mend="x") == tmp_path / "tool"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("nothing-here", "nothing-here is not on PATH; mend it"),
        ("", "the engine's command is empty; mend it"),
        ("{}/missing", "does not exist; mend it"),
        ("{}", "is a directory; mend it"),
        ("{}/plain", "may not be executed by user [a-z0-9]+; mend it"),
    ],
)
def test_programs_that_cannot_be_started(tmp_path: Path, command: str, told: str) -> None:
    """What cannot be started is told with its name, the reason and the mend, status 78."""
    program(tmp_path / "plain", 0o644)
    with pytest.raises(SetupError, match=told) as caught:
        find(command.replace("{}", str(tmp_path)), search_path=str(tmp_path), mend="mend it")
    assert caught.value.status == 78


def test_models_that_are_certain_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not there, or a folder without a model's file, is told with its path and where it was looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for model, told in (
        (f"{tmp_path}/no", f"model {tmp_path}/no does not exist"),
        (str(tmp_path), f"model {tmp_path} has no config.json"),
        ("./no", f"model ./no (in {tmp_path}) does not exist"),
        ("../no/", f"model ../no/ (in {tmp_path}) does not exist"),
        (".", f"model . (in {tmp_path}) has no config.json"),
        ("~/no", "model ~/no: nobody expands the ~ here; write /home/me/no"),
    ):
        with pytest.raises(SetupError) as caught:
            check_model(model)
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_models_that_may_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A folder with a model's file, a single file, and every name that is no path are left to the engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    for model in (str(tmp_path), str(tmp_path / name), "org/model", ".", f"./{name}", "s3://bucket/model", ".hidden/m"):
        check_model(model)
