"""Commands that look at a running supervisor and change nothing: `status` and `events`."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from vllm_supervisor.cli.finding import connect, expected_form
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.cli.status_view import Row, rows
from vllm_supervisor.core.plain_text import printable

_WATCH_INTERVAL = 1.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
@click.option("--watch", is_flag=True, help="Show it again every second, until interrupted.")
@click.pass_obj
def status(options: GlobalOptions, *, as_json: bool, watch: bool) -> None:
    """Show the running supervisor at a glance."""
    client = connect(options)
    if not watch:
        _show(client.get("/status"), as_json=as_json)
    elif as_json or not sys.stdout.isatty():
        while True:
            _show(client.get("/status"), as_json=as_json)
            time.sleep(_WATCH_INTERVAL)
    else:
        _watch(lambda: client.get("/status"))


@click.command()
@click.option(
    "-n", "count", type=click.IntRange(min=0), default=20, show_default=True, help="How many of the last ones."
)
@click.option("--follow", is_flag=True, help="Go on with each new one, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def events(options: GlobalOptions, *, count: int, follow: bool, as_json: bool) -> None:
    """Show what happened and why."""
    client = connect(options)
    with expected_form():
        found = client.lines("/events", n=count, follow=1) if follow else client.get("/events", n=count)["events"]
        for event in found:
            click.echo(json.dumps(event) if as_json else event_line(event))


def event_line(event: Mapping[str, Any]) -> str:
    """Write an event for a person: time, word, sentence, and whatever else it says."""
    known = ("at", "event", "why")
    at, word, why = (str(event.get(name) or "") for name in known)
    rest = " ".join(f"{name}={_plain(value)}" for name, value in event.items() if name not in {*known, "n", "level"})
    return printable("  ".join(part for part in (at, word, why, rest) if part))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _show(answer: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=None if not sys.stdout.isatty() else 2))
    elif sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415  # only a terminal gets colours

        Console().print(_table(rows(answer)))
    else:
        for label, text, _ in rows(answer):
            click.echo(f"{label:<11} {text}")


def _watch(read: Callable[[], Mapping[str, Any]]) -> None:
    from rich.live import Live  # noqa: PLC0415  # only a terminal gets a screen

    with Live(_table(rows(read())), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_INTERVAL)
            live.update(_table(rows(read())), refresh=True)


def _table(shown: list[Row]) -> Any:
    from rich.table import Table  # noqa: PLC0415  # only a terminal gets a table
    from rich.text import Text  # noqa: PLC0415

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text, style in shown:
        table.add_row(label, Text(text, style=style))
    return table
