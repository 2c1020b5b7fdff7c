"""The command `vllm-supervisor`: the options that stand before a sub-command, and the table of sub-commands.

Rules:
* Our options come first; what follows `serve`, `run` and `mock-engine` belongs to the engine, and the other
  sub-commands take our options behind them too. A sub-command is imported when it is called, so that starting a
  supervisor never pays for the tools.
* A new command is one line in `COMMANDS`.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from vllm_supervisor import __version__
from vllm_supervisor.cli.errors import guarded
from vllm_supervisor.cli.groups import ENGINES, SuggestingGroup, with_global_options
from vllm_supervisor.cli.planning import GlobalOptions

# The sub-commands: where each is defined, in the order `--help` shows them.
COMMANDS = {
    "serve": "serve:serve",
    "run": "serve:run",
    "mock-engine": "serve:mock_engine",
    "status": "inspect:status",
    "events": "inspect:events",
    "drain": "control:drain",
    "resume": "control:resume",
    "restart": "control:restart",
    "stop": "control:stop",
    "report": "control:report",
    "ledger": "ledger:ledger",
    "gate": "gate:gate",
    "timeouts": "timeouts:timeouts",
    "check": "check:check",
    "doctor": "doctor:doctor",
    "explain-exit": "explain_exit:explain_exit",
    "config": "config_cmd:config",
}


UNTOUCHED = {"serve", "run", "mock-engine"}  # what follows these is the engine's


class _LazyGroup(SuggestingGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"vllm_supervisor.cli.{module}"), attribute)
        return command if cmd_name in UNTOUCHED else with_global_options(command)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND [ARG]...",
    no_args_is_help=False,
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--config", metavar="FILE", help="Configuration file (TOML).")
@click.option(
    "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="One key; wins over file and environment."
)
@click.option("--name", metavar="NAME", help="Name of the instance; default: the front door's port.")
@click.option("--engine", type=click.Choice(ENGINES), default="vllm", help="What `serve` starts: vLLM or the stand-in.")
@click.pass_context
def cli(ctx: click.Context, config: str | None, sets: tuple[str, ...], name: str | None, engine: str) -> None:
    """Run vLLM as a child: its own front door, judged by its progress, restarted only on proof.

    `vllm-supervisor serve ARGS` answers where `vllm serve ARGS` would.
    """
    ctx.obj = GlobalOptions(config, sets, name, engine, dict(os.environ))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _invoke(words))


def _invoke(words: list[str]) -> int | None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # so for our imports; from here on `guarded` tells it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with cli.make_context("vllm-supervisor", words) as context:
        status: int | None = cli.invoke(context)
        return status
