"""The command as a process: what it costs to start, and how it ends when its reader leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.control_socket import serving

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vllm_supervisor.cli"]
HEAVY = {"rich", "httpx", "yaml", "prometheus_client", "http.client"}

# Stands in for carrying the plan out: it only says which modules are loaded when that begins.
SERVE = """
import json, sys, types
app = types.ModuleType("vllm_supervisor.runtime.app")
app.run = lambda plan: print(json.dumps(sorted(sys.modules))) or 0
sys.modules[app.__name__] = app
from vllm_supervisor.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str, program: list[str] = COMMAND, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a command with our source root on its path, bounded."""
    environ = {"PYTHONPATH": str(ROOT / "supervisor"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(
        [*program, *words], env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )


def test_version() -> None:
    """`--version` says name and version."""
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("vllm-supervisor 0.")


def test_version_loads_nothing_heavy() -> None:
    """`--version` imports none of the libraries only some commands need."""
    program = (
        "import sys; from vllm_supervisor.cli.main import main; main(['--version']); print(*sys.modules, sep='\\n')"
    )
    done = run(program=[sys.executable, "-c", program])
    assert "vllm_supervisor.cli.main" in done.stdout
    assert HEAVY.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("words", [["serve", "m", "--port", "9"], ["run", "--", "cat", "{uds}"]])
def test_starting_loads_nothing_heavy(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    """Until the plan is carried out, starting imports none of the libraries only some commands need."""
    place = tmp_path_factory.mktemp("s")
    places = ["--set", f"run_dir={place}/r", "--set", f"state_dir={place}/s", "--engine", "mock"]
    done = run(*places, *words, program=[sys.executable, "-c", SERVE])
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(json.loads(done.stdout))


def test_mistakes_have_no_traceback() -> None:
    """A mistake is one line on standard error and a status, as a process as well."""
    done = run("--set", "engine.command=/nothing", "serve", "m")
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.startswith("vllm-supervisor: /nothing does not exist; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_before_the_command_line_is_read_has_no_traceback(tmp_path: Path, *, ignored: bool) -> None:
    """An interrupt during our imports ends us by that signal and without a word; one that is ignored does nothing."""
    (tmp_path / "click.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on', flush=True)\nos._exit(0)\n"
    )
    trap = "trap '' INT; " if ignored else ""
    begin = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT / 'supervisor')]}"
    words = f'{trap}exec "{sys.executable}" -P -c "{begin}; from vllm_supervisor.cli.__main__ import main; main()"'
    done = subprocess.run(["/bin/sh", "-c", words], env={}, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == ((0, "went on\n") if ignored else (-signal.SIGINT, ""))
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["status", "--watch", "--json"], ["events", "--follow", "--json"]])
def test_ctrl_c_ends_a_tool_that_watches(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    """A tool that goes on until it is interrupted then ends quietly with 130."""
    place = tmp_path_factory.mktemp("w")
    environ = {"PYTHONPATH": str(ROOT / "supervisor"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    with serving(place / "control.sock", {"/status": (200, b"{}"), "/events": (200, b'{"n": 1}\n' * 10**6)}):
        argv = [*COMMAND, "--set", f"run_dir={place}", *words]
        with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
            assert tool.stdout is not None
            assert tool.stderr is not None
            assert tool.stdout.readline().startswith("{")
            tool.send_signal(signal.SIGINT)
            _, said = tool.communicate(timeout=60)
    assert (tool.returncode, said) == (130, "")


def test_a_reader_that_leaves(tmp_path_factory: pytest.TempPathFactory) -> None:
    """When nobody reads the output any more, a tool ends quietly with the status a shell shows for it."""
    place = tmp_path_factory.mktemp("b")
    events = b"\n".join(b'{"event": "%d"}' % number for number in range(20_000))
    with serving(place / "control.sock", {"/events": (200, events)}):
        tool = " ".join([*COMMAND, "--set", f"run_dir={place}", "events", "--follow"])
        done = run(program=["/bin/bash", "-c", f"{tool} | head -n 1; echo ${{PIPESTATUS[0]}}"])
    assert done.stdout == "0\n141\n"
    assert done.stderr == ""


def test_the_stand_in_is_a_command_of_ours() -> None:
    """`mock-engine` becomes the stand-in, with its words untouched."""
    done = run("mock-engine", "--help")
    assert done.returncode == 0, done.stderr
    assert "mock-engine" in done.stdout
