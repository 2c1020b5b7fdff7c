"""The stand-in engine's processes: start, titles, stop, and the deaths measured on vLLM 0.32."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.mock_process import MARKER, MockEngine
from fakes.ports import free_port

LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def data(events: list[str]) -> list[dict]:
    """Give the JSON of `data:` events, `[DONE]` left out."""
    return [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]


def gone(pid: int, timeout: float = 10.0) -> bool:
    """Wait for the end of a process that is not ours."""
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)


@pytest.mark.parametrize("uds", [True, False])
def test_connections_are_refused_until_it_is_loaded(tmp_path: Path, uds: bool) -> None:
    """The address exists during the load and refuses; the first connection that is taken finds it healthy."""
    port = None if uds else free_port()
    with MockEngine("--mock-fault", "slow_start=60s", directory=tmp_path, port=port) as engine:
        engine.wait_line("Starting to load model")
        with pytest.raises(ConnectionRefusedError):
            engine.get("/health")
    with MockEngine(directory=tmp_path, port=port) as engine:
        engine.wait_ready()
        assert engine.get("/health").status == 200


def test_children_have_vllms_titles_and_readable_markers(tmp_path: Path) -> None:
    """EngineCore is a child, Worker a grandchild; comm is cut at 15 characters; the environment can be read."""
    with MockEngine(directory=tmp_path) as engine:
        engine.wait_ready()
        (core,), (worker,) = engine.pids("VLLM::EngineCore"), engine.pids("VLLM::Worker")
        assert Path(f"/proc/{core}/comm").read_text() == "VLLM::EngineCor\n"
        assert Path(f"/proc/{engine.process.pid}/comm").read_text() == "vllm\n"
        assert Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()[1] == str(engine.process.pid)
        assert Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1] == str(core)
        assert f"{MARKER}={engine.marker}".encode() in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_engine_ends_with_0_and_takes_its_children(tmp_path: Path, number: int) -> None:
    """TERM or INT: exit 0, nothing left a moment later, the socket file stays."""
    with MockEngine(directory=tmp_path) as engine:
        engine.wait_ready()
        children = engine.pids()
        engine.send_signal(number)
        assert engine.wait_exit() == 0
        assert all(gone(pid) for pid in children)
        assert Path(engine.uds).exists()


def test_term_during_the_load_is_ignored(tmp_path: Path) -> None:
    """A loading engine takes TERM without a word, becomes ready, and ends at the next one."""
    with MockEngine("--mock-start-time", "1s", directory=tmp_path) as engine:
        engine.wait_line("Starting to load model")
        engine.send_signal(signal.SIGTERM)
        engine.wait_ready()
        assert engine.get("/health").status == 200
        assert engine.stop() == 0


def test_term_aborts_streams_with_done_and_refuses_late_requests(tmp_path: Path) -> None:
    """An open stream ends with finish_reason abort and [DONE]; a late request gets 500 while /health is 200."""
    with MockEngine("--mock-fault", "slow_term=1h", directory=tmp_path) as engine:
        engine.wait_ready()
        with engine.stream(CHAT, LONG) as stream:
            events = iter(stream)
            next(events)
            engine.send_signal(signal.SIGTERM)
            engine.wait_line("Shutting down")
            late = engine.post(CHAT, LONG)
            assert late.status == 500
            assert late.json["error"]["message"] == "cannot schedule new futures after shutdown"
            assert engine.get("/health").status == 200
            engine.clear("slow_term")
            rest = list(events)
        assert rest[-1] == "data: [DONE]"
        assert data(rest)[-1]["choices"][0]["finish_reason"] == "abort"
        assert engine.wait_exit() == 0


def test_a_shutdown_timeout_lets_streams_complete(tmp_path: Path) -> None:
    """With --shutdown-timeout an open stream reaches its own end before the process does."""
    args = ["--shutdown-timeout", "10", "--mock-tokens-per-second", "50"]
    with MockEngine(*args, directory=tmp_path) as engine:
        engine.wait_ready()
        with engine.stream(CHAT, LONG | {"max_tokens": 40}) as stream:
            events = iter(stream)
            next(events)
            engine.send_signal(signal.SIGTERM)
            rest = list(events)
        assert data(rest)[-1]["choices"][0]["finish_reason"] == "length"
        assert engine.wait_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGUSR1])
def test_a_killed_main_process_leaves_its_children(tmp_path: Path, number: int) -> None:
    """KILL, HUP and USR1 end the main process by that signal; EngineCore and Worker live on."""
    with MockEngine(directory=tmp_path) as engine:
        engine.wait_ready()
        children = engine.pids()
        engine.send_signal(number)
        assert engine.wait_exit() == -number
        assert engine.pids() == children


def test_quit_changes_nothing(tmp_path: Path) -> None:
    """After QUIT the engine answers as before."""
    with MockEngine(directory=tmp_path) as engine:
        engine.wait_ready()
        engine.send_signal(signal.SIGQUIT)
        assert engine.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_killed_child_ends_the_engine_with_0(tmp_path: Path, title: str) -> None:
    """Open streams get an error event and [DONE], /health 503, new requests 500; then exit 0, nothing left."""
    # wedged_exit holds the exit back until everything was looked at.
    with MockEngine("--mock-death-time", "0", "--mock-fault", "wedged_exit", directory=tmp_path) as engine:
        engine.wait_ready()
        children = engine.pids()
        with engine.stream(CHAT, LONG) as stream:
            events = iter(stream)
            next(events)
            os.kill(engine.pids(title)[0], signal.SIGKILL)
            rest = list(events)
        assert rest[-1] == "data: [DONE]"
        assert data(rest)[-1]["error"]["type"] == "InternalServerError"
        assert engine.get("/health").status == 503
        assert engine.post(CHAT, LONG).json["error"]["message"].startswith("EngineCore encountered an issue")
        engine.clear("wedged_exit")
        assert engine.wait_exit() == 0
        assert all(gone(pid) for pid in children)


def test_a_stopped_worker_is_a_hang(tmp_path: Path) -> None:
    """SIGSTOP on the Worker freezes the counters with running at 1 and /health at 200; CONT completes the stream."""
    with MockEngine("--mock-tokens-per-second", "100", directory=tmp_path) as engine:
        engine.wait_ready()
        with engine.stream(CHAT, LONG | {"max_tokens": 60}) as stream:
            events = iter(stream)
            next(events)
            worker = engine.pids("VLLM::Worker")[0]
            os.kill(worker, signal.SIGSTOP)
            before = engine.metric("vllm:generation_tokens_total")
            later = [engine.metric("vllm:generation_tokens_total") for _ in range(30)][-1]
            assert later <= before + 1  # the step that was under way may still end, the one after it cannot
            assert engine.get("/health").status == 200
            assert engine.metric("vllm:num_requests_running") == 1
            os.kill(worker, signal.SIGCONT)
            assert list(events)[-1] == "data: [DONE]"


def test_an_address_in_use_ends_the_start_with_1(tmp_path: Path) -> None:
    """A port that somebody listens on, or a socket file that is there, is exit 1 with vLLM's words."""
    with socket.create_server(("127.0.0.1", 0)) as taken, MockEngine(port=taken.getsockname()[1]) as engine:
        assert engine.wait_exit() == 1
        engine.wait_line("[Errno 98] Address already in use")
    path = tmp_path / "left.sock"
    path.touch()
    with MockEngine("--uds", str(path), directory=tmp_path) as engine:
        assert engine.wait_exit() == 1
        engine.wait_line("[Errno 98] Address already in use")


@pytest.mark.parametrize("words", [["--port", "x"], ["--mock-fault", "no_such_fault"], ["--mock-typo"]])
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, words: list[str]) -> None:
    """Usage errors are one line on standard error and status 2, as argparse has it."""
    with MockEngine(*words, directory=tmp_path) as engine:
        assert engine.wait_exit() == 2
        engine.wait_line("error:")


END_CASES: dict[str, tuple[list[str], int, Callable[[MockEngine], object]]] = {
    "code in the load": (["exit=3@load"], 3, lambda _: None),
    "code after a time": (["exit=7@50ms"], 7, lambda _: None),
    "code after answers": (["exit=0@2req"], 0, lambda engine: [engine.post("/v1/completions", {}) for _ in range(2)]),
    "signal": (["signal=SEGV@50ms"], -11, lambda _: None),
    "error text": (["error=kv_too_small"], 1, lambda engine: engine.wait_line("To serve at least one request")),
    "usage text": (["error=usage"], 2, lambda engine: engine.wait_line("unrecognized arguments")),
    "EngineCore dies": (["engine_core_dies=50ms"], 0, lambda engine: engine.wait_line("EngineDeadError")),
    "Worker dies": (["worker_dies=50ms"], 0, lambda engine: engine.wait_line("Worker proc VllmWorker-0 died")),
}


@pytest.mark.parametrize("case", END_CASES)
def test_an_end_that_was_asked_for_comes(tmp_path: Path, case: str) -> None:
    """Each ending fault ends the process with its status at its time, having printed its text."""
    faults, status, during = END_CASES[case]
    words = [word for fault in faults for word in ("--mock-fault", fault)]
    with MockEngine("--mock-death-time", "100ms", *words, directory=tmp_path) as engine:
        if "req" in faults[0]:
            engine.wait_ready()
        during(engine)
        assert engine.wait_exit() == status


def test_a_signal_leaves_the_children_an_exit_does_not(tmp_path: Path) -> None:
    """Dying of a signal orphans the children; exiting takes them along."""
    with MockEngine("--mock-fault", "signal=ABRT@0s", directory=tmp_path) as engine:
        assert engine.wait_exit() == -signal.SIGABRT
        assert len(engine.pids()) == 2
    with MockEngine("--mock-fault", "exit=1@0s", directory=tmp_path) as engine:
        engine.wait_ready()
        engine.wait_exit()
        assert all(gone(pid) for pid in engine.pids())


def test_children_of_their_own_session_outlive_an_orderly_end(tmp_path: Path) -> None:
    """With own_session both children lead sessions of their own and are there after exit 0."""
    with MockEngine("--mock-fault", "own_session", directory=tmp_path) as engine:
        engine.wait_ready()
        children = engine.pids()
        assert all(os.getsid(pid) == pid for pid in children)
        assert engine.stop() == 0
        assert engine.pids() == children


def test_a_wedged_engine_says_it_is_dead_and_stays(tmp_path: Path) -> None:
    """With wedged_exit a dead engine logs EngineDeadError, ignores TERM and answers 503; KILL ends it."""
    words = ["--mock-fault", "wedged_exit", "--mock-fault", "engine_core_dies", "--mock-death-time", "0s"]
    with MockEngine(*words, directory=tmp_path) as engine:
        engine.wait_line("EngineDeadError")
        engine.send_signal(signal.SIGTERM)
        assert engine.get("/health").status == 503
        engine.clear("wedged_exit")
        assert engine.wait_exit() == 0


def test_term_is_ignored_on_demand(tmp_path: Path) -> None:
    """With ignore_term the engine serves on after TERM, and ends at a TERM after the fault was cleared."""
    with MockEngine("--mock-fault", "ignore_term", directory=tmp_path) as engine:
        engine.wait_ready()
        engine.send_signal(signal.SIGTERM)
        assert engine.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
        engine.clear("ignore_term")
        assert engine.stop() == 0


def test_it_waits_for_ever_for_open_connections_on_demand(tmp_path: Path) -> None:
    """With never_exit_with_streams a stream pins the process after TERM until its client leaves; then exit 0."""
    with MockEngine("--mock-fault", "never_exit_with_streams", directory=tmp_path) as engine:
        engine.wait_ready()
        with engine.stream(CHAT, LONG) as stream:
            next(iter(stream))
            engine.send_signal(signal.SIGTERM)
            engine.wait_line("Waiting for connections to close")
            assert engine.process.poll() is None
        assert engine.wait_exit() == 0


def test_shared_memory_is_left_behind_by_kill_alone(tmp_path: Path) -> None:
    """With shm EngineCore maps a /dev/shm/psm_ file: gone after an orderly end, there after KILL of everything."""
    for end, left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        with MockEngine("--mock-fault", "shm", directory=tmp_path) as engine:
            engine.wait_ready()
            maps = Path(f"/proc/{engine.pids('VLLM::EngineCore')[0]}/maps").read_text()
            path = Path(next(word for word in maps.split() if word.startswith("/dev/shm/psm_")))
            children = engine.pids()
            engine.send_signal(end)
            engine.wait_exit()
            if end == signal.SIGKILL:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
            assert all(gone(pid) for pid in children)
            assert path.exists() is left
            path.unlink(missing_ok=True)
