"""Errors of gRPC calls name fields of their messages."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from services.gateway.api.chat import chat_of
from services.gateway.api.completion import completion_of
from services.gateway.api.field_names import FieldNames
from services.gateway.api.parameters import UnknownFields
from services.gateway.grpc import kserve_translate, translate
from services.gateway.vocabulary.errors import BadRequest, GatewayError
from tideserve.gateway.v1 import gateway_pb2 as pb


def names_in(descriptor: Descriptor) -> set[str]:
    """The names of fields and oneofs in a message and its nested messages."""
    todo, seen, names = [descriptor], set[str](), set[str]()
    while todo:
        message = todo.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        names |= {*message.oneofs_by_name}
        for field in message.fields:
            names.add(field.name)
            todo += [field.message_type] if field.message_type is not None else []
    return names


def check_names(error: GatewayError, names: FieldNames, descriptor: Descriptor) -> str:
    """Assert that the error names a field of the message; return the name."""
    message, param = names.translated(error)
    assert param is not None and f"'{param}" in message
    own = names_in(descriptor)
    assert all(part.isdecimal() or part in own for part in param.split(".")), param
    return param


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(model="m", messages=[pb.Message(role=pb.ROLE_USER, text="hi")], **fields)


NAMED = pb.ToolChoice(name="a b")
USE = pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(id="1", name="")])
RESULT = pb.Message(role=pb.ROLE_TOOL, text="x", tool_call_id="stop")
CHATS: list[tuple[pb.ChatRequest, str]] = [
    (chat(structure=pb.Structure(json_schema="{")), "structure.json_schema"),
    (chat(structure=pb.Structure(json_schema='{"$ref": "x"}')), "structure.json_schema"),
    (chat(structure=pb.Structure(regex="")), "structure.regex"),
    (chat(structure=pb.Structure(lark="")), "structure.lark"),
    (chat(structure=pb.Structure(choices=pb.Choices())), "structure.choices"),
    (chat(structure=pb.Structure()), "structure"),
    (chat(reasoning=pb.Reasoning(effort="much")), "reasoning.effort"),
    (chat(reasoning=pb.Reasoning(chat_template_kwargs="[")), "chat_template_kwargs"),
    (chat(options=pb.Options(service_class=9)), "options.service_class"),
    (
        chat(options=pb.Options(service_level=pb.ServiceLevel(ttft_ms=0.5))),
        "options.service_level.ttft_ms",
    ),
    (chat(options=pb.Options(request_id="a b")), "request_id"),
    (chat(sampling=pb.Sampling(temperature=9)), "temperature"),
    (chat(sampling=pb.Sampling(max_tokens=1, min_tokens=2)), "min_tokens"),
    (chat(sampling=pb.Sampling(top_logprobs=3)), "top_logprobs"),
    (chat(sampling=pb.Sampling(stop=[""])), "stop"),
    (chat(tools=[pb.Tool(name="a b")]), "tools"),
    (chat(tools=[pb.Tool(name="a", parameters="{")]), "tools"),
    (chat(tool_choice=NAMED), "tool_choice"),
    (chat(tool_choice=pb.ToolChoice(name="stop")), "tool_choice"),
    (pb.ChatRequest(model="m", messages=[USE]), "messages.0.tool_calls.0.name"),
    (pb.ChatRequest(model="m", messages=[RESULT]), "messages"),
    (pb.ChatRequest(model="m", messages=[pb.Message(text="x")]), "messages.0.role"),
]


@pytest.mark.parametrize(("request_", "name"), CHATS)
def test_errors_of_chats_name_message_fields(request_: pb.ChatRequest, name: str) -> None:
    names = translate.NAMES["Chat"]
    with pytest.raises(BadRequest) as refused:
        chat_of(translate.chat_fields(request_), UnknownFields(refuse=False))
    message, param = names.translated(refused.value)
    assert param == name
    assert "'function'" not in message and "'response_format" not in message
    own = names_in(pb.ChatRequest.DESCRIPTOR)
    assert all(part.isdecimal() or part in own for part in name.split("."))


COMPLETIONS: list[tuple[pb.CompleteRequest, str]] = [
    (pb.CompleteRequest(model="m"), "prompts"),
    (pb.CompleteRequest(model="m", prompts=[pb.Prompt(text="hi")] * 65), "prompts"),
    (
        pb.CompleteRequest(
            model="m",
            prompts=[pb.Prompt(text="hi")],
            sampling=pb.Sampling(logprobs=True, top_logprobs=99),
        ),
        "top_logprobs",
    ),
]


@pytest.mark.parametrize(("request_", "name"), COMPLETIONS)
def test_errors_of_completions_name_message_fields(request_: pb.CompleteRequest, name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        completion_of(translate.completion_fields(request_), UnknownFields(refuse=False))
    names = translate.NAMES["Complete"]
    assert check_names(refused.value, names, pb.CompleteRequest.DESCRIPTOR) == name


def test_errors_of_other_calls_name_message_fields() -> None:
    error = BadRequest("'prompt' is empty; send text", param="prompt")
    names = translate.NAMES["Tokenize"]
    assert check_names(error, names, pb.TokenizeRequest.DESCRIPTOR) == "text"
    message = "'text_input' is empty; send text"
    assert kserve_translate.NAMES.translated(error) == (message, "text_input")
