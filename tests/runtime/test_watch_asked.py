"""When the watch looks."""

from typing import Any

import trio
import trio.lowlevel

from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.runtime.watch import Watch

INTERVAL = 0.2


class Looks(Watch):
    """A watch whose looks are counted instead of carried out."""

    seen = 0

    def _look(self, _nursery: trio.Nursery, _late: float) -> None:
        self.seen += 1


def test_a_look_that_was_asked_for_does_not_put_off_the_next() -> None:
    """However many reports come in between, the next look comes at its interval."""
    unused: Any = None
    watch = Looks(
        state=unused,
        current=unused,
        gate=Gate(limit=1, new_id=str),
        account=unused,
        journal=unused,
        policy=HealthPolicy(),
        interval=INTERVAL,
        probe_interval=0.0,
        api_key=None,
        tell=unused,
        say=unused,
        testimony=unused,
    )

    async def main() -> None:
        with trio.fail_after(50 * INTERVAL):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                for asked in range(100):
                    watch.look_now()
                    while watch.seen <= asked:
                        await trio.lowlevel.checkpoint()
                while watch.seen <= 100:  # noqa: ASYNC110
                    await trio.sleep(INTERVAL / 10)
                nursery.cancel_scope.cancel()

    trio.run(main)
