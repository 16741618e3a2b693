"""Translates between the tensors of KServe's protocol and the fields of the HTTP API.

The input names are those of Triton's vLLM backend and of Dynamo. Sampling parameters have the names
of the HTTP API; they arrive in a JSON tensor, in the request's parameters, or in both.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api.completion import CompletionRequest
from services.gateway.api.field_names import FieldNames
from services.gateway.api.json_object import parse_object
from services.gateway.vocabulary.errors import BadRequest, NoSuchModel
from tideserve.kserve.v2 import inference_pb2 as pb

Fields = dict[str, Any]

VERSION = "1"
"""The version of every model."""
ID_CHARS_MAX = 1024
"""Maximum characters of a request id, which stays in memory until the response."""
FINAL = "triton_final_response"
OUTPUTS = ("text_output", "finish_reason")
# Datatypes of the inputs.
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "streaming": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
}
# Triton's parameters for queues and streams, which have no effect on the output and are ignored.
_CONTROL = frozenset(
    {
        "binary_data_output",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "timeout",
        "triton_enable_empty_final_response",
    }
)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" or any(map(_takes_text, schema.get("anyOf", ())))


# Fields whose value may be text. Text in other fields is parsed as JSON: Triton's examples send
# numbers as text.
_TEXT = frozenset(
    name
    for name, schema in CompletionRequest.model_json_schema()["properties"].items()
    if _takes_text(schema)
)
NAMES = FieldNames({"prompt": "text_input"})
_ENDPOINT = frozenset({"model", "prompt", "stream", "stream_options"})


@dataclass(frozen=True, slots=True)
class Inference:
    """The form of the response. `prefix`: the prompt, if the text starts with it, else "".

    `outputs`: names of the requested tensors.
    """

    model: str
    request_id: str
    stream: bool
    prefix: str
    outputs: tuple[str, ...]


def inference_of(request: pb.ModelInferRequest) -> tuple[Inference, Fields]:
    """The form of the response, and the equivalent completion body. Raises GatewayError."""
    check_version(request.model_version)
    if len(request.id) > ID_CHARS_MAX:
        raise BadRequest(
            f"'id' has more than {ID_CHARS_MAX} characters; choose a shorter one", param="id"
        )
    values = _inputs(request)
    text = values.get("text_input")
    if text is None:
        raise BadRequest("the input 'text_input' is missing; send it", param="text_input")
    stream = bool(values.get("stream") or values.get("streaming"))
    fields = _sampling(values.get("sampling_parameters"), request.parameters)
    if stream and fields.get("n") not in (None, 1):
        raise BadRequest("'n' must be 1 in a stream; omit 'n' or 'stream'", param="n")
    fields |= {"model": request.model_name, "prompt": text}
    if stream:
        fields["stream"] = True
    inference = Inference(
        model=request.model_name,
        request_id=request.id,
        stream=stream,
        prefix=text if _includes_prompt(values, stream) else "",
        outputs=_outputs(request),
    )
    return inference, fields


def check_version(version: str) -> None:
    """Raise NoSuchModel unless the version exists."""
    if version not in ("", VERSION):
        raise NoSuchModel(
            f"the version {version[:64]!a} does not exist, only '{VERSION}'; omit it",
            param="model_version",
            code="version_not_found",
        )


def _includes_prompt(values: Mapping[str, Any], stream: bool) -> bool:
    """Whether the text starts with the prompt, as in Triton's vLLM backend; never in a stream."""
    excluded = values.get("exclude_input_in_output")
    if stream and excluded is False:
        raise BadRequest(
            "'exclude_input_in_output' cannot be false in a stream; omit it, or do not stream",
            param="exclude_input_in_output",
        )
    if excluded is not None:
        return not excluded
    return not stream and ("stream" in values or "sampling_parameters" in values)


def _outputs(request: pb.ModelInferRequest) -> tuple[str, ...]:
    wanted = tuple(output.name for output in request.outputs)
    for name in wanted:
        if name not in OUTPUTS:
            raise BadRequest(
                f"the output {name[:64]!a} does not exist; request {' or '.join(OUTPUTS)}",
                param="outputs",
            )
    return wanted or OUTPUTS


def _inputs(request: pb.ModelInferRequest) -> Fields:
    """The values of the inputs, by name."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(
            f"{len(raw)} raw contents do not match {len(request.inputs)} inputs; send one each",
            param="raw_input_contents",
        )
    values: Fields = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in INPUTS or name in values:
            raise BadRequest(
                f"the input {name[:64]!a} is unknown or duplicate; the inputs are"
                f" {', '.join(INPUTS)}",
                param="inputs",
            )
        _check_form(tensor)
        read = _read_bytes if INPUTS[name] == "BYTES" else _read_bool
        values[name] = read(tensor, raw[index] if raw else None)
    return values


def _check_form(tensor: pb.ModelInferRequest.InferInputTensor) -> None:
    name, kind = tensor.name, INPUTS[tensor.name]
    if tensor.datatype != kind:
        raise BadRequest(f"'{name}' must have the datatype {kind}; correct it", param=name)
    if not tensor.shape or any(size != 1 for size in tensor.shape):
        raise BadRequest(f"'{name}' must have a single element; use the shape [1]", param=name)


def _read_bytes(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> str:
    """The text of a tensor with a single element."""
    if raw is None:
        elements = list(tensor.contents.bytes_contents)
    else:
        # Raw BYTES elements have a prefix of their length: 4 bytes, little-endian.
        size = struct.unpack_from("<I", raw)[0] if len(raw) >= 4 else -1
        elements = [raw[4:]] if size == len(raw) - 4 else []
    if len(elements) != 1:
        raise BadRequest(f"'{tensor.name}' must hold a single element", param=tensor.name)
    try:
        return elements[0].decode()
    except UnicodeDecodeError:
        raise BadRequest(
            f"'{tensor.name}' is not valid UTF-8; encode it as UTF-8", param=tensor.name
        ) from None


def _read_bool(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bool:
    values = list(tensor.contents.bool_contents) if raw is None else [bool(byte) for byte in raw]
    if len(values) != 1:
        raise BadRequest(f"'{tensor.name}' must hold a single element", param=tensor.name)
    return values[0]


def _sampling(text: str | None, parameters: Mapping[str, pb.InferParameter]) -> Fields:
    """Merge the sampling parameters of both places; the tensor has priority."""
    given: Fields = {
        name: _value(name, parameter)
        for name, parameter in parameters.items()
        if name not in _CONTROL
    }
    if text is not None:
        given |= parse_object(text, "'sampling_parameters'", "sampling_parameters")
    # Inputs of the request have these values; a second value would be ambiguous.
    for name in given.keys() & _ENDPOINT:
        raise BadRequest(f"'{name}' is not a sampling parameter; send it as an input", param=name)
    return {name: _typed(name, value) for name, value in given.items()}


def _value(name: str, parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise BadRequest(
            f"the parameter {name[:64]!a} has no value; set a value", param="parameters"
        )
    return getattr(parameter, kind)


def _typed(name: str, value: Any) -> Any:
    """Decode a number, list or object that arrived as text."""
    if not isinstance(value, str) or name in _TEXT:
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except (ValueError, RecursionError):
        # Not JSON: leave the error message to the field's own check.
        return value


def response_of(
    inference: Inference, texts: Sequence[str], reasons: Sequence[str], final: bool | None = None
) -> pb.ModelInferResponse:
    """A response with an element per choice. `final`: whether it ends a request of a stream."""
    response = pb.ModelInferResponse(
        model_name=inference.model, model_version=VERSION, id=inference.request_id
    )
    if final is not None:
        response.parameters[FINAL].bool_param = final
    for name, values in zip(OUTPUTS, (texts, reasons), strict=True):
        if name in inference.outputs:
            response.outputs.add(name=name, datatype="BYTES", shape=[len(values)])
            response.raw_output_contents.append(b"".join(map(_element, values)))
    return response


def _element(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def error_response(message: str, request_id: str) -> pb.ModelStreamInferResponse:
    """An error that ends a request of a stream."""
    response = pb.ModelInferResponse(id=request_id)
    response.parameters[FINAL].bool_param = True
    return pb.ModelStreamInferResponse(error_message=message, infer_response=response)
