"""The ledger's writer on a real directory: order, segments, pruning, the end of a file."""

from pathlib import Path

import pytest

from fakes.ledger_files import LIMIT_S, FailingOps, line, numbers, run_writer
from vllm_supervisor.core.ledger import LedgerPolicy, segment_name
from vllm_supervisor.core.ledger_parser import parse
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


def test_a_waited_line_is_in_the_file(tmp_path: Path) -> None:
    """When the wait for an acceptance returns, its line can be read from the file by anyone."""

    async def body(writer: LedgerWriter) -> None:
        for number in range(50):
            await writer.append_and_wait(line(number), f"r-{number}")
            assert numbers(tmp_path / "l")[-1] == number

    run_writer(tmp_path / "l", body)


def test_lines_keep_their_order(tmp_path: Path) -> None:
    """Lines stand in the file in the order they were handed over, waited for or not."""

    async def body(writer: LedgerWriter) -> None:
        for number in range(1000):
            if number % 10:
                writer.append(line(number))
            else:
                await writer.append_and_wait(line(number), "")

    run_writer(tmp_path, body)
    assert numbers(tmp_path) == list(range(1000))


def test_modes_are_private(tmp_path: Path) -> None:
    """The directory is 0700 and each file 0600."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(1), "")

    run_writer(tmp_path / "ledger", body)
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "ledger" / segment_name(1)).stat().st_mode & 0o777 == 0o600


def test_segments_rotate_and_begin_with_a_header(tmp_path: Path) -> None:
    """A full segment is followed by the next number, whose first line says where the oldest open id stands."""

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(0, 600), "r-0")
        await writer.append_and_wait(line(1, 600), "r-1")
        await writer.append_and_wait(line(2, 600), "r-2")

    run_writer(tmp_path, body, segment_bytes=500)
    assert numbers(tmp_path) == [0, "segment", 1, "segment", 2]
    header = parse((tmp_path / segment_name(3)).read_bytes().splitlines()[0])
    assert header is not None
    assert (header["segment"], header["oldest_needed"]) == (3, 1)


def test_pruning_spares_open_ids(tmp_path: Path) -> None:
    """Old segments go once the total is too large, but none from the first that holds an open id on."""

    async def body(writer: LedgerWriter) -> None:
        writer.recovered({})
        for number in range(6):
            await writer.append_and_wait(line(number, 600), f"r-{number}")
            if number in (0, 1, 3):
                writer.append(line(number), settles=f"r-{number}")
                assert await writer.flush(LIMIT_S)

    run_writer(tmp_path, body, segment_bytes=500, policy=LedgerPolicy(sync="off", max_bytes=1))
    kept = [path.name for path in sorted(tmp_path.iterdir())]
    assert segment_name(1) not in kept
    assert any(b'"number":2' in (tmp_path / name).read_bytes() for name in kept)


def test_nothing_is_pruned_before_recovery(tmp_path: Path) -> None:
    """Until it is known what earlier runs left open, no segment goes."""

    async def body(writer: LedgerWriter) -> None:
        for number in range(4):
            await writer.append_and_wait(line(number, 600), "")

    run_writer(tmp_path, body, segment_bytes=500, policy=LedgerPolicy(sync="off", max_bytes=1))
    assert len(list(tmp_path.iterdir())) == 4


def test_interval_sync_reaches_rotated_segments(tmp_path: Path) -> None:
    """Every line of every segment is synced by the time the writer is closed."""
    ops = FailingOps()

    async def body(writer: LedgerWriter) -> None:
        for number in range(5):
            await writer.append_and_wait(line(number, 600), "")

    before = len(list(Path("/proc/self/fd").iterdir()))
    run_writer(tmp_path, body, ops=ops, policy=LedgerPolicy(sync="interval", interval_s=0.001), segment_bytes=500)
    assert ops.synced.is_set()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_any_cut_of_the_file_is_mended_on_opening(tmp_path: Path, cut: int) -> None:
    """However a crash cut the file, opening it leaves whole lines only, and appending goes on after them."""
    whole = line(0) + line(1)
    path = tmp_path / segment_name(1)
    path.write_bytes(whole[: len(whole) - cut])

    async def body(writer: LedgerWriter) -> None:
        await writer.append_and_wait(line(2), "")

    run_writer(tmp_path, body)
    found = numbers(tmp_path)
    assert found[-1] == 2
    assert found[:-1] == [0, 1][: len(found) - 1]
    if cut <= 1:
        assert found == [0, 1, 2]
