"""Converts bodies of the HTTP API to equivalent messages of the gRPC API, where possible."""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.grpc import translate
from services.gateway.vocabulary.errors import BadRequest
from tideserve.client.request import chat_messages, tool_of
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2 as pb

Request = pb.ChatRequest | pb.CompleteRequest

_MODES = {"auto": 1, "none": 2, "required": 3}
_SAMPLING = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name) - {"logprobs", "top_logprobs"}
_WRONG = (TypeError, ValueError, KeyError, AttributeError, BadRequest)


def to_message(endpoint: str, body: Mapping[str, Any]) -> Request | None:
    """The message equivalent to `body`; None if the message types cannot express it.

    Whether it is streamed depends on the method that the caller invokes.
    """
    wanted = {name: value for name, value in body.items() if name != "stream"}
    if "stream" in body and not isinstance(body["stream"], bool):
        return None
    try:
        request = _chat(wanted) if endpoint == "chat" else _completion(wanted)
        back = (
            translate.chat_fields(request)
            if isinstance(request, pb.ChatRequest)
            else translate.completion_fields(request)
        )
    except _WRONG:
        return None
    return request if _same(wanted, back) else None


def _same(first: Any, other: Any) -> bool:
    """Whether values and types are equal, so 1.0 and true differ from 1.

    Floats may be given as ints.
    """
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(
            _same(first[name], other[name]) for name in first
        )
    if isinstance(first, list) and isinstance(other, list):
        return len(first) == len(other) and all(map(_same, first, other))
    whole = type(first) is int and type(other) is float
    return (type(first) is type(other) or whole) and bool(first == other)


def _chat(body: Mapping[str, Any]) -> pb.ChatRequest:
    request = pb.ChatRequest(messages=chat_messages(body.get("messages", [])))
    for name in ("logprobs", "top_logprobs"):
        if name in body:
            setattr(request.sampling, name, body[name])
    request.tools.extend(map(tool_of, body.get("tools", ())))
    if "tool_choice" in body:
        choice = body["tool_choice"]
        if isinstance(choice, str):
            request.tool_choice.mode = _MODES[choice]  # type: ignore[assignment]
        else:
            request.tool_choice.name = choice["function"]["name"]
    if "reasoning_effort" in body:
        request.reasoning.effort = body["reasoning_effort"]
    if "chat_template_kwargs" in body:
        request.reasoning.chat_template_kwargs = json.dumps(body["chat_template_kwargs"])
    if "parallel_tool_calls" in body:
        request.parallel_tool_calls = body["parallel_tool_calls"]
    _fill(request, body)
    return request


def _completion(body: Mapping[str, Any]) -> pb.CompleteRequest:
    prompt = body.get("prompt", [])
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    prompts = prompt if several else [prompt]
    request = pb.CompleteRequest(prompts=map(_prompt, prompts))
    if "logprobs" in body:
        request.sampling.logprobs, request.sampling.top_logprobs = True, body["logprobs"]
    if "echo" in body:
        request.echo = body["echo"]
    _fill(request, body)
    return request


def _prompt(prompt: Any) -> pb.Prompt:
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))


def _fill(request: Request, body: Mapping[str, Any]) -> None:
    request.model = body.get("model", "")
    sampling = {name: value for name, value in body.items() if name in _SAMPLING}
    if isinstance(bias := sampling.pop("logit_bias", {}), Mapping):
        for token, value in bias.items():
            request.sampling.logit_bias[int(token)] = value
    stop = sampling.get("stop")
    if isinstance(stop, str):
        sampling["stop"] = [stop]
    request.sampling.MergeFrom(pb.Sampling(**sampling))
    for name in ("request_id", "user", "cache_salt", "priority"):
        if name in body:
            setattr(request.options, name, body[name])
    if "slo_class" in body:
        value = service_pb2.ServiceClass.Value(f"SERVICE_CLASS_{body['slo_class'].upper()}")
        request.options.service_class = value
    if "slo" in body:
        request.options.service_level.MergeFrom(pb.ServiceLevel(**body["slo"]))
    _structure(request, body)


def _structure(request: Request, body: Mapping[str, Any]) -> None:
    form = body.get("response_format", {})
    if form.get("type") == "json_object":
        request.structure.json_object.SetInParent()
    elif form:
        request.structure.json_schema = json.dumps(form["json_schema"]["schema"])
    wanted = body.get("structured_outputs", {})
    if "choice" in wanted:
        request.structure.choices.texts.extend(wanted["choice"])
    if "regex" in wanted:
        request.structure.regex = wanted["regex"]
    if "grammar" in wanted:
        request.structure.lark = wanted["grammar"]
