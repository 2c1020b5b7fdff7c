"""How many choices a request asks for, where its body tells cheaply."""

import json
import re
from typing import Any

from vllm_supervisor.core.words import RequestClass

# A key inside a string has its quotes escaped, so this is a real one; one that stands deeper only costs the parsing.
_LIST_PROMPT = re.compile(rb'"prompt"\s*:\s*\[')
_MAX_PARSED = 64 * 1024  # bytes; a larger body is not worth parsing for this


def choices_asked(request_class: RequestClass, body: bytes) -> int | None:
    """Return n times the number of prompts of a whole chat or completions body; None where it is not cheaply known."""
    if request_class is not RequestClass.CHAT and request_class is not RequestClass.COMPLETIONS:
        return None
    if body.find(b'"n"') < 0 and (request_class is RequestClass.CHAT or _LIST_PROMPT.search(body) is None):
        return 1
    if len(body) > _MAX_PARSED:
        return None
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    n = asked.get("n")
    each = n if isinstance(n, int) and n > 0 else 1
    return each * _prompts(asked.get("prompt"))


def _prompts(prompt: Any) -> int:
    """Count the prompts: a list of numbers is one, made of token ids; a list of anything else is several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
