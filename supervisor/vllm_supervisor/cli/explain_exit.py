"""`explain-exit`: the supervisor's own reading of an exit status, for a person.

Nothing is known here but the number, so both phases are shown where they differ.
"""

import json
from typing import Any

import click

from vllm_supervisor.core.exit_status import Asked, ExitEvidence, ExitReading, interpret
from vllm_supervisor.core.own_status import MEANINGS
from vllm_supervisor.core.signal_names import LAST_SIGNAL, NUMBERS
from vllm_supervisor.core.signatures import StartPhase


class ExitStatus(click.ParamType[int]):
    """An exit code (0 to 255), minus a signal (-9), or a signal's name (SIGKILL, KILL)."""

    name = "STATUS"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the raw status, negative for a signal."""
        text = str(value).strip().upper()
        number = NUMBERS.get(text) or NUMBERS.get(f"SIG{text}")
        if number:
            return -number
        try:
            raw = int(text)
        except ValueError:
            raw = -LAST_SIGNAL - 1
        if not -LAST_SIGNAL <= raw <= 255:
            self.fail(f"{value!r} is no exit status; give 0 to 255, -9, or a name like SIGKILL", param, ctx)
        return raw


@click.command("explain-exit", context_settings={"ignore_unknown_options": True})
@click.argument("status", type=ExitStatus())
@click.option("--requested", is_flag=True, help="The end was asked for by the supervisor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain_exit(status: int, *, requested: bool, as_json: bool) -> None:
    """Say what an exit STATUS means: 0 to 255, -9, or SIGKILL. 128 + n is signal n as a shell reports it."""
    asked = Asked.TERM if requested else Asked.NOTHING
    readings = {phase: interpret(status, asked, phase, ExitEvidence()) for phase in StartPhase}
    own = MEANINGS.get(status)
    if as_json:
        engine = {phase.value: _plain(reading) for phase, reading in readings.items()}
        click.echo(json.dumps({"status": status, "requested": requested, "engine": engine, "supervisor": own}))
        return
    for sentence in dict.fromkeys(_sentence(reading) for reading in readings.values()):
        click.echo(sentence)
    if own:
        click.echo(f"as the status of vllm-supervisor itself: {own}")


def _plain(reading: ExitReading) -> dict[str, Any]:
    return {
        "cause": reading.cause.value,
        "clean": reading.clean,
        "repeat": reading.repeat.value,
        "sentence": reading.sentence,
        "mend": reading.mend,
    }


def _sentence(reading: ExitReading) -> str:
    if reading.clean:
        return f"{reading.sentence}: a clean end, whatever the number"
    outlook = "the next start would fail too" if reading.retries == 0 else "worth another start"
    return f"{reading.sentence}. {outlook.capitalize()}. Mend: {reading.mend}"
