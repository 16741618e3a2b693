"""openai-agents: runs of agents over chat completions and over the Responses API."""

import asyncio
from typing import Any, Literal

import agents
import openai
import pydantic
import pytest
import support as s
from agents import Agent, ModelSettings, Runner, function_tool

agents.set_tracing_disabled(True)
CHAT: Any = agents.OpenAIChatCompletionsModel
RESPONSES: Any = agents.OpenAIResponsesModel
# The client treats responses truncated by max_tokens as errors, so a stop word ends these.
ENDED: Any = {"max_tokens": s.ANSWER_TOKENS, "extra_body": {"stop": [" is", " the", ",", "."]}}
LONG: Any = {"max_tokens": s.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
both = pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=["chat", "responses"])
calls: list[tuple[str, str]] = []


class City(pydantic.BaseModel):
    city: Literal["Paris", "London", "Rome"]
    millions: int = pydantic.Field(ge=0, le=99)


@function_tool
def get_weather(
    city: Literal["Paris", "London", "Rome"], unit: Literal["celsius", "fahrenheit"]
) -> str:
    """Returns the weather of a city."""
    calls.append((city, unit))
    return s.TOOL_RESULT


def agent(api: Any, name: str = s.MODEL, settings: Any = None, **more: Any) -> Any:
    """A greedy agent with a new client, since each test has its own event loop."""
    client = openai.AsyncOpenAI(base_url=f"{s.URL}/v1", api_key=s.API_KEY, max_retries=0)
    chosen = {"temperature": 0, "max_tokens": s.TOKENS, "store": False, **(settings or {})}
    model = api(model=name, openai_client=client)
    return Agent(name="agent", model=model, model_settings=ModelSettings(**chosen), **more)


async def run(agent: Any, question: str = s.QUESTION) -> Any:
    """The agent's final answer."""
    return (await Runner.run(agent, question, max_turns=4)).final_output


@both
async def test_run(api: Any) -> None:
    assert await run(agent(api)) == s.chat_text()


@both
async def test_instructions(api: Any) -> None:
    wanted = s.chat([s.BRIEFLY, *s.MESSAGES], s.ANSWER_TOKENS, **ENDED["extra_body"])
    assert await run(agent(api, settings=ENDED, instructions="Answer briefly.")) == wanted


@both
async def test_settings(api: Any) -> None:
    chosen = {**ENDED, "top_p": 0.9, "temperature": 0.7, "metadata": {"key": "1"}}
    if api is CHAT:
        chosen |= {"frequency_penalty": 0.1, "presence_penalty": 0.1}
    assert await run(agent(api, settings=chosen))


@both
async def test_three_at_once(api: Any) -> None:
    assert all(await asyncio.gather(*(run(agent(api)) for _ in range(3))))


@both
async def test_stream(api: Any) -> None:
    result = Runner.run_streamed(agent(api), s.QUESTION)
    events = [event async for event in result.stream_events()]
    raw: list[Any] = [event.data for event in events if event.type == "raw_response_event"]
    texts = [data.delta for data in raw if data.type == "response.output_text.delta"]
    assert s.joined(texts) == result.final_output == s.chat_text()


@both
async def test_a_cancelled_stream_is_cancelled(api: Any) -> None:
    with s.given_up():
        result = Runner.run_streamed(agent(api, settings=LONG), s.QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()


@both
async def test_a_cancelled_task_is_cancelled(api: Any) -> None:
    await s.cancelled(run(agent(api, settings=LONG)))


@both
async def test_unknown_model(api: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        await run(agent(api, name=s.UNKNOWN_MODEL))


async def test_refused_by_decision() -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await Runner.run(agent(RESPONSES), s.QUESTION, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError):  # the server would run this tool
        await run(agent(RESPONSES, tools=[agents.WebSearchTool()]))


@both
async def test_pydantic_model(api: Any) -> None:
    settings = {"max_tokens": s.ANSWER_TOKENS}
    answer = await run(agent(api, settings=settings, output_type=City), s.CITY_QUESTION)
    assert isinstance(answer, City)


@both
async def test_a_named_tool(api: Any) -> None:
    calls.clear()
    settings = {"max_tokens": s.ANSWER_TOKENS, "tool_choice": get_weather.name}
    tools: Any = {"tools": [get_weather], "tool_use_behavior": "stop_on_first_tool"}
    assert await run(agent(api, settings=settings, **tools), s.TOOL_QUESTION) == s.TOOL_RESULT
    assert len(calls) == 1


@both
async def test_a_required_tool_and_its_result_streamed(api: Any) -> None:
    calls.clear()
    # Without the second setting a model this small calls until it is truncated.
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    tool_agent = agent(
        api, settings={"max_tokens": s.ANSWER_TOKENS, **required}, tools=[get_weather]
    )
    result = Runner.run_streamed(tool_agent, s.TOOL_QUESTION, max_turns=4)
    async for _event in result.stream_events():
        pass
    assert calls and isinstance(result.final_output, str)
