"""openai-agents: runs of agents over chat completions and over the Responses API."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import agents
import openai
from agents import Agent, ModelSettings, Runner, function_tool

from tours import task
from tours.city import City
from tours.tour import Kind, Tour, check, equal, joined, refused_later

tour = Tour()
agents.set_tracing_disabled(True)

CHAT: Any = agents.OpenAIChatCompletionsModel
RESPONSES: Any = agents.OpenAIResponsesModel


asked_for: list[tuple[str, str]] = []


@function_tool
def get_weather(
    city: Literal["Paris", "London", "Rome"], unit: Literal["celsius", "fahrenheit"]
) -> str:
    """Tells the weather of a city."""
    asked_for.append((city, unit))
    return task.TOOL_RESULT


def agent(kind: Any, name: str = tour.model, settings: Any = None, **more: Any) -> Any:
    """A greedy agent; a client of its own, since each call has an event loop of its own."""
    client = openai.AsyncOpenAI(base_url=f"{tour.url}/v1", api_key=tour.api_key, max_retries=0)
    chosen = {"temperature": 0, "max_tokens": task.TOKENS, "store": False, **(settings or {})}
    model = kind(model=name, openai_client=client)
    return Agent(name="tour", model=model, model_settings=ModelSettings(**chosen), **more)


async def run(one: Any, question: str = task.QUESTION) -> Any:
    """What the agent answers in the end."""
    return (await Runner.run(one, question, max_turns=4)).final_output


def both(kind: Kind, name: str, call: Callable[[Any], Any]) -> None:
    """The call over either API."""
    tour.call(kind, f"{name}, chat completions")(lambda: call(CHAT))
    tour.call(kind, f"{name}, Responses")(lambda: call(RESPONSES))


async def _run(kind: Any) -> None:
    equal(await run(agent(kind)), tour.plain.chat_text)


async def _instructions(kind: Any) -> None:
    system: Any = {"role": "system", "content": "Answer briefly."}
    # A response that max_tokens cuts is an error to it, as OpenAI's own is; a word ends this one.
    ends: Any = {"stop": [" is", " the", ",", "."]}
    settings = {"max_tokens": task.ANSWER_TOKENS, "extra_body": ends}
    wanted = tour.plain.chat([system, *task.MESSAGES], task.ANSWER_TOKENS, **ends)
    equal(await run(agent(kind, settings=settings, instructions="Answer briefly.")), wanted)


async def _settings(kind: Any) -> None:
    chosen = {"top_p": 0.9, "temperature": 0.7, "metadata": {"tour": "1"}}
    if kind is CHAT:
        chosen |= {"frequency_penalty": 0.1, "presence_penalty": 0.1}
    check(await run(agent(kind, settings=chosen)), "an empty answer")


async def _at_once(kind: Any) -> None:
    for text in await asyncio.gather(*(run(agent(kind)) for _ in range(3))):
        check(text, "an empty answer")


async def _stream(kind: Any) -> None:
    result = Runner.run_streamed(agent(kind), task.QUESTION)
    events = [event async for event in result.stream_events()]
    raw: list[Any] = [one.data for one in events if one.type == "raw_response_event"]
    texts = [data.delta for data in raw if data.type == "response.output_text.delta"]
    equal(joined(texts), tour.plain.chat_text)
    equal(result.final_output, tour.plain.chat_text)


async def _cancel_stream(kind: Any) -> None:
    settings = {"max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
    with tour.given_up():
        result = Runner.run_streamed(agent(kind, settings=settings), task.QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()


async def _cancel(kind: Any) -> None:
    settings = {"max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
    await tour.cancelled(run(agent(kind, settings=settings)))


async def _unknown_model(kind: Any) -> None:
    await refused_later(run(agent(kind, name=task.UNKNOWN_MODEL)), openai.NotFoundError)


async def _previous() -> None:
    asked = Runner.run(agent(RESPONSES), task.QUESTION, previous_response_id="resp_1")
    error = await refused_later(asked, openai.BadRequestError)
    equal(error.param, "previous_response_id", "param")


async def _hosted() -> None:
    asked = run(agent(RESPONSES, tools=[agents.WebSearchTool()]))
    await refused_later(asked, openai.BadRequestError)


async def _schema(kind: Any) -> None:
    settings = {"max_tokens": task.ANSWER_TOKENS}
    answer = await run(agent(kind, settings=settings, output_type=City), task.CITY_QUESTION)
    check(isinstance(answer, City), f"nothing parsed: {answer!r}")


async def _named(kind: Any) -> None:
    asked_for.clear()
    settings = {"max_tokens": task.ANSWER_TOKENS, "tool_choice": get_weather.name}
    one = agent(
        kind, settings=settings, tools=[get_weather], tool_use_behavior="stop_on_first_tool"
    )
    equal(await run(one, task.TOOL_MESSAGES[0]["content"]), task.TOOL_RESULT)
    equal(len(asked_for), 1, "calls")


async def _required(kind: Any) -> None:
    asked_for.clear()
    # Without the last setting so small a model calls until it is cut.
    settings = {
        "max_tokens": task.ANSWER_TOKENS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    one = agent(kind, settings=settings, tools=[get_weather])
    result = Runner.run_streamed(one, task.TOOL_MESSAGES[0]["content"], max_turns=4)
    async for _event in result.stream_events():
        pass
    check(asked_for and isinstance(result.final_output, str), "no tool was called")


both("unary", "Runner.run", _run)
both("unary", "Runner.run with instructions", _instructions)
both("unary", "Runner.run with settings", _settings)
both("unary", "three runs at once", _at_once)
both("stream", "Runner.run_streamed", _stream)
both("cancel", "a streamed run that is cancelled", _cancel_stream)
both("cancel", "a run whose task is cancelled", _cancel)
both("error", "unknown model", _unknown_model)
tour.limit("Runner.run with previous_response_id, Responses", "api.md#responses")(_previous)
tour.limit("a tool that the server would run, Responses", "api.md#responses")(_hosted)
both("schema", "output_type of a pydantic model", _schema)
both("tool", "tool_choice names a tool", _named)
both("tool", "tool_choice required, the result goes back, streamed", _required)
