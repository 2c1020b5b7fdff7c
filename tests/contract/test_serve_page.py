"""The page on `serve` lists our own questions to the engine."""

from pathlib import Path

from vllm_supervisor.core import probe

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def test_each_of_our_own_questions_stands_on_the_page() -> None:
    """Who finds a request in the engine's log that no client sent can look it up."""
    paths = [value for name, value in vars(probe).items() if name.endswith("_PATH")]
    table = [line for line in PAGE.splitlines() if line.startswith("|") and "`GET" in line]
    assert len(paths) == 4
    assert [path for path in (*paths, probe.PROBE_PATHS[0]) if not any(f"{path}`" in line for line in table)] == []
