"""How a command ends: mistakes are one line each on standard error, with their exit status and without a traceback."""

import os
import sys
from collections.abc import Callable

import click

from vllm_supervisor.core.errors import ConfigError, UserError

INTERRUPTED = 130
BROKEN_PIPE = 141


def guarded(run: Callable[[], int | None]) -> int:
    """Call `run` and turn what it raises into an exit status; faults of ours go through, with their traceback."""
    try:
        return run() or 0
    except UserError as error:
        tell(error.problems if isinstance(error, ConfigError) else [str(error)])
        return error.status
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "vllm-supervisor"
        tell([f"{error.format_message()} (see `{command} --help`)"])
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`events | head`): nothing is to be told, and the interpreter must not try to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def tell(problems: list[str]) -> None:
    """Write one line a problem to standard error."""
    for problem in problems:
        click.echo(f"vllm-supervisor: {' '.join(problem.split())}", err=True)
