"""What a start shows, and how often."""

import pytest

from vllm_supervisor.core.load_progress import LoadProgress, Progress, report_due

SHARDS = "(EngineCore pid=68) \rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.5it/s]"


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        (SHARDS.replace("\r", ""), Progress("Loading safetensors checkpoint shards", 50)),
        (
            "Capturing CUDA graphs (decode, FULL):  10%|█         | 1/10 [00:00<00:03]",
            Progress("Capturing CUDA graphs (decode, FULL)", 10),
        ),
        ("model.safetensors: 100%|██████████| 1.2G/1.2G", Progress("model.safetensors", 100)),
        (" 33.5% done", Progress("", 33)),
    ],
)
def test_a_percentage_is_read_with_its_label(line: str, progress: Progress) -> None:
    """Progress bars of vLLM and its libraries give label and percentage."""
    load = LoadProgress()
    load.add(line, 5.0)
    assert (load.progress, load.changed_at) == (progress, 5.0)


def test_only_steps_count_as_change() -> None:
    """The same percentage again is no step; the next one, or a new line, is."""
    load = LoadProgress()
    load.add("x: 10%", 1.0)
    load.add("x: 10%", 2.0)
    assert load.changed_at == 1.0
    load.add("x: 11%", 3.0)
    assert load.changed_at == 3.0
    load.add("(EngineCore pid=1) INFO 11-29 21:14:50 [core.py:1] Initializing a V1 LLM engine", 4.0)
    assert (load.line, load.progress, load.changed_at) == ("Initializing a V1 LLM engine", None, 4.0)


def test_lines_that_say_nothing_are_passed_over() -> None:
    """Routes, banners and warnings do not become the load line."""
    load = LoadProgress()
    for line in (
        "(APIServer pid=1) INFO 11-29 21:14:50 [launcher.py:195] Route: /docs, Methods: HEAD, GET",
        "(APIServer pid=1) INFO 11-29 21:14:50 [api_utils.py:347]   █▄█▀ █     █",
        "(APIServer pid=1) WARNING 11-29 21:14:50 [x.py:1] Triton is not installed.",
        "plain words",
    ):
        load.add(line, 1.0)
    assert (load.line, load.changed_at) == ("", None)


def test_the_line_fits_its_width() -> None:
    """Time, memory and a bar stand in one line, cut with an ellipsis where the terminal is narrow."""
    load = LoadProgress()
    assert load.show(5.9, None, 80) == "starting 0:05"
    load.add("Loading shards: 50%", 1.0)
    assert load.show(75, 3 << 29, 80) == "starting 1:15  1.5 GiB  [#####.....] 50% Loading shards"
    assert load.show(75, 9 << 20, 20) == "starting 1:15  9 Mi…"
    assert load.show(75, None, 0) == ""
    load.add("INFO 11-29 21:14:50 [x.py:1] a\tb", 1.0)
    assert load.show(0, None, 80) == "starting 0:00  a?b"


def test_reports_come_now_and_then() -> None:
    """An hour of loading makes about 75 lines: every 10 s in the first minute, 30 s up to ten, then every minute."""
    reports = [0.0]
    for second in range(3600):
        if report_due(second, reports[-1]):
            reports.append(second)
    assert reports[1:8] == [10, 20, 30, 40, 50, 60, 90]
    assert 70 < len(reports) < 80
