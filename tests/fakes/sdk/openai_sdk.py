"""The openai package against a server, as its users write it: `python openai_sdk.py URL KEY`. Fails loudly."""

import asyncio
import sys

import openai
from turn_tool import FORCED, TOOL

URL, KEY = sys.argv[1:3]
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"model": "tiny", "max_tokens": 8}
ARGUMENTS = ('{"side":"left"}', '{"side":"right"}')
ENDS = ("length", "stop")


def synchronous() -> None:
    """Whole, streamed, tools, the other families, and what it raises for mistakes."""
    client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(messages=HELLO, n=2, **SHORT)
    assert [choice.finish_reason in ENDS for choice in whole.choices] == [True, True], whole
    chunks = list(
        client.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **SHORT)
    )
    assert chunks[-1].usage.completion_tokens, chunks[-1]
    assert chunks[-2].choices[0].finish_reason in ENDS, chunks[-2]
    texts = list(client.completions.create(prompt="Hello", n=2, stream=True, **SHORT))
    assert {text.choices[0].index for text in texts if text.choices[0].finish_reason} == {0, 1}, texts
    response = client.responses.create(model="tiny", input="Hello", max_output_tokens=8)
    assert response.status in ("completed", "incomplete"), response
    events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=8, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1]

    asked = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": FORCED,
        "max_tokens": 256,
        "temperature": 0,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "turn", call
    assert "".join(call.function.arguments.split()) in ARGUMENTS, call
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [call.name for call in calls if call.name] == ["turn"], calls
    assert "".join("".join(call.arguments or "" for call in calls).split()) in ARGUMENTS, calls

    for mistake, error in (({"model": "huge"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{"messages": HELLO, **SHORT, **mistake})
        except error as told:
            assert told.body["message"], told  # noqa: PT017 - no pytest in vLLM's environment
        else:
            raise AssertionError(mistake)
    try:
        openai.OpenAI(base_url=URL + "/v1", api_key="guess", max_retries=0).models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key passed")


async def asynchronous() -> None:
    """Eight streams at once over one pool; one of them is left before its end, and the pool goes on."""
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0) as client:

        async def stream(**more: object) -> list[object]:
            return [chunk async for chunk in await client.chat.completions.create(messages=HELLO, stream=True, **more)]

        all_chunks = await asyncio.gather(*(stream(**SHORT) for _ in range(8)))
        assert all(chunks[-1].choices[0].finish_reason in ENDS for chunks in all_chunks), all_chunks
        endless = {"model": "tiny", "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
        async with await client.chat.completions.create(messages=HELLO, stream=True, **endless) as left:
            await anext(aiter(left))
        whole = await client.chat.completions.create(messages=HELLO, **SHORT)
        assert whole.choices[0].finish_reason in ENDS, whole


synchronous()
asyncio.run(asynchronous())
