"""langchain-openai: chat models, completions, structured output and tools as chains use them."""

from typing import Any, Literal

import langchain_openai
import openai
import pydantic
import pytest
import support as s
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate

HOW: Any = {"base_url": f"{s.URL}/v1", "api_key": s.API_KEY, "model": s.MODEL, "max_retries": 0}
GREEDY: Any = {**HOW, "temperature": 0, "max_tokens": s.TOKENS}
LONG: Any = {"max_tokens": s.LONG_TOKENS, "extra_body": {"ignore_eos": True}}


def chat(**more: Any) -> Any:
    """A greedy chat model."""
    return langchain_openai.ChatOpenAI(**{**GREEDY, **more})


def asynchronous(**more: Any) -> Any:
    """The same with new connections: models share theirs, but each test has its own loop."""
    return chat(http_async_client=openai.DefaultAsyncHttpxClient(), **more)


model = chat()
answering = chat(max_tokens=s.ANSWER_TOKENS)
completions = langchain_openai.OpenAI(**GREEDY)


class City(pydantic.BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "London", "Rome"]
    millions: int = pydantic.Field(ge=0, le=99)


class Weather(pydantic.BaseModel):
    """Returns the weather of a city."""

    city: Literal["Paris", "London", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def test_invoke() -> None:
    answer = model.invoke(s.QUESTION)
    assert answer.content == s.chat_text()
    assert answer.usage_metadata["input_tokens"] > 0


async def test_system_message() -> None:
    messages = [SystemMessage("Answer briefly."), HumanMessage(s.QUESTION)]
    answer = await asynchronous().ainvoke(messages)
    assert answer.content == s.chat([s.BRIEFLY, *s.MESSAGES])


def test_chain_of_a_prompt_and_a_model() -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")])
    assert (prompt | model).invoke({"country": "France"}).content == s.chat_text()


def test_batch() -> None:
    assert all(answer.content for answer in model.batch([s.QUESTION] * 4))


def test_sampling_fields() -> None:
    penalties: Any = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {17: -5}}
    wide = chat(temperature=0.8, n=2, logprobs=True, top_logprobs=2, seed=3, **penalties)
    (choices,) = wide.generate([[HumanMessage(s.QUESTION)]], stop=["zzz"]).generations
    assert len(choices) == 2 and choices[0].message.response_metadata["logprobs"]


def test_completion() -> None:
    assert completions.invoke(s.PROMPT) == s.completion_text()
    assert s.joined(completions.stream(s.PROMPT)) == s.completion_text()


def test_responses_api() -> None:
    responses = chat(use_responses_api=True, store=False)
    assert responses.invoke(s.QUESTION).text == s.chat_text()
    assert s.joined(chunk.text for chunk in responses.stream(s.QUESTION)) == s.chat_text()


def test_stream_with_usage() -> None:
    chunks = list(chat(stream_usage=True).stream(s.QUESTION))
    assert s.joined(chunk.content for chunk in chunks) == s.chat_text()
    assert any(chunk.usage_metadata for chunk in chunks)


async def test_async_stream() -> None:
    texts = [chunk.content async for chunk in asynchronous().astream(s.QUESTION)]
    assert s.joined(texts) == s.chat_text()


def test_a_closed_stream_is_cancelled() -> None:
    with s.given_up():
        stream = chat(**LONG).stream(s.QUESTION)
        for _, _chunk in zip(range(4), stream, strict=False):
            pass
        stream.close()


async def test_a_cancelled_task_is_cancelled() -> None:
    await s.cancelled(asynchronous(**LONG).ainvoke(s.QUESTION))


def test_errors() -> None:
    with pytest.raises(openai.NotFoundError):
        chat(model=s.UNKNOWN_MODEL).invoke(s.QUESTION)
    with pytest.raises(openai.BadRequestError) as raised:
        list(chat(temperature=9).stream(s.QUESTION))
    assert raised.value.param == "temperature"


def test_refused_by_decision() -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(**HOW, check_embedding_ctx_length=False)
    with pytest.raises(openai.BadRequestError):
        embeddings.embed_query("tide")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: str) -> None:
    chain = answering.with_structured_output(City, method=method)
    assert isinstance(chain.invoke(s.CITY_QUESTION), City)


def test_structured_output_of_a_dict_streamed() -> None:
    schema = {"title": "city", "description": "A capital.", **s.CITY_SCHEMA}
    chain = answering.with_structured_output(schema, method="json_schema")
    s.check_city(list(chain.stream(s.CITY_QUESTION))[-1])


def test_a_named_tool_and_its_result() -> None:
    question = HumanMessage(s.TOOL_QUESTION)
    message = answering.bind_tools([Weather], tool_choice="Weather").invoke([question])
    (call,) = message.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    result = ToolMessage(s.TOOL_RESULT, tool_call_id=call["id"])
    assert answering.bind_tools([Weather]).invoke([question, message, result])


def test_any_tool_streamed() -> None:
    # Without the last field a model this small calls until it is truncated.
    bound = answering.bind_tools([s.TOOL], tool_choice="any", parallel_tool_calls=False)
    first, *rest = bound.stream(s.TOOL_QUESTION)
    (call,) = sum(rest, first).tool_calls
    s.check_tool(call["name"], call["args"])
