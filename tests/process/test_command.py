"""The command as a process: what it costs to start, and how it ends when its reader leaves."""

import json
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
