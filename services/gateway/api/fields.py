"""Types of request fields: parsers and JSON schemas."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.core.request import BAD_WORDS_MAX, BIAS_MAX, LOGIT_BIAS_MAX

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
BAD_WORD_CHARS_MAX = 256
# Restricted to safe characters: the client's id appears in headers and logs.
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:=@+/-]{1,128}$"

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


def refusal(message: str) -> PydanticCustomError:
    """The error for an invalid value; `message` completes a sentence about the field."""
    return PydanticCustomError("refused", "{why}", {"why": message})


def is_text(value: Any) -> bool:
    """Whether the value is a string with a UTF-8 encoding; JSON escapes permit lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_texts(count_max: int, chars_max: int) -> Callable[[Any], tuple[str, ...]]:
    """A parser of a string or a list of strings."""

    def parse(value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or len(strings) > count_max:
            raise refusal(f"must be a string or a list of up to {count_max} strings")
        if not all(is_text(text) and 1 <= len(text) <= chars_max for text in strings):
            raise refusal(f"must hold strings of 1 to {chars_max} characters")
        return tuple(strings)

    return parse


def _texts_schema(count_max: int, chars_max: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "maxLength": chars_max}
    several = {"type": "array", "maxItems": count_max, "items": text}
    return {"anyOf": [text, several, {"type": "null"}]}


def _parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Parse a mapping from token ids, which are text in JSON, to biases."""
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > LOGIT_BIAS_MAX:
        raise refusal(f"must be an object of up to {LOGIT_BIAS_MAX} token ids and their biases")
    biases = {}
    for key, bias in value.items():
        token_id = _token_id(key)
        if token_id is None or token_id in biases:
            raise refusal("must have unique token ids as keys, such as '42'")
        # `type`, not isinstance: a bool is an int.
        if type(bias) not in (int, float) or not -BIAS_MAX <= bias <= BIAS_MAX:
            raise refusal(f"must have numbers of -{BIAS_MAX} to {BIAS_MAX} as values")
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _token_id(key: Any) -> int | None:
    # Convert at most ten digits, the length of INT32_MAX: conversions of long texts are slow.
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        key = int(key)
    return key if type(key) is int and 0 <= key <= INT32_MAX else None


Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_texts(STOP_STRINGS_MAX, STOP_CHARS_MAX)),
    WithJsonSchema(_texts_schema(STOP_STRINGS_MAX, STOP_CHARS_MAX)),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_texts(BAD_WORDS_MAX, BAD_WORD_CHARS_MAX)),
    WithJsonSchema(_texts_schema(BAD_WORDS_MAX, BAD_WORD_CHARS_MAX)),
]
SessionKey = Annotated[
    str | None,
    # Clients send values of any type in fields that other servers ignore.
    PlainValidator(lambda value: value if isinstance(value, str) else None),
    WithJsonSchema({"type": "string"}),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": LOGIT_BIAS_MAX,
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {
                        "type": "number",
                        "minimum": -BIAS_MAX,
                        "maximum": BIAS_MAX,
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


def token_ids(value: Sequence[Any]) -> tuple[int, ...] | None:
    """The ids in a nonempty list of token ids; None for any other list."""
    if not value or not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        return None
    return tuple(value)
