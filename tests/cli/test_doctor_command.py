"""`doctor` as a command: its three exit statuses, JSON for scripts, and that it changes nothing."""

import json
import socket
from pathlib import Path

import pytest

from vllm_supervisor.cli.main import main


@pytest.fixture(autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Look for sockets and state in places of this test alone, whose paths are short enough for sockets."""
    root = tmp_path_factory.mktemp("d")
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(root / "run"))
    return root


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Run `doctor --json` with options before and a command line behind."""
    before = words[: words.index("doctor")]
    behind = words[words.index("doctor") + 1 :]
    status = main([*before, "doctor", "--json", *behind])
    return status, json.loads(capsys.readouterr().out)


def test_an_address_in_use_is_an_error_that_names_its_holder(capsys: pytest.CaptureFixture[str], places: Path) -> None:
    """Status 2, and nothing was made on the way."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = run(
            capsys, "--engine", "mock", "doctor", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port)
        )
    assert status == 2
    (found,) = (finding for finding in said["findings"] if finding["check"] == "port")
    assert (found["level"], "in use by pid" in found["what"]) == ("error", True)
    assert all(finding["why"] and finding["mend"] for finding in said["findings"] if finding["level"] != "ok")
    assert list(places.iterdir()) == []


def test_warnings_are_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that blinds us is a warning, and with nothing graver the status is 1."""
    status, said = run(capsys, "--engine", "mock", "doctor", "serve", "tiny", "--disable-log-stats", "--port", "0")
    assert "--disable-log-stats" in said["findings"][0]["what"]
    assert status == 1


def test_a_wrong_configuration_is_all_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake is an error of its own."""
    status, said = run(capsys, "--set", "drain.budget=soon", "--set", "no.such=1", "doctor")
    assert status == 2
    assert [finding["check"] for finding in said["findings"]] == ["config", "config"]


def test_it_takes_a_serve_command_line_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is a usage error."""
    assert main(["doctor", "sevre", "tiny"]) == 2
    assert "expected nothing, or the command line after `serve`" in capsys.readouterr().err


def test_unified_memory_is_judged_by_the_configuration_and_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine as the files show it: too high a utilisation is found for this command line; without a GPU it is said."""
    (tmp_path / "meminfo").write_text("MemTotal: 125829120 kB\nMemFree: 100000000 kB\nMemAvailable: 104857600 kB\n")
    sets = ("--engine", "mock", "--set", "memory.mode=unified", "--set", f"memory.proc={tmp_path}")
    line = ("doctor", "serve", "tiny", "--port", "0", "--gpu-memory-utilization")
    for asked, wrong in (("0.95", True), ("0.7", False)):
        _, said = run(capsys, *sets, *line, asked)
        found = [one["what"] for one in said["findings"] if one["check"] == "unified_memory"]
        assert any(f"--gpu-memory-utilization {asked}" in what for what in found) is wrong
        assert any("--max-model-len is not given" in what for what in found)
    _, said = run(capsys, "--engine", "mock", "--set", f"memory.proc={tmp_path}", *line, "0.95")
    found = [one for one in said["findings"] if one["check"] == "unified_memory"]
    assert [(one["level"], one["what"][:16]) for one in found] == [("ok", "memory guard off")]


def test_a_name_that_is_a_port_names_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    """`--name N` looks at port N, before and behind the command; a name that is no port asks for none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (("--name", port, "doctor"), ("doctor", "--name", port)):
            _, said = run(capsys, "--engine", "mock", *words)
            (found,) = (one for one in said["findings"] if one["check"] == "port")
            assert f":{port} is in use by pid" in found["what"]
        _, said = run(capsys, "--engine", "mock", "--name", "mine", "doctor")
        assert [one for one in said["findings"] if one["check"] == "port"] == []


def test_json_is_understood_behind_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """People write it last, and vLLM has no such option."""
    main(["--engine", "mock", "doctor", "serve", "tiny", "--port", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["findings"]


def test_a_doubtful_variable_is_a_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One underscore where two are meant."""
    monkeypatch.setenv("VLLM_SUPERVISOR_DRAIN_BUDGET", "5s")
    _, said = run(capsys, "--engine", "mock", "doctor", "serve", "tiny", "--port", "0")
    assert [one["level"] for one in said["findings"] if one["check"] == "config"] == ["warning"]
