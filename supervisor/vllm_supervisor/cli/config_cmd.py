"""`config show`, `config check` and `config schema`: what is in force, whether it is right, and what there is."""

import json
from typing import Any

import click

from vllm_supervisor.cli.errors import tell
from vllm_supervisor.cli.groups import SuggestingGroup
from vllm_supervisor.cli.planning import GlobalOptions, load_config
from vllm_supervisor.core import redact
from vllm_supervisor.core.config import Loaded, settings, value_of
from vllm_supervisor.core.config_kinds import TABLE


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Look at the configuration: file, environment and --set taken together."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="One object: for each key its value and origin.")
@click.pass_obj
def show(options: GlobalOptions, *, as_json: bool) -> None:
    """Print every key that is in force and where its value came from; secrets are not shown."""
    loaded = load_config(options)
    tell(list(loaded.doubts))
    if as_json:
        found = {key: {"value": _shown(loaded, key), "origin": loaded.origins[key]} for key in settings()}
        click.echo(json.dumps(found, indent=2))
        return
    section = ""
    for key, known in settings().items():
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            click.echo(f"\n[{section}]")
        line = f"{name} = {known.kind.show(_shown(loaded, key))}"
        click.echo(f"{line:<40} # {loaded.origins[key]}")


@config.command()
@click.pass_obj
def check(options: GlobalOptions) -> None:
    """Say whether the configuration is right; every mistake is told at once, with status 78."""
    tell(list(load_config(options).doubts))
    click.echo("the configuration is right")


@config.command()
def schema() -> None:
    """Print every key with its kind, default and meaning, as JSON Schema."""
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-supervisor configuration",
        **_object(),
    }
    for key, known in settings().items():
        head, _, name = key.rpartition(".")
        home = root["properties"].setdefault(head, _object())["properties"] if head else root["properties"]
        home[name] = {
            **known.kind.schema,
            "default": known.default,
            "description": f"{known.doc}. Expected: {known.kind.expects}.",
        }
    click.echo(json.dumps(root, indent=2, ensure_ascii=False))


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _shown(loaded: Loaded, key: str) -> Any:
    value = value_of(loaded.config, key)
    return redact.environment(value) if settings()[key].kind is TABLE else value
