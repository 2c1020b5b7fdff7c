"""Bad surroundings: what the machine refuses or plants is one line at the start, or does no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.supervisor_process import Account, StartMock, command

REFUSED = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "refused.py"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("unix_socket", "Unix sockets are refused here (Address family not supported by protocol)"),
        ("pidfd_open", "pidfd_open(2) is refused here (Operation not permitted)"),
    ],
)
def test_a_system_call_that_is_refused_is_named(start_mock: StartMock, call: str, told: str) -> None:
    """A seccomp filter in front of what nothing works without: status 78, one line with the mend, nothing started."""
    supervisor, _client = start_mock(under=(*REFUSED, call))
    assert supervisor.ends(within=20.0) == 78, supervisor.words()
    (line,) = supervisor.err.text.splitlines()
    assert line.startswith(f"vllm-supervisor: {told}")
    assert "the seccomp profile of a container" in line


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Give a directory with modules that end whoever imports them."""
    for name in ("json", "trio", "click", "signal", "structlog", "yaml", "httptools"):
        (tmp_path / f"{name}.py").write_text(
            "import os\nos.write(2, b'hijacked by ' + __name__.encode())\nos._exit(9)\n"
        )
    return tmp_path


@pytest.mark.parametrize("how", ["PYTHONPATH", "working directory"])
def test_modules_meant_for_the_engine_are_not_ours(account: Account, planted: Path, how: str) -> None:
    """What stands in PYTHONPATH, or where we were started, is never imported by a command of ours."""
    env = account.env | ({"PYTHONPATH": f"{planted}:/none"} if how == "PYTHONPATH" else {})
    for words in (
        ["config", "show", "--json"],
        ["--engine", "mock", "doctor", "serve", "tiny", "--port", "0", "--json"],
    ):
        done = subprocess.run([*command(), *words], env=env, cwd=planted, capture_output=True, check=False)
        assert b"hijacked" not in done.stderr
        assert json.loads(done.stdout)


def test_the_engine_still_gets_its_python_path(account: Account, planted: Path) -> None:
    """The variable goes on to the engine unchanged, and the stand-in, which is ours, is not led astray by it."""
    account.env["PYTHONPATH"] = str(planted)
    port = "0"
    supervisor = account.start("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", port)
    supervisor.until(lambda: supervisor.events("ready"), within=30.0, what="ready")
    engine = int(supervisor.events("spawned")[0]["pid"])
    assert f"PYTHONPATH={planted}".encode() in Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
    assert "hijacked" not in supervisor.err.text


def test_a_start_without_threads_names_the_limit(account: Account) -> None:
    """Root has no such limit of its own, so the refusal is Python's: one line with the mend, status 78."""
    script = (
        "import sys, threading\n"
        'def refuse(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
        "from vllm_supervisor.cli.__main__ import main\n"
        "sys.exit(main(['--engine', 'mock', 'serve', 'tiny', '--host', '127.0.0.1', '--port', '0']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=account.env, capture_output=True, text=True, check=False, cwd=os.sep
    )
    assert done.returncode == 78, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-supervisor: no more threads can be started: ")
    assert "TasksMax=" in line


def test_threads_that_are_refused_while_serving_end_nothing(account: Account) -> None:
    """Once it serves, what wanted a thread does without: requests go on, the stop is clean, and status is 0."""
    script = (
        "import sys, trio\n"
        "from vllm_supervisor.cli.__main__ import main\n"
        'async def refuse(*_args, **_more): raise RuntimeError("can\'t start new thread")\n'
        "trio.to_thread.run_sync = refuse\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    own = (sys.executable, "-c", script)
    words = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", "0")
    with subprocess.Popen([*own, *words], env=account.env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"event": "ready"' in line:
                process.terminate()
        assert process.wait(20) == 0
    account.expect_nothing_left()
