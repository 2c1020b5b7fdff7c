"""`timeouts`: who owns which time limit of a stop, and whether they fit, as the running supervisor sees it."""

import json
from typing import Any

import click

from vllm_supervisor.cli.finding import connect, expected_form
from vllm_supervisor.cli.planning import GlobalOptions

_FITS = {True: "yes", False: "NO", None: "-"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.pass_obj
def timeouts(options: GlobalOptions, *, as_json: bool) -> int:
    """Show who owns which time limit, what it covers, what it does not guarantee, and whether it fits (status 1: not)."""
    answer = connect(options).get("/timeouts")
    with expected_form():
        text = json.dumps(answer) if as_json else render(answer)
        fits = bool(answer["fits"])
    click.echo(text)
    return 0 if fits else 1


def render(answer: dict[str, Any]) -> str:
    """Write the matrix for a terminal: one limit a paragraph, so that no sentence is cut."""
    blocks = [str(answer["sentence"])]
    for row in answer["rows"]:
        value = "none" if row["value"] is None else f"{row['value']:g} s"
        blocks.append(
            f"{row['limit']}: {value}   fits: {_FITS[row['fits']]}\n"
            f"    owner          {row['owner']}\n"
            f"    covers         {row['covers']}\n"
            f"    not guaranteed {row['not_guaranteed']}"
        )
    return "\n\n".join(blocks)
