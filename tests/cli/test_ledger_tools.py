"""`ledger` and `gate` on ledgers that a journal wrote: what they show, and how they exit."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fakes.control_socket import serving
from fakes.hostile_ledger import LINES, READABLE
from fakes.ledger_kit import identity, outcome, request, run_journal
from vllm_supervisor.adapters import directories
from vllm_supervisor.cli.gate import gate
from vllm_supervisor.cli.ledger import ledger
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.core.errors import ConfigError, UsageError
from vllm_supervisor.core.ledger import segment_name
from vllm_supervisor.core.words import Evidence, ExecutionState, Outcome, RequestClass
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter

EXIT_PAGE = Path(__file__).parents[2] / "docs" / "exit-status.md"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Write two runs: one that ended clean, and one that still has a request open."""

    async def first(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run1-1", sent_at=1.0, engine_id="a"))
        journal.execution("run1-1", ExecutionState.COMPLETED, Evidence.ANSWER)
        journal.outcome(outcome("run1-1"))
        await journal.accepted(request("run1-2", RequestClass.COMPLETIONS, sent_at=1.0, engine_id="b"))
        journal.outcome(outcome("run1-2", Outcome.CANCELLED, request_class=RequestClass.COMPLETIONS))
        journal.rejected(RequestClass.CHAT, "draining")
        journal.engine_gone()
        assert await journal.end(5.0, clean=True)

    async def second(journal: LedgerJournal, _writer: LedgerWriter) -> None:
        await journal.accepted(request("run2-1", sent_at=1.0, engine_id="c"))
        journal.outcome(outcome("run2-1", Outcome.CANCELLED))
        await journal.accepted(request("run2-2", sent_at=1.0, engine_id="d"))

    run_journal(tmp_path / "ledger", first)
    run_journal(tmp_path / "ledger", second, who=identity("run2"))
    return tmp_path


def run(state: Path, *words: str, command: str = "ledger") -> Result:
    """Run a tool on the state directory and return what it did; an error of the user's is raised."""
    options = GlobalOptions(None, (), None, "vllm", {})
    chosen = ledger if command == "ledger" else gate
    arguments = [*words, "--state-dir", str(state)]
    result = CliRunner().invoke(chosen, arguments, obj=options, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def isolated(root: Path, monkeypatch: pytest.MonkeyPatch) -> GlobalOptions:
    """Give options under which only what lies below `root` is found; supervisors that really run are not meant."""
    monkeypatch.setattr(directories, "_SYSTEM", root / "none")
    (root / "run").mkdir()
    environ = {"XDG_STATE_HOME": str(root), "XDG_RUNTIME_DIR": str(root / "run"), "TMPDIR": str(root / "none")}
    return GlobalOptions(None, (), None, "vllm", environ)


def test_the_summary_keeps_the_registers_apart(state: Path) -> None:
    """The summary counts outcomes by class and executions by state, and says what is open now."""
    answer = json.loads(run(state, "summary", "--json").stdout)
    (release,) = answer["releases"]
    assert release["classes"]["chat"] == {"completed": 1, "failed": 0, "cancelled": 1, "open": 0}
    assert release["classes"]["completions"] == {"completed": 0, "failed": 0, "cancelled": 1, "open": 0}
    assert release["executions"] == {"completed": 1, "confirmed_stopped": 1, "running": 1}
    assert (release["runs"], release["accepted"], release["rejected"]) == (2, 4, {"draining": 1})
    assert (answer["open_now"], answer["unsettled_executions"]) == (1, 1)


def test_what_is_open_counts_whatever_the_window(state: Path) -> None:
    """A window leaves out what was accepted before it, but never what is open now."""
    answer = json.loads(run(state, "summary", "--json", "--since", "2100-01-01").stdout)
    assert sum(release["accepted"] for release in answer["releases"]) == 0
    assert answer["open_now"] == 1


def test_the_summary_is_readable(state: Path) -> None:
    """For a person both registers stand in lines of their own."""
    text = run(state, "summary").stdout
    assert "chat         completed 1  failed 0  cancelled 1  open 0" in text
    assert "executions   not_started 0  running 1  completed 1  confirmed_stopped 1  unknown 0" in text
    assert "open now: 1, the oldest for " in text


def test_one_request_is_shown_whole(state: Path) -> None:
    """`show ID` prints each line of that request in order, as it stands in the file with --json."""
    result = run(state, "show", "run1-2", "--json")
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == [
        "accepted", "outcome", "execution", "execution",
    ]  # fmt: skip
    assert "completions" in run(state, "show", "run1-2").stdout


def test_an_unknown_id_is_said(state: Path) -> None:
    """An id that is not in the ledger exits 1."""
    assert run(state, "show", "run9-9").return_value == 1


def test_open_shows_what_is_not_settled(state: Path) -> None:
    """`show --open` prints requests without an outcome and executions that are not final, and no others."""
    lines = [json.loads(line) for line in run(state, "show", "--open", "--json").stdout.splitlines()]
    assert {line["id"] for line in lines} == {"run2-1", "run2-2"}


def test_nothing_open_is_no_failure(tmp_path: Path) -> None:
    """`show --open` is 0 with nothing open as well, and its help and the page on exits say so."""
    (tmp_path / "ledger").mkdir()
    assert run(tmp_path, "show", "--open").return_value == 0
    assert run(tmp_path, "show", "--since", "1h").return_value == 1
    assert "with --open 0 either way" in " ".join(CliRunner().invoke(ledger, ["show", "--help"]).stdout.split())
    assert "`ledger show --open` is 0 either way" in EXIT_PAGE.read_text(encoding="utf-8")


def test_show_wants_one_selection(state: Path) -> None:
    """Without a selection, or with two, the usage is said."""
    for words in (["show"], ["show", "run1-1", "--open"]):
        with pytest.raises(UsageError, match="one of"):
            run(state, *words)


def test_an_audit_that_holds(state: Path) -> None:
    """A clean run and a living one both hold."""
    result = run(state, "audit")
    assert (result.return_value, result.stdout) == (0, "run run1: holds\nrun run2: holds (not ended)\n")


def test_an_audit_that_does_not_hold(state: Path) -> None:
    """A second outcome written by hand is found and exits 1."""
    path = state / "ledger" / segment_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    extra = next(line for line in lines if b'"outcome":"completed"' in line)
    path.write_bytes(b"".join([*lines, extra]))
    result = run(state, "audit", "--json")
    assert result.return_value == 1
    answer = json.loads(result.stdout)
    assert answer["runs"][0]["violations"] == ["run1-1: a second outcome"]


def put_in(state: Path, line: bytes) -> int:
    """Put `line` into the middle of the first run; return its number."""
    path = state / "ledger" / segment_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    return 4


def said_by_all(state: Path) -> str:
    """Run every tool, with and without --json; return what they said, which can stand on any terminal."""
    (state / "rules.toml").write_text("minimum_sample = 1\nmax_unresolved_executions = 100", encoding="utf-8")
    said = ""
    for form in ((), ("--json",)):
        for words in (
            ["summary"],
            ["show", "run1-1"],
            ["show", "--open"],
            ["show", "--since", "2020-01-01"],
            ["audit"],
        ):
            result = run(state, *words, *form)
            said += result.stdout + result.stderr
        said += run(state, "--rules", str(state / "rules.toml"), *form, command="gate").stdout
    assert all(letter.isprintable() for letter in said.replace("\n", "")), said
    return said


@pytest.mark.parametrize("name", LINES)
def test_each_line_that_cannot_be_read_is_told_by_every_tool(state: Path, name: str) -> None:
    """By its place and the reason, on one line; the audit, the summary and the gate fail for it, and for nothing else."""
    line, reason = LINES[name]
    told = f"segment 1 line {put_in(state, line)} is unreadable: {reason}"
    found = run(state, "audit")
    assert found.return_value == 1
    assert found.stdout.splitlines() == [
        "run run1: DOES NOT HOLD (lines of it are missing)",
        "    1 of its lines cannot be read",
        "run run2: holds (not ended)",
        f"EVIDENCE MISSING: {told}",
    ]
    counted = run(state, "summary")
    assert (counted.return_value, counted.stdout.splitlines()[-1]) == (1, f"EVIDENCE MISSING: {told}")
    if "another boot" not in reason:  # which a single line cannot tell
        assert run(state, "show", "run1-1").stderr == f"EVIDENCE MISSING: {told}\n"
    status, checks = rules(state, "minimum_sample = 1\nmax_unresolved_executions = 100")
    assert (status, checks["evidence"], checks["max_unresolved_executions"]) == (1, False, True)
    assert told in said_by_all(state)


@pytest.mark.parametrize("name", READABLE)
def test_whatever_can_be_read_can_be_shown(state: Path, name: str) -> None:
    """Text of any kind comes out printable, and no tool fails of it."""
    put_in(state, READABLE[name])
    assert "EVIDENCE MISSING" not in said_by_all(state)


def test_a_segment_that_cannot_be_read_is_told_by_every_tool(state: Path) -> None:
    """A pipe, a directory or a link in the place of a file, and one that is gone: nothing waits, nothing is followed."""
    for number, make in ((2, os.mkfifo), (3, Path.mkdir), (5, lambda path: path.symlink_to(segment_name(1)))):
        make(state / "ledger" / segment_name(number))
    found = run(state, "audit")
    assert (found.return_value, found.stdout.splitlines()[2:]) == (
        1,
        [
            "EVIDENCE MISSING: segment 2 is unreadable: it is no regular file",
            "EVIDENCE MISSING: segment 3 is unreadable: it is no regular file",
            "EVIDENCE MISSING: segment 4 is missing",
            "EVIDENCE MISSING: segment 5 is unreadable: it is a symbolic link",
        ],
    )
    assert "segment 5 is unreadable" in run(state, "show", "run1-1").stderr
    said_by_all(state)


def test_damage_before_the_window_does_not_close_the_gate(state: Path) -> None:
    """Only what may lie inside it does; the end of the ledger always may."""
    put_in(state, b"garbage\n")
    text = 'minimum_sample = 1\nmax_unresolved_executions = 100\nwindow = "{}"'
    assert "evidence" in rules(state, text.format("30000d"))[1]
    assert "evidence" not in rules(state, text.format("1h"))[1]
    (state / "ledger" / segment_name(2)).mkdir()
    assert "evidence" in rules(state, text.format("1h"))[1]


def test_many_unreadable_lines_are_counted(state: Path) -> None:
    """The first of them are named, and the time they take grows with their number alone."""
    put_in(state, b"garbage\n" * 50_000)
    for words, where in ((["audit"], "stdout"), (["show", "run1-1"], "stderr")):
        lines = getattr(run(state, *words), where).splitlines()
        assert sum("is unreadable: not a whole JSON object" in line for line in lines) == 20
        assert lines[-1] == "EVIDENCE MISSING: and 49980 more"


def test_a_ledger_that_may_not_be_listed_is_one_line(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the directory and the option, for every tool."""

    def denied(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    for words in (["summary"], ["show", "--open"], ["show", "run1-1"], ["audit"]):
        with pytest.raises(UsageError, match=r"ledger cannot be read: Permission denied; say where by --state-dir"):
            run(state, *words)


def test_a_half_written_line_is_no_fault(state: Path) -> None:
    """While the writer is in the middle of a line, the tools read what is there and do not complain."""
    with (state / "ledger" / segment_name(1)).open("ab") as file:
        file.write(b'{"t":1.0,"at"')
    assert run(state, "audit").return_value == 0


def rules(state: Path, text: str) -> tuple[int, dict[str, bool]]:
    """Run the gate with the rules `text`; return its status and what each rule said."""
    file = state / "rules.toml"
    file.write_text(text)
    result = run(state, "--rules", str(file), "--json", command="gate")
    return result.return_value, {check["rule"]: check["passes"] for check in json.loads(result.stdout)["checks"]}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('minimum_sample = 3\nmax_incomplete_streams = "70%"', 0),
        ('minimum_sample = 3\nmax_incomplete_streams = "60%"', 1),
        ('minimum_sample = 4\nmax_incomplete_streams = "70%"', 1),
        ("minimum_sample = 1\nmax_unresolved_executions = 1", 0),
        ("minimum_sample = 1\nmax_unresolved_executions = 0", 1),
        ('minimum_sample = 1\nmax_open_age = "10s"', 1),
        ('minimum_sample = 1\nmax_open_age = "30000d"', 0),
        ('minimum_sample = 1\nmax_open_age = "30000d"\nrelease = "r2"', 1),
        ('minimum_sample = 1\nmax_unresolved_executions = 9\nwindow = "1s"', 1),
    ],
)
def test_the_gate_passes_or_fails(state: Path, text: str, status: int) -> None:
    """Each rule is judged by itself; one that is unmet, or too little data, fails the whole."""
    found, checks = rules(state, text)
    assert found == status
    assert all(checks.values()) == (status == 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("minimum_sample = 1\nmax_opne_age = 3", "max_opne_age: no such rule"),
        ('max_open_age = "1s"', "minimum_sample is missing"),
        ("minimum_sample = 1", "no rule that could fail"),
        ('minimum_sample = 0\nmax_open_age = "x"', "max_open_age = 'x'"),
        ("minimum_sample = ", "is not TOML"),
    ],
)
def test_bad_rules_are_refused(state: Path, text: str, problem: str) -> None:
    """A rules file with an unknown key, a bad value or nothing to judge is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        rules(state, text)
    assert problem in str(caught.value)


def test_a_missing_ledger_is_said(tmp_path: Path) -> None:
    """Where no ledger is, the option that says where is named."""
    with pytest.raises(UsageError, match="--state-dir"):
        run(tmp_path, "summary")


@pytest.mark.parametrize("names", [(), ("8000",), ("8000", "8001")])
def test_the_only_ledger_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Without a state directory the only instance's ledger is taken; several are listed, none is said."""
    for name in names:
        (tmp_path / "vllm-supervisor" / name / "ledger").mkdir(parents=True)
    options = isolated(tmp_path, monkeypatch)
    result = CliRunner().invoke(ledger, ["audit"], obj=options, standalone_mode=False)
    if len(names) == 1:
        assert (result.stdout, result.exception) == ("the ledger is empty\n", None)
    else:
        assert isinstance(result.exception, UsageError)
        assert ("8000, 8001" in str(result.exception)) == (len(names) == 2)


def test_a_name_without_a_ledger_is_told_with_those_that_have_one(tmp_path: Path) -> None:
    """A mistyped name is seen at once; a state directory of one's own choice belongs to any name."""
    for name in ("8000", "8001"):
        (tmp_path / "vllm-supervisor" / name / "ledger").mkdir(parents=True)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for sets, name, told in (
        ((), "8000", None),
        ((), "9999", r"9999 \(there are: 8000, 8001\); say where"),
        ((f"state_dir={tmp_path}/vllm-supervisor/8001",), "9999", None),
    ):
        options = GlobalOptions(None, sets, name, "vllm", environ)
        result = CliRunner().invoke(ledger, ["audit"], obj=options, standalone_mode=False)
        if told is None:
            assert (result.stdout, result.exception) == ("the ledger is empty\n", None)
        else:
            assert re.search(told, str(result.exception))


def test_of_several_ledgers_that_of_the_only_running_one_is_meant(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `status` means it; with none or two running, or one whose ledger is elsewhere, they are listed."""
    root = tmp_path_factory.mktemp("l")
    options = isolated(root, monkeypatch)
    for name in ("8000", "8001"):
        (root / "vllm-supervisor" / name / "ledger").mkdir(parents=True)
        (root / "run" / "vllm-supervisor" / name).mkdir(parents=True)
    (root / "vllm-supervisor" / "8001" / "ledger" / segment_name(1)).write_bytes(b'{"t":1.0,"at"\n')

    def audit() -> Result:
        return CliRunner().invoke(ledger, ["audit"], obj=options, standalone_mode=False)

    def socket(name: str) -> Path:
        return root / "run" / "vllm-supervisor" / name / "control.sock"

    assert isinstance(audit().exception, UsageError)
    with serving(socket("8000"), {"/status": (200, b'{"name": "8000"}')}) as server:
        assert audit().stdout == "the ledger is empty\n"
        server.answers["/status"] = (200, b'{"name": "8001"}')
        assert "EVIDENCE MISSING" in audit().stdout
        server.answers["/status"] = (200, b'{"name": "9000"}')
        assert "8000, 8001; choose by --name" in str(audit().exception)
        server.answers["/status"] = (200, b'{"name": "8000"}')
        with serving(socket("8001"), {"/status": (200, b'{"name": "8001"}')}):
            assert "8000, 8001; choose by --name" in str(audit().exception)
