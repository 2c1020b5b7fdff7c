"""The words as people read them."""

import pytest

from vllm_supervisor.core.words import verdict_line


@pytest.mark.parametrize(
    ("verdict", "sentence", "held", "said"),
    [
        ("stuck", "nothing moved for 300 s", "", "stuck: nothing moved for 300 s"),
        ("stuck", "nothing moved for 300 s", "for 5 s", "stuck for 5 s: nothing moved for 300 s"),
        ("idle", "idle: nothing runs", "", "idle: nothing runs"),
        ("idle", "idle: nothing runs", "for 5 s", "idle for 5 s: nothing runs"),
        ("busy", "busy and healthy: 3 running", "for 5 s", "busy for 5 s and healthy: 3 running"),
        ("idle", "idleness", "", "idle: idleness"),
        ("dead", "", "for 5 s", "dead for 5 s"),
        ("", "", "", ""),
    ],
)
def test_a_verdict_is_said_once(verdict: str, sentence: str, held: str, said: str) -> None:
    """However its sentence begins, the verdict stands in the line once, followed by how long it has held."""
    assert verdict_line(verdict, sentence, held) == said
