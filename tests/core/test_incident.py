"""What a bundle says, and which bundles are kept."""

import json

import pytest

from fakes.life import Engine, Life
from vllm_supervisor.core import redact
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.incident import Bundle, document, summary, surplus
from vllm_supervisor.core.words import RequestClass


@pytest.mark.parametrize(
    ("sizes", "keep", "max_size", "removed"),
    [
        ([10, 10, 10], 3, 100, []),
        ([10, 10, 10], 2, 100, [1]),
        ([10, 10, 10], 3, 20, [1]),
        ([50, 10, 10], 3, 30, [1]),
        ([10, 10, 500], 3, 100, [1, 2]),
        ([500], 0, 1, []),
        ([], 3, 100, []),
    ],
)
def test_the_newest_bundles_are_kept(sizes: list[int], keep: int, max_size: int, removed: list[int]) -> None:
    """Bundles go from the oldest on when there are too many or they are too large; the newest always stays."""
    bundles = [Bundle(number, size) for number, size in enumerate(sizes, start=1)]
    assert surplus(bundles, keep, max_size) == removed


def test_a_document_is_readable_by_itself() -> None:
    """The document holds the sentence, the numbers, the last samples and the requests by class and age."""
    life = Life([Engine(running=1, open_tokens=1)])
    life.users(1)
    seen = []
    life.run(305, lambda _passed: seen.append(life.observation()))
    made = document(
        cause="stuck",
        at="2026-01-01T00:00:00Z",
        run="r1",
        incarnation=3,
        judgement=life.last,
        samples=seen,
        requests=[OpenRequest("led-1", RequestClass.CHAT, admitted_at=life.now - 300)],
        lines=[f"line {number}" for number in range(1000)],
        first_error=["ValueError: api_key='sk-verysecret'"],
    )
    text = json.dumps(made, default=str)
    assert made["verdict"] == "stuck"
    assert made["open_requests"] == [{"class": "chat", "age_s": 300.0, "first_byte": False}]
    assert (len(made["samples"]), len(made["last_lines"])) == (20, 200)
    assert made["last_lines"][-1] == "line 999"
    assert "verysecret" not in text
    assert summary(7, "stuck", life.last).startswith("incident 7: stuck: the engine has had work for 30")


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'api_key': ['topsecret'], 'port': 9}",
        "HF_TOKEN=topsecret",
        "--api-key topsecret --port 9",
        "Authorization: Bearer topsecret",
        "using key sk-topsecret99",
        'hf_token="topsecret"',
    ],
)
def test_keys_in_lines_do_not_show(line: str) -> None:
    """What follows a secret's name, and what looks like a key, is replaced in a line the engine printed."""
    shown = redact.text(line)
    assert "topsecret" not in shown
    assert redact.REDACTED in shown


@pytest.mark.parametrize("line", ["loaded tokenizer in 3 s", "max_tokens=5 prompt tokens: 7", "KeyError: 'x'"])
def test_other_lines_stay_as_they_are(line: str) -> None:
    """Lines without a secret are not touched."""
    assert redact.text(line) == line
