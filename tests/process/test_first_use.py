"""A person's first minutes, with the stand-in engine: it answers at once, serves, shows its state, ends on Ctrl-C."""

import grp
import json
import os
import shutil
import signal
import stat
import subprocess
import time

import pytest

from fakes.ports import free_port
from fakes.spellings import SPELLINGS, Spelling
from fakes.supervisor_process import Account, Client, StartMock


def test_the_front_door_answers_before_the_engine_is_ready_then_serves(start_mock: StartMock) -> None:
    """The first answers are 503 engine_starting with the promised form; later the same path gives 200."""
    supervisor, client = start_mock("--mock-start-time", "2s")
    supervisor.until(client.listens, within=10.0, what="the front door listens")
    early = client.chat()
    assert early.status_code == 503
    assert early.json()["error"]["code"] == "engine_starting"
    assert early.json()["error"]["type"] == "service_unavailable"
    assert 1 <= int(early.headers["Retry-After"]) <= 60
    assert early.headers["Connection"].lower() == "close"
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").json()["engine"] == "starting"
    supervisor.until(client.is_ready, within=30.0, what="ready")
    assert client.chat().status_code == 200


def test_a_group_of_ones_choice_may_use_the_control_socket(start_mock: StartMock, account: Account) -> None:
    """`control.group` is in force before the first client is answered, and the owner's tools work as before."""
    group = grp.getgrgid(os.getegid())
    supervisor, client = start_mock(before=("--set", f"control.group={group.gr_name}"))
    supervisor.until(client.listens, within=10.0, what="the front door listens")
    [control] = account.home.glob("run/vllm-supervisor/*/control.sock")
    found = control.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, group.gr_gid)
    assert stat.S_IMODE(control.parent.stat().st_mode) == 0o710
    assert account.tool("status").returncode == 0


def test_curl_streams_a_chat(start_mock: StartMock) -> None:
    """Plain curl gets the stream as the README shows it, up to [DONE]."""
    curl = shutil.which("curl")
    assert curl, "curl is missing: apt-get install curl"
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    argv = [curl, "-sN", f"{client.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*argv, "-d", json.dumps(body)], capture_output=True, text=True, timeout=20, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_ctrl_c_on_an_idle_server_ends_it_within_two_seconds(start_mock: StartMock, account: Account) -> None:
    """Ctrl-C on its terminal ends the supervisor by SIGINT, as shells expect, and every process with it."""
    supervisor, client = start_mock(terminal=True)
    supervisor.until(client.is_ready, within=30.0, what="ready")
    pressed = time.monotonic()
    supervisor.press_ctrl_c()
    assert supervisor.ends(within=20.0) == -signal.SIGINT, supervisor.words()
    assert time.monotonic() - pressed < 2.0
    account.expect_nothing_left()
    assert "Traceback" not in supervisor.out.text


def test_the_engines_lines_go_to_standard_output_and_ours_to_standard_error(start_mock: StartMock) -> None:
    """The two outputs do not mix: ours is one JSON object a line when it is not a terminal."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=20.0) == 0, supervisor.words()
    assert supervisor.out.text.strip(), "the engine printed nothing"
    assert len(supervisor.log()) == len(supervisor.err.text.splitlines()), supervisor.err.text


def test_two_supervisors_on_two_ports_have_their_own_status(start_mock: StartMock, account: Account) -> None:
    """Two instances run side by side; --name picks one, and without it a tool lists both and exits 2."""
    (one, first), (two, second) = start_mock(), start_mock()
    for supervisor, client in ((one, first), (two, second)):
        supervisor.until(client.is_ready, within=30.0, what="ready")
    for supervisor, client in ((one, first), (two, second)):
        name = client.url.rpartition(":")[2]
        told = account.tool("--name", name, "status", "--json")
        assert told.returncode == 0, told
        status = json.loads(told.stdout)
        assert (status["name"], status["pid"], status["engine"]["state"]) == (name, supervisor.pid, "ready")
    both = account.tool("status")
    assert both.returncode == 2, both
    assert all(client.url.rpartition(":")[2] in both.stdout + both.stderr for client in (first, second))


def test_without_a_running_supervisor_the_tools_exit_3(account: Account) -> None:
    """No instance in the run directory they are pointed at: one line that says so, status 3."""
    told = account.tool("--set", f"run_dir={account.home / 'run'}", "status")
    assert told.returncode == 3, told
    assert len(told.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
def test_every_spelling_of_the_address_lands_on_it(spelling: Spelling, account: Account) -> None:
    """Whatever way vLLM's options spell host and port, the front door listens there and the engine becomes ready."""
    port = free_port()
    supervisor = account.start("--engine", "mock", "serve", "tiny", *spelling.argv(port, account.home))
    with Client(port) as client:
        supervisor.until(client.is_ready, within=30.0, what=f"ready on {port}")


def test_an_engine_that_stays_unhealthy_is_named_while_it_starts(start_mock: StartMock) -> None:
    """A /health that answers 500, as with a middleware that fails, is the reason within a minute, not at start_timeout."""
    supervisor, client = start_mock("--mock-start-time", "0", "--mock-fault", "health_status=500")
    supervisor.until(client.listens, within=10.0, what="the front door listens")
    supervisor.until(
        lambda: "its /health gave status 500" in client.get("/readyz").json()["reason"],
        within=60.0,
        what="the reason in /readyz",
    )
    assert client.get("/readyz").status_code == 503
    assert supervisor.err.text.count("its /health gave status 500; its own lines say why") == 1


def test_doctor_finds_the_port_of_a_running_instance_well(start_mock: StartMock, account: Account) -> None:
    """The address that the instance itself holds is no clash, by its name and by its command line."""
    supervisor, client = start_mock()
    supervisor.until(client.listens, within=10.0, what="the front door listens")
    port = str(client.port)
    for words in (("--name", port), ("serve", "tiny", "--host", "127.0.0.1", "--port", port)):
        said = json.loads(account.tool("--engine", "mock", "doctor", "--json", *words).stdout)
        (found,) = (one for one in said["findings"] if one["check"] == "port")
        assert (found["level"], f"is served by the supervisor '{port}'" in found["what"]) == ("ok", True), found
