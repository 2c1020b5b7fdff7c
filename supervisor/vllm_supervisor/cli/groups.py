"""A group of commands that says which one was probably meant; newer versions of click do so, for commands they know."""

import difflib
from collections.abc import Sequence

import click


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
