"""`explain-exit`: the supervisor's own reading of an exit status, for a person.

Nothing is known here but the number, so a failure is read for both phases, and shown twice where they differ.
"""

import json
from typing import Any

import click

from vllm_supervisor.core.exit_status import Asked, ExitEvidence, ExitReading, ended, interpret, signal_of
from vllm_supervisor.core.own_status import MEANINGS
from vllm_supervisor.core.signal_names import LAST_SIGNAL, NUMBERS
from vllm_supervisor.core.signatures import StartPhase


def parse_status(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Read 0 to 255, minus a signal (-9) or a signal's name (SIGKILL, KILL); return the raw status."""
    name = value.strip().upper().removeprefix("SIG")
    if f"SIG{name}" in NUMBERS:
        return -NUMBERS[f"SIG{name}"]
    try:
        raw = int(name)
    except ValueError:
        raw = -LAST_SIGNAL - 1
    if not -LAST_SIGNAL <= raw <= 255:
        raise click.BadParameter(f"{value!r} is no exit status; give 0 to 255, -9, or a name like SIGKILL")
    return raw


@click.command("explain-exit", context_settings={"ignore_unknown_options": True})
@click.argument("status", callback=parse_status)
@click.option("--requested", is_flag=True, help="The end was asked for by the supervisor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain_exit(status: int, *, requested: bool, as_json: bool) -> None:
    """Say what an exit STATUS means: 0 to 255, -9, or SIGKILL. 128 + n is signal n as a shell reports it."""
    asked = Asked.NOTHING
    if requested:
        asked = Asked.KILL if signal_of(status) == NUMBERS["SIGKILL"] else Asked.TERM
    readings = {phase: interpret(status, asked, phase, ExitEvidence()) for phase in StartPhase}
    own = MEANINGS.get(status)
    if as_json:
        engine = {phase.value: _plain(reading) for phase, reading in readings.items()}
        click.echo(json.dumps({"status": status, "requested": requested, "engine": engine, "supervisor": own}))
        return
    if own:  # whoever asks has met a number, and a service's is the supervisor's
        click.echo(f"The supervisor that {ended(status)}:\n  {own}")
    loading, serving = readings[StartPhase.LOADING], readings[StartPhase.SERVING]
    click.echo(f"An engine that {ended(status)}:")
    if _outlook(loading) == _outlook(serving):
        click.echo(f"  {_outlook(loading)}")
    else:
        click.echo(f"  before it was ready: {_outlook(loading)}")
        click.echo(f"  while it served: {_outlook(serving)}")


def _plain(reading: ExitReading) -> dict[str, Any]:
    return {
        "cause": reading.cause.value,
        "clean": reading.clean,
        "repeat": reading.repeat.value,
        "sentence": reading.sentence,
        "mend": reading.mend,
    }


def _outlook(reading: ExitReading) -> str:
    if reading.clean:
        return f"{reading.meaning}: a clean end, whatever the number"
    next_start = "not started again, it would fail the same way" if reading.retries == 0 else "worth another start"
    return f"{reading.meaning}; {next_start}; {reading.mend}"
