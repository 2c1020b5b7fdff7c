"""The diagrams in the documents are the tables."""

from pathlib import Path

from vllm_supervisor.core.diagrams import DIAGRAMS, between_marks

PAGE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def test_the_diagrams_are_drawn_from_the_tables() -> None:
    """ARCHITECTURE.md shows what the code does; `scripts/draw` mends it."""
    text = PAGE.read_text()
    assert between_marks(text) == text
    for name in DIAGRAMS:
        assert f"<!-- diagram: {name} -->\n```mermaid\n" in text
