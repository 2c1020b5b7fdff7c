"""How many choices a request asks for."""

import json

import pytest

from vllm_supervisor.core.asked import choices_asked
from vllm_supervisor.core.words import RequestClass


@pytest.mark.parametrize(
    ("cls", "body", "expected"),
    [
        (RequestClass.CHAT, {"messages": []}, 1),
        (RequestClass.CHAT, {"messages": [], "n": 3}, 3),
        (RequestClass.CHAT, {"messages": [], "n": None}, 1),
        (RequestClass.CHAT, {"tools": [{"n": 5}]}, 1),
        (RequestClass.COMPLETIONS, {"prompt": "a"}, 1),
        (RequestClass.COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (RequestClass.COMPLETIONS, {"prompt": ["a", "b"]}, 2),
        (RequestClass.COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (RequestClass.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (RequestClass.COMPLETIONS, {"prompt": []}, 1),
        (RequestClass.COMPLETIONS, {"prompt": ["a" * 70000] * 2}, None),
        (RequestClass.EMBEDDINGS, {"n": 3}, None),
        (RequestClass.COMPLETIONS, {"prompt": '["n"]'}, 1),
        (RequestClass.CHAT, {"messages": [{"content": "prompt: ["}]}, 1),
    ],
)
def test_choices_asked(cls: RequestClass, body: dict[str, object], expected: int | None):
    """Choices times prompts, where the body is small and says so; else unknown."""
    assert choices_asked(cls, json.dumps(body).encode()) == expected


@pytest.mark.parametrize("body", [b'{"n":', b'[{"n":1}]', b'{"n":"x"', b'\xff"n"', b'"n"' + b"[" * 60000])
def test_broken_bodies_are_unknown(body: bytes):
    """A body that is not an object says nothing and raises nothing."""
    assert choices_asked(RequestClass.COMPLETIONS, body) is None
