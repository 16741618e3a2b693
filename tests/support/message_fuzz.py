"""Random gRPC messages: valid, valid with an injected error, and bytes that do not parse.

Seeded, so that failures can be reproduced.
"""

import math
import random
import string
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.kserve.v2 import inference_pb2 as kserve

TEXTS = ["hi", "x", " ", "\0", "é日本語", "a b c", "\n", "the tide", "<|im_end|>", "\U0001f30a" * 9]
# For fields with JSON, a regular expression or a grammar; invalid in all other fields.
NOTATIONS = [
    *("{}", "null", "[]", "1", '""', "{", '{"a": 1, "a": 2}', '{"\\ud800": "\\udfff"}', "9" * 5000),
    *('{"type": "object"}', '{"type": "str"}', '{"type": "string", "maxLength": 3}'),
    *(
        '{"$ref": "#"}',
        '{"$ref": "http://127.0.0.1:1/"}',
        '{"const": "\\u0000"}',
        '{"a": "\\ud800"}',
    ),
    *('{"minimum": 1e999}', '{"minimum": NaN}', '{"minLength": -1}', '{"maxLength": 1e30}'),
    *('{"enum": ["\\ud800"]}', '{"pattern": "("}', '{"pattern": "\\ud800"}', "(", "[a-", "(a+)+$"),
    *("a{2,1}", "\\", "start: /a/", "start: start", "start: %json {", "x: 1\ny", "\\p{Foo}", "\\1"),
    '{"temperature": 1e999, "n": -1, "logit_bias": {"\\ud800": 1}}',
    '{"type": "object", "properties": {"\\ud800\\u0000": {"type": "integer"}}}',
    '{"max_tokens": 4, "stop": ["\\ud800"], "seed": 18446744073709551616}',
]
SCHEMAS = [
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    '{"type": "object", "additionalProperties": false, "properties": {"city": {"enum": ["x"]}}}',
    '{"type": "object"}',
]
# Expensive to compile, or large.
DEAR = [
    *("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "x" * 70_000, "(" * 2000 + ")" * 2000),
    '{"enum": [' + ",".join(f'"{i}"' for i in range(2000)) + "]}",
    '{"type": "string", "pattern": "(a{1,1000}){1,1000}"}',
]
NAMES = [
    "",
    "m",
    "x",
    "1",
    "text_input",
    "stream",
    "\0",
    "é\n",
    "n",
    "prompt",
    "x" * 300,
    "__proto__",
]
SAMPLING = [
    *pb.Sampling.DESCRIPTOR.fields_by_name,
    "response_format",
    "tools",
    "request_id",
    "user",
]
INTEGERS = [0, 1, -1, 2, 5, 17, 259, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**64 - 1]
NUMBERS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.5, 1e308, 5e-324, math.nan, math.inf, -math.inf]
# Valid values of Sampling, including bounds.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0.01, 1),
    "top_k": (-1, 99),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.5, 2),
    "seed": (0, 2**62),
    "min_tokens": (0, 3),
    "n": (1, 3),
    "prompt_logprobs": (0, 5),
}
TOKENS_MAX = 24
GATEWAY = "/tideserve.gateway.v1.GatewayService/"
KSERVE = "/inference.GRPCInferenceService/"


class Messages:
    """Draws messages for the methods of a gateway that serves `model`."""

    def __init__(self, rng: random.Random, model: str = "m") -> None:
        self._rng = rng
        self._model = model
        self._good: dict[str, Callable[[], Message]] = {
            f"{GATEWAY}Chat": self._chat,
            f"{GATEWAY}StreamChat": lambda: pb.StreamChatRequest(chat=self._chat()),
            f"{GATEWAY}Complete": self._completion,
            f"{GATEWAY}StreamComplete": lambda: pb.StreamCompleteRequest(
                completion=self._completion()
            ),
            f"{GATEWAY}Tokenize": self._tokenize,
            f"{GATEWAY}Detokenize": lambda: pb.DetokenizeRequest(
                model=self._model, token_ids=self._ids()
            ),
            f"{GATEWAY}ListModels": pb.ListModelsRequest,
            f"{GATEWAY}Cancel": lambda: pb.CancelRequest(request_id=self._pick(["x", "gen-1"])),
            f"{KSERVE}ModelInfer": self._inference,
            f"{KSERVE}ModelStreamInfer": self._inference,
            f"{KSERVE}ServerLive": kserve.ServerLiveRequest,
            f"{KSERVE}ServerReady": kserve.ServerReadyRequest,
            f"{KSERVE}ServerMetadata": kserve.ServerMetadataRequest,
            f"{KSERVE}ModelReady": lambda: kserve.ModelReadyRequest(name=self._model),
            f"{KSERVE}ModelMetadata": lambda: kserve.ModelMetadataRequest(name=self._model),
            f"{KSERVE}ModelConfig": lambda: kserve.ModelConfigRequest(name=self._model),
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (
                lambda: reflection_pb2.ServerReflectionRequest(list_services="")
            ),
            "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
        }

    @property
    def methods(self) -> list[str]:
        """Full names of the methods."""
        return list(self._good)

    def draw(self, method: str) -> bytes:
        """A message for the method; a third are valid."""
        message = self._good[method]()
        for _ in range(self._pick([0, 0, 1, 1, 2, 4])):
            self._spoil(message)
        data = message.SerializeToString()
        return mangled(self._rng, data) if self._rng.random() < 0.12 else data

    def good(self, method: str) -> bytes:
        """A valid message."""
        return self._good[method]().SerializeToString()

    def _pick(self, values: Any) -> Any:
        return self._rng.choice(values)

    def _text(self) -> str:
        return str(self._pick(TEXTS)) * self._rng.randint(1, 3)

    def _ids(self) -> list[int]:
        return [self._rng.randrange(99) for _ in range(self._rng.randint(1, 9))]

    def _sampling(self) -> pb.Sampling:
        sampling = pb.Sampling(max_tokens=self._rng.randint(1, TOKENS_MAX))
        for name in self._rng.sample(list(_RANGES), self._pick([0, 0, 1, 3])):
            low, high = _RANGES[name]
            value = self._pick([low, high, self._rng.uniform(low, high)])
            whole = name in ("top_k", "seed", "min_tokens", "n", "prompt_logprobs")
            setattr(sampling, name, round(value) if whole else value)
        if self._rng.random() < 0.2:
            sampling.logprobs, sampling.top_logprobs = True, self._rng.randint(0, 5)
        if self._rng.random() < 0.1:
            sampling.logit_bias[self._rng.randrange(99)] = self._rng.uniform(-100, 100)
            sampling.stop.append(self._text())
        return sampling

    def _chat(self) -> pb.ChatRequest:
        chat = pb.ChatRequest(model=self._model, sampling=self._sampling())
        for _ in range(self._rng.randint(1, 3)):
            role = self._pick([pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_SYSTEM])
            chat.messages.add(role=role, text=self._text())
        if self._rng.random() < 0.2:
            parts = pb.ContentParts(parts=[pb.ContentPart(text=self._text())])
            chat.messages.add(role=pb.ROLE_USER, parts=parts)
        if self._rng.random() < 0.3:
            self._add_tools(chat)
        elif self._rng.random() < 0.3:
            chat.structure.CopyFrom(self._structure())
        if self._rng.random() < 0.2:
            chat.reasoning.CopyFrom(pb.Reasoning(effort="low", chat_template_kwargs="{}"))
        if self._rng.random() < 0.3:
            chat.options.CopyFrom(self._options())
        return chat

    def _add_tools(self, chat: pb.ChatRequest) -> None:
        """Add functions, and messages with a call and its result."""
        for name in ("get_weather", "add")[: self._rng.randint(1, 2)]:
            chat.tools.add(name=name, description=self._text(), parameters=self._pick(SCHEMAS))
        mode = self._pick([pb.TOOL_MODE_AUTO, pb.TOOL_MODE_NONE, pb.TOOL_MODE_REQUIRED])
        named = self._rng.random() < 0.3
        choice = pb.ToolChoice(name="get_weather") if named else pb.ToolChoice(mode=mode)
        chat.tool_choice.CopyFrom(choice)
        if self._rng.random() < 0.5:
            message = chat.messages.add(role=pb.ROLE_ASSISTANT)
            message.tool_calls.add(id="call_1", name="get_weather", arguments="{}")
            chat.messages.add(role=pb.ROLE_TOOL, tool_call_id="call_1", text=self._text())

    def _structure(self) -> pb.Structure:
        form = self._pick(["json_object", "json_schema", "regex", "lark", "choices"])
        if form == "json_object":
            return pb.Structure(json_object=pb.JsonObject())
        if form == "choices":
            return pb.Structure(choices=pb.Choices(texts=["yes", "no"]))
        texts = {"json_schema": self._pick(SCHEMAS), "regex": "[a-z]+", "lark": "start: /[a-z]+/"}
        return pb.Structure(**{form: texts[form]})

    def _options(self) -> pb.Options:
        drawn = "".join(self._rng.choices(string.ascii_letters, k=24))
        options = pb.Options(request_id=drawn, user="someone", cache_salt="s", priority=-3)
        options.service_class = self._rng.randrange(4)
        options.service_level.CopyFrom(pb.ServiceLevel(ttft_ms=100.0, tpot_ms=10.0))
        return options

    def _completion(self) -> pb.CompleteRequest:
        request = pb.CompleteRequest(model=self._model, sampling=self._sampling())
        for _ in range(self._pick([1, 1, 1, 3])):
            if self._rng.random() < 0.3:
                request.prompts.add(token_ids=pb.TokenIds(ids=self._ids()))
            else:
                request.prompts.add(text=self._text())
        if self._rng.random() < 0.3:
            request.structure.CopyFrom(self._structure())
        if self._rng.random() < 0.3:
            request.options.CopyFrom(self._options())
        return request

    def _tokenize(self) -> pb.TokenizeRequest:
        if self._rng.random() < 0.5:
            return pb.TokenizeRequest(model=self._model, text=self._text())
        return pb.TokenizeRequest(
            model=self._model, chat=pb.ChatInput(messages=self._chat().messages)
        )

    def _inference(self) -> kserve.ModelInferRequest:
        request = kserve.ModelInferRequest(model_name=self._model, id=self._pick(["", "7", "é"]))
        raw = self._rng.random() < 0.5
        text = self._text().encode()
        limit = f'{{"max_tokens": {self._rng.randint(1, TOKENS_MAX)}}}'.encode()
        for name, data in (("text_input", text), ("sampling_parameters", limit)):
            made = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            if raw:
                request.raw_input_contents.append(struct.pack("<I", len(data)) + data)
            else:
                made.contents.bytes_contents.append(data)
        if self._rng.random() < 0.5:
            made = request.inputs.add(name="stream", datatype="BOOL", shape=[1])
            if raw:
                request.raw_input_contents.append(self._pick([b"\0", b"\1"]))
            else:
                made.contents.bool_contents.append(self._rng.random() < 0.5)
        if self._rng.random() < 0.3:
            request.parameters["temperature"].double_param = self._rng.random()
            request.parameters["seed"].int64_param = 3
            request.parameters["stop"].string_param = self._text()
            request.outputs.add(name="text_output")
        return request

    def _spoil(self, message: Message) -> None:
        """Change one field of the message or of a nested message."""
        inner = [
            element
            for field, value in message.ListFields()
            if field.message_type is not None and not _is_map(field)
            for element in (value if field.is_repeated else [value])
        ]
        if inner and self._rng.random() < 0.7:
            self._spoil(self._pick(inner))
        elif message.DESCRIPTOR.fields:
            self._set(message, self._pick(message.DESCRIPTOR.fields))

    def _set(self, message: Message, field: FieldDescriptor) -> None:
        if self._rng.random() < 0.15:
            message.ClearField(field.name)
        elif _is_map(field):
            self._put(getattr(message, field.name), field)
        elif field.is_repeated:
            self._extend(getattr(message, field.name), field)
        elif field.message_type is not None:
            made = getattr(message, field.name)
            made.SetInParent()
            self._spoil(made)
        else:
            setattr(message, field.name, self._scalar(field))

    def _extend(self, values: Any, field: FieldDescriptor) -> None:
        # Rarely many copies of an element.
        count = self._pick([1, 1, 1, 2, 5, 40]) if self._rng.random() < 0.98 else 3000
        if field.message_type is None:
            values.extend([self._scalar(field)] * count)
            return
        made = values.add()
        self._spoil(made)
        for _ in range(count - 1):
            values.add().CopyFrom(made)

    def _put(self, values: Any, field: FieldDescriptor) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self._pick([1, 1, 3, 40])):
            named = self._pick([*NAMES, *SAMPLING]) if key.type == key.TYPE_STRING else None
            at = self._scalar(key) if named is None else named
            if value.message_type is None:
                values[at] = self._scalar(value)
            else:
                self._spoil(values[at])

    def _scalar(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self._rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self._pick(NUMBERS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return self._pick([0, 1, 2, 3, 99, -1, 2**31 - 1])
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return self._rng.choice(
                        [self._any_text().encode(), self._rng.randbytes(7), b""]
                    )
                return self._any_text()
        low, high = _BOUNDS[field.cpp_type]
        return self._pick([integer for integer in INTEGERS if low <= integer <= high])

    def _any_text(self) -> str:
        if self._rng.random() < 0.02:
            return str(self._pick(DEAR))
        strange = "".join(self._rng.choices(string.printable, k=self._rng.randint(0, 12)))
        return str(
            self._pick([self._pick(NOTATIONS), self._pick(TEXTS), self._pick(NAMES), strange])
        )


_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def mangled(rng: random.Random, data: bytes) -> bytes:
    """Bytes that mostly do not parse."""
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        [
            lambda: data[:at],
            lambda: data[:at] + rng.randbytes(3) + data[at:],
            lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            lambda: data + data,
            lambda: rng.randbytes(rng.randint(1, 60)),
            # An unknown field, truncated, and with an endless varint.
            lambda: data + b"\xfa\x3f\x03abc",
            lambda: data + b"\x0a\xff\xff\xff\xff\x0f",
            lambda: data + b"\x08" + b"\xff" * 11,
            # Nested groups, and text that is not UTF-8.
            lambda: data + b"\x0b" * 300,
            lambda: data + b"\x0a\x02\xed\xa0",
            lambda: b"\0" * rng.choice([1, 5, 100_000]),
        ]
    )()
