"""Groups of commands: which one was probably meant, and the supervisor's own options after a sub-command as well.

Newer versions of click name the nearest command by themselves, for commands they know.
"""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

ENGINES = ("vllm", "mock")


class SuggestingGroup(click.Group):
    """A group whose error on an unknown command names the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; UsageError if there is none of that name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise click.UsageError(no_such_command(name, self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)


def no_such_command(name: str, known: Sequence[str]) -> str:
    """Return the sentence about an unknown command."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"No such command {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")


def with_global_options(command: click.Command) -> click.Command:
    """Let a command, and those below it, take the options that stand before it as well; both places count together."""
    known = {name for parameter in command.params for name in parameter.opts}
    command.params += [option for option in _global_options() if known.isdisjoint(option.opts)]
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_global_options(inner)
    return command


def _global_options() -> list[click.Option]:
    """Make the options anew, since each belongs to one command; they are shown where they stand first."""
    shared: dict[str, Any] = {"expose_value": False, "hidden": True, "callback": _keep}
    return [
        click.Option(["--config"], **shared),
        click.Option(["--set", "sets"], multiple=True, **shared),
        click.Option(["--name"], **shared),
        click.Option(["--engine"], type=click.Choice(ENGINES), **shared),
    ]


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value and option.name is not None:
        given = (*ctx.obj.sets, *value) if option.name == "sets" else value
        ctx.obj = replace(ctx.obj, **{option.name: given})
