"""A real child, its pipes, our queue and a reader that may not be there."""

import os
import subprocess
import sys
from collections.abc import Sequence

import trio

from fakes.custody import async_test, python
from vllm_supervisor.adapters.child import owned
from vllm_supervisor.adapters.output import Output
from vllm_supervisor.adapters.processes import Tree
from vllm_supervisor.adapters.pump import Pump
from vllm_supervisor.core.custody import Marker

FLOOD = (
    "import sys\n"
    "line = 'x' * 199 + '\\n'\n"
    "for _ in range(1000): sys.stdout.write(line * 50); sys.stderr.write(line * 50)\n"
    "print('last words', flush=True)\n"
)


@async_test
async def test_a_flood_that_nobody_reads_blocks_no_engine() -> None:
    """20 MB printed by the engine with our own output full: it ends as it would alone, and its last words are known."""
    read, write = os.pipe()
    out = Output(write)
    lines: list[str] = []

    def last(line: str) -> None:
        lines[:] = [line]

    child = python(FLOOD)
    pump = Pump(child.stdout, child.stderr, forward=out.put, on_line=last)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        assert await child.wait() == 0
        await pump.drain_then_close(10)
    assert out.dropped > 50_000
    assert not out.close(0)
    assert lines in (["last words"], ["x" * 199])
    os.close(read)


@async_test
async def test_an_orphan_that_holds_the_pipes_delays_nobody() -> None:
    """The main process ends and its child lives on with both pipes: the pump ends in its bound."""
    marker = Marker("output", "run", 1)
    code = "import os, signal\nif not os.fork(): signal.pause()\nprint('bye', os.getpid(), flush=True)\n"
    child = python(code, env=marker.variables())
    lines: list[str] = []
    got: list[bytes] = []

    def forward(pieces: Sequence[bytes]) -> None:
        got.extend(pieces)

    pump = Pump(child.stdout, child.stderr, forward=forward, on_line=lines.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        assert await child.wait() == 0
        await pump.drain_then_close(0.1)
    assert lines == [f"bye {child.pid}"]
    assert got == [f"bye {child.pid}\n".encode()]
    killed, left = await Tree(child.id, marker, spawned=owned, subreaper=False).sweep(10)
    assert (len(killed), left) == (1, [])


def test_closed_standard_descriptors_are_filled() -> None:
    """Started without stdin, stdout and stderr, no file of ours comes to lie where output is written."""
    code = (
        "import os\n"
        "os.closerange(0, 3)\n"
        "from vllm_supervisor.adapters.output import fill_standard_descriptors\n"
        "fill_standard_descriptors()\n"
        "assert [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)] == ['/dev/null'] * 3\n"
        "assert os.open('/dev/zero', os.O_RDONLY) == 3\n"
        "fill_standard_descriptors()\n"
        "assert os.open('/dev/zero', os.O_RDONLY) == 4\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=30).returncode == 0
