"""`check`: judge servers that are not ours, for people, scripts and monitoring."""

import json
import os
from pathlib import Path
from typing import Any

import click

from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.units import parse_duration


@click.command("check")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--wait", "waits", metavar="S", multiple=True, help="A wait before `stuck`; give it twice.")
@click.option("--state", metavar="FILE", help="Remember the last reading here between runs, instead of waiting.")
@click.option("--proxy", is_flag=True, help="Look at /v1/models alone: behind a proxy no engine can be judged.")
@click.option("--no-probe", is_flag=True, help="Send nothing but reads, to an idle server too.")
@click.option("--model", metavar="M", help="Model of the one-token request; default: the first that is served.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    urls: tuple[str, ...],
    *,
    waits: tuple[str, ...],
    state: str | None,
    proxy: bool,
    no_probe: bool,
    model: str | None,
    as_json: bool,
) -> None:
    """Say of each URL (http://HOST:PORT, https://…, unix:/PATH) whether its engine is idle, busy, or hangs.

    Nothing but reads is sent unless the server is idle; then one request for one token, with the key of VLLM_API_KEY.
    Exit status: 0 idle or busy; 1 suspect, starting, asleep, paused, degraded; 2 stuck, failing, dead, unreachable; 3
    unjudgeable. Of several servers the worst decides.
    """
    import trio  # noqa: PLC0415 - only here, so that other commands start without it

    from vllm_supervisor.adapters.run_fate import boot_id  # noqa: PLC0415 - as above
    from vllm_supervisor.core.check import target, worst  # noqa: PLC0415 - as above
    from vllm_supervisor.runtime.check import CheckOptions, check_all  # noqa: PLC0415 - as above

    targets = [target(url) for url in dict.fromkeys(urls)]
    options = CheckOptions(
        waits=_waits(waits),
        proxy=proxy,
        probe=not no_probe,
        model=model,
        api_key=os.environ.get("VLLM_API_KEY") or None,
    )
    path = None if state is None else Path(state)
    boot = "" if path is None else boot_id()
    remembered = None if path is None else _remembered(path, boot)
    found, kept = trio.run(check_all, targets, options, remembered)
    if path is not None:
        _keep(path, {"boot": boot, "servers": {**(remembered or {}), **kept}})
    status = worst(result.exit for result in found)
    if as_json:
        click.echo(json.dumps({"exit": status, "servers": [result.plain() for result in found]}))
    else:
        for result in found:
            click.echo(result.line())
    raise click.exceptions.Exit(status)


def _remembered(path: Path, boot: str) -> dict[str, Any]:
    """Return the readings of this boot, by URL; a file that holds none is told, and written anew.

    Raises UsageError for what is no file, which writing would put a file in the place of.
    """
    from vllm_supervisor.adapters import json_file  # noqa: PLC0415 - only where it is needed
    from vllm_supervisor.core.check import readings  # noqa: PLC0415 - as above

    try:
        return readings(json_file.read(path), boot)
    except FileNotFoundError:
        return {}
    except OSError as fault:
        raise UsageError(f"--state {path} cannot be read: {fault.strerror}; give a file of your own") from None
    except ValueError as fault:
        click.echo(f"vllm-supervisor: --state {path} is unreadable: {fault}; it is written anew", err=True)
        return {}


def _keep(path: Path, value: dict[str, Any]) -> None:
    from vllm_supervisor.adapters import json_file  # noqa: PLC0415 - only where it is needed

    try:
        json_file.replace(path, value)
    except OSError as fault:
        raise UsageError(f"--state {path}: {fault.strerror}; give a file in a directory you may write") from None


def _waits(given: tuple[str, ...]) -> tuple[float, float] | None:
    if not given:
        return None
    if len(given) != 2:
        raise UsageError("--wait is given twice (two waits in a row before `stuck`), or not at all")
    try:
        first, second = (parse_duration(text) for text in given)
    except ValueError as fault:
        raise UsageError(f"--wait: {fault}") from fault
    return first, second
