"""`ledger summary|show|audit`: read the two ledgers, also while they are written and when nothing runs.

Rules:
* The two registers are shown side by side and never added.
* Requests that are open now are shown whatever the window.
* Read line by line: the size of a ledger costs time, not memory.
* What cannot be read is told on its own lines, and nothing of a ledger reaches a terminal but printable text.
"""

import json
from datetime import UTC, datetime
from typing import Any

import click

from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.cli.groups import SuggestingGroup
from vllm_supervisor.cli.ledger_place import ledger_directory, read_fold, readable, since_stamp
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.core.accounts import MAX_DAMAGE
from vllm_supervisor.core.audit import Audit
from vllm_supervisor.core.audit import audit as check
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.ledger_parser import Record
from vllm_supervisor.core.ledger_summary import summarize
from vllm_supervisor.core.plain_text import printable
from vllm_supervisor.core.words import ExecutionState, Outcome

_OPENING = ("t", "at", "boot", "run", "inc", "event")


_place = click.option(
    "--state-dir", metavar="DIR", help="Where the ledgers are; default: the instance's state directory."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


@click.group(cls=SuggestingGroup)
def ledger() -> None:
    """Read what became of requests and of the engine's work for them."""


@ledger.command()
@click.option("--since", metavar="WHEN", help='Only requests accepted since then: "1h", or a time in ISO 8601.')
@_place
@_json_option
@click.pass_obj
def summary(options: GlobalOptions, *, since: str | None, state_dir: str | None, as_json: bool) -> int:
    """Count per release: outcomes by class, executions by state, refusals; and what is open now.

    Status 1 if lines or segments cannot be read or are missing: the counts are too low then.
    """
    now = datetime.now(UTC)
    fold = read_fold(ledger_directory(options, state_dir), since_stamp(since, now))
    answer = summarize(fold, now)
    click.echo(json.dumps(answer) if as_json else render_summary(answer))
    return 1 if fold.damage else 0


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def render_summary(answer: dict[str, Any]) -> str:
    """Write a summary for a terminal: first the request register, then, apart from it, the execution register."""
    lines: list[str] = []
    for release in answer["releases"]:
        lines.append(
            f"release {release['release'] or '(none)'}: {_runs(release['runs'])}, {release['accepted']} accepted"
        )
        lines.append("  requests")
        for request_class, counts in sorted(release["classes"].items()):
            lines.append(f"    {request_class:12} " + "  ".join(f"{name} {counts[name]}" for name in Outcome))
        if release["why"]:
            lines.append("    why: " + ", ".join(f"{why} {n}" for why, n in release["why"].most_common()))
        if release["rejected"]:
            lines.append("    rejected: " + ", ".join(f"{why} {n}" for why, n in release["rejected"].most_common()))
        states = release["executions"]
        lines.append("  executions   " + "  ".join(f"{state} {states[state]}" for state in ExecutionState))
    if answer["open_now"]:
        lines.append(f"open now: {answer['open_now']}, the oldest for {answer['oldest_open_s']:.0f} s")
    else:
        lines.append("open now: none")
    lines.append(f"executions not settled: {answer['unsettled_executions']}")
    missing = {name.replace("_", " "): n for name, n in answer["missing"].items() if n}
    if missing:
        lines.append("EVIDENCE MISSING: " + ", ".join(f"{n} {name}" for name, n in missing.items()))
    lines += [f"EVIDENCE MISSING: {sentence}" for sentence in answer["damage"]]
    return "\n".join(map(printable, lines))


@ledger.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option(
    "--open", "only_open", is_flag=True, help="What is not settled: no outcome yet, or an execution not final."
)
@click.option("--since", metavar="WHEN", help='Every line since then: "1h", or a time in ISO 8601.')
@_place
@_json_option
@click.pass_obj
def show(
    options: GlobalOptions,
    *,
    request_id: str | None,
    only_open: bool,
    since: str | None,
    state_dir: str | None,
    as_json: bool,
) -> int:
    """Show the lines of one request, of everything not settled, or since a time.

    Status 1 if there are no lines of that request or since then; with --open 0 either way.
    """
    if sum((request_id is not None, only_open, since is not None)) != 1:
        raise UsageError("ledger show: say one of ID, --open, --since")
    directory = ledger_directory(options, state_dir)
    wanted = {account.id for account in read_fold(directory).open_ids()} if only_open else {request_id}
    stamp = since_stamp(since, datetime.now(UTC))
    found, unreadable = False, 0
    with readable(directory):
        for number, at, line, record, problem in ledger_reader.read(directory):
            if problem:
                unreadable += 1
                if unreadable <= MAX_DAMAGE:
                    where = f"segment {number} line {at}" if at else f"segment {number}"
                    click.echo(printable(f"EVIDENCE MISSING: {where} is unreadable: {problem}"), err=True)
            elif record is not None and (record["at"] >= stamp if since is not None else record.get("id") in wanted):
                found = True
                click.echo(_as_it_stands(line, record) if as_json else _plain(record))
    if unreadable > MAX_DAMAGE:
        click.echo(f"EVIDENCE MISSING: and {unreadable - MAX_DAMAGE} more", err=True)
    if not found and not as_json:
        sought = f"request {request_id}" if request_id else "line since then"
        click.echo(f"nothing: {'everything is settled' if only_open else f'no {sought}'} in {directory}", err=True)
    return 0 if found or only_open else 1


def _plain(record: Record) -> str:
    rest = " ".join(f"{key}={json.dumps(value)}" for key, value in record.items() if key not in _OPENING)
    return printable(f"{record['at']}  {record['run']}/{record['inc']}  {record['event']:9}  {rest}")


def _as_it_stands(line: bytes, record: Record) -> str:
    """Give the line itself; one that is none of ours, because a terminal might obey it, as JSON that is printable."""
    text = line.decode().rstrip("\n")
    return text if text.isascii() and text.isprintable() else json.dumps(record)


@ledger.command()
@_place
@_json_option
@click.pass_obj
def audit(options: GlobalOptions, *, state_dir: str | None, as_json: bool) -> int:
    """Check each run: everything accepted has one outcome and an execution state (status 1: something does not hold)."""
    found = check(read_fold(ledger_directory(options, state_dir)))
    click.echo(json.dumps(audit_json(found)) if as_json else render_audit(found))
    return 0 if found.holds else 1


def audit_json(found: Audit) -> dict[str, Any]:
    """Build the audit as JSON."""
    return {
        "holds": found.holds,
        "evidence": found.evidence,
        "runs": [
            {
                "run": run.run,
                "release": run.release,
                "holds": run.holds,
                "live": run.live,
                "partial": run.partial,
                "violations": run.violations,
            }
            for run in found.runs
        ],
    }


def render_audit(found: Audit) -> str:
    """Write the audit for a terminal: a line a run, violations below."""
    lines = []
    for run in found.runs:
        notes = [note for note in ("not ended" if run.live else "", run.gone) if note]
        verdict = "holds" if run.holds else "DOES NOT HOLD"
        lines.append(f"run {run.run}: {verdict}" + (f" ({', '.join(notes)})" if notes else ""))
        lines += [f"    {violation}" for violation in run.violations]
    lines += [f"EVIDENCE MISSING: {sentence}" for sentence in found.evidence]
    return "\n".join(map(printable, lines)) or "the ledger is empty"
