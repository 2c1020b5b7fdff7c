"""`gate --rules FILE`: may a rollout go on? Exit status 0 if every rule holds, 1 if one does not or data is too scarce."""

import json
import tomllib
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from vllm_supervisor.cli.ledger_place import ledger_directory, read_fold, since_stamp
from vllm_supervisor.cli.planning import GlobalOptions
from vllm_supervisor.core.errors import ConfigError, UsageError
from vllm_supervisor.core.gate_rules import Rules, judge, parse_rules


@click.command()
@click.option("--rules", "rules_file", required=True, metavar="FILE", help="TOML; its keys are in docs/ledgers.md.")
@click.option("--state-dir", metavar="DIR", help="Where the ledgers are; default: the instance's state directory.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@click.pass_obj
def gate(options: GlobalOptions, *, rules_file: str, state_dir: str | None, as_json: bool) -> int:
    """Check the rules of a release gate against the ledgers."""
    rules = _read(rules_file)
    now = datetime.now(UTC)
    since = since_stamp(None if rules.window is None else f"{rules.window:f}", now)
    checks = judge(read_fold(ledger_directory(options, state_dir), since), rules, now)
    passes = all(check.passes for check in checks)
    if as_json:
        click.echo(json.dumps({"passes": passes, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            click.echo(f"{'pass' if check.passes else 'FAIL'}  {check.rule}: {check.sentence}")
    return 0 if passes else 1


def _read(name: str) -> Rules:
    try:
        data = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--rules {name} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{name} is not TOML: {error}"]) from None
    return parse_rules(data, name)
