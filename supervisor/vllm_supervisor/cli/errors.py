"""How a command ends: mistakes are one line each on standard error, with their exit status and without a traceback."""

import os
import sys
import traceback
from collections.abc import Callable

import click

from vllm_supervisor.adapters import journal_stream
from vllm_supervisor.adapters.kernel_needs import no_threads
from vllm_supervisor.core.errors import ConfigError, SetupError, UserError, is_thread_limit
from vllm_supervisor.core.own_status import FAULT
from vllm_supervisor.core.priorities import with_priority

INTERRUPTED = 130
BROKEN_PIPE = 141


def guarded(run: Callable[[], int | None]) -> int:
    """Call `run` and turn what it raises into an exit status; faults of ours go through, with their traceback.

    In the journal a traceback is one error a line, as every mistake is.
    """
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
    except Exception as fault:
        if is_thread_limit(fault):
            tell([no_threads()])
            return SetupError.status
        if not journal_stream.connected(os.environ):
            raise
        click.echo(with_priority(traceback.format_exc().rstrip(), "error"), err=True)
        return FAULT


def tell(problems: list[str]) -> None:
    """Write one line a problem to standard error."""
    journal = journal_stream.connected(os.environ)
    for problem in problems:
        line = f"vllm-supervisor: {' '.join(problem.split())}"
        click.echo(with_priority(line, "error") if journal else line, err=True)
