"""Random request bodies, valid and invalid, drawn from the API's schemas.

Seeded, so that failures can be reproduced.
"""

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import CompletionRequest
from services.gateway.api.parameters import CHAT, COMPLETION
from tests.support.bad_inputs import VOCABULARY

_KINDS = {"chat": (ChatRequest, CHAT), "completion": (CompletionRequest, COMPLETION)}
SCHEMAS = {endpoint: kind.model_json_schema() for endpoint, (kind, _) in _KINDS.items()}
TEXTS = ["hi", "x", " ", "\0", "é日本語", "a b c", "\n", "the tide", "<|im_end|>", "\U0001f30a" * 9]
# None is valid for every field; some are valid for none.
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 17, 21, 2**31, 2**63, -(2**63) - 1, 2**64, 1e308),
    *("", "x", "x" * 300, "1", "\ud800", "\0", "null", [], [[]], [None], {}, {"a": 1}, {"": []}),
    *([0] * 500, ["a"] * 200, {"1": "x"}, [[[[[[[[1]]]]]]]], {"type": "json_schema"}),
]
# Cheap values, within the context length of the fakes.
TOKENS_MAX = 24


def random_body(rng: random.Random, endpoint: str, bad: float = 0.06) -> dict[str, Any]:
    """A body for "chat" or "completion"; each field is junk with probability `bad`."""
    schema = SCHEMAS[endpoint]
    fields = list(schema["properties"])
    body: dict[str, Any] = {"max_tokens": rng.randint(1, TOKENS_MAX)}
    for name in (*schema["required"], *rng.sample(fields, rng.choice((0, 1, 2, 4, 8)))):
        field = schema["properties"][name]
        body[name] = _value(rng, endpoint, name, field) if rng.random() > bad else junk(rng)
    if rng.random() < 2 * bad:
        body.pop(rng.choice(list(body)))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        body[_foreign(rng, endpoint)] = rng.choice((None, junk(rng)))
    if rng.random() < 0.4:
        body["stream"] = True
    if body.get("stream") is not True and rng.random() > bad:
        body.pop("stream_options", None)
    return body


def junk(rng: random.Random) -> Any:
    """A value that is invalid for nearly every field."""
    return rng.choice(JUNK)


def _foreign(rng: random.Random, endpoint: str) -> str:
    """The name of a field that the endpoint ignores, refuses or does not know."""
    policy = _KINDS[endpoint][1]
    unknown = "".join(rng.choices(string.printable, k=rng.randint(0, 12)))
    return rng.choice([*policy.ignored, *policy.refused, unknown, unknown])


def _token_ids(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]


def _tokens(rng: random.Random) -> int:
    return rng.randint(0, TOKENS_MAX)


# Values for fields whose schema allows what the fakes cannot serve quickly.
_DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "model": lambda rng: "m",
    "messages": lambda rng: [_message(rng) for _ in range(rng.randint(1, 3))],
    "prompt": lambda rng: rng.choice((_prompt(rng), [_prompt(rng) for _ in range(3)])),
    "max_tokens": _tokens,
    "max_completion_tokens": _tokens,
    "min_tokens": _tokens,
    "n": lambda rng: rng.randint(1, 3),
    "best_of": lambda rng: rng.randint(1, 3),
    "top_k": lambda rng: rng.randint(-1, VOCABULARY),
    "allowed_token_ids": _token_ids,
    "stop_token_ids": _token_ids,
    "logit_bias": lambda rng: {
        str(token_id): rng.uniform(-100, 100) for token_id in _token_ids(rng)
    },
    "request_id": lambda rng: "".join(rng.choices(string.ascii_letters, k=24)),
    "truncate_prompt_tokens": lambda rng: rng.choice((-1, 1, 5, 99)),
}


def _value(rng: random.Random, endpoint: str, name: str, schema: Mapping[str, Any]) -> Any:
    """A valid value, of a size that the fakes can serve."""
    if (draw := _DRAWN.get(name)) is not None:
        return draw(rng)
    return sample(rng, schema, SCHEMAS[endpoint].get("$defs", {}))


def _prompt(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
    return rng.choice(TEXTS) * rng.randint(1, 3)


def _message(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(TEXTS)
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    return {
        "role": rng.choice(("user", "assistant", "user", "system", "developer")),
        "content": rng.choice((text, [part], [part, part])),
    }


def sample(rng: random.Random, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """A value allowed by the schema, often at a bound of its range."""
    if "$ref" in schema:
        return sample(rng, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return sample(rng, rng.choice(choices), definitions)
    if named := [schema["const"]] if "const" in schema else schema.get("enum"):
        return rng.choice(named)
    kind = schema.get("type")
    if kind == "array":
        length = min(rng.choice((schema.get("minItems", 0), 1, 3)), schema.get("maxItems", 3))
        return [sample(rng, schema["items"], definitions) for _ in range(length)]
    if kind == "object":
        fields = schema.get("properties", {})
        names = [name for name in fields if rng.random() < 0.7]
        return {name: sample(rng, fields[name], definitions) for name in names}
    return _scalar(rng, schema)


def _scalar(rng: random.Random, schema: Mapping[str, Any]) -> Any:
    match schema.get("type"):
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 99)
            return rng.choice((low, high, rng.randint(low, high)))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1e-6)
            high = schema.get("maximum", 1)
            return rng.choice((low, high, rng.uniform(low, high)))
        case "string":
            return rng.choice(TEXTS)[: schema.get("maxLength", 99)]
    return None
