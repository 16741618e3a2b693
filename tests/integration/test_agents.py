"""Output formats and tool calls with the real default model, which was trained for neither."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.bounded_schemas import SCHEMAS, WORD, of
from tests.support.client import open_client
from tests.support.cluster import Cluster

MODEL = "SmolLM2-135M-Instruct"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather in a city.",
            "parameters": of(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}),
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": of(
                a={"type": "integer", "minimum": 0, "maximum": 99},
                b={"type": "integer", "minimum": 0, "maximum": 99},
            ),
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # On a busy machine two threads wait for each other, for seconds per token.
    with Cluster(memory="512MiB", dtype="bfloat16", workers=1, threads=1) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with open_client(cluster.url, "none") as client:
        yield client


async def check_schema(
    client: openai.AsyncOpenAI, schema: dict[str, Any], count: int, seed: int
) -> None:
    """Check that `count` answers at temperature 1 end by themselves and validate."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent an example and answer in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "example", "schema": schema, "strict": True},
        },
        n=count,
        temperature=1,
        seed=seed,
        max_tokens=500,
    )
    assert len(answer.choices) == count
    for choice in answer.choices:
        assert choice.finish_reason == "stop", choice
        assert choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), schema)


async def test_every_schema_is_followed(client: openai.AsyncOpenAI) -> None:
    await asyncio.gather(*(check_schema(client, schema, 1, seed=1) for schema in SCHEMAS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
async def test_two_hundred_answers_validate(client: openai.AsyncOpenAI, number: int) -> None:
    await check_schema(client, SCHEMAS[number], 200 // len(SCHEMAS), seed=number)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_match_their_schemas(client: openai.AsyncOpenAI, choice: Any) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 17 and 25, and the weather in Oslo?"}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=choice is NAMED,  # a named tool is called exactly once
        n=8,
        temperature=1,
        seed=3,
        max_tokens=200,
    )
    for output in answer.choices:
        assert output.finish_reason == "tool_calls"
        assert output.message.content is None and output.message.tool_calls is not None
        (call,) = output.message.tool_calls
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        assert choice == "required" or call.function.name == "add"


async def test_a_streamed_call_equals_the_whole_call(client: openai.AsyncOpenAI) -> None:
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is 17 and 25?"}],
        "tools": TOOLS,
        "tool_choice": NAMED,
        "temperature": 0,
        "max_tokens": 200,
    }
    whole = (await client.chat.completions.create(**fields)).choices[0].message.tool_calls
    streamed, name = "", ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            streamed += call.function.arguments or ""
    assert whole is not None and whole[0].type == "function"
    assert (name, streamed) == ("add", whole[0].function.arguments)
