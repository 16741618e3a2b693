"""What is said: prompts and the content of messages, their checks and how they are described."""

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.api.fields import is_text, refusal, token_ids
from services.gateway.vocabulary.errors import NotSupported

PROMPTS_MAX = 64

Prompt = str | tuple[int, ...]

_PARTS_UNSUPPORTED = ("image_url", "input_audio", "file", "refusal")


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt, or several that become choices."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list) or not value:
        raise refusal("must be a nonempty string, list of token ids, or list of these")
    if isinstance(value[0], int):
        return (_token_prompt(value),)
    if len(value) > PROMPTS_MAX:
        raise refusal(f"must hold at most {PROMPTS_MAX} prompts")
    return tuple(
        _token_prompt(item) if isinstance(item, list) else _text_prompt(item) for item in value
    )


def _text_prompt(value: Any) -> str:
    if not is_text(value) or not value:
        raise refusal("must hold nonempty strings of valid Unicode")
    return str(value)


def _token_prompt(value: list[Any]) -> tuple[int, ...]:
    ids = token_ids(value)
    if ids is None:
        raise refusal("must hold token ids: nonempty lists of integers from 0")
    return ids


def _parse_content(value: Any) -> str:
    """Plain text, or the text parts joined; what else a text part has is not looked at."""
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
            raise refusal("must hold parts of the form {'type': 'text', 'text': …}")
        if not is_text(part["text"]):
            raise refusal("must hold valid Unicode")
        texts.append(part["text"])
    return "".join(texts)


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
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
