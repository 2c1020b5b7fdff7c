"""The tools that speak to a running supervisor, and those that look at the configuration."""

import json
import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fakes.control_socket import Server, serving
from vllm_supervisor.adapters import directories
from vllm_supervisor.cli.inspect import event_line
from vllm_supervisor.cli.main import COMMANDS, UNTOUCHED, cli, main
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.cli.status_view import rows
from vllm_supervisor.core.config import settings

STATUS = {
    "version": "0.1.0", "name": "8000", "run": "r", "pid": 7, "phase": "running", "uptime_s": 3725.2, "release": "rel",
    "admission": {"open": True, "reason": None, "in_flight": 2, "limit": 1024},
    "engine": {"state": "ready", "incarnation": 1, "pid": 8, "uptime_s": 60.0, "address": "unix:/e.sock", "beacon": True,
               "processes": [{"pid": 8, "name": "vllm", "rss_bytes": 3 * 2**29}, {"pid": 9, "name": "VLLM::Worker", "rss_bytes": 2**20}]},
    "health": {"verdict": "busy", "sentence": "busy: steps advance", "evidence": {}, "since_s": 5, "running": 2.0, "waiting": 0.0,
               "tokens_per_s": 450.25, "steps_per_s": 55.0},
    "restarts": {"total": 1, "by_cause": {"crash": 1}, "budget": {"max": 3, "within_s": 900.0, "used": 1, "stuck": {"max": 3, "within_s": 21600.0, "used": 2}}, "last": {"cause": "crash", "ago_s": 90.0, "ready_after_s": 24.2, "requests_lost": 3}},
    "requests": {"accepted": 5, "completed": 3, "open": 2},
    "executions": {"not_started": 0, "running": 2},
    "drain": {"budget_s": 60, "elapsed_s": 20, "remaining_s": 40, "in_flight": 2, "oldest_s": 41},
    "memory": {"available_bytes": 8 * 2**30, "floor_bytes": None, "pressure": 0.5},
}  # fmt: skip
SCREEN = """\
supervisor  8000, phase running, pid 7, up 62 min 5 s, version 0.1.0, release rel
admission   open, 2 in flight, limit 1024
engine      ready, incarnation 1, pid 8, up 60 s, unix:/e.sock, with beacon
            vllm, pid 8, 1.5 GiB
            VLLM::Worker, pid 9, 1 MiB
health      busy for 5 s: steps advance
work        2 running, 0 waiting, 450.2 tokens/s, 55.0 steps/s
drain       2 in flight, oldest 41 s, 40 s left, of 60 s
restarts    1, crash 1, crashes 1 of 3 within 15m, hangs 2 of 3 within 6h, last: crash, 90 s ago, 3 requests lost, ready after 24 s
requests    5 accepted, 3 completed, 2 open
executions  0 not started, 2 running
memory      8.0 GiB available, pressure 0.5
"""


class Control:
    """A control socket in a run directory of its own."""

    def __init__(self, run_dir: Path, server: Server) -> None:
        """Keep both."""
        self.run_dir = run_dir
        self.server = server

    def run(self, *words: str) -> int:
        """Run a tool against it."""
        return main(["--set", f"run_dir={self.run_dir}", *words])

    def answer(self, path: str, value: object, status: int = 200) -> None:
        """Set what `path` answers."""
        self.server.answers[path] = (status, json.dumps(value).encode())


@pytest.fixture
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """Give a control socket without answers yet."""
    run_dir = tmp_path_factory.mktemp("t")
    with serving(run_dir / "control.sock", {}) as server:
        yield Control(run_dir, server)


def test_status_on_one_screen(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the status is plain lines that say everything in words."""
    control.answer("/status", STATUS)
    assert control.run("status") == 0
    assert capsys.readouterr().out == SCREEN


def test_a_run_directory_of_ones_own_choice_is_taken_at_its_word(control: Control) -> None:
    """With run_dir given, --name is the instance's name and not the directory's."""
    control.answer("/status", {})
    assert control.run("--name", "anything", "status") == 0


def test_status_as_json(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives the object as it came."""
    control.answer("/status", STATUS)
    assert control.run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"admission": None, "engine": None, "health": None, "restarts": None, "drain": None, "memory": None},
        {"admission": [], "engine": {"processes": [None, 5, {}]}, "health": {"since_s": None, "tokens_per_s": "x"}},
        {"engine": {"processes": {"a": 1}}, "restarts": {"by_cause": None, "budget": {"max": 1}, "last": None}},
        {name: dict.fromkeys(part) if isinstance(part, dict) else None for name, part in STATUS.items()},
    ],
)
def test_missing_parts_are_missing_rows(status: dict) -> None:
    """A status of another version, with parts missing or different, is shown as far as it goes."""
    for label, text, style in rows(status):
        assert isinstance(label + text + style, str)


@pytest.mark.parametrize(
    ("words", "path", "answer"),
    [
        (("events",), "/events", {}),
        (("events",), "/events", {"events": [5]}),
        (("events",), "/events", {"events": 5}),
        (("timeouts",), "/timeouts", {}),
        (("timeouts",), "/timeouts", {"sentence": "", "rows": [{}], "fits": True}),
        (("drain",), "/drain", {"in_flight": "x"}),
        (("drain",), "/drain", {"in_flight": None}),
    ],
)
def test_an_answer_of_another_form_is_one_line(
    control: Control, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], path: str, answer: object
) -> None:
    """Whatever answers on the socket, a tool ends with status 1 and a sentence."""
    control.answer(path, answer)
    assert control.run(*words) == 1
    told = capsys.readouterr().err
    assert "the answer has not the expected form" in told
    assert told.count("\n") == 1


def test_few_descriptors_are_told() -> None:
    """Plenty of them have no row."""
    assert "descriptors" not in {label for label, _, _ in rows({"descriptors": {"open": 40, "limit": 8448}})}
    assert "descriptors" not in {label for label, _, _ in rows({"descriptors": {"open": None, "limit": None}})}
    assert (
        "descriptors",
        "8448 of 8448 open: new connections may be refused; raise LimitNOFILE=",
        "red",
    ) in rows({"descriptors": {"open": 8448, "limit": 8448}})


def test_missing_evidence_is_told() -> None:
    """A ledger that is whole has no row; one that fails, or has lost lines, says so in words."""
    whole = {"failed": False, "error": None, "missing": False, "lost": 0, "late": 0, "at_risk": 0}
    assert "ledger" not in {label for label, _, _ in rows({"ledger": whole})}
    failing = {**whole, "failed": True, "error": "No space left on device", "missing": True, "lost": 3, "late": 1}
    assert (
        "ledger",
        "CANNOT BE WRITTEN: No space left on device, EVIDENCE MISSING, 3 lines lost, 1 late",
        "red",
    ) in rows({"ledger": failing})
    assert ("ledger", "EVIDENCE MISSING, 2 not surely on the disk", "red") in rows(
        {"ledger": {**whole, "missing": True, "at_risk": 2}}
    )


def test_a_closed_gate_says_why() -> None:
    """A closed admission shows its reason."""
    shown = rows({"admission": {"open": False, "reason": "draining", "in_flight": 0}})
    assert ("admission", "closed: draining, 0 in flight", "yellow") in shown


def test_events(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """Events are lines for a person, or the objects as they came."""
    event = {
        "n": 4,
        "at": "2026-01-01T00:00:00Z",
        "event": "engine",
        "level": "info",
        "why": "it is ready",
        "pid": 5,
        "state": "ready",
    }
    control.answer("/events", {"events": [event]})
    assert control.run("events", "-n", "3") == 0
    assert capsys.readouterr().out == "2026-01-01T00:00:00Z  engine  it is ready  pid=5 state=ready\n"
    assert control.run("events", "--json") == 0
    assert json.loads(capsys.readouterr().out) == event
    assert [path for _, path, _ in control.server.asked] == ["/events?n=3", "/events?n=20"]


def test_events_followed(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """--follow shows each event as its line comes, until the supervisor ends the answer."""
    control.server.answers["/events"] = (200, b'{"event": "a"}\n{"event": "b"}\n')
    assert control.run("events", "--follow") == 0
    assert capsys.readouterr().out == "a\nb\n"
    assert control.server.asked[0][1] == "/events?n=20&follow=1"


def test_an_event_with_little_in_it() -> None:
    """An event that lacks the usual parts is shown with what it has."""
    assert event_line({"event": "x", "why": None, "data": {"a": 1}}) == 'x  data={"a": 1}'


@pytest.mark.parametrize(
    ("words", "path", "body", "answer", "shown"),
    [
        ("drain", "/drain", {"wait": False, "hook": False, "timeout_s": None}, {"drained": False, "in_flight": 3}, "draining: 3 in flight"),
        ("drain --wait --hook --timeout 1.5m", "/drain", {"wait": True, "hook": True, "timeout_s": 90.0}, {"drained": True, "in_flight": 0}, "drained: nothing is in flight"),
        ("resume", "/resume", {}, {"admission": "open"}, "admission: open"),
        ("restart --reason why", "/restart", {"reason": "why"}, {"incarnation": 2}, "restarting: incarnation 2 is being replaced"),
        ("stop", "/stop", {}, {"phase": "draining", "does": "hurrying: all is cut"}, "hurrying: all is cut; `events --follow` shows how it goes and returns at the end"),
        ("report --source s --reason r", "/report", {"source": "s", "reason": "r"}, {"recorded": True, "verdict": "busy", "sentence": "7 running"}, "recorded; busy: 7 running"),
    ],
)  # fmt: skip
def test_actions(
    control: Control, capsys: pytest.CaptureFixture[str], *, words: str, path: str, body: dict, answer: dict, shown: str
) -> None:
    """Each action sends its body to its path and says in a line what came of it."""
    control.answer(path, answer)
    assert control.run(*words.split()) == 0
    assert control.server.asked == [("POST", path, body)]
    assert capsys.readouterr().out == shown + "\n"


def test_a_drain_that_did_not_end_in_time(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """`drain --wait` that ran out of time is status 1, and says how many are left."""
    control.answer("/drain", {"drained": False, "in_flight": 2})
    assert control.run("drain", "--wait", "--timeout", "1") == 1
    assert capsys.readouterr().err == "draining: 2 in flight\n"


@pytest.mark.parametrize(("cut", "shown"), [(1, "1 request was cut"), (3, "3 requests were cut")])
def test_a_drain_that_ended_by_a_cut(
    control: Control, capsys: pytest.CaptureFixture[str], cut: int, shown: str
) -> None:
    """`drain --wait` is status 1 where nothing is in flight because it was cut; without --wait it only says so."""
    control.answer("/drain", {"drained": True, "in_flight": 0, "background": 0, "cut": cut})
    assert control.run("drain", "--wait") == 1
    assert capsys.readouterr().err == f"drained: nothing is in flight, but {shown}\n"
    assert control.run("drain") == 0
    assert capsys.readouterr().out == f"drained: nothing is in flight, but {shown}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("restart", "Missing option '--reason'."),
        ("report --reason r", "Missing option '--source'."),
        ("drain --timeout soon", "Invalid value for '--timeout': soon: expected a duration"),
        ("events -n -1", "Invalid value for '-n'"),
        ("status extra", "Got unexpected extra argument (extra)"),
    ],
)
def test_usage(control: Control, capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    """A wrong use of a tool is one line and status 2, and nothing is sent."""
    assert control.run(*words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"vllm-supervisor: {told}")
    assert f"(see `vllm-supervisor {words.split(maxsplit=1)[0]} --help`)" in captured.err
    assert captured.err.count("\n") == 1
    assert control.server.asked == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("staus", "No such command 'staus'. Did you mean 'status'? (see `vllm-supervisor --help`)"),
        ("ledger sumary", "No such command 'sumary'. Did you mean 'summary'? (see `vllm-supervisor ledger --help`)"),
        ("config chek", "No such command 'chek'. Did you mean 'check'? (see `vllm-supervisor config --help`)"),
        ("zzz", "No such command 'zzz'. (see `vllm-supervisor --help`)"),
    ],
)
def test_the_nearest_command_is_suggested(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    """A misspelled command names the one that was probably meant."""
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"vllm-supervisor: {told}\n"


def test_refusals_are_shown(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal of the supervisor is its own sentence on standard error, status 1."""
    control.answer("/restart", {"error": {"message": "already stopping"}}, 409)
    assert control.run("restart", "--reason", "x") == 1
    assert capsys.readouterr().err == "vllm-supervisor: already stopping\n"


def test_finding_the_running_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None: status 3. One: it. Several: they are listed, status 2, and --name chooses. A stale socket does not count."""
    root = tmp_path_factory.mktemp("f")
    # Supervisors that really run on this machine are not meant.
    monkeypatch.setattr(directories, "_SYSTEM", root / "run")
    monkeypatch.setenv("TMPDIR", str(root / "tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    paths = {name: root / "vllm-supervisor" / name / "control.sock" for name in ("one", "two", "old")}
    for path in paths.values():
        path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(paths["old"]))
    assert main(["status"]) == 3
    assert main(["--name", "old", "status"]) == 3
    with serving(paths["one"], {"/status": (200, b'{"name": "one"}')}):
        assert main(["status"]) == 0
        with serving(paths["two"], {"/status": (200, b'{"name": "two"}')}):
            assert main(["status"]) == 2
            assert main(["--name", "two", "status"]) == 0
            assert main(["--name", "three", "status"]) == 3
    captured = capsys.readouterr()
    places = " or ".join(map(str, directories.control_places("", os.environ)))
    assert str(root / "vllm-supervisor") in places
    assert [line.split()[1] for line in captured.out.splitlines()] == ["one", "two"]
    assert captured.err.splitlines() == [
        f"vllm-supervisor: no running supervisor was found in {places}",
        f"vllm-supervisor: no running supervisor called old was found in {places}",
        "vllm-supervisor: several supervisors run here: one, two; choose one with --name NAME",
        f"vllm-supervisor: no running supervisor called three was found in {places}; these run: one, two",
    ]


def test_config_show_is_a_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config show` prints is TOML that holds every key, with the origin beside it and without secrets."""
    monkeypatch.setenv("VLLM_SUPERVISOR_RELEASE", "r")
    assert main(["--set", "engine.env.HF_TOKEN=hunter2", "--set", "engine.env.A=b", "config", "show"]) == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["engine"]["env"] == {"HF_TOKEN": "<redacted>", "A": "b"}
    assert sum(len(entry) if isinstance(entry, dict) else 1 for entry in tomllib.loads(shown).values()) == len(
        settings()
    )
    assert 'release = "r"' in shown
    assert "# environment VLLM_SUPERVISOR_RELEASE" in shown
    assert "hunter2" not in shown


def test_config_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives each key's value and origin."""
    assert main(["--set", "drain.budget=90s", "config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(settings())
    assert shown["drain.budget"] == {"value": 90.0, "origin": "--set"}


def test_config_check(capsys: pytest.CaptureFixture[str]) -> None:
    """`config check` is 0 for a right configuration, 78 with every mistake for a wrong one."""
    assert main(["config", "check"]) == 0
    assert main(["--set", "x=1", "--set", "y=1", "config", "check"]) == 78
    captured = capsys.readouterr()
    assert captured.out == "the configuration is right\n"
    assert captured.err.count("\n") == 2


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """`config schema` describes every key with its default and meaning."""
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for key, known in settings().items():
        found = schema
        for part in key.split("."):
            found = found["properties"][part]
        assert found["default"] == known.default
        assert known.doc in found["description"]


def _words() -> list[list[str]]:
    """Every command of ours that takes our options behind it, down to the last sub-command."""
    found = []
    for name in sorted(COMMANDS.keys() - UNTOUCHED):
        with cli.make_context("vllm-supervisor", [name]) as context:
            command = cli.get_command(context, name)
        assert command is not None
        inner = sorted(command.commands) if isinstance(command, click.Group) else []
        found += [[name, word] for word in inner] or [[name]]
    return found


@pytest.mark.parametrize("words", _words(), ids=" ".join)
def test_our_options_are_understood_behind_every_other_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--name, --config, --set and --engine mean the same before and behind a command; --set of both places counts."""
    seen: list[GlobalOptions] = []
    with cli.make_context("x", ["--set", "a.b=1", *words]) as context:
        command = cli.get_command(context, words[0])
        for word in words[1:]:
            assert isinstance(command, click.Group)
            command = command.get_command(context, word)
    assert command is not None
    needed = [
        word
        for parameter in command.params
        if parameter.required
        for word in ([parameter.opts[0], "1"] if isinstance(parameter, click.Option) else ["1"])
    ]
    monkeypatch.setattr(command, "callback", lambda *_, **__: seen.append(click.get_current_context().obj))
    ours = ["--name", "n", "--config=c", "--set", "c.d=2", "--set=e.f=3", "--engine", "mock"]
    assert main(["--set", "a.b=1", "--name", "old", *words, *ours, *needed]) == 0
    (found,) = seen
    assert (found.name, found.config, found.sets, found.engine) == ("n", "c", ("a.b=1", "c.d=2", "e.f=3"), "mock")


def test_our_options_behind_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """They may also stand between a group and its command."""
    assert main(["config", "--set", "drain.budget=7s", "show", "--set", "drain.reserve=1s"]) == 0
    shown = capsys.readouterr().out
    assert 'budget = "7s"' in shown
    assert shown.count("# --set") == 2


def test_a_doubtful_variable_is_told_by_the_configuration_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config check` and `config show` name it on standard error, and go on."""
    monkeypatch.setenv("VLLM_SUPERVISOR_DRAIN_BUDGET", "5s")
    for word in ("check", "show"):
        assert main(["config", word]) == 0
        assert "VLLM_SUPERVISOR_DRAIN__BUDGET was probably meant" in capsys.readouterr().err
