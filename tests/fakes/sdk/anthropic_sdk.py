"""The anthropic package against a server, as its users write it: `python anthropic_sdk.py URL KEY`. Fails loudly."""

import asyncio
import sys

import anthropic

URL, KEY = sys.argv[1:3]
ASKED = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
ENDS = ("max_tokens", "end_turn")


def synchronous() -> None:
    """Whole, streamed by both ways it has, a count of tokens, and what it raises for mistakes."""
    client = anthropic.Anthropic(base_url=URL, auth_token=KEY, max_retries=0)
    assert client.messages.create(**ASKED).stop_reason in ENDS
    events = list(client.messages.create(stream=True, **ASKED))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop"), events
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason in ENDS, final
    assert final.content[0].text == text, final
    assert client.messages.count_tokens(model="tiny", messages=ASKED["messages"]).input_tokens > 0
    try:
        client.messages.create(**{**ASKED, "model": "huge"})
    except anthropic.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not there answered")


async def asynchronous() -> None:
    """Four streams at once."""
    async with anthropic.AsyncAnthropic(base_url=URL, auth_token=KEY, max_retries=0) as client:

        async def one() -> str | None:
            async with client.messages.stream(**ASKED) as stream:
                return (await stream.get_final_message()).stop_reason

        assert all(reason in ENDS for reason in await asyncio.gather(*(one() for _ in range(4))))


synchronous()
asyncio.run(asynchronous())
