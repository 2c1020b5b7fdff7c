"""The outermost guard of a task that serves a stranger: an internal error ends that task's work and nothing else."""

import contextlib
from collections.abc import Callable, Iterator

Report = Callable[[Exception], None]


@contextlib.contextmanager
def contained(report: Report) -> Iterator[None]:
    """Pass an internal error of the block to `report`, once, and end the block; cancellation and exits pass through.

    A group that holds both is split: a task that is cancelled while it fails is reported and still ends as cancelled.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        errors, rest = group.split(Exception)
        if errors is not None:
            report(_first(errors))
        if rest is not None:
            raise rest from None
    except Exception as error:  # noqa: BLE001 - what is raised here must not end the other tasks of the nursery
        report(error)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the only error of a group, else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    assert isinstance(error, Exception)  # noqa: S101 - the split above took nothing else
    return error
