"""Types of the fields in request bodies: their checks, and how they are described."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.gateway.errors import Unsupported

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
STOP_STRINGS_MAX = 4
STOP_CHARS_MAX = 256
PROMPTS_MAX = 64

Prompt = str | tuple[int, ...]


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}", {"why": message})


def _is_text(value: Any) -> bool:
    """Whether it is a string that has a UTF-8 form; JSON escapes can make others."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if value is None:
        return ()
    if not isinstance(strings, list) or len(strings) > STOP_STRINGS_MAX:
        raise _refuse(f"must be a string or a list of up to {STOP_STRINGS_MAX} strings")
    if not all(_is_text(text) and 1 <= len(text) <= STOP_CHARS_MAX for text in strings):
        raise _refuse(f"must hold strings of 1 to {STOP_CHARS_MAX} characters")
    return tuple(strings)


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt, or several that become choices."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list) or not value:
        raise _refuse("must be a nonempty string, list of token ids, or list of these")
    if isinstance(value[0], int):
        return (_token_prompt(value),)
    if len(value) > PROMPTS_MAX:
        raise _refuse(f"must hold at most {PROMPTS_MAX} prompts")
    return tuple(
        _token_prompt(item) if isinstance(item, list) else _text_prompt(item) for item in value
    )


def _text_prompt(value: Any) -> str:
    if not _is_text(value) or not value or "\0" in value:
        raise _refuse("must hold nonempty strings of valid Unicode without NUL")
    return str(value)


def _token_prompt(value: Sequence[Any]) -> tuple[int, ...]:
    if not value or not all(type(item) is int and 0 <= item <= INT32_MAX for item in value):
        raise _refuse("must hold token ids: nonempty lists of integers from 0")
    return tuple(value)


def _parse_content(value: Any) -> str:
    """Plain text, or the text parts joined."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise _refuse("must be a string or a nonempty list of text parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("image_url", "input_audio", "file", "refusal"):
            raise Unsupported(
                f"message parts of type '{kind}' are not supported yet; send text",
                param="messages",
            )
        if kind != "text" or set(part) != {"type", "text"}:
            raise _refuse("must hold parts of the form {'type': 'text', 'text': …}")
        if not _is_text(part["text"]) or "\0" in part["text"]:
            raise _refuse("must hold valid Unicode without NUL")
        texts.append(part["text"])
    return "".join(texts)


Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                {
                    "type": "array",
                    "maxItems": STOP_STRINGS_MAX,
                    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                },
                {"type": "null"},
            ]
        }
    ),
]
_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKENS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": PROMPTS_MAX,
                    "items": {"type": "string", "minLength": 1},
                },
                {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX, "items": _TOKENS_SCHEMA},
            ]
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(_parse_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
