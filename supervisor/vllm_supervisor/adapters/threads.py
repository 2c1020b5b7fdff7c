"""Work in a thread, and in this one where the kernel gives none (pids.max, RLIMIT_NPROC): slower, but done.

Source: clone(2) on EAGAIN; CPython's threading, which says "can't start new thread".
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

import trio

from vllm_supervisor.core.errors import is_thread_limit

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(
    call: Callable[[*Ts], T], *arguments: *Ts, abandon: bool = True, instead: Callable[[], T] | None = None
) -> T:
    """Return what `call` returns. `abandon`: a caller that is cancelled does not wait for it.

    Without a thread `instead` is called here, else `call` itself, which holds everything up as long as it takes.
    """
    try:
        return await trio.to_thread.run_sync(partial(call, *arguments), abandon_on_cancel=abandon)
    except RuntimeError as fault:
        if not is_thread_limit(fault):
            raise
    return call(*arguments) if instead is None else instead()
