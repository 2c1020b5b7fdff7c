"""The engine's output on its way: unchanged, at once, whatever the engine prints."""

import os
from collections.abc import Sequence

import trio

from fakes.custody import async_test
from vllm_supervisor.adapters.pump import Pump


class Rig:
    """A pump over two pipes, with what came out of it."""

    def __init__(self) -> None:
        """Open the pipes."""
        self.out, self.out_write = os.pipe2(os.O_NONBLOCK)
        self.err, self.err_write = os.pipe2(os.O_NONBLOCK)
        self.pieces: list[bytes] = []
        self.lines: list[str] = []
        self.news = trio.Event()
        self.pump = Pump(self.out, self.err, forward=self._forward, on_line=self._line)

    def _forward(self, pieces: Sequence[bytes]) -> None:
        self.pieces += pieces

    def _line(self, line: str) -> None:
        self.lines.append(line)
        self.news.set()
        self.news = trio.Event()

    async def until(self, line: str) -> None:
        """Wait for a line."""
        while line not in self.lines:
            await self.news.wait()


@async_test
async def test_both_streams_pass_line_by_line() -> None:
    """Lines of both streams come unchanged, as text without ends, and the ends of both pipes end the pump."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.pump.run)
        os.write(rig.out_write, b"one\nt")
        os.write(rig.err_write, b"\x1b[31mred\xff\x1b[0m\r\n")
        await rig.until("one")
        os.write(rig.out_write, b"wo\n\n")
        os.close(rig.out_write)
        os.close(rig.err_write)
    assert sorted(rig.pieces) == sorted([b"one\n", b"two\n", b"\n", b"\x1b[31mred\xff\x1b[0m\r\n"])
    assert sorted(rig.lines) == ["\x1b[31mred\ufffd\x1b[0m", "one", "two"]


@async_test
async def test_a_line_without_end_is_shown_while_the_engine_pauses() -> None:
    """A progress bar that writes its carriage return first is seen before its next step."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.pump.run)
        os.write(rig.err_write, b"\rLoading: 50%")
        await rig.until("Loading: 50%")
        os.write(rig.err_write, b"\rLoading: 75%")
        await rig.until("Loading: 75%")
        nursery.cancel_scope.cancel()
    assert b"".join(rig.pieces) == b"\rLoading: 50%\rLoading: 75%"
    os.close(rig.out_write)
    os.close(rig.err_write)


@async_test
async def test_the_last_words_are_read_although_orphans_hold_the_pipes() -> None:
    """With the pipes held open by others, closing waits its bound, takes what is there and ends."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.pump.run)
        await rig.pump.drain_then_close(0.05)
        assert rig.lines == []
    os.close(rig.out_write)
    os.close(rig.err_write)

    rig = Rig()
    last = b"".join(b"last words %d\n" % number for number in range(4000))
    async with trio.open_nursery() as nursery:
        os.write(rig.out_write, last)
        os.write(rig.err_write, b"Traceback")
        nursery.start_soon(rig.pump.run)
        await rig.pump.drain_then_close(0)
    assert sum(map(len, rig.pieces)) == len(last) + len(b"Traceback")
    assert rig.lines[-1] in ("last words 3999", "Traceback")
    os.close(rig.out_write)
    os.close(rig.err_write)


@async_test
async def test_the_end_of_the_pipes_ends_the_wait_early() -> None:
    """Closing returns as soon as both pipes have ended, not after its bound."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.pump.run)
        os.write(rig.out_write, b"bye")
        os.close(rig.out_write)
        os.close(rig.err_write)
        await rig.pump.drain_then_close(3600)
    assert rig.lines == ["bye"]
