"""Commands that run an engine: `serve` (vLLM, or the stand-in), `run` (any other), `mock-engine` (the stand-in alone).

What follows the command's name is not ours: it goes through word by word, options and `--` included.
"""

import os
import sys
from collections.abc import Callable

import click

from vllm_supervisor.cli.planning import GlobalOptions, plan_run, plan_serve
from vllm_supervisor.core.plan import Plan


class _Untouched(click.Command):
    """A command whose arguments are left alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args


class _HelpOurs(_Untouched):
    """The same, but a request for help shows ours, which says how to see the other."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = args[: args.index("--")] if "--" in args else args
        if any(word in {"-h", "--help"} or word.startswith("--help=") for word in before):
            click.echo(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)


def _carry_out(plan: Callable[[], Plan]) -> int:
    resolved = plan()
    from vllm_supervisor.runtime.app import run as carry_out  # noqa: PLC0415  # a mistake in the command line is told before this loads

    return carry_out(resolved)


@click.command(cls=_HelpOurs, options_metavar="[MODEL] [any `vllm serve` option]...")
@click.pass_context
def serve(ctx: click.Context) -> int:
    """Run vLLM behind the front door: the same arguments, address and API as `vllm serve`.

    Host, port, --uds and the --ssl options name the front door; the engine gets a private Unix socket. Options of the
    supervisor stand before `serve` (vllm-supervisor --help); every key of its configuration: vllm-supervisor config
    schema.

    vLLM's own options: `vllm serve --help=all`.
    """
    options: GlobalOptions = ctx.obj
    return _carry_out(lambda: plan_serve(options, ctx.args))


@click.command(cls=_HelpOurs, options_metavar="-- COMMAND [ARG]...")
@click.pass_context
def run(ctx: click.Context) -> int:
    """Run any OpenAI-compatible engine behind the front door, which listens on listen.host and listen.port.

    COMMAND is told its private address by the tokens {uds}, or {host} and {port}, which are replaced wherever they
    stand in an argument. With {port} the engine listens on a free port of the loopback, which other local users can
    reach past the front door; prefer {uds}.
    """
    options: GlobalOptions = ctx.obj
    arguments = ctx.args[1:] if ctx.args[:1] == ["--"] else ctx.args
    return _carry_out(lambda: plan_run(options, arguments))


@click.command(name="mock-engine", cls=_Untouched)
@click.pass_context
def mock_engine(ctx: click.Context) -> None:
    """Run the stand-in engine on its own; its options: vllm-supervisor mock-engine --help."""
    program = [sys.executable, "-P", "-m", "vllm_supervisor.mock", "serve", *ctx.args]
    os.execv(sys.executable, program)  # noqa: S606  # it is the whole rest of this process's life, and no shell is meant
