"""Unknown fields of messages are found at any depth, and named by number and path."""

import pytest
from google.protobuf.message import Message

from services.gateway.api.parameters import UnknownFields
from services.gateway.grpc.unknown_fields import SEARCHED_MAX, decoded_known
from services.gateway.vocabulary.errors import BadRequest
from tideserve.gateway.v1 import gateway_pb2 as pb

ODD = b"\xf8\x06\x01"
"""The field 111, a number."""


def odd(message: Message) -> Message:
    message.MergeFromString(ODD)
    return message


def warnings(request: Message) -> tuple[str, ...]:
    unknown = UnknownFields(refuse=False)
    decoded_known(type(request), request.SerializeToString(), unknown)
    return unknown.warnings


def hi() -> pb.Message:
    return pb.Message(role=pb.ROLE_USER, text="hi")


def test_unknown_fields_are_named_with_their_path() -> None:
    parts = pb.ContentParts(parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")])
    request = pb.ChatRequest(model="m", messages=[hi(), pb.Message(parts=parts)])
    assert warnings(request) == ()
    odd(request.messages[1].parts.parts[1])
    assert warnings(request) == ("ignored unknown fields: messages.1.parts.parts.1.field-111",)
    with pytest.raises(BadRequest) as caught:
        decoded_known(pb.ChatRequest, request.SerializeToString(), UnknownFields(refuse=True))
    assert caught.value.param == "messages.1.parts.parts.1"
    assert caught.value.code == "unknown_parameter"
    odd(request.sampling)
    odd(request)
    names = "field-111, sampling.field-111, messages.1.parts.parts.1.field-111"
    assert warnings(request) == (f"ignored unknown fields: {names}",)


def test_unknown_fields_are_removed() -> None:
    request = pb.ChatRequest(model="m", messages=[hi()])
    data = request.SerializeToString()
    read = decoded_known(pb.ChatRequest, data + ODD, UnknownFields(refuse=False))
    assert read == request and read.SerializeToString() == data


def test_alternative_encodings_are_not_unknown_fields() -> None:
    request = pb.ChatRequest(model="m", messages=[hi()])
    request.sampling.logit_bias[5] = 0.0
    data = pb.ChatRequest(model="other").SerializeToString() + request.SerializeToString()
    unknown = UnknownFields(refuse=True)
    assert decoded_known(pb.ChatRequest, data, unknown) == request


def test_the_list_of_unknown_fields_is_bounded() -> None:
    request = pb.ChatRequest(messages=[hi() for _ in range(20)])
    for message in request.messages:
        odd(message)
    (warning,) = warnings(request)
    assert warning.count("field-111") == 8 and warning.endswith(" and 12 more")
    hidden = pb.ChatRequest(messages=[hi() for _ in range(3 * SEARCHED_MAX)])
    odd(hidden.messages[-1])
    assert warnings(hidden) == ("ignored unknown fields: field-of-a-long-message",)
    with pytest.raises(BadRequest):
        decoded_known(pb.ChatRequest, hidden.SerializeToString(), UnknownFields(refuse=True))
