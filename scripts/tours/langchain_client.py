"""langchain-openai: chat models, completions, structured output and tools as chains use them."""

from typing import Any, Literal

import langchain_openai
import openai
import pydantic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate

from tours import task
from tours.city import City
from tours.tour import Tour, check, check_tool, equal, joined, refused, validate

tour = Tour()
HOW: Any = {
    "base_url": f"{tour.url}/v1",
    "api_key": tour.api_key,
    "model": tour.model,
    "max_retries": 0,
}


def chat(**more: Any) -> Any:
    """A greedy chat model."""
    return langchain_openai.ChatOpenAI(
        **{**HOW, "temperature": 0, "max_tokens": task.TOKENS, **more}
    )


def alone() -> Any:
    """Connections of its own: models share theirs, and each call here has an event loop."""
    return {"http_async_client": openai.DefaultAsyncHttpxClient()}


model = chat()
answering = chat(max_tokens=task.ANSWER_TOKENS)
LONG: Any = {"max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}


class Weather(pydantic.BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "London", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


@tour.call("unary", "ChatOpenAI.invoke")
def _invoke() -> None:
    answer = model.invoke(task.QUESTION)
    equal(answer.content, tour.plain.chat_text)
    check(answer.usage_metadata["input_tokens"] > 0, "no usage")


@tour.call("unary", "ChatOpenAI.ainvoke with a system message")
async def _system() -> None:
    answer = await chat(**alone()).ainvoke(
        [SystemMessage("Answer briefly."), HumanMessage(task.QUESTION)]
    )
    system: Any = {"role": "system", "content": "Answer briefly."}
    equal(answer.content, tour.plain.chat([system, *task.MESSAGES]))


@tour.call("unary", "a chain of a prompt and a model")
def _chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")])
    equal((prompt | model).invoke({"country": "France"}).content, tour.plain.chat_text)


@tour.call("unary", "ChatOpenAI.batch, four")
def _batch() -> None:
    for answer in model.batch([task.QUESTION] * 4):
        check(answer.content, "an empty answer")


@tour.call("unary", "ChatOpenAI.generate: n=2, logprobs, penalties, seed, stop")
def _fields() -> None:
    wide = chat(
        temperature=0.8,
        n=2,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={17: -5},
        seed=3,
    )
    (choices,) = wide.generate([[HumanMessage(task.QUESTION)]], stop=["zzz"]).generations
    equal(len(choices), 2, "choices")
    check(choices[0].message.response_metadata["logprobs"], "no logprobs")


@tour.call("unary", "OpenAI.invoke, completions")
def _complete() -> None:
    text = langchain_openai.OpenAI(**HOW, temperature=0, max_tokens=task.TOKENS)
    equal(text.invoke(task.PROMPT), tour.plain.completion_text)


@tour.call("unary", "ChatOpenAI.invoke over the Responses API")
def _respond() -> None:
    answer = chat(use_responses_api=True, store=False).invoke(task.QUESTION)
    equal(answer.text, tour.plain.chat_text)


@tour.call("stream", "ChatOpenAI.stream with usage")
def _stream() -> None:
    chunks = list(chat(stream_usage=True).stream(task.QUESTION))
    equal(joined([chunk.content for chunk in chunks]), tour.plain.chat_text)
    check(any(chunk.usage_metadata for chunk in chunks), "no usage")


@tour.call("stream", "ChatOpenAI.astream")
async def _astream() -> None:
    texts = [chunk.content async for chunk in chat(**alone()).astream(task.QUESTION)]
    equal(joined(texts), tour.plain.chat_text)


@tour.call("stream", "OpenAI.stream, completions")
def _stream_text() -> None:
    text = langchain_openai.OpenAI(**HOW, temperature=0, max_tokens=task.TOKENS)
    equal(joined(list(text.stream(task.PROMPT))), tour.plain.completion_text)


@tour.call("stream", "ChatOpenAI.stream over the Responses API")
def _stream_response() -> None:
    chunks = chat(use_responses_api=True, store=False).stream(task.QUESTION)
    equal(joined([chunk.text for chunk in chunks]), tour.plain.chat_text)


@tour.call("cancel", "a stream that is closed")
def _close() -> None:
    with tour.given_up():
        stream = chat(**LONG).stream(task.QUESTION)
        for _, _chunk in zip(range(4), stream, strict=False):
            pass
        stream.close()


@tour.call("cancel", "ainvoke whose task is cancelled")
async def _cancel() -> None:
    await tour.cancelled(chat(**LONG, **alone()).ainvoke(task.QUESTION))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    other = chat(model=task.UNKNOWN_MODEL)
    refused(lambda: other.invoke(task.QUESTION), openai.NotFoundError)


@tour.call("error", "temperature out of range, streamed")
def _bad_value() -> None:
    hot = chat(temperature=9)
    error = refused(lambda: list(hot.stream(task.QUESTION)), openai.BadRequestError)
    equal(error.param, "temperature", "param")


@tour.limit("OpenAIEmbeddings.embed_query", "api.md#embeddings")
def _embed() -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(**HOW, check_embedding_ctx_length=False)
    refused(lambda: embeddings.embed_query("tide"), openai.BadRequestError)


@tour.call("schema", "with_structured_output, json_schema")
def _schema() -> None:
    chain = answering.with_structured_output(City, method="json_schema")
    check(isinstance(chain.invoke(task.CITY_QUESTION), City), "nothing parsed")


@tour.call("schema", "with_structured_output, function_calling")
def _schema_by_tool() -> None:
    chain = answering.with_structured_output(City, method="function_calling")
    check(isinstance(chain.invoke(task.CITY_QUESTION), City), "nothing parsed")


@tour.call("schema", "with_structured_output, json_schema of a dict, streamed")
def _schema_of_dict() -> None:
    schema = {"title": "city", "description": "A capital.", **task.CITY_SCHEMA}
    chain = answering.with_structured_output(schema, method="json_schema")
    validate(list(chain.stream(task.CITY_QUESTION))[-1], task.CITY_SCHEMA)


@tour.call("tool", "bind_tools names a tool, and its result is sent back")
def _named() -> None:
    question = HumanMessage(task.TOOL_MESSAGES[0]["content"])
    told = answering.bind_tools([Weather], tool_choice="Weather").invoke([question])
    (call,) = told.tool_calls
    equal(call["name"], "Weather", "tool")
    Weather.model_validate(call["args"])
    result = ToolMessage(task.TOOL_RESULT, tool_call_id=call["id"])
    check(answering.bind_tools([Weather]).invoke([question, told, result]), "no answer")


@tour.call("tool", "bind_tools, any tool, streamed")
def _any() -> None:
    # Without the last field so small a model calls until it is cut.
    bound = answering.bind_tools([task.TOOL], tool_choice="any", parallel_tool_calls=False)
    whole: Any = None
    for chunk in bound.stream(task.TOOL_MESSAGES[0]["content"]):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    check_tool(call["name"], call["args"])
