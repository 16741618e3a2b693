"""Field types of prompts and message contents: parsers and JSON schemas."""

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.api.fields import is_text, refusal, token_ids
from services.gateway.vocabulary.errors import NotSupported

PROMPTS_MAX = 64

Prompt = str | tuple[int, ...]

_PARTS_UNSUPPORTED = ("image_url", "input_audio", "file", "refusal")


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Parse a prompt, or a list of prompts."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list) or not value:
        raise refusal("must be a string, nonempty list of token ids, or list of these")
    if isinstance(value[0], int):
        return (_token_prompt(value),)
    if len(value) > PROMPTS_MAX:
        raise refusal(f"must have at most {PROMPTS_MAX} prompts")
    return tuple(
        _token_prompt(prompt) if isinstance(prompt, list) else _text_prompt(prompt)
        for prompt in value
    )


def _text_prompt(value: Any) -> str:
    if not is_text(value):
        raise refusal("must have strings of valid Unicode")
    return str(value)


def _token_prompt(value: list[Any]) -> tuple[int, ...]:
    ids = token_ids(value)
    if ids is None:
        raise refusal("must have token ids: nonempty lists of integers from 0")
    return ids


def _parse_content(value: Any) -> str:
    """Parse text, or join text parts; ignores other fields of a text part."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise refusal("must be a string or a nonempty list of text parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PARTS_UNSUPPORTED:
            raise NotSupported(
                f"message parts of type '{kind}' are not supported yet; send text",
                param="messages",
            )
        if kind != "text" or "text" not in part:
            raise refusal("must have parts of the form {'type': 'text', 'text': …}")
        if not is_text(part["text"]):
            raise refusal("must be valid Unicode")
        texts.append(part["text"])
    return "".join(texts)


_TEXT_SCHEMA = {"type": "string"}
_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _TOKENS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": PROMPTS_MAX,
                    "items": {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA]},
                },
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
                    },
                },
            ]
        }
    ),
]
