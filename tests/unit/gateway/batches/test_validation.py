"""Inputs are validated in a single pass, and each error names its line."""

import io
import json
import random
from typing import Any

import pytest

from services.core.batches.order import BatchOrder
from services.gateway.batches import line_reader
from services.gateway.batches.line_reader import LINE_BYTES_MAX, read_lines
from services.gateway.batches.validation import (
    ERRORS_MAX,
    TOKENS_MAX,
    BatchRules,
    InputValidator,
)
from services.gateway.vocabulary.errors import no_such_model

CHAT = "/v1/chat/completions"


def line(name: object = "a", **changes: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    data = {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | changes
    return json.dumps(data).encode() + b"\n"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": []} | fields


def check_model(name: str) -> None:
    if name != "m":
        raise no_such_model(name, "m")


def validated(content: bytes, **rules: Any) -> tuple[InputValidator, list[Any]]:
    rules = {"endpoint": CHAT, "lines_max": 50_000, "check_model": check_model} | rules
    validator = InputValidator(io.BytesIO(content), BatchRules(**rules))
    lines = []
    while not validator.ended:
        lines += validator.next_chunk()
    return validator, lines


def test_lines_are_split_as_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    monkeypatch.setattr(line_reader, "LINE_BYTES_MAX", 40)
    for _ in range(300):
        monkeypatch.setattr(line_reader, "READ_BYTES", draw.randint(1, 60))
        content = bytes(draw.choice(b"ab\n") for _ in range(draw.randrange(200)))
        content = content.replace(b"a", b"a" * draw.choice([1, 30]))
        pieces = content.split(b"\n")
        offset, wanted = 0, []
        for number, piece in enumerate(pieces, start=1):
            kept = piece if len(piece) <= 40 else None
            wanted.append((number, offset, kept, number < len(pieces)))
            offset += len(piece) + 1
        if not pieces[-1]:
            wanted.pop()
        read = [
            (raw.number, raw.offset, raw.content, raw.ended)
            for raw in read_lines(io.BytesIO(content))
        ]
        assert read == wanted


def test_a_valid_input_has_no_errors() -> None:
    content = b"".join(line(f"id-{n}") for n in range(2500))
    validator, lines = validated(content)
    assert validator.errors == [] and validator.total == 2500
    assert [new.line for new in lines] == list(range(1, 2501))
    for new in (lines[0], lines[1234]):
        assert json.loads(content[new.offset : new.offset + new.length])["custom_id"] == (
            new.custom_id
        )


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (line("b").replace(b"\n", b"\r\n"), "crlf"),
        (line("b")[:-1], "no_final_newline"),
        (b"\n", "empty_line"),
        (b"{]\n", "invalid_json"),
        (b"[1]\n", "invalid_json"),
        (line("b").replace(b"hello", b"\xff"), "invalid_utf8"),
        (line("b").replace(b"hello", b"x" * LINE_BYTES_MAX), "line_too_long"),
        (line("a"), "duplicate_custom_id"),
        (line(None), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("\0"), "invalid_custom_id"),
        (line("\ud800"), "invalid_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/completions"), "invalid_url"),
        (line("b", body=None), "missing_field"),
        (line("b", body=body(model=None)), "missing_field"),
        (line("b", body=body(model="foreign")), "model_not_found"),
        (line("b", body=body(stream=True)), "unsupported_value"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(bad: bytes, code: str) -> None:
    validator, _ = validated(line("a") + line("c") + bad)
    assert [(error.code, error.line) for error in validator.errors] == [(code, 3)]


def test_a_byte_order_mark_is_reported() -> None:
    validator, _ = validated(b"\xef\xbb\xbf" + line())
    assert [(error.code, error.line) for error in validator.errors] == [("byte_order_mark", 1)]


def test_the_first_errors_of_many_are_reported() -> None:
    validator, _ = validated(b"{}\n" * 1000)
    assert [error.line for error in validator.errors] == list(range(1, ERRORS_MAX + 1))


@pytest.mark.parametrize(
    ("content", "rules", "code"),
    [
        (b"", {}, "empty_file"),
        (line("a") + line("b"), {"lines_max": 1}, "too_many_lines"),
    ],
)
def test_an_input_that_is_too_large_or_empty_fails(
    content: bytes, rules: dict[str, Any], code: str
) -> None:
    validator, _ = validated(content, **rules)
    assert [error.code for error in validator.errors] == [code]


def test_tokens_are_estimated_by_bytes_and_limits() -> None:
    prompt = "x" * 400
    validator, _ = validated(line(body=body(messages=prompt, max_tokens=7, n=3)))
    assert 100 + 21 <= validator.tokens <= 101 + 21
    shortest, _ = validated(line(body=body(messages=prompt)), order=BatchOrder.SJF)
    assert shortest.tokens > 500


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10**30},
        {"max_tokens": 2**62, "n": 4},
        {"n": -(10**30)},
        {"max_tokens": -(10**30), "n": -3},
        {"max_tokens": True},
    ],
)
def test_the_estimate_of_a_line_is_bounded(fields: dict[str, Any]) -> None:
    validator, lines = validated(line(body=body(**fields)))
    assert not validator.errors and len(lines) == 1
    assert 0 <= validator.tokens <= TOKENS_MAX


def test_a_lone_surrogate_is_reported_with_its_line() -> None:
    surrogate = line("b", body=body(messages=[{"role": "user", "content": "\ud800"}]))
    validator, _ = validated(line("a") + surrogate)
    assert [(error.line, error.param) for error in validator.errors] == [(2, "body")]
