"""Tensors of the KServe protocol in both dialects, and errors in them."""

import json
import struct
from typing import Any

import pytest

from services.gateway.grpc.kserve_translate import FINAL, inference_of, response_of
from services.gateway.vocabulary.errors import BadRequest, GatewayError, NoSuchModel
from tideserve.kserve.v2 import inference_pb2 as pb

Tensor = pb.ModelInferRequest.InferInputTensor


def raw_of(value: str | bool) -> bytes:
    if isinstance(value, bool):
        return bytes([value])
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def tensor(name: str, value: str | bool, raw: bool) -> Tensor:
    made = Tensor(name=name, shape=[1], datatype="BOOL" if isinstance(value, bool) else "BYTES")
    if not raw and isinstance(value, bool):
        made.contents.bool_contents.append(value)
    elif not raw and isinstance(value, str):
        made.contents.bytes_contents.append(value.encode())
    return made


def request(raw: bool = True, parameters: Any = None, **inputs: str | bool) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(
        model_name="m", inputs=[tensor(name, value, raw) for name, value in inputs.items()]
    )
    if raw:
        made.raw_input_contents.extend(map(raw_of, inputs.values()))
    for name, value in (parameters or {}).items():
        kinds = {bool: "bool", int: "int64", float: "double", str: "string"}
        setattr(made.parameters[name], f"{kinds[type(value)]}_param", value)
    return made


@pytest.mark.parametrize("raw", [True, False])
def test_both_dialects_translate_equally(raw: bool) -> None:
    wanted = {"model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 0.5, "stream": True}
    sampling = {"max_tokens": 5, "temperature": 0.5}
    triton, by_tensor = inference_of(
        request(raw, text_input="hi", stream=True, sampling_parameters=json.dumps(sampling))
    )
    dynamo, by_parameters = inference_of(request(raw, sampling, text_input="hi", streaming=True))
    assert by_tensor == by_parameters == wanted
    assert triton == dynamo


def test_numbers_may_be_strings() -> None:
    """As in the examples of Triton's vLLM backend."""
    sampling = {"temperature": "0.1", "max_tokens": "100", "ignore_eos": "True", "stop": "5"}
    more = {"structured_outputs": '{"json": {"type": "object"}}', "seed": 7, "top_k": "x"}
    _, fields = inference_of(
        request(parameters=more, text_input="hi", sampling_parameters=json.dumps(sampling))
    )
    assert fields == {
        "model": "m",
        "prompt": "hi",
        "temperature": 0.1,
        "max_tokens": 100,
        "ignore_eos": True,
        "stop": "5",
        "structured_outputs": {"json": {"type": "object"}},
        "seed": 7,
        "top_k": "x",
    }


@pytest.mark.parametrize("text", ["42", "0.5", "true", "True", "null", "[1]", '"x"', '{"a": 1}'])
def test_string_fields_stay_strings(text: str) -> None:
    names = (
        *("request_id", "cache_salt", "service_tier", "slo_class", "truncation_side"),
        *("stop", "bad_words", "guided_regex", "guided_grammar", "guided_json"),
    )
    given = dict.fromkeys(names, text)
    _, by_tensor = inference_of(request(text_input="hi", sampling_parameters=json.dumps(given)))
    _, by_parameters = inference_of(request(parameters=given, text_input="hi"))
    assert by_tensor == by_parameters == given | {"model": "m", "prompt": "hi"}


def test_triton_parameters_are_not_sampling_parameters() -> None:
    made = request(
        parameters={"triton_enable_empty_final_response": True, "sequence_id": 5}, text_input="hi"
    )
    assert inference_of(made)[1] == {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize(
    ("inputs", "prefix"),
    [
        ({}, ""),
        ({"streaming": False}, ""),
        ({"stream": False}, "hi"),
        ({"sampling_parameters": "{}"}, "hi"),
        ({"sampling_parameters": "{}", "exclude_input_in_output": True}, ""),
        ({"exclude_input_in_output": False}, "hi"),
        ({"stream": True}, ""),
    ],
)
def test_the_prompt_is_echoed_unless_excluded(inputs: Any, prefix: str) -> None:
    assert inference_of(request(text_input="hi", **inputs))[0].prefix == prefix


def broken(**changes: Any) -> pb.ModelInferRequest:
    made = request(text_input="hi")
    for name, value in changes.items():
        setattr(made.inputs[0], name, value)
    return made


def shaped(shape: list[int]) -> pb.ModelInferRequest:
    made = request(text_input="hi")
    made.inputs[0].shape[:] = shape
    return made


def with_raw(*raw: bytes) -> pb.ModelInferRequest:
    made = request(text_input="hi")
    made.raw_input_contents[:] = raw
    return made


@pytest.mark.parametrize(
    ("made", "param"),
    [
        (pb.ModelInferRequest(model_name="m"), "text_input"),
        (request(streaming=True), "text_input"),
        (broken(name="pixels"), "inputs"),
        (pb.ModelInferRequest(inputs=[tensor("text_input", "a", False)] * 2), "inputs"),
        (broken(datatype="FP32"), "text_input"),
        (shaped([]), "text_input"),
        (shaped([2]), "text_input"),
        (shaped([1, -1]), "text_input"),
        (with_raw(b"hi"), "text_input"),
        (with_raw(b""), "text_input"),
        (with_raw(struct.pack("<I", 9) + b"hi"), "text_input"),
        (with_raw(struct.pack("<I", 2**32 - 1) + b"hi"), "text_input"),
        (with_raw(raw_of("hi"), raw_of("hi")), "raw_input_contents"),
        (with_raw(struct.pack("<I", 1) + b"\xff"), "text_input"),
        (request(False, text_input="hi", stream="x"), "stream"),
        (request(text_input="hi", sampling_parameters="[1]"), "sampling_parameters"),
        (request(text_input="hi", sampling_parameters="{"), "sampling_parameters"),
        (request(text_input="hi", sampling_parameters='{"prompt": "x"}'), "prompt"),
        (request(parameters={"stream": True}, text_input="hi"), "stream"),
        (request(parameters={"n": 2}, text_input="hi", stream=True), "n"),
        (
            request(text_input="hi", stream=True, exclude_input_in_output=False),
            "exclude_input_in_output",
        ),
    ],
)
def test_invalid_input_is_named(made: pb.ModelInferRequest, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        inference_of(made)
    assert caught.value.param == param


def test_empty_parameters_versions_and_outputs_are_validated() -> None:
    made = request(text_input="hi")
    made.parameters["seed"].SetInParent()
    cases: list[tuple[pb.ModelInferRequest, type[GatewayError]]] = [(made, BadRequest)]
    made = request(text_input="hi")
    made.model_version = "2"
    cases.append((made, NoSuchModel))
    made = request(text_input="hi")
    made.outputs.add(name="logits")
    cases.append((made, BadRequest))
    for wrong, kind in cases:
        with pytest.raises(kind):
            inference_of(wrong)


def test_responses_have_the_requested_outputs() -> None:
    made = request(text_input="hi")
    made.id = "7"
    both = response_of(inference_of(made)[0], ["a", "é"], ["stop", "length"])
    assert (both.id, both.model_name, both.model_version) == ("7", "m", "1")
    assert [(response.name, list(response.shape)) for response in both.outputs] == [
        ("text_output", [2]),
        ("finish_reason", [2]),
    ]
    assert both.raw_output_contents[0] == raw_of("a") + raw_of("é")
    assert FINAL not in both.parameters
    made.outputs.add(name="finish_reason")
    response = response_of(inference_of(made)[0], ["a"], ["stop"], final=True)
    assert [output.name for output in response.outputs] == ["finish_reason"]
    assert list(response.raw_output_contents) == [raw_of("stop")]
    assert response.parameters[FINAL].bool_param
