"""Commands that ask a running supervisor for something: drain, resume, restart, stop, report."""

import sys

import click

from vllm_supervisor.cli.finding import connect, expected_form
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.core.drain_report import drained
from vllm_supervisor.core.units import BadValueError, parse_duration
from vllm_supervisor.core.words import verdict_line


def _duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_duration(value)
    except BadValueError as error:
        raise click.BadParameter(f"{value}: {error}") from None


@click.command()
@click.option(
    "--wait", is_flag=True, help="Return when nothing is in flight any more; 1: time is over, or requests were cut."
)
@click.option("--hook", is_flag=True, help="Called by a pre-stop hook: a stop will follow, so admission stays closed.")
@click.option(
    "--timeout",
    callback=_duration,
    metavar="S",
    help="How long --wait waits; default: the drain's own budget, for --hook as far as it fits the outer limit.",
)
@click.pass_obj
def drain(options: GlobalOptions, *, wait: bool, hook: bool, timeout: float | None) -> int:
    """Close admission and let what is in flight finish; `resume` opens it again."""
    client = connect(options, acts=True)
    answer = client.post("/drain", {"wait": wait, "hook": hook, "timeout_s": timeout}, patient=wait)
    with expected_form():
        in_flight, background, cut = (int(answer.get(name, 0)) for name in ("in_flight", "background", "cut"))
    more = f", {background} answered and still running" if background else ""
    said = drained(cut) if answer.get("drained") else f"draining: {in_flight} in flight{more}"
    failed = wait and (cut > 0 or not answer.get("drained"))
    click.echo(said, file=sys.stderr if failed else sys.stdout)
    return int(failed)


@click.command()
@click.pass_obj
def resume(options: GlobalOptions) -> None:
    """Open admission again after a drain."""
    client = connect(options, acts=True)
    answer = client.post("/resume", {})
    click.echo(f"admission: {answer.get('admission', 'open')}")


@click.command()
@click.option("--reason", required=True, metavar="TEXT", help="Why; it stands in the events and in the log.")
@click.pass_obj
def restart(options: GlobalOptions, *, reason: str) -> None:
    """Stop the engine in order and start it anew; leaves `parked` as well."""
    client = connect(options, acts=True)
    answer = client.post("/restart", {"reason": reason})
    click.echo(f"restarting: incarnation {answer.get('incarnation', '?')} is being replaced")


@click.command()
@click.pass_obj
def stop(options: GlobalOptions) -> None:
    """Stop the supervisor in order, as TERM does; returns when the stop has begun.

    A second one ends the drain now, as a second TERM does: what is still open is cut. To wait for the end:
    `events --follow` shows how it goes and returns then.
    """
    client = connect(options, acts=True)
    answer = client.post("/stop", {})
    click.echo(f"{answer.get('does', 'stopping')}; `events --follow` shows how it goes and returns at the end")


@click.command()
@click.option("--source", required=True, metavar="NAME", help="Who complains.")
@click.option("--reason", required=True, metavar="TEXT", help="What was seen.")
@click.pass_obj
def report(options: GlobalOptions, *, source: str, reason: str) -> None:
    """Hand in another watchdog's complaint: evidence for the verdict, never a restart by itself."""
    client = connect(options)
    answer = client.post("/report", {"source": source, "reason": reason})
    click.echo(f"recorded; {verdict_line(str(answer.get('verdict', '?')), str(answer.get('sentence', '?')))}")
