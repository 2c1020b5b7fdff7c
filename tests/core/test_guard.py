"""The guard around tasks that serve strangers: what it stops, and what it must let through."""

import pytest
import trio
from trio.testing import trio_test

from vllm_supervisor.core.guard import contained


def test_an_error_is_reported_once_and_goes_no_further() -> None:
    """Whatever kind of error it is, alone or in a group of one."""
    for error in (ValueError("x"), RecursionError("deep"), AssertionError()):
        seen: list[Exception] = []
        with contained(seen.append):
            raise error
        with contained(seen.append):
            raise ExceptionGroup("nursery", [ExceptionGroup("inner", [error])])
        assert seen == [error, error]


def test_several_errors_are_reported_as_their_group() -> None:
    """Two tasks that failed at once are one report."""
    seen: list[Exception] = []
    group = ExceptionGroup("nursery", [ValueError(), KeyError()])
    with contained(seen.append):
        raise group
    assert len(seen) == 1
    assert isinstance(seen[0], ExceptionGroup)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ends_pass_through(end: type[BaseException]) -> None:
    """Neither an interrupt nor an exit is an error."""
    seen: list[Exception] = []
    with pytest.raises(end), contained(seen.append):
        raise end
    assert not seen


@trio_test
async def test_cancellation_passes_through() -> None:
    """A cancelled task ends as cancelled, also when another of its nursery fails at the same moment."""
    seen: list[Exception] = []

    async def failing() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while it is cancelled")

    with trio.CancelScope() as scope:
        with contained(seen.append):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(failing)
                nursery.start_soon(trio.sleep_forever)
                await trio.lowlevel.checkpoint()
                scope.cancel()
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert [type(error) for error in seen] == [ValueError]
