"""Mistakes of a person: one clear line each, the promised exit status, no traceback, nothing left behind."""

import os
import socket
from pathlib import Path

from fakes.ports import free_port
from fakes.supervisor_process import Account, Supervisor

SERVE = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1")


def expect_one_line(supervisor: Supervisor, status: int, *words: str) -> None:
    """Fail unless it ends with `status` and one line on standard error that holds `words`."""
    assert supervisor.ends(within=15.0) == status, supervisor.words()
    said = supervisor.err.text
    assert "Traceback" not in said, said
    assert len(said.strip().splitlines()) == 1, said
    for word in words:
        assert word in said, said


def test_a_port_in_use_is_an_error_at_once_that_names_the_holder(account: Account) -> None:
    """The line names the port and the process that holds it; no engine was started."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        expect_one_line(account.start(*SERVE, "--port", port), 78, port, str(os.getpid()))
    account.expect_nothing_left()


def test_a_port_that_a_loading_server_has_bound_is_in_use(account: Account) -> None:
    """Bare vLLM binds its port long before it listens: one line names it, and no second engine is loaded beside it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
        expect_one_line(account.start(*SERVE, "--port", port), 78, port, str(os.getpid()), "does not listen yet")
    account.expect_nothing_left()


def test_a_run_directory_that_cannot_be_made_is_named(account: Account) -> None:
    """A run directory below a plain file cannot be made by anyone, root included: the line names it."""
    blocked = account.home / "file" / "run"
    blocked.parent.write_text("in the way", encoding="utf-8")
    supervisor = account.start("--set", f"run_dir={blocked}", *SERVE, "--port", str(free_port()))
    expect_one_line(supervisor, 78, str(blocked))
    account.expect_nothing_left()


def test_an_unknown_control_group_is_named(account: Account) -> None:
    """Nobody is left to believe that a group has been let in."""
    supervisor = account.start("--set", "control.group=no-such-group", *SERVE, "--port", str(free_port()))
    expect_one_line(supervisor, 78, "control.group = 'no-such-group'", "no such group")
    account.expect_nothing_left()


def test_a_vllm_that_is_not_installed_is_said_with_the_mend(account: Account) -> None:
    """Without `vllm` on PATH the line names the option that says where it is."""
    lonely = account.home / "empty"
    lonely.mkdir()
    argv = ("serve", "tiny", "--host", "127.0.0.1", "--port", str(free_port()))
    supervisor = account.start(
        "--set", "engine.command=vllm-that-nobody-has", *argv, env={"PATH": f"{lonely}:/usr/bin:/bin"}
    )
    expect_one_line(supervisor, 78, "vllm-that-nobody-has", "engine.command")
    account.expect_nothing_left()


def test_an_unreadable_configuration_is_named(account: Account) -> None:
    """A configuration file that is not there, and one that is no TOML: each line names the file."""
    missing = account.home / "missing.toml"
    expect_one_line(account.start("--config", str(missing), *SERVE, "--port", str(free_port())), 78, str(missing))
    broken = account.home / "broken.toml"
    broken.write_text("[drain\nbudget = ", encoding="utf-8")
    expect_one_line(account.start("--config", str(broken), *SERVE, "--port", str(free_port())), 78, str(broken))


def test_every_mistake_in_the_configuration_is_told_at_once(account: Account) -> None:
    """An unknown key and a bad value stand in one report, each with key and value."""
    file = account.home / "supervisor.toml"
    file.write_text('[drain]\nbudgett = "5s"\nbudget = "soon"\n', encoding="utf-8")
    supervisor = account.start("--config", str(file), *SERVE, "--port", str(free_port()))
    assert supervisor.ends(within=15.0) == 78, supervisor.words()
    said = supervisor.err.text
    assert "Traceback" not in said
    assert "drain.budgett" in said
    assert "drain.budget" in said
    assert "soon" in said


def test_a_wrong_command_line_exits_2(account: Account) -> None:
    """An unknown option of ours before the sub-command is a usage error that names it."""
    supervisor = account.start("--no-such-option", "serve", "tiny")
    assert supervisor.ends(within=15.0) == 2, supervisor.words()
    assert "--no-such-option" in supervisor.err.text
    assert "Traceback" not in supervisor.err.text


def test_a_model_folder_that_is_not_there_is_told_before_anything_starts(account: Account) -> None:
    """A path that does not exist is no model: one line that names it, and no engine was started."""
    own = ("--set", "engine.command=/bin/false")
    argv = ("serve", "/nonexistent/model", "--host", "127.0.0.1", "--port", str(free_port()))
    expect_one_line(account.start(*own, *argv), 78, "/nonexistent/model")
    account.expect_nothing_left()


def test_on_a_terminal_an_option_the_engine_refuses_ends_the_command(account: Account) -> None:
    """The engine's usage error is not tried again: 78, the reason in the last line on the screen, nothing left."""
    supervisor = account.start(*SERVE, "--port", str(free_port()), "--mock-no-such-option", terminal=True)
    assert supervisor.ends(within=15.0) == 78, supervisor.words()
    assert "--mock-no-such-option" in supervisor.screen()[-1], supervisor.screen()
    assert "Traceback" not in supervisor.err.text
    account.expect_nothing_left()


def test_the_second_supervisor_on_a_state_directory_names_the_first(account: Account, tmp_path: Path) -> None:
    """The lock of the state directory: the second one exits 78 and says which process holds it."""
    state = ("--set", f"state_dir={tmp_path / 'state'}")
    first = account.start(*state, *SERVE, "--port", str(free_port()))
    first.named("VLLM::EngineCore")
    second = account.start(*state, *SERVE, "--port", str(free_port()))
    expect_one_line(second, 78, str(first.pid))
